defmodule Sidewinder.ReadmeTest do
  # It starts a process by name.
  use ExUnit.Case, async: false

  import ExUnit.CaptureIO

  @root Path.expand("../..", __DIR__)
  @files [
    "README.md" | Path.wildcard("#{@root}/guides/*.md") |> Enum.map(&Path.relative_to(&1, @root))
  ]
  # The lines of code that a file has at least.
  @lines %{
    "README.md" => 25,
    "guides/from_elixir.md" => 60,
    "guides/quantized_weights.md" => 15,
    "guides/training_to_serving.md" => 20
  }
  # Code that needs a layer is left out where that is not compiled, and no other code.
  @needs [
    {~r/\bNx\.|Sidewinder\.selective_scan/, Sidewinder.Reference},
    {~r/\bAxon\./, Sidewinder.Axon},
    {~r/\bEXLA\b/, Sidewinder.CustomCall}
  ]

  # The file with all but the code blank, so that errors tell the file's own lines.
  defp code(markdown, run? \\ &can_run?/1) do
    {lines, _} =
      markdown
      |> String.split(~r/^```(?:elixir)?\n/m, include_captures: true)
      |> Enum.flat_map_reduce(:text, fn
        "```elixir\n", :text -> {["\n"], :code}
        "```\n", :code -> {["\n"], :text}
        part, :code -> {[if(run?.(part), do: part, else: blank(part))], :code}
        part, :text -> {[blank(part)], :text}
      end)

    Enum.join(lines)
  end

  defp blank(text), do: String.replace(text, ~r/[^\n]/, "")

  defp can_run?(code) do
    Enum.all?(@needs, fn {sign, module} -> not (code =~ sign) or Code.ensure_loaded?(module) end)
  end

  test "only the code is taken, at its lines" do
    text = "a\n```elixir\nx = 1\n```\n\n    sh\n\n```elixir\ny = 2\n```\n"
    assert code(text) == "\n\nx = 1\n\n\n\n\n\ny = 2\n\n"
  end

  test "all of these files are there, and their code is found" do
    assert Map.keys(@lines) -- @files == []

    for path <- @files do
      code = path |> Path.expand(@root) |> File.read!() |> code(fn _ -> true end)
      lines = length(String.split(code, "\n", trim: true))
      assert lines >= Map.get(@lines, path, 0), "#{path} has #{lines} lines of code"
    end
  end

  for path <- @files do
    @tag skip: not Sidewinder.Native.loaded?()
    test "the code of #{path} runs as printed, one part after the other" do
      path = Path.expand(unquote(path), @root)
      code = path |> File.read!() |> code()
      told = capture_io(fn -> send(self(), Code.eval_string(code, [], file: path)) end)

      assert_received {_, binding}
      on_exit(fn -> if folder = binding[:folder], do: File.rm_rf!(folder) end)
      check(unquote(path), Map.new(binding), told)
    end
  end

  defp check("README.md", binding, told) do
    assert byte_size(told) > 100
    assert %Sidewinder.Mamba{} = binding.mamba
    if Code.ensure_loaded?(Sidewinder.Axon), do: assert(told =~ "loss: ")
  end

  defp check("guides/from_elixir.md", binding, told) do
    assert byte_size(told) > 100
    assert %Sidewinder.Tensor{shape: {2, 256}} = binding.all
  end

  defp check("guides/quantized_weights.md", binding, _told),
    do: assert(%Sidewinder.Quantized{} = binding.w)

  defp check("guides/training_to_serving.md", binding, told) do
    if mamba = binding[:mamba] do
      assert told =~ "loss: "
      assert Sidewinder.Mamba.load(binding.folder).config == mamba.config
    end
  end

  defp check(_path, _binding, _told), do: :ok
end
