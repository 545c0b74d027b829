# What the examples of recall share: a plot of answers that are right by training step, and results as JSON with a row of
# the curve on a line.

defmodule Sidewinder.Examples.Curves do
  @doc """
  The plot as SVG. A curve is `{label, colour, [{step, part}]}` with parts from 0 to 1; a mark is a dashed line
  at a step, with a text below.
  """
  def svg(title, curves, marks \\ []) do
    last = curves |> Enum.flat_map(fn {_, _, points} -> points end) |> Enum.max() |> elem(0)

    """
    <svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 360" font-family="sans-serif" font-size="12">
    <rect width="720" height="360" fill="white"/>
    <text x="50" y="22">#{title}</text>
    #{Enum.map_join([0.0, 0.25, 0.5, 0.75, 1.0], "\n", &grid/1)}
    #{Enum.map_join(marks, "\n", &mark(&1, last))}
    #{Enum.map_join(curves, "\n", &line(&1, last))}
    #{Enum.map_join(curves, "\n", &label/1)}
    </svg>
    """
  end

  defp grid(part) do
    ~s(<line x1="50" x2="700" y1="#{y(part)}" y2="#{y(part)}" stroke="#ddd"/>) <>
      ~s(<text x="8" y="#{y(part) + 4}">#{percent(part)}</text>)
  end

  defp mark({step, text}, last) do
    at = Float.round(x(step, last), 1)

    ~s(<line x1="#{at}" x2="#{at}" y1="40" y2="320" stroke="#bbb" stroke-dasharray="3"/>) <>
      ~s(<text x="#{at + 2}" y="338" fill="#666">#{text}</text>)
  end

  defp line({_label, colour, points}, last) do
    at = fn {step, part} -> "#{Float.round(x(step, last), 1)},#{Float.round(y(part), 1)}" end

    ~s(<polyline fill="none" stroke="#{colour}" stroke-width="2" points="#{Enum.map_join(points, " ", at)}"/>)
  end

  # Beside the end of the curve, within the plot.
  defp label({label, colour, points}) do
    {_, part} = List.last(points)
    y = round(y(part)) + if part > 0.5, do: 16, else: -8
    ~s(<text x="695" y="#{y}" text-anchor="end" fill="#{colour}">#{label}</text>)
  end

  defp x(step, last), do: 50 + 650 * step / max(last, 1)
  defp y(part), do: 320 - 280 * part

  @doc "Fields by their names, and lists of rows, each a keyword list, by theirs."
  def json(fields, rows) do
    fields =
      for {name, value} <- Enum.sort(fields), do: ~s(  "#{name}": #{Sidewinder.JSON.text(value)})

    rows =
      for {name, rows} <- rows, do: ~s(  "#{name}": [\n#{Enum.map_join(rows, ",\n", &row/1)}\n  ])

    "{\n#{Enum.join(fields ++ rows, ",\n")}\n}\n"
  end

  defp row(values) do
    "    {#{Enum.map_join(values, ", ", fn {name, value} -> ~s("#{name}": #{rounded(value)}) end)}}"
  end

  defp rounded(value) when is_float(value), do: Float.round(value, 4)
  defp rounded(value), do: value

  def percent(part), do: "#{Float.round(100.0 * part, 1)}%"
end
