defmodule Sidewinder.Reference.HdsQueryTopk do
  @moduledoc false
  # Attention over the slots that a walk down a hierarchy finds, and its gradient with these slots.

  alias Sidewinder.{Error, Reference.HdsConstruct}
  import Sidewinder.Reference.Numbers

  @doc "How many slots are found, by sizes and options of a call."
  def candidates(%{m: m, levels: levels, ratio: ratio, top_k: top_k}) do
    unless levels in 1..16, do: wrong(:option, "levels", "a number from 1 to 16", levels)
    unless ratio > 1, do: wrong(:option, "ratio", "2 or more", ratio)
    parts = Integer.pow(ratio, levels - 1)

    unless rem(m, parts) == 0,
      do: wrong(:shape, "k", "slots that are a multiple of #{ratio}^#{levels - 1}", m)

    Enum.reduce(List.duplicate(ratio, levels - 1), div(m, parts), &(min(top_k, &2) * &1))
  end

  defp wrong(kind, name, expected, got) do
    raise Error.new(kind, name, op: "hds_query_topk", expected: expected, got: "#{got}")
  end

  def body(op, %{"q" => q, "k" => k, "v" => v}) do
    [q, k, v] = for t <- [q, shared(k, q), shared(v, q)], do: wide(t)
    top = top(op, k)
    {batch, length, _} = q.shape
    slots = Nx.iota({batch, length, Nx.axis_size(top, 1)}, axis: 2, type: :s32)

    slots =
      op
      |> above(k)
      |> Enum.reverse()
      |> Enum.reduce(slots, fn level, slots ->
        slots |> best(scores(q, rows(level, slots)), op.top_k) |> children(op.ratio)
      end)

    weights = weights(q, rows(k, slots))
    context = attend(weights, rows(v, slots))
    [context: context, slots: slots]
  end

  # The memory broadcast to the batch.
  defp shared(memory, q), do: Nx.broadcast(memory, put_elem(memory.shape, 0, Nx.axis_size(q, 0)))

  defp top(op, k), do: List.last([k | above(op, k)])

  # The levels above the bank.
  defp above(%{levels: 1}, _k), do: []

  defp above(op, k) do
    hds = %{levels: op.levels, ratio: op.ratio, cursor: 0}
    levels = HdsConstruct.body(struct(Sidewinder.Block.HdsConstruct, hds), %{"k" => k, "v" => k})
    for level <- 1..(op.levels - 1), do: Keyword.fetch!(levels, :"k#{level}")
  end

  # The rows of [B, M, D] of these slots, [B, L, C, D].
  defp rows(level, slots) do
    {batch, length, count} = slots.shape
    {_, _, width} = level.shape

    at =
      slots
      |> Nx.reshape({batch, length * count, 1})
      |> Nx.broadcast({batch, length * count, width})

    level |> Nx.take_along_axis(at, axis: 1) |> Nx.reshape({batch, length, count, width})
  end

  # [B, L, C]
  defp scores(q, rows) do
    products = Nx.dot(q, [2], [0, 1], rows, [3], [0, 1])
    Nx.multiply(products, constant(1 / :math.sqrt(Nx.axis_size(q, 2)), q))
  end

  # The best slots in order. Of equal scores the lower slot ranks first, and NaN ranks last: a slot's rank is the number of better slots.
  defp best(slots, scores, top_k) do
    count = Nx.axis_size(slots, 2)
    [mine, other] = [Nx.new_axis(scores, 3), Nx.new_axis(scores, 2)]
    shape = Tuple.insert_at(scores.shape, 3, count)
    lower = Nx.less(Nx.iota(shape, axis: 3), Nx.iota(shape, axis: 2))
    [no_mine, no_other] = for t <- [mine, other], do: Nx.is_nan(t)

    same =
      Nx.logical_or(
        Nx.equal(mine, other),
        Nx.logical_and(no_mine, no_other)
      )

    better =
      Nx.logical_or(
        Nx.greater(other, mine),
        Nx.logical_and(no_mine, Nx.logical_not(no_other))
      )

    rank = Nx.sum(Nx.logical_or(better, Nx.logical_and(same, lower)), axes: [3])
    # A stable sort keeps the best in the order of their slots.
    out = Nx.greater_equal(rank, top_k)
    order = Nx.argsort(out, axis: 2, stable: true)
    Nx.take_along_axis(slots, Nx.slice_along_axis(order, 0, min(top_k, count), axis: 2), axis: 2)
  end

  defp children(slots, ratio) do
    {batch, length, count} = slots.shape
    each = Nx.iota({1, 1, 1, ratio}, axis: 3, type: :s32)
    all = Nx.add(Nx.multiply(Nx.new_axis(slots, 3), ratio), each)
    Nx.reshape(all, {batch, length, count * ratio})
  end

  defp weights(q, rows) do
    scores = scores(q, rows)
    largest = Nx.reduce_max(scores, axes: [2], keep_axes: true)
    powers = Nx.exp(Nx.subtract(scores, largest))
    Nx.divide(powers, Nx.sum(powers, axes: [2], keep_axes: true))
  end

  # [B, L, D]
  defp attend(weights, rows), do: Nx.dot(weights, [2], [0, 1], rows, [2], [0, 1])

  @doc """
  With P the weights: dP = dy v, dS = P (dP - sum P dP), dq = scale dS k, dk = scale dS q, dv = P dy, the last two
  added up in their slots.
  """
  def gradient(%{"q" => q, "k" => k, "v" => v, "slots" => slots, "dcontext" => dy}) do
    [wide_q, wide_k, wide_v, dy] = for t <- [q, shared(k, q), shared(v, q), dy], do: wide(t)
    {keys, values} = {rows(wide_k, slots), rows(wide_v, slots)}
    weights = weights(wide_q, keys)
    dweights = Nx.dot(dy, [2], [0, 1], values, [3], [0, 1])
    mean = Nx.sum(Nx.multiply(weights, dweights), axes: [2], keep_axes: true)
    scale = constant(1 / :math.sqrt(Nx.axis_size(q, 2)), wide_q)
    dscores = weights |> Nx.multiply(Nx.subtract(dweights, mean)) |> Nx.multiply(scale)

    %{
      "dq" => Nx.as_type(attend(dscores, keys), q.type),
      "dk" => into_slots(dscores, wide_q, slots, k),
      "dv" => into_slots(weights, dy, slots, v)
    }
  end

  # The products of [B, L, C] and [B, L, D] in the slots of a memory.
  defp into_slots(factors, rows, slots, memory) do
    {batch, length, count} = slots.shape
    {of_memory, _, width} = memory.shape
    terms = Nx.multiply(Nx.new_axis(factors, 3), Nx.new_axis(rows, 2))
    batches = Nx.iota(slots.shape, axis: 0, type: slots.type)
    batches = if of_memory == 1, do: Nx.multiply(batches, 0), else: batches
    at = Nx.reshape(Nx.stack([batches, slots], axis: 3), {batch * length * count, 2})
    zeros = Nx.broadcast(constant(0, factors), memory.shape)
    sums = Nx.indexed_add(zeros, at, Nx.reshape(terms, {batch * length * count, width}))
    Nx.as_type(sums, memory.type)
  end
end
