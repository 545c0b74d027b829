defmodule Sidewinder.Reference.BlockRecurrence do
  @moduledoc false
  # The recurrence of the MM-Rec block and its gradient, of checked inputs. Within, time comes first.

  import Nx.Defn
  alias Sidewinder.Reference.{Activations, Recurrence}
  import Recurrence, only: [at: 2, put: 3, swap: 1, zeros: 2]
  import Sidewinder.Reference.Numbers

  @eps 1.0e-6

  def body(op, %{"z" => z} = inputs) do
    {terms, weights, initial} = given(inputs)
    {h, last} = steps(terms, initial, weights, op: op, mixed: mixed?(inputs))
    [h: h |> swap() |> Nx.as_type(z.type), last_state: Nx.squeeze(last, axes: [0])]
  end

  @doc """
  With G after clip and norm, and s and m of h[t-1], which are known for all times at once:

      ds = G z s (1 - s)          dm = mix G (z - h[t-1]) m (1 - m)
      dz = G s + mix G m + (dm w_mix)[:D]                   dgamma = (1 + mix) G h[t-1]
      the next G = G ((1 + mix) gamma + mix (1 - m)) + ds w_gate + (dm w_mix)[D:]
  """
  def backward(op, %{"h" => h, "dh" => dh} = inputs) do
    {{z, gamma, of_z}, weights, initial} = given(inputs)
    before = Recurrence.before(swap(wide(h)), initial)
    {s, m} = gates(before, of_z, weights, mixed?(inputs))
    u = unbounded(op, {z, gamma, before}, {s, m})
    # What G is multiplied with for ds, dm and the next G.
    ds = Nx.multiply(z, slope(s))
    dm = m && scaled(op.mix, Nx.multiply(Nx.subtract(z, before), slope(m)))
    keep = unbounded(op, {constant(0, z), gamma, constant(1, z)}, {constant(0, z), m})

    terms = {swap(wide(dh)), u, keep, ds, dm || ds}
    dlast = first(inputs["dlast_state"]) || zeros(initial.shape, initial.type)
    {g, dinitial_state} = back(terms, dlast, weights, op: op, mixed: mixed?(inputs))
    [ds, dm] = for t <- [ds, dm], do: t && Nx.multiply(g, t)
    of_gate = m && Nx.add(scaled(op.mix, Nx.multiply(g, m)), times(dm, half(inputs["w_mix"], 0)))

    cast(inputs,
      dz: swap(add(Nx.multiply(g, s), of_gate)),
      dgamma: swap(scaled(1 + if(m, do: op.mix, else: 0), Nx.multiply(g, before))),
      dw_gate: outer(ds, before),
      db_gate: Nx.sum(ds, axes: [0, 1]),
      dw_mix: m && Nx.concatenate([outer(dm, z), outer(dm, before)], axis: 1),
      db_mix: m && Nx.sum(dm, axes: [0, 1]),
      dinitial_state: Nx.squeeze(dinitial_state, axes: [0])
    )
  end

  defp cast(inputs, gradients) do
    for {name, t} <- gradients,
        input = inputs[String.replace_prefix(Atom.to_string(name), "d", "")],
        do: {name, Nx.as_type(t, input.type)}
  end

  ## What forward and backward share

  defp mixed?(inputs), do: is_map_key(inputs, "w_mix")

  # Sequences, weights as {w_gate, b_gate, the half of w_mix for h}, and the initial state. The second gate's product
  # with z is computed for all times at once. Without a second gate, its tensors are placeholders that are never read.
  defp given(%{"z" => z, "gamma" => gamma, "w_gate" => w_gate, "b_gate" => b_gate} = inputs) do
    [z, gamma] = for t <- [z, gamma], do: t |> wide() |> swap()
    [w_gate, b_gate] = for t <- [w_gate, b_gate], do: wide(t)
    initial = first(inputs["initial_state"]) || zeros(put_elem(z.shape, 0, 1), z.type)

    if mixed?(inputs) do
      of_z = Nx.add(linear(z, half(inputs["w_mix"], 0)), wide(inputs["b_mix"]))
      {{z, gamma, of_z}, {w_gate, b_gate, half(inputs["w_mix"], 1)}, initial}
    else
      {{z, gamma, z}, {w_gate, b_gate, w_gate}, initial}
    end
  end

  # The half of w_mix for z, or for h.
  defp half(w_mix, which) do
    width = Nx.axis_size(w_mix, 0)
    w_mix |> wide() |> Nx.slice_along_axis(which * width, width, axis: 1)
  end

  defp first(nil), do: nil
  defp first(t), do: Nx.new_axis(wide(t), 0)

  defp gates(h, of_z, {w_gate, b_gate, w_mix}, mixed) do
    s = Activations.value(Nx.add(linear(h, w_gate), b_gate), :sigmoid)
    {s, if(mixed, do: Activations.value(Nx.add(of_z, linear(h, w_mix)), :sigmoid))}
  end

  # u of the formula.
  defp unbounded(op, {z, gamma, h}, {s, m}) do
    kept = Nx.multiply(gamma, h)
    core = Nx.add(Nx.multiply(z, s), kept)
    add(core, m && scaled(op.mix, Nx.add(mean(m, z, h), kept)))
  end

  defp mean(m, z, h), do: Nx.add(Nx.multiply(m, z), Nx.multiply(rest(m), h))

  defp add(t, nil), do: t
  defp add(t, other), do: Nx.add(t, other)
  defp rest(t), do: Nx.subtract(constant(1, t), t)
  defp slope(s), do: Nx.multiply(s, rest(s))
  defp scaled(number, t), do: Nx.multiply(constant(number, t), t)

  # Weights are stored {out, in}.
  defp linear(t, w), do: Nx.dot(t, [-1], w, [1])
  defp times(t, w), do: Nx.dot(t, [-1], w, [0])
  defp outer(d, t), do: Nx.dot(d, [0, 1], t, [0, 1])

  ## Norm and clip

  defp bounded(op, u) do
    {v, _, _} = norm(op, u)
    clip = op.state_clip && constant(op.state_clip, u)
    if clip, do: v |> Nx.max(Nx.negate(clip)) |> Nx.min(clip), else: v
  end

  # u / (root + eps), what u is multiplied with, and the root.
  defp norm(%{state_norm: false}, u), do: {u, nil, nil}

  defp norm(_op, u) do
    root = u |> Nx.multiply(u) |> Nx.mean(axes: [-1], keep_axes: true) |> Nx.sqrt()
    r = Nx.divide(constant(1, u), Nx.add(root, constant(@eps, u)))
    {Nx.multiply(u, r), r, root}
  end

  # The cotangent of u for that of what is bounded.
  defp through(op, g, u) do
    {v, r, root} = norm(op, u)
    g = if op.state_clip, do: inside(g, v, constant(op.state_clip, v)), else: g
    if r, do: through_norm(g, {v, r, root}), else: g
  end

  defp inside(g, v, clip), do: Nx.select(Nx.greater(Nx.abs(v), clip), constant(0, g), g)

  # r (g - u mean(g u r) / root), where the root is not 0.
  defp through_norm(g, {v, r, root}) do
    none = Nx.equal(root, 0)
    along = g |> Nx.multiply(v) |> Nx.mean(axes: [-1], keep_axes: true)
    share = Nx.divide(along, Nx.select(none, constant(1, root), Nx.multiply(root, r)))
    share = Nx.select(none, constant(0, root), share)
    Nx.multiply(r, Nx.subtract(g, Nx.multiply(v, share)))
  end

  ## Loops over time

  defnp steps({z, gamma, of_z}, initial, weights, opts \\ []) do
    {_, h, out, _, _} =
      while {t = 0, h = initial, out = z, terms = {z, gamma, of_z}, weights},
            t < Nx.axis_size(z, 0) do
        {z, gamma, of_z} = terms
        h = step({at(z, t), at(gamma, t), h}, at(of_z, t), weights, opts)
        {t + 1, h, put(out, t, h), terms, weights}
      end

    {out, h}
  end

  deftransformp step({_, _, h} = now, of_z, weights, opts) do
    bounded(opts[:op], unbounded(opts[:op], now, gates(h, of_z, weights, opts[:mixed])))
  end

  # From the last time to the first: G of all times, and the gradient of the initial state.
  defp back(terms, dlast, weights, opts) do
    terms = terms |> Tuple.to_list() |> Enum.map(&Nx.reverse(&1, axes: [0])) |> List.to_tuple()
    {g, dinitial_state} = steps_back(terms, dlast, weights, opts)
    {Nx.reverse(g, axes: [0]), dinitial_state}
  end

  defnp steps_back({dh, u, keep, ds, dm}, dlast, weights, opts \\ []) do
    {_, carry, out, _, _} =
      while {t = 0, carry = dlast, out = dh, terms = {dh, u, keep, ds, dm}, weights},
            t < Nx.axis_size(dh, 0) do
        {dh, u, keep, ds, dm} = terms
        g = cotangent(carry + at(dh, t), at(u, t), opts)
        carry = step_back(g, {at(keep, t), at(ds, t), at(dm, t)}, weights, opts)
        {t + 1, carry, put(out, t, g), terms, weights}
      end

    {out, carry}
  end

  deftransformp(cotangent(g, u, opts), do: through(opts[:op], g, u))

  deftransformp step_back(g, {keep, ds, dm}, {w_gate, _b_gate, w_mix}, opts) do
    of_gate = times(Nx.multiply(g, ds), w_gate)
    of_mix = if opts[:mixed], do: times(Nx.multiply(g, dm), w_mix)
    add(Nx.add(Nx.multiply(g, keep), of_gate), of_mix)
  end
end
