defmodule Sidewinder.ReadmeTest do
  use ExUnit.Case, async: false

  import ExUnit.CaptureIO
  alias Sidewinder.Markdown

  @readme Path.expand("../../README.md", __DIR__)
  # Code that needs a layer is left out where that is not compiled, and no other code.
  @needs [
    {~r/\bNx\.|Sidewinder\.selective_scan/, Sidewinder.Reference},
    {~r/\bAxon\./, Sidewinder.Axon},
    {~r/\bEXLA\b/, Sidewinder.CustomCall}
  ]

  defp can_run?(code) do
    Enum.all?(@needs, fn {sign, module} -> not (code =~ sign) or Code.ensure_loaded?(module) end)
  end

  test "only the code is taken, at its lines" do
    shown = ~s(<!-- livebook:{"force_markdown":true} -->\n\n```elixir\nw = 4\n```\n)

    text =
      "a\n```elixir\nx = 1\n```\n\n    sh\n\n```rust\nz\n```\n#{shown}```elixir\ny = 2\n```\n"

    blank = String.duplicate("\n", 13)
    assert Markdown.code(text) == "\n\nx = 1\n" <> blank <> "y = 2\n\n"
    assert Markdown.code(text, &(&1 =~ "x")) == "\n\nx = 1\n" <> blank <> "\n\n"
  end

  @tag skip: not Sidewinder.Native.loaded?()
  test "the code of README.md runs as printed, one part after the other" do
    markdown = File.read!(@readme)
    lines = markdown |> Markdown.code() |> String.split("\n", trim: true)
    assert length(lines) >= 25
    code = Markdown.code(markdown, &can_run?/1)
    told = capture_io(fn -> send(self(), Code.eval_string(code, [], file: @readme)) end)

    assert_received {_, binding}
    assert byte_size(told) > 100
    assert %Sidewinder.Mamba{} = binding[:mamba]
    if Code.ensure_loaded?(Sidewinder.Axon), do: assert(told =~ "loss: ")
  end

  test "links between documents lead to files that are there" do
    root = Path.dirname(@readme)
    files = ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md" | Path.wildcard("guides/*", [])]

    for file <- files,
        [_, link] <- Regex.scan(~r/\]\(([^)#:]+)\)/, File.read!(Path.join(root, file))) do
      path = Path.expand(link, Path.dirname(Path.join(root, file)))
      assert File.exists?(path), "#{file} links to #{link}"
    end
  end
end
