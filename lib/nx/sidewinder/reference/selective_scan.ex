defmodule Sidewinder.Reference.SelectiveScan do
  @moduledoc false
  # The selective scan and its gradient. Inputs are checked, without names and vectorized axes, each
  # of its op's type.

  import Nx.Defn
  alias Sidewinder.Reference.{Activations, Recurrence}
  import Recurrence, only: [at: 2, put: 3, swap: 1, zeros: 2]
  import Sidewinder.Reference.Numbers, only: [constant: 2]

  @doc "y, the last state, and all states where they are known."
  def body(op, %{"x" => x, "A" => a} = inputs) do
    %{x: x4, delta: delta, b: b, c: c} = terms(op, inputs)
    {y, last_state, states} = scan(op, {x4, delta, a, b, c}, first(inputs["initial_state"]))
    y = y |> skip(inputs["D"], x4) |> gate(wide(inputs["z"], a.type))

    [
      y: y |> swap() |> Nx.as_type(x.type),
      last_state: Nx.squeeze(last_state, axes: [0]),
      states: states && swap(states)
    ]
  end

  @doc "The gradients, by the formulas in the documentation of `Sidewinder.selective_scan_backward/7`."
  def backward(op, %{"A" => a} = inputs) do
    %{x: x, delta: delta, raw: raw, b: b, c: c} = terms(op, inputs)

    [d, initial, dlast, dstates] =
      for name <- ["D", "initial_state", "dlast_state", "dstates"], do: inputs[name]

    [z, dy] = for name <- ["z", "dy"], do: wide(inputs[name], a.type)
    [b, c] = for t <- [b, c], do: per_channel(t, Nx.axis_size(a, 0))

    decay = Nx.exp(Nx.multiply(delta, a))
    input = Nx.multiply(delta, x)
    states = Recurrence.forwards(:sequential, {decay, Nx.multiply(input, b)}, first(initial))

    ungated = gate(dy, z)
    dh = add(Nx.multiply(Nx.new_axis(ungated, -1), c), dstates && swap(dstates))
    g = Recurrence.backwards(decay, dh, first(dlast))

    along = g |> Nx.multiply(decay) |> Nx.multiply(Recurrence.before(states, first(initial)))
    through_b = Nx.sum(Nx.multiply(g, b), axes: [-1])
    flat_x = Nx.squeeze(x, axes: [-1])

    ddelta = Nx.add(Nx.sum(Nx.multiply(along, a), axes: [-1]), Nx.multiply(through_b, flat_x))
    ddt = Nx.multiply(ddelta, raw_slope(op, raw))

    cast(inputs,
      dx: skip(Nx.multiply(through_b, Nx.squeeze(delta, axes: [-1])), d, ungated) |> swap(),
      ddt: swap(ddt),
      dA: Nx.sum(Nx.multiply(along, delta), axes: [0, 1]),
      dB: ungroup(Nx.multiply(g, input), inputs["B"]),
      dC: ungroup(Nx.multiply(states, Nx.new_axis(ungated, -1)), inputs["C"]),
      dD: d && Nx.sum(Nx.multiply(ungated, flat_x), axes: [0, 1]),
      dz: z && dy |> Nx.multiply(skip(read_out(c, states), d, x)) |> gate_slope(z) |> swap(),
      ddt_bias: Nx.sum(ddt, axes: [0, 1]),
      dinitial_state: Nx.squeeze(Nx.multiply(at(decay, 0), at(g, 0)), axes: [0])
    )
  end

  # Each gradient in the type of its input, for the inputs that are there.
  defp cast(inputs, gradients) do
    for {name, t} <- gradients, input = inputs[of(name)], do: {name, Nx.as_type(t, input.type)}
  end

  defp of(name), do: name |> Atom.to_string() |> String.replace_prefix("d", "")

  ## What forward and backward share, time first

  # x and delta as [L, B, D, 1], dt before its softplus, and B and C as [L or 1, B or 1, G, N].
  defp terms(op, %{"x" => x, "dt" => dt, "A" => a} = inputs) do
    raw = add(wide(dt, a.type), inputs["dt_bias"])
    delta = raw |> size(op) |> clamp(op.dt_clamp)
    [x, delta] = for t <- [wide(x, a.type), delta], do: Nx.new_axis(t, -1)
    [b, c] = for name <- ["B", "C"], do: per_step(inputs[name], a.type)
    %{x: x, delta: delta, raw: raw, b: b, c: c}
  end

  defp wide(nil, _), do: nil
  defp wide(t, type), do: t |> Nx.as_type(type) |> swap()

  defp first(nil), do: nil
  defp first(t), do: Nx.new_axis(t, 0)

  defp per_step(t, type) do
    case t.shape do
      {d, n} -> Nx.reshape(Nx.as_type(t, type), {1, 1, d, n})
      {b, l, n} -> wide(Nx.reshape(t, {b, l, 1, n}), type)
      {_, _, _, _} -> wide(t, type)
    end
  end

  defp add(t, nil), do: t
  defp add(t, other), do: Nx.add(t, other)

  defp size(raw, op), do: Activations.value(raw, softplus(op))

  defp softplus(op), do: if(op.dt_softplus, do: :softplus)

  # The bounds are in the type of the arithmetic, and inclusive.
  defp clamp(s, nil), do: s
  defp clamp(s, {lo, hi}), do: s |> Nx.max(constant(lo, s)) |> Nx.min(constant(hi, s))

  # d delta / d dt
  defp raw_slope(op, raw) do
    raw |> Activations.slope(softplus(op)) |> mask(size(raw, op), op)
  end

  defp mask(slope, _, %{dt_clamp: nil}), do: slope
  defp mask(slope, _, %{clamp_grad: :straight_through}), do: slope

  defp mask(slope, s, %{dt_clamp: {lo, hi}}) do
    outside = Nx.logical_or(Nx.less(s, constant(lo, s)), Nx.greater(s, constant(hi, s)))
    Nx.select(outside, 0, slope)
  end

  # x is [L, B, D], or has an additional axis.
  defp skip(y, nil, _), do: y
  defp skip(y, d, x), do: Nx.add(y, Nx.multiply(d, Nx.reshape(x, y.shape)))

  defp gate(y, nil), do: y
  defp gate(y, z), do: Nx.multiply(y, Activations.value(z, :silu))

  defp gate_slope(dy, z), do: Nx.multiply(dy, Activations.slope(z, :silu))

  # Repeats each group of [L, B, G, N] for its channels.
  defp per_channel(t, channels) do
    {length, batch, groups, state} = t.shape

    t
    |> Nx.reshape({length, batch, groups, 1, state})
    |> Nx.broadcast({length, batch, groups, div(channels, groups), state})
    |> Nx.reshape({length, batch, channels, state})
  end

  # The reverse: the gradient of a tensor of one of the forms of B and C.
  defp ungroup(t, %{shape: {_, _}}), do: Nx.sum(t, axes: [0, 1])
  defp ungroup(t, %{shape: {_, _, _}}), do: swap(Nx.sum(t, axes: [2]))

  defp ungroup(t, %{shape: {_, _, groups, _}}) do
    {length, batch, channels, state} = t.shape

    t
    |> Nx.reshape({length, batch, groups, div(channels, groups), state})
    |> Nx.sum(axes: [3])
    |> swap()
  end

  ## Forward: y [L, B, D], the last state [1, B, D, N], and all states [L, B, D, N] where known

  defp scan(%{algorithm: :sequential} = op, {x, _, a, _, _} = inputs, initial) do
    {length, batch, channels, 1} = x.shape
    state = Nx.axis_size(a, 1)
    y = zeros({length, batch, channels}, a.type)
    h = initial || zeros({1, batch, channels, state}, a.type)

    if op.return_states do
      {h, {y, states}} = steps(inputs, h, {y, zeros({length, batch, channels, state}, a.type)})
      {y, h, states}
    else
      {h, {y}} = steps(inputs, h, {y})
      {y, h, nil}
    end
  end

  defp scan(%{algorithm: algorithm}, {x, delta, a, b, c}, initial) do
    states = Recurrence.forwards(algorithm, coefficients(x, delta, a, b), initial)
    {read_out(c, states), at(states, Nx.axis_size(x, 0) - 1), states}
  end

  # Decay and input of all steps h -> decay h + input, each [L, B, D, N].
  deftransformp coefficients(x, delta, a, b) do
    decay = Nx.exp(Nx.multiply(delta, a))
    {decay, Nx.multiply(Nx.multiply(delta, x), per_channel(b, Nx.axis_size(a, 0)))}
  end

  deftransformp read_out(c, states) do
    Nx.sum(Nx.multiply(per_channel(c, Nx.axis_size(states, 2)), states), axes: [-1])
  end

  defnp steps({x, delta, a, b, c}, h, out) do
    {_, h, out, _} =
      while {t = 0, h, out, {x, delta, a, b, c}}, t < Nx.axis_size(x, 0) do
        {decay, input} = coefficients(at(x, t), at(delta, t), a, at(b, t))
        h = decay * h + input
        {t + 1, h, write(out, t, read_out(at(c, t), h), h), {x, delta, a, b, c}}
      end

    {h, out}
  end

  deftransformp write(out, t, y, h) do
    values = Enum.take([y, h], tuple_size(out))
    List.to_tuple(Enum.zip_with(Tuple.to_list(out), values, &put(&1, t, &2)))
  end
end
