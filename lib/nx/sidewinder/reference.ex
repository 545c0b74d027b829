defmodule Sidewinder.Reference do
  @moduledoc """
  The ops in pure Nx: what runs where the native library is missing, and the baseline that the
  kernels are measured against.

  Three algorithms compute the recurrence `h_t = a_t h_{t-1} + b_t`. The last two combine steps,
  seen as maps `h -> a h + b`, by `(a1, b1) . (a2, b2) = (a1 a2, a2 b1 + b2)`, earlier first:

    * `:sequential` - step by step in a `while`: `L` steps of work.
    * `:hillis_steele` - every element takes in the one 1, 2, 4, ... before it
      (Hillis and Steele 1986): `L log L` work, `log L` steps.
    * `:blelloch` - up-sweep to sums of pairs, down-sweep to prefixes (Blelloch 1990): `2 L` work,
      `2 log L` steps.

  Functions take Nx tensors, eagerly and inside `defn` on any compiler and backend. Arithmetic is
  f32 for f32, bf16 and f16 tensors, f64 for f64. They have no gradient yet and raise if asked.
  """
  import Nx.Defn

  alias Sidewinder.{Block, Error, Op}

  @algorithms [:sequential, :hillis_steele, :blelloch]

  @doc """
  `Sidewinder.selective_scan/6` in pure Nx, with the same shapes, options and errors, and one
  option more:

    * `:algorithm` - `:sequential` (default), `:hillis_steele` or `:blelloch`. The last two hold all
      states, `batch * length * channels * state` numbers, at once.

  ## Examples

      iex> x = Nx.tensor([[[1.0], [2.0]]])
      iex> dt = Nx.tensor([[[0.5], [1.0]]])
      iex> a = Nx.tensor([[-1.0]])
      iex> b = Nx.tensor([[[1.0], [0.5]]])
      iex> c = Nx.tensor([[[1.0], [2.0]]])
      iex> y = Sidewinder.Reference.selective_scan(x, dt, a, b, c, algorithm: :blelloch)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.5, 2.36788]
  """
  @spec selective_scan(Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) :: Nx.t() | tuple
  deftransform selective_scan(x, dt, a, b, c, opts \\ []) do
    {algorithm, opts} = algorithm(opts)
    op = %Block.SelectiveScan{algorithm: algorithm, target: [backend: :nx]}
    Block.SelectiveScan.call(op, [x, dt, a, b, c], opts)
  end

  @doc """
  The recurrence `h_t = a_t h_{t-1} + b_t` over axis 1 of `a` and `b`, both `{batch, length, width}`.
  Returns `h` of that shape.

  Options: `:initial_state` `{batch, width}` (zeros by default) and `:algorithm` as in
  `selective_scan/6`. Raises `Sidewinder.Error` on shapes and types that do not fit.

  ## Examples

      iex> a = Nx.broadcast(0.5, {1, 4, 1})
      iex> b = Nx.broadcast(1.0, {1, 4, 1})
      iex> Sidewinder.Reference.linear_scan(a, b, algorithm: :hillis_steele) |> Nx.to_flat_list()
      [1.0, 1.5, 1.75, 1.875]
  """
  @spec linear_scan(Nx.t(), Nx.t(), keyword) :: Nx.t()
  deftransform linear_scan(a, b, opts \\ []) do
    {algorithm, opts} = algorithm(opts)
    op = %Block.LinearScan{algorithm: algorithm, target: [backend: :nx]}
    [h: h] = Op.call(op, [{"a", a}, {"b", b}], opts)
    h
  end

  @doc """
  The three algorithms as `{name, function}` for tables of run times. Each function takes the five
  tensors of a plain `selective_scan` as `Sidewinder.Tensor`s and returns `y` as one.
  """
  @spec demo_levels() :: [{String.t(), (... -> Sidewinder.Tensor.t())}]
  def demo_levels do
    for algorithm <- @algorithms do
      {"Nx #{algorithm}", fn x, dt, a, b, c -> on_tensors([x, dt, a, b, c], algorithm) end}
    end
  end

  defp on_tensors(tensors, algorithm) do
    [x, dt, a, b, c] = Enum.map(tensors, &Op.from_kernel/1)
    Op.to_kernel(selective_scan(x, dt, a, b, c, algorithm: algorithm))
  end

  defp algorithm(opts) when not is_list(opts), do: {:sequential, opts}

  defp algorithm(opts) do
    case Keyword.pop(opts, :algorithm, :sequential) do
      {algorithm, opts} when algorithm in @algorithms ->
        {algorithm, opts}

      {other, _} ->
        raise Error.new(:option, "algorithm",
                expected: "one of #{inspect(@algorithms)}",
                got: Error.show(other)
              )
    end
  end

  # From here on: checked inputs without names and vectorized axes, each of its op's type.

  @doc false
  def selective_scan_body(op, %{"x" => x, "A" => a} = inputs) do
    wide = a.type
    x4 = x |> Nx.as_type(wide) |> Nx.new_axis(-1)
    delta = inputs |> step_size(op, wide) |> Nx.new_axis(-1)
    b = per_step(inputs["B"], wide)
    c = per_step(inputs["C"], wide)

    {y, last_state, states} = scan(op, {x4, delta, a, b, c}, inputs["h0"])
    y = y |> skip(inputs["D"], x) |> gate(inputs["z"]) |> Nx.as_type(x.type)

    [y: y, last_state: last_state, states: states]
  end

  @doc false
  def selective_state_update_body(op, inputs) do
    as_scan =
      Map.new(inputs, fn {name, t} ->
        {name(name), if(timeless?(name), do: Nx.new_axis(t, 1), else: t)}
      end)

    op = %Block.SelectiveScan{
      dt_softplus: op.dt_softplus,
      dt_clamp: op.dt_clamp,
      algorithm: op.algorithm
    }

    [{:y, y}, {:last_state, state} | _] = selective_scan_body(op, as_scan)
    [y: Nx.squeeze(y, axes: [1]), state: state]
  end

  defp name("state"), do: "h0"
  defp name(name), do: name

  defp timeless?(name), do: name in ["x", "dt", "B", "C", "z"]

  @doc false
  def linear_scan_body(op, %{"a" => a, "b" => b} = inputs) do
    wide = if a.type == {:f, 64}, do: {:f, 64}, else: {:f, 32}
    h0 = inputs["h0"] && Nx.new_axis(inputs["h0"], 1)
    h = recurrence(op.algorithm, {Nx.as_type(a, wide), Nx.as_type(b, wide)}, h0)
    [h: Nx.as_type(h, a.type)]
  end

  ## The formula

  defp step_size(%{"dt" => dt} = inputs, op, wide) do
    dt
    |> Nx.as_type(wide)
    |> add(inputs["dt_bias"])
    |> then(&if(op.dt_softplus, do: softplus(&1), else: &1))
    |> clamp(op.dt_clamp, wide)
  end

  defp add(t, nil), do: t
  defp add(t, bias), do: Nx.add(t, bias)

  # Overflows nowhere, unlike log(1 + exp(v)).
  defp softplus(v),
    do: v |> Nx.abs() |> Nx.negate() |> Nx.exp() |> Nx.log1p() |> Nx.add(Nx.max(v, 0))

  defp clamp(s, nil, _), do: s

  defp clamp(s, {lo, hi}, type),
    do: s |> Nx.max(Nx.tensor(lo, type: type)) |> Nx.min(Nx.tensor(hi, type: type))

  defp skip(y, nil, _), do: y
  defp skip(y, d, x), do: Nx.add(y, Nx.multiply(d, Nx.as_type(x, y.type)))

  defp gate(y, nil), do: y

  defp gate(y, z),
    do: z |> Nx.as_type(y.type) |> then(&Nx.multiply(y, Nx.multiply(&1, Nx.sigmoid(&1))))

  # All forms of B and C as [B or 1, L or 1, groups, N].
  defp per_step(t, wide) do
    t = Nx.as_type(t, wide)

    case t.shape do
      {d, n} -> Nx.reshape(t, {1, 1, d, n})
      {b, l, n} -> Nx.reshape(t, {b, l, 1, n})
      {_, _, _, _} -> t
    end
  end

  # Returns y [B, L, D], the last state [B, D, N], and all states [B, L, D, N] where they are known.
  defp scan(%{algorithm: :sequential} = op, {x, _, a, _, _} = inputs, h0) do
    {batch, length, channels, 1} = x.shape
    state = Nx.axis_size(a, 1)
    y = Nx.broadcast(Nx.tensor(0, type: a.type), {batch, length, channels})
    h = Nx.new_axis(h0 || Nx.broadcast(Nx.tensor(0, type: a.type), {batch, channels, state}), 1)

    states =
      if op.return_states,
        do: Nx.broadcast(Nx.tensor(0, type: a.type), {batch, length, channels, state})

    case steps(inputs, h, if(states, do: {y, states}, else: {y})) do
      {h, {y, states}} -> {y, Nx.squeeze(h, axes: [1]), states}
      {h, {y}} -> {y, Nx.squeeze(h, axes: [1]), nil}
    end
  end

  defp scan(%{algorithm: algorithm}, {x, delta, a, b, c}, h0) do
    states = recurrence(algorithm, coefficients(x, delta, a, b), h0 && Nx.new_axis(h0, 1))
    last = Nx.squeeze(take(states, Nx.axis_size(x, 1) - 1, 1), axes: [1])
    {read_out(c, states), last, states}
  end

  # What the step at t does to the state, h -> decay h + input: two tensors [B, L, D, N].
  deftransformp coefficients(x, delta, a, b) do
    decay = Nx.exp(Nx.multiply(delta, a))
    {decay, Nx.multiply(Nx.multiply(delta, x), per_channel(b, Nx.axis_size(a, 0)))}
  end

  deftransformp read_out(c, states) do
    Nx.sum(Nx.multiply(per_channel(c, Nx.axis_size(states, 2)), states), axes: [-1])
  end

  # Repeats each group of [B, L, G, N] for its channels.
  defp per_channel(t, channels) do
    {batch, length, groups, state} = t.shape

    t
    |> Nx.reshape({batch, length, groups, 1, state})
    |> Nx.broadcast({batch, length, groups, div(channels, groups), state})
    |> Nx.reshape({batch, length, channels, state})
  end

  defnp steps({x, delta, a, b, c}, h, out) do
    {_, h, out, _} =
      while {t = 0, h, out, {x, delta, a, b, c}}, t < Nx.axis_size(x, 1) do
        {decay, input} = coefficients(at(x, t), at(delta, t), a, at(b, t))
        h = decay * h + input
        {t + 1, h, write(out, t, read_out(at(c, t), h), h), {x, delta, a, b, c}}
      end

    {h, out}
  end

  deftransformp write(out, t, y, h) do
    values = Enum.take([y, h], tuple_size(out))
    List.to_tuple(Enum.zip_with(Tuple.to_list(out), values, &put_at(&1, t, &2)))
  end

  deftransformp put_at(out, t, value) do
    Nx.put_slice(out, [0, t | List.duplicate(0, Nx.rank(out) - 2)], value)
  end

  # What does not vary with time has length 1.
  deftransformp at(t, time) do
    if Nx.axis_size(t, 1) == 1, do: t, else: take(t, time, 1)
  end

  ## The recurrence over axis 1 of pairs {a, b} of any rank

  defp recurrence(:sequential, {a, b}, h0),
    do: linear_steps(a, b, h0 || Nx.multiply(take(b, 0, 1), 0))

  defp recurrence(algorithm, pairs, h0) do
    {a, b} = if algorithm == :blelloch, do: blelloch(pairs), else: hillis_steele(pairs, 1)
    if h0, do: Nx.add(Nx.multiply(a, h0), b), else: b
  end

  defnp linear_steps(a, b, h0) do
    {_, _, out, _} =
      while {t = 0, h = h0, out = b, {a, b}}, t < Nx.axis_size(b, 1) do
        h = at(a, t) * h + at(b, t)
        {t + 1, h, put_at(out, t, h), {a, b}}
      end

    out
  end

  # The sizes of every level differ, so these loops run over the levels while the graph is built:
  # log2(L) of them.
  defp hillis_steele({_, b} = pairs, stride) do
    length = Nx.axis_size(b, 1)

    if stride >= length do
      pairs
    else
      composed = compose(take(pairs, 0, length - stride), take(pairs, stride, length - stride))
      hillis_steele(join(take(pairs, 0, stride), composed), 2 * stride)
    end
  end

  defp blelloch({_, b} = pairs) do
    length = Nx.axis_size(b, 1)

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
  defp exclusive({_, b} = pairs) do
    if Nx.axis_size(b, 1) == 1 do
      each(pairs, &identity/2)
    else
      {left, right} = halves(pairs)
      prefix = exclusive(compose(left, right))
      interleave(prefix, compose(prefix, left))
    end
  end

  defp identity(t, value), do: Nx.broadcast(Nx.tensor(value, type: t.type), t.shape)

  defp compose({a1, b1}, {a2, b2}), do: {Nx.multiply(a1, a2), Nx.add(Nx.multiply(a2, b1), b2)}

  defp pad(pairs, 0), do: pairs

  defp pad(pairs, count) do
    each(pairs, fn t, value ->
      Nx.pad(
        t,
        Nx.tensor(value, type: t.type),
        for(axis <- Nx.axes(t), do: {0, if(axis == 1, do: count, else: 0), 0})
      )
    end)
  end

  defp halves({a, b}) do
    {a1, a2} = even_odd(a)
    {b1, b2} = even_odd(b)
    {{a1, b1}, {a2, b2}}
  end

  defp even_odd(t) do
    [batch, length | rest] = Tuple.to_list(t.shape)
    split = Nx.reshape(t, List.to_tuple([batch, div(length, 2), 2 | rest]))
    {Nx.squeeze(split[[.., .., 0..0]], axes: [2]), Nx.squeeze(split[[.., .., 1..1]], axes: [2])}
  end

  defp interleave({a1, b1}, {a2, b2}), do: {weave(a1, a2), weave(b1, b2)}

  defp weave(even, odd) do
    [batch, length | rest] = Tuple.to_list(even.shape)
    Nx.reshape(Nx.stack([even, odd], axis: 2), List.to_tuple([batch, 2 * length | rest]))
  end

  defp join({a1, b1}, {a2, b2}),
    do: {Nx.concatenate([a1, a2], axis: 1), Nx.concatenate([b1, b2], axis: 1)}

  defp take({a, b}, start, length), do: {take(a, start, length), take(b, start, length)}
  defp take(t, start, length), do: Nx.slice_along_axis(t, start, length, axis: 1)

  # The identity of `compose` is (1, 0).
  defp each({a, b}, fun), do: {fun.(a, 1), fun.(b, 0)}
end
