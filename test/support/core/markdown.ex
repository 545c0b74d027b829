defmodule Sidewinder.Markdown do
  @moduledoc false
  # The code of documents and of notebooks.

  @shown ~r/^<!-- livebook:\{"force_markdown":true\} -->\n+```elixir\n.*?^```\n/ms

  @doc """
  The file with all but its Elixir code blank, so that errors tell the file's own lines. Code that a notebook only shows,
  and parts for which `run?` is false, are blank too.
  """
  def code(markdown, run? \\ fn _part -> true end) do
    {lines, _} =
      @shown
      |> Regex.replace(markdown, &blank/1)
      |> String.split(~r/^```(?:\w+)?\n/m, include_captures: true)
      |> Enum.flat_map_reduce(:text, fn
        "```elixir\n", :text -> {["\n"], :code}
        "```" <> _ = fence, :text -> {[blank(fence)], :other}
        "```\n", _ -> {["\n"], :text}
        part, :code -> {[if(run?.(part), do: part, else: blank(part))], :code}
        part, state -> {[blank(part)], state}
      end)

    Enum.join(lines)
  end

  defp blank(text), do: String.replace(text, ~r/[^\n]/, "")
end
