defmodule Sidewinder.Reference.Recurrence do
  @moduledoc false
  # The recurrence h_t = a_t h_{t-1} + b_t over the first axis of pairs {a, b}, of any rank, forwards
  # and backwards, and helpers for loops over time. Time comes first because slices of a first axis
  # cost nothing.

  import Nx.Defn

  @doc "[B, L, ...] as [L, B, ...], or the other way round."
  def swap(t), do: Nx.transpose(t, axes: [1, 0 | Enum.drop(Nx.axes(t), 2)])

  @doc "The slice at a time, `[1, ...]`. A tensor that does not vary has length 1."
  deftransform at(t, time) do
    if Nx.axis_size(t, 0) == 1, do: t, else: take(t, time, 1)
  end

  @doc """
  Writes the value of a time, in a loop over all times in order.

  The Evaluator's backend copies all of `out` for each number that `Nx.put_slice/3` writes, so there
  the values are appended.
  """
  deftransform put(out, time, value) do
    length = Nx.axis_size(out, 0)

    cond do
      length == 1 -> value
      Nx.Defn.Compiler.current() != Nx.Defn.Evaluator -> put_slice(out, time, value)
      true -> Nx.concatenate([take(out, 1, length - 1), value])
    end
  end

  defp put_slice(out, time, value) do
    Nx.put_slice(out, [time | List.duplicate(0, Nx.rank(out) - 1)], value)
  end

  def take({a, b}, start, length), do: {take(a, start, length), take(b, start, length)}
  def take(t, start, length), do: Nx.slice_along_axis(t, start, length, axis: 0)

  def zeros(shape, type), do: Nx.broadcast(Nx.tensor(0, type: type), shape)

  @doc "All h, by an algorithm. `initial` is `[1, ...]` or nil."
  def forwards(:sequential, {a, b}, initial), do: steps(a, b, initial || first(b, 0))

  def forwards(algorithm, pairs, initial) do
    {a, b} = if algorithm == :blelloch, do: blelloch(pairs), else: hillis_steele(pairs, 1)
    if initial, do: Nx.add(Nx.multiply(a, initial), b), else: b
  end

  @doc """
  All g of g_t = dh_t + a_{t+1} g_{t+1}, the cotangents of all h. `dlast`, `[1, ...]` or nil, is an
  additional cotangent of the last h.
  """
  def backwards(a, dh, dlast) do
    length = Nx.axis_size(a, 0)
    next = Nx.concatenate(later(a, length) ++ [first(a, 1)])
    Nx.reverse(steps(reverse(next), reverse(dh), dlast || first(dh, 0)), axes: [0])
  end

  defp later(_, 1), do: []
  defp later(a, length), do: [take(a, 1, length - 1)]

  defp reverse(t), do: Nx.reverse(t, axes: [0])

  defp first(t, value), do: Nx.broadcast(Nx.tensor(value, type: t.type), put_elem(t.shape, 0, 1))

  @doc "The previous h of each time: `initial`, then all but the last."
  def before(h, initial) do
    length = Nx.axis_size(h, 0)
    initial = initial || first(h, 0)
    if length == 1, do: initial, else: Nx.concatenate([initial, take(h, 0, length - 1)])
  end

  defnp steps(a, b, initial) do
    {_, _, out, _} =
      while {t = 0, h = initial, out = b, {a, b}}, t < Nx.axis_size(b, 0) do
        h = at(a, t) * h + at(b, t)
        {t + 1, h, put(out, t, h), {a, b}}
      end

    out
  end

  ## In parallel

  # The sizes of every level differ, so these loops run over the levels while the graph is built:
  # log2(L) of them.
  defp hillis_steele({_, b} = pairs, stride) do
    length = Nx.axis_size(b, 0)

    if stride >= length do
      pairs
    else
      composed = compose(take(pairs, 0, length - stride), take(pairs, stride, length - stride))
      hillis_steele(join(take(pairs, 0, stride), composed), 2 * stride)
    end
  end

  defp blelloch({_, b} = pairs) do
    length = Nx.axis_size(b, 0)

    pairs
    |> pad(next_power_of_two(length, 1) - length)
    |> exclusive()
    |> take(0, length)
    |> compose(pairs)
  end

  defp next_power_of_two(length, n) when n >= length, do: n
  defp next_power_of_two(length, n), do: next_power_of_two(length, 2 * n)

  # Up-sweep on the way down the recursion, down-sweep on the way back: the prefix of a pair is its
  # left element's, and composed with that element it is its right element's.
  defp exclusive({a, b} = pairs) do
    if Nx.axis_size(b, 0) == 1 do
      {first(a, 1), first(b, 0)}
    else
      {left, right} = halves(pairs)
      prefix = exclusive(compose(left, right))
      interleave(prefix, compose(prefix, left))
    end
  end

  defp compose({a1, b1}, {a2, b2}), do: {Nx.multiply(a1, a2), Nx.add(Nx.multiply(a2, b1), b2)}

  # The identity of `compose` is (1, 0).
  defp pad(pairs, 0), do: pairs

  defp pad({a, b}, count) do
    more = fn t, value -> Nx.broadcast(first(t, value), put_elem(t.shape, 0, count)) end
    join({a, b}, {more.(a, 1), more.(b, 0)})
  end

  defp halves({a, b}) do
    {a1, a2} = even_odd(a)
    {b1, b2} = even_odd(b)
    {{a1, b1}, {a2, b2}}
  end

  defp even_odd(t) do
    [length | rest] = Tuple.to_list(t.shape)
    split = Nx.reshape(t, List.to_tuple([div(length, 2), 2 | rest]))
    {split[[.., 0]], split[[.., 1]]}
  end

  defp interleave({a1, b1}, {a2, b2}), do: {weave(a1, a2), weave(b1, b2)}

  defp weave(even, odd) do
    [length | rest] = Tuple.to_list(even.shape)
    Nx.reshape(Nx.stack([even, odd], axis: 1), List.to_tuple([2 * length | rest]))
  end

  defp join({a1, b1}, {a2, b2}), do: {Nx.concatenate([a1, a2]), Nx.concatenate([b1, b2])}
end
