defmodule Sidewinder.Reference.GatedDeltaRule do
  @moduledoc false
  # The gated delta rule and its gradient. Inputs are checked, without names and vectorized axes, each of its op's type.

  import Nx.Defn
  import Sidewinder.Reference.MatrixState
  import Sidewinder.Reference.Numbers, only: [constant: 2, wide: 1]
  import Sidewinder.Reference.Recurrence, only: [at: 2, before: 2, put: 3, swap: 1, zeros: 2]

  # Added to the square of the length of a key.
  @eps 1.0e-6

  @doc "y and the last state."
  def body(op, %{"v" => v} = inputs) do
    {terms, initial} = terms(op, inputs)
    {last_state, {y}} = steps(terms, initial, {zeros(elem(terms, 2).shape, initial.type)})
    [y: sequence(y, v), last_state: Nx.squeeze(last_state, axes: [0])]
  end

  @doc "The gradients, by the formulas at the head of the kernel's `mod.rs`."
  def backward(op, %{"q" => q, "k" => k, "v" => v, "dy" => dy} = inputs) do
    {{q_t, k_t, v_t, beta, a} = terms, initial} = terms(op, inputs)
    dy = values(dy)
    {_, {_, states}} = steps(terms, initial, {v_t, zeros(all_states(v_t, k_t), initial.type)})
    decayed = Nx.multiply(a, before(states, initial))
    e = Nx.subtract(v_t, by_key(decayed, k_t))

    {g, carry} =
      cotangents({q_t, k_t, beta, a, dy}, first(inputs["dlast_state"]) || Nx.multiply(initial, 0))

    de = by_key(g, k_t)
    dv = Nx.multiply(beta, de)
    left = Nx.subtract(g, Nx.multiply(k_t, dv))
    of_input = by_value(g, Nx.multiply(beta, e))

    cast(inputs,
      dq: states |> by_value(dy) |> Nx.multiply(scale(op, k)) |> through(op, q),
      dk: of_input |> Nx.subtract(by_value(decayed, dv)) |> through(op, k),
      dv: sequence(dv, v),
      dbeta: swap(Nx.sum(Nx.multiply(de, e), axes: [-2, -1])),
      dg: swap(Nx.sum(Nx.multiply(left, decayed), axes: [-2, -1])),
      dinitial_state: Nx.squeeze(carry, axes: [0])
    )
  end

  ## What forward and backward share

  # q, with the scale, k, v, beta and the decay of all steps; and the initial state.
  defp terms(op, %{"q" => q, "k" => k, "v" => v, "beta" => beta} = inputs) do
    {batch, _, heads, width} = v.shape
    beta = numbers(beta)
    v_t = values(v)
    decay = if g = inputs["g"], do: Nx.exp(numbers(g)), else: Nx.add(Nx.multiply(beta, 0), 1)
    q = q |> unit(op) |> Nx.multiply(scale(op, k)) |> keys(heads)
    state = {1, batch, heads, Nx.axis_size(k, 3), width}
    initial = first(inputs["initial_state"]) || zeros(state, v_t.type)
    {{q, k |> unit(op) |> keys(heads), v_t, beta, decay}, initial}
  end

  # A key divided by its length where that is asked for.
  defp unit(x, op) do
    x = wide(x)
    if op.qk_l2norm, do: Nx.divide(x, length_of(x)), else: x
  end

  defp length_of(x) do
    square = Nx.sum(Nx.multiply(x, x), axes: [-1], keep_axes: true)
    Nx.sqrt(Nx.add(square, constant(@eps, x)))
  end

  # The gradient of a key of each head, [L, B, H, K], as that of the input: summed over the heads of a group, and taken
  # through the division by the length.
  defp through(gradient, op, x), do: gradient |> of_groups(x) |> through_length(op, wide(x))

  defp through_length(gradient, %{qk_l2norm: false}, _), do: gradient

  defp through_length(gradient, _, x) do
    {length, unit} = {length_of(x), Nx.divide(x, length_of(x))}
    along = Nx.sum(Nx.multiply(gradient, unit), axes: [-1], keep_axes: true)
    Nx.divide(Nx.subtract(gradient, Nx.multiply(unit, along)), length)
  end

  ## Loops over time

  # The last state, and y, and all states where there is room for them.
  defnp steps({q, k, v, beta, a}, state, out) do
    {_, state, out, _} =
      while {t = 0, state, out, {q, k, v, beta, a}}, t < Nx.axis_size(v, 0) do
        decayed = at(a, t) * state
        e = at(v, t) - by_key(decayed, at(k, t))
        state = decayed + at(k, t) * (at(beta, t) * e)
        {t + 1, state, write(out, t, by_key(state, at(q, t)), state), {q, k, v, beta, a}}
      end

    {state, out}
  end

  deftransformp write(out, t, y, state) do
    values = Enum.take([y, state], tuple_size(out))
    List.to_tuple(Enum.zip_with(Tuple.to_list(out), values, &put(&1, t, &2)))
  end

  # The cotangents of all states, and that of the initial one.
  defp cotangents({q, k, beta, a, dy}, last) do
    reversed = for t <- [q, k, beta, a, dy], do: Nx.reverse(t, axes: [0])
    {length, batch, heads, keys, 1} = q.shape
    out = zeros({length, batch, heads, keys, Nx.axis_size(dy, 4)}, q.type)
    {g, carry} = back(List.to_tuple(reversed), last, out)
    {Nx.reverse(g, axes: [0]), carry}
  end

  defnp back({q, k, beta, a, dy}, carry, out) do
    {_, carry, out, _} =
      while {t = 0, carry, out, {q, k, beta, a, dy}}, t < Nx.axis_size(dy, 0) do
        g = carry + at(q, t) * at(dy, t)
        carry = at(a, t) * (g - at(k, t) * (at(beta, t) * by_key(g, at(k, t))))
        {t + 1, carry, put(out, t, g), {q, k, beta, a, dy}}
      end

    {out, carry}
  end
end
