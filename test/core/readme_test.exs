defmodule Sidewinder.ReadmeTest do
  # It starts a process by name.
  use ExUnit.Case, async: false

  import ExUnit.CaptureIO

  @readme Path.expand("../../README.md", __DIR__)
  # The parts that need a layer which is not compiled, and no others.
  @needs [
    {~r/\bNx\.|Sidewinder\.selective_scan/, Sidewinder.Reference},
    {~r/\bAxon\./, Sidewinder.Axon}
  ]

  # The file with all but the code blank, so that errors tell the README's own lines.
  defp code(markdown) do
    {lines, _} =
      markdown
      |> String.split(~r/^```(?:elixir)?\n/m, include_captures: true)
      |> Enum.flat_map_reduce(:text, fn
        "```elixir\n", :text -> {["\n"], :code}
        "```\n", :code -> {["\n"], :text}
        part, :code -> {[if(can_run?(part), do: part, else: blank(part))], :code}
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

  @tag skip: not Sidewinder.Native.loaded?()
  test "its code runs as printed, one part after the other" do
    code = @readme |> File.read!() |> code()
    assert length(String.split(code, "\n", trim: true)) > 40

    told =
      capture_io(fn ->
        send(self(), Code.eval_string(code, [], file: @readme))
      end)

    assert_received {_, binding}
    saved = Path.join(System.tmp_dir!(), "sidewinder-readme")
    on_exit(fn -> Enum.each([saved, binding[:folder]], &File.rm_rf!/1) end)
    assert byte_size(told) > 100
    assert %Sidewinder.Quantized{} = binding[:w]

    if mamba = binding[:mamba] do
      assert told =~ "loss: "
      assert Sidewinder.Mamba.load(saved).config == mamba.config
    end
  end
end
