defmodule Sidewinder.GuidesTest do
  # Guides start processes by name, and attach handlers.
  use ExUnit.Case, async: false

  import ExUnit.CaptureIO
  alias Sidewinder.Markdown

  @root Path.expand("../..", __DIR__)
  @guides Path.wildcard("#{@root}/guides/*.{livemd,cheatmd}") |> Enum.map(&Path.basename/1)

  # What a guide's code needs besides the native library.
  @worlds %{
    "cheatsheet.cheatmd" => [Sidewinder.Axon],
    "from_pytorch.livemd" => [Sidewinder.Axon],
    "game_agents.livemd" => [],
    "mm_rec_and_long_memory.livemd" => [Sidewinder.Axon],
    "quantize_and_run.livemd" => [],
    "scan_in_five_minutes.livemd" => [Sidewinder.Reference],
    "serve_to_a_cluster.livemd" => [Sidewinder.Mamba.Serving],
    "train_mamba.livemd" => [Sidewinder.Axon],
    "write_an_op.livemd" => []
  }

  # Modules of lib/exla are there only with EXLA, whose compiler and backend these guides then use.
  @exla ["scan_in_five_minutes.livemd", "train_mamba.livemd"]

  @missing for {guide, needed} <- @worlds,
               missing = Enum.reject(needed, &Code.ensure_loaded?/1),
               missing =
                 if(Sidewinder.Native.loaded?(), do: missing, else: ["the native library"]),
               missing != [],
               into: %{},
               do:
                 {guide,
                  "#{guide} is left out, as there is no #{Enum.map_join(missing, ", ", &inspect/1)}"}

  for {_guide, why} <- @missing, do: IO.puts(why)

  for guide <- @exla,
      not is_map_key(@missing, guide),
      not Code.ensure_loaded?(Sidewinder.CustomCall),
      do: IO.puts("#{guide} runs without a compiler, as there is no EXLA")

  defp text(guide), do: File.read!(Path.join([@root, "guides", guide]))

  # The cell that installs is for Livebook.
  defp code(guide), do: guide |> text() |> Markdown.code(&(not (&1 =~ "Mix.install(")))

  test "every guide is in the list of those that run" do
    assert @guides == Enum.sort(Map.keys(@worlds))
  end

  test "notebooks begin with a title and a cell that installs Sidewinder" do
    for guide <- @guides, Path.extname(guide) == ".livemd" do
      assert [_, install] =
               Regex.run(~r/\A# [^\n]+\n\n```elixir\n(Mix\.install\(.*?)```/s, text(guide))

      version =
        Mix.Project.config()[:version] |> String.split(".") |> Enum.take(2) |> Enum.join(".")

      assert install =~ ~s({:sidewinder, "~> #{version}"})
      assert {:ok, _} = Code.string_to_quoted(install)
    end
  end

  test "cells are formatted, as Livebook keeps them" do
    for guide <- @guides,
        Path.extname(guide) == ".livemd",
        [_, cell] <- Regex.scan(~r/^```elixir\n(.*?)^```$/ms, text(guide)) do
      assert cell == IO.iodata_to_binary([Code.format_string!(cell), "\n"]), "in #{guide}"
    end
  end

  for guide <- Map.keys(@worlds) do
    @tag skip: @missing[guide] || false
    test "the code of #{guide} runs, one cell after the other" do
      guide = unquote(guide)
      code = code(guide)
      assert length(String.split(code, "\n", trim: true)) >= 20
      defaults = if guide in @exla, do: compile_with_exla()
      on_exit(fn -> undo(defaults) end)

      told =
        capture_io(fn ->
          {_, binding} = Code.eval_string(code, [], file: Path.join([@root, "guides", guide]))
          if folder = binding[:folder], do: File.rm_rf!(folder)
        end)

      for word <- printed(guide), do: assert(told =~ word)
    end
  end

  defp printed("scan_in_five_minutes.livemd"),
    do: ["selective_scan: x f32", "forward", "gradient"]

  defp printed("train_mamba.livemd"), do: ["loss: "]
  defp printed("write_an_op.livemd"), do: ["plain Elixir", "ok"]
  defp printed(_guide), do: []

  # As the notebooks' first cells do. By `apply`, because EXLA may not be there.
  defp compile_with_exla do
    if Code.ensure_loaded?(Sidewinder.CustomCall) do
      backend = apply(Nx, :global_default_backend, [EXLA.Backend])
      {backend, apply(Nx.Defn, :global_default_options, [[compiler: EXLA]])}
    end
  end

  defp undo(nil), do: :ok

  defp undo({backend, options}) do
    apply(Nx, :global_default_backend, [backend])
    apply(Nx.Defn, :global_default_options, [options])
  end
end
