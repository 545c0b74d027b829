defmodule Sidewinder.Reference.LinearAttention do
  @moduledoc false
  # Linear attention and its gradient. Inputs are checked, without names and vectorized axes, each of its op's type. The
  # sum of keys, z, is the column that a state has for a value of 1 after all others.

  import Nx.Defn
  import Sidewinder.Reference.MatrixState
  import Sidewinder.Reference.Numbers, only: [constant: 2, wide: 1]
  import Sidewinder.Reference.Recurrence, only: [at: 2, before: 2, put: 3, swap: 1, zeros: 2]

  # Added to the divisor of y.
  @eps 1.0e-10

  @doc "y, and the last states of S and z."
  def body(op, %{"v" => v} = inputs) do
    {terms, initial} = terms(op, inputs)
    {last, {products}} = steps(terms, initial, {zeros(elem(terms, 2).shape, initial.type)})
    {n, d} = parts(products)
    {last_state, last_z} = states(last)
    [y: n |> Nx.divide(divisor(op, d)) |> sequence(v), last_state: last_state, last_z: last_z]
  end

  @doc "The gradients, by the formulas at the head of the kernel's `mod.rs`."
  def backward(op, %{"q" => q, "k" => k, "v" => v, "dy" => dy} = inputs) do
    {{q_t, k_t, v_t, a} = terms, initial} = terms(op, inputs)
    {_, {products, states}} = steps(terms, initial, {v_t, all(v_t, k_t)})
    dy = cotangents_of_products(op, parts(products), values(dy))
    last = both(inputs, "dlast_state", "dlast_z") || Nx.multiply(initial, 0)
    {g, carry} = cotangents({q_t, a, dy}, last)
    {dv, _} = g |> by_key(k_t) |> parts()
    {dinitial_state, dinitial_z} = states(carry)
    decayed = Nx.multiply(a, before(states, initial))

    cast(inputs,
      dq: states |> by_value(dy) |> Nx.multiply(scale(op, k)) |> of_groups(q),
      dk: g |> by_value(v_t) |> of_groups(k),
      dv: sequence(dv, v),
      dg: g |> Nx.multiply(decayed) |> of_decay(inputs["g"]),
      dinitial_state: dinitial_state,
      dinitial_z: dinitial_z
    )
  end

  # Summed over values, and over keys where all have the decay of their head.
  defp of_decay(t, %{shape: {_, _, _, _}}), do: swap(Nx.sum(t, axes: [-1]))
  defp of_decay(t, _), do: swap(Nx.sum(t, axes: [-2, -1]))

  defp divisor(%{normalize: true}, d), do: Nx.add(d, constant(@eps, d))
  defp divisor(_, d), do: constant(1, d)

  # The cotangents of n and d where y = n / (d + 1.0e-10), or n.
  defp cotangents_of_products(op, {n, d}, dy) do
    divisor = divisor(op, d)
    dn = Nx.divide(dy, divisor)
    along = Nx.divide(Nx.sum(Nx.multiply(dn, n), axes: [-1], keep_axes: true), divisor)
    dd = if op.normalize, do: Nx.negate(along), else: Nx.multiply(d, 0)
    Nx.concatenate([dn, dd], axis: -1)
  end

  # q, with the scale, k, v with the 1, and the decay of all steps; and the initial state.
  defp terms(op, %{"q" => q, "k" => k, "v" => v} = inputs) do
    heads = Nx.axis_size(v, 2)
    v = values(v)
    v = Nx.concatenate([v, Nx.broadcast(constant(1, v), put_elem(v.shape, 4, 1))], axis: -1)
    q = q |> wide() |> Nx.multiply(scale(op, k)) |> keys(heads)
    k = k |> wide() |> keys(heads)

    initial =
      both(inputs, "initial_state", "initial_z") || zeros(put_elem(all(v, k).shape, 0, 1), v.type)

    {{q, k, v, decay(inputs["g"], v)}, initial}
  end

  defp all(v, k), do: zeros(all_states(v, k), v.type)

  defp decay(nil, v), do: zeros({1, 1, 1, 1, 1}, v.type) |> Nx.add(1)
  defp decay(%{shape: {_, _, _, _}} = g, _), do: g |> Nx.exp() |> Nx.new_axis(-1) |> swap()
  defp decay(g, _), do: Nx.exp(numbers(g))

  # States of S and z as one, or nil.
  defp both(inputs, s, z) do
    case {inputs[s], inputs[z]} do
      {nil, nil} -> nil
      {nil, z} -> both(zeros(Tuple.insert_at(z.shape, 3, width(inputs)), z.type), z)
      {s, nil} -> both(s, zeros(Tuple.delete_at(s.shape, 3), s.type))
      {s, z} -> both(s, z)
    end
  end

  defp both(s, z), do: first(Nx.concatenate([s, Nx.new_axis(z, -1)], axis: -1))

  defp width(%{"v" => v}), do: Nx.axis_size(v, 3)

  # All columns but the last, and the last.
  defp parts(t) do
    width = Nx.axis_size(t, -1) - 1
    part = &Nx.slice_along_axis(t, &1, &2, axis: -1)
    {part.(0, width), part.(width, 1)}
  end

  defp states(t) do
    {s, z} = parts(Nx.squeeze(t, axes: [0]))
    {s, Nx.squeeze(z, axes: [-1])}
  end

  ## Loops over time

  # The last state, the products with q, and all states where there is room for them.
  defnp steps({q, k, v, a}, state, out) do
    {_, state, out, _} =
      while {t = 0, state, out, {q, k, v, a}}, t < Nx.axis_size(v, 0) do
        state = at(a, t) * state + at(k, t) * at(v, t)
        {t + 1, state, write(out, t, by_key(state, at(q, t)), state), {q, k, v, a}}
      end

    {state, out}
  end

  deftransformp write(out, t, y, state) do
    values = Enum.take([y, state], tuple_size(out))
    List.to_tuple(Enum.zip_with(Tuple.to_list(out), values, &put(&1, t, &2)))
  end

  # The cotangents of all states, and that of the initial one.
  defp cotangents({q, a, dy}, last) do
    reversed = for t <- [q, a, dy], do: Nx.reverse(t, axes: [0])
    {length, batch, heads, keys, 1} = q.shape
    out = zeros({length, batch, heads, keys, Nx.axis_size(dy, 4)}, q.type)
    {g, carry} = back(List.to_tuple(reversed), last, out)
    {Nx.reverse(g, axes: [0]), carry}
  end

  defnp back({q, a, dy}, carry, out) do
    {_, carry, out, _} =
      while {t = 0, carry, out, {q, a, dy}}, t < Nx.axis_size(dy, 0) do
        g = carry + at(q, t) * at(dy, t)
        {t + 1, at(a, t) * g, put(out, t, g), {q, a, dy}}
      end

    {out, carry}
  end
end
