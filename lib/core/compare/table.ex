defmodule Sidewinder.Compare.Table do
  @moduledoc false
  # Results of `Sidewinder.Compare`, to print.

  alias Sidewinder.CommandLine

  @widths [10, 9, 6, 10, 13, 13, 8]

  def text(%{op: op, inputs: inputs, forward: forward, gradient: gradient}) do
    inputs = Enum.map_join(inputs, ", ", fn {name, text} -> "#{name} #{text}" end)
    parts = [section("forward", forward), section("gradient", gradient), absent(forward)]
    IO.iodata_to_binary(["#{op}: #{inputs}\n" | parts])
  end

  defp section(_title, []), do: []

  defp section(title, rows) do
    head = [title, "ms", "+-", "runs", "speed-up", "max abs err", "max rel err", ""]
    ["\n", line(head), Enum.map(rows, &row/1), Enum.map(rows, &note/1)]
  end

  defp row(%{status: {:unavailable, _}}), do: []
  defp row(%{status: {:error, _}, label: label}), do: line([label, "FAILED"])

  defp row(%{time: time} = row) do
    std = if time.iterations > 1, do: short(time.std), else: "-"
    speedup = if row.speedup, do: short(row.speedup) <> "x", else: "-"
    numbers = [short(time.median), std, to_string(time.iterations), speedup]
    status = if row.status == :ok, do: "ok", else: "WRONG"
    line([row.label | numbers ++ [short(row.max_abs_err), short(row.max_rel_err), status]])
  end

  defp line([label | cells]) do
    cells = for {cell, width} <- Enum.zip(cells, @widths), do: String.pad_leading(cell, width)
    [String.trim_trailing(String.pad_trailing(label, 24) <> Enum.join(cells)), "\n"]
  end

  defp short(number), do: CommandLine.short(number)

  defp note(%{status: {:error, error}, label: label}),
    do: "#{label} failed: #{Exception.message(error)}\n"

  defp note(%{status: :wrong, label: label, outputs: outputs}) do
    wrong =
      for {name, d} <- outputs, not d.within_tolerance, do: "#{name} by #{short(d.max_abs_err)}"

    "#{label} is out of tolerance: #{Enum.join(wrong, ", ")}\n"
  end

  defp note(_row), do: []

  # Many levels may be missing for the same reason.
  defp absent(rows) do
    reasons = for %{status: {:unavailable, why}, label: label} <- rows, do: {why, label}
    groups = Enum.group_by(reasons, &elem(&1, 0), &elem(&1, 1))
    for {why, labels} <- groups, do: "\nNot here: #{Enum.join(labels, "; ")}. Why: #{why}\n"
  end
end
