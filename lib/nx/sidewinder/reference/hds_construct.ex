defmodule Sidewinder.Reference.HdsConstruct do
  @moduledoc false
  # The hierarchy over a memory bank and its gradient. All windows of a level are gathered with the size of the largest.
  # Rows beyond a window are masked, so that a NaN there has no effect.

  alias Sidewinder.Error
  import Sidewinder.Reference.Numbers

  @most 16

  @doc "The axes of the levels' slots, as the kernel's declaration calls them."
  def axes,
    do: for(level <- 1..(@most - 1), do: {:"m#{level}", {:by, {__MODULE__, :slots, [level]}}})

  @doc "The slots of a level of a bank of `m`, by sizes and options of a call."
  def slots(%{m: m, levels: levels, ratio: ratio}, level) do
    unless levels in 2..@most,
      do: wrong("levels", "a number from 2 to #{@most}", levels)

    unless ratio > 1, do: wrong("ratio", "2 or more", ratio)
    max(1, div(m, Integer.pow(ratio, level)))
  end

  defp wrong(name, expected, got) do
    raise Error.new(:option, name, op: "hds_construct", expected: expected, got: "#{got}")
  end

  def body(op, %{"k" => k} = inputs) do
    for name <- ["k", "v"],
        bank = inputs[name] |> wide() |> rotate(op.cursor),
        {level, i} <- op |> sizes(k) |> Enum.scan(bank, &up/2) |> Enum.with_index(1),
        do: {:"#{name}#{i}", Nx.as_type(level, k.type)}
  end

  @doc "From the top level down: each slot gets its share of the cotangents of the slots that average it."
  def backward(op, %{"k" => k} = inputs) do
    levels = Enum.reverse(Enum.with_index([Nx.axis_size(k, 1) | sizes(op, k)]))

    for name <- ["k", "v"] do
      g = Enum.reduce(levels, nil, &sum(down(&2, &1, k), inputs["d#{name}#{elem(&1, 1)}"]))
      slots = Nx.axis_size(k, 1)
      {:"d#{name}", g |> rotate(slots - rem(op.cursor, slots)) |> Nx.as_type(k.type)}
    end
  end

  defp sum(from_above, nil), do: from_above
  defp sum(from_above, given), do: Nx.add(from_above, wide(given))

  # The cotangent of a level of `slots` slots by that of the level above.
  defp down(nil, {slots, _}, k),
    do: Nx.broadcast(constant(0, wide(k)), put_elem(k.shape, 1, slots))

  defp down(above, {slots, _}, _k) do
    count = Nx.axis_size(above, 1)
    above |> Nx.divide(counts(slots, count, above)) |> windows(slots)
  end

  defp up(slots, below),
    do: below |> windows(slots) |> Nx.divide(counts(Nx.axis_size(below, 1), slots, below))

  defp sizes(op, k) do
    sizes = Map.put(Map.from_struct(op), :m, Nx.axis_size(k, 1))
    for level <- 1..max(op.levels - 1, 1), do: slots(sizes, level)
  end

  # How many rows each window has, [1, T, 1].
  defp counts(from, to, like) do
    counts = for {_, count} <- spans(from, to), do: count
    counts |> Nx.tensor(type: like.type) |> Nx.reshape({1, to, 1})
  end

  # First rows and counts of the windows, as `window` in hds/mod.rs of the kernels has them.
  defp spans(from, to) do
    for j <- 0..(to - 1) do
      first = div(j * from, to)
      {first, div((j + 1) * from + to - 1, to) - first}
    end
  end

  # The sums of the windows, [B, T, D].
  defp windows(level, to) do
    from = Nx.axis_size(level, 1)
    spans = spans(from, to)
    most = spans |> Enum.map(&elem(&1, 1)) |> Enum.max()
    at = for {first, _} <- spans, do: for(i <- 0..(most - 1), do: min(first + i, from - 1))

    there =
      for {_, count} <- spans, do: for(i <- 0..(most - 1), do: if(i < count, do: 1, else: 0))

    rows = Nx.take(level, Nx.tensor(at), axis: 1)
    there = there |> Nx.tensor(type: :u8) |> Nx.reshape({1, to, most, 1}) |> Nx.broadcast(rows)
    there |> Nx.select(rows, constant(0, rows)) |> Nx.sum(axes: [2])
  end

  # Rotates the bank so that the slot `first` modulo its slots comes first.
  defp rotate(bank, first) do
    slots = Nx.axis_size(bank, 1)

    case rem(first, slots) do
      0 ->
        bank

      first ->
        parts = [{first, slots - first}, {0, first}]
        parts = for {at, count} <- parts, do: Nx.slice_along_axis(bank, at, count, axis: 1)
        Nx.concatenate(parts, axis: 1)
    end
  end
end
