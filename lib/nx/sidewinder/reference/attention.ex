defmodule Sidewinder.Reference.Attention do
  @moduledoc false
  # Attention and its gradient, with all scores at once. Within, heads come first, and queries are
  # [B, G, R, L, W] for keys [B, G, M, W]: R heads of queries read each head of keys.

  import Sidewinder.Reference.Numbers

  def body(op, %{"q" => q} = inputs) do
    {scores, visible} = scores(op, inputs)
    lowest = Nx.Constants.min_finite(scores.type)
    zero = constant(0, scores)
    seen = Nx.select(visible, scores, lowest)
    largest = seen |> Nx.reduce_max(axes: [-1], keep_axes: true) |> Nx.max(lowest)
    weights = Nx.select(visible, Nx.exp(Nx.subtract(seen, largest)), zero)
    sum = Nx.sum(weights, axes: [-1], keep_axes: true)

    # A query with no visible key has a sum of 0.
    divisor = Nx.select(Nx.equal(sum, 0), constant(1, sum), sum)
    y = Nx.dot(Nx.divide(weights, divisor), [4], [0, 1], heads(op, inputs["v"]), [2], [0, 1])

    lse =
      Nx.select(
        Nx.equal(sum, 0),
        Nx.Constants.neg_infinity(sum.type),
        Nx.add(largest, Nx.log(divisor))
      )

    [
      y: y |> ungroup() |> layout(op) |> Nx.as_type(q.type),
      lse: ungroup(Nx.squeeze(lse, axes: [4]))
    ]
  end

  @doc """
  With P = exp(S - lse) and delta = sum dy y - dlse: dS = P (dP - delta), dP = dy v', dq = scale dS k,
  dk = scale dS' q, dv = P' dy, dbias = dS summed over the axes it is repeated on
  """
  def backward(op, inputs) do
    {scores, visible} = scores(op, inputs)
    [k, v] = for name <- ["k", "v"], do: heads(op, inputs[name])
    [q, y, dy] = for name <- ["q", "y", "dy"], do: queries(op, inputs[name], k)
    [lse, dlse] = for name <- ["lse", "dlse"], do: inputs[name] && per_query(inputs[name], k)

    visible = Nx.logical_and(visible, Nx.greater(lse, Nx.Constants.neg_infinity(lse.type)))
    none = Nx.Constants.neg_infinity(scores.type)
    weights = Nx.exp(Nx.select(visible, Nx.subtract(scores, lse), none))
    delta = Nx.sum(Nx.multiply(dy, y), axes: [-1], keep_axes: true)
    delta = if dlse, do: Nx.subtract(delta, dlse), else: delta
    dweights = Nx.dot(dy, [4], [0, 1], v, [3], [0, 1])
    dscores = Nx.multiply(weights, Nx.subtract(dweights, delta))
    scaled = Nx.multiply(dscores, constant(factor(op, inputs), dscores))

    gradients = [
      dq: ungroup(Nx.dot(scaled, [4], [0, 1], k, [2], [0, 1])),
      dk: Nx.dot(scaled, [2, 3], [0, 1], q, [2, 3], [0, 1]),
      dv: Nx.dot(weights, [2, 3], [0, 1], dy, [2, 3], [0, 1])
    ]

    for({name, t} <- gradients, do: {name, t |> layout(op) |> Nx.as_type(inputs["q"].type)}) ++
      [dbias: inputs["bias"] && repeated(ungroup(dscores), inputs["bias"])]
  end

  # All scores [B, G, R, L, M], and which keys a query sees.
  defp scores(op, inputs) do
    k = heads(op, inputs["k"])
    q = queries(op, inputs["q"], k)
    scores = Nx.dot(q, [4], [0, 1], k, [3], [0, 1])
    scores = Nx.multiply(scores, constant(factor(op, inputs), scores))
    shape = ungroup(scores).shape
    bias = inputs["bias"]
    scores = if bias, do: Nx.add(scores, like(bias, shape, scores)), else: scores

    visible = [
      inputs["mask"] && like(Nx.not_equal(inputs["mask"], 0), shape, scores),
      causal(op, scores)
    ]

    all = Nx.broadcast(Nx.tensor(1, type: :u8), scores)
    {scores, visible |> Enum.filter(& &1) |> Enum.reduce(all, &Nx.logical_and/2)}
  end

  defp factor(%{scale: nil}, %{"q" => q}), do: 1 / :math.sqrt(Nx.axis_size(q, -1))
  defp factor(%{scale: scale}, _), do: scale

  defp like(t, shape, scores), do: t |> Nx.broadcast(shape) |> Nx.reshape(scores.shape)

  # j <= i + offset
  defp causal(%{causal: false}, _), do: nil

  defp causal(%{q_offset: offset}, scores) do
    {_, _, _, queries, keys} = scores.shape
    # Larger offsets are equivalent to these bounds.
    offset = (offset || keys - queries) |> max(-queries) |> min(keys)
    Nx.less_equal(Nx.iota(scores.shape, axis: 4), Nx.add(Nx.iota(scores.shape, axis: 3), offset))
  end

  ## Axes

  defp heads(op, t), do: t |> wide() |> layout(op)

  defp layout(t, %{layout: :heads_first}), do: t
  defp layout(t, %{layout: :heads_last}), do: Nx.transpose(t, axes: [0, 2, 1, 3])

  defp queries(op, t, k), do: op |> heads(t) |> group(k)

  defp per_query(t, k), do: t |> group(k) |> Nx.new_axis(-1)

  # [B, H, ...] as [B, G, R, ...], and back.
  defp group(t, k) do
    [batch, heads | rest] = Tuple.to_list(t.shape)
    groups = Nx.axis_size(k, 1)
    Nx.reshape(t, List.to_tuple([batch, groups, div(heads, groups) | rest]))
  end

  defp ungroup(t) do
    [batch, groups, each | rest] = Tuple.to_list(t.shape)
    Nx.reshape(t, List.to_tuple([batch, groups * each | rest]))
  end

  defp repeated(t, like) do
    axes = for axis <- Nx.axes(like), Nx.axis_size(like, axis) == 1, do: axis
    if axes == [], do: t, else: Nx.sum(t, axes: axes, keep_axes: true)
  end
end
