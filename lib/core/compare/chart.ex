defmodule Sidewinder.Compare.Chart do
  @moduledoc false
  # Results of `Sidewinder.Compare` as an SVG picture: a bar for the time of each level, the longest across the width.

  alias Sidewinder.CommandLine

  @left 190
  @width 360
  @row 24

  def svg(%{op: op, inputs: inputs, forward: forward, gradient: gradient}) do
    inputs = Enum.map_join(inputs, ", ", fn {name, text} -> "#{name} #{text}" end)

    parts = [
      [title(op, 15), title(inputs, 11)],
      part("forward", forward),
      part("gradient", gradient)
    ]

    {lines, height} = parts |> Enum.concat() |> Enum.map_reduce(@row, &{&1.(&2), &2 + @row})

    """
    <svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 #{height}" font-family="sans-serif" font-size="12">
    <rect width="720" height="#{height}" fill="white"/>
    #{Enum.join(lines, "\n")}
    </svg>
    """
  end

  # Functions of the height at which a line of the picture stands. The reference is not meant to be fast.
  defp part(name, rows) do
    case for(%{time: %{}} = row <- rows, row.level != "reference", do: row) do
      [] -> []
      rows -> [title("#{name}, median time", 13) | Enum.map(rows, &bar(&1, longest(rows)))]
    end
  end

  defp longest(rows), do: rows |> Enum.map(& &1.time.median) |> Enum.max() |> max(1.0e-9)

  defp title(text, size),
    do: &~s(<text x="10" y="#{&1}" font-size="#{size}">#{escaped(text)}</text>)

  defp bar(%{label: label, time: %{median: median}} = row, longest) do
    width = Float.round(max(@width * median / longest, 1.0), 1)
    {colour, note} = if row.status == :ok, do: {"#1b6ca8", times(row)}, else: {"#c0392b", "WRONG"}
    says = "#{CommandLine.short(median)} ms #{note}"

    fn y ->
      ~s(<text x="10" y="#{y}">#{escaped(label)}</text>) <>
        ~s(<rect x="#{@left}" y="#{y - 12}" width="#{width}" height="15" fill="#{colour}"/>) <>
        ~s(<text x="#{Float.round(@left + width + 6, 1)}" y="#{y}">#{says}</text>)
    end
  end

  defp times(%{speedup: nil}), do: ""
  defp times(%{speedup: speedup}), do: "(#{CommandLine.short(speedup)}x)"

  defp escaped(text),
    do: text |> String.replace("&", "&amp;") |> String.replace("<", "&lt;")
end
