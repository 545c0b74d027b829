defmodule Sidewinder.Reference.MmrecBlock do
  @moduledoc false
  # The block of MM-Rec, composed of its parts.

  alias Sidewinder.{Error, Op}
  alias Sidewinder.Block.{Attention, BlockRecurrence, Linear, MdiGamma, RmsNorm}
  import Sidewinder.Reference.Numbers

  @gamma Map.keys(MdiGamma.weights())

  def body(op, inputs), do: compose(op, inputs, fn t, _which -> t end)

  # `drop` is done to what is added to x, to the activated hidden layer, and to what comes of it.
  defp compose(op, %{"x" => x} = inputs, drop) do
    xn = norm(op, x, inputs["n1"])
    [q, k, v, z] = for name <- ~w(q k v z), do: linear(op, xn, inputs, name)
    gamma = gamma(op, z, k, inputs)
    [h: h, h_last: h_last] = recurrence(op, z, gamma, inputs)
    context = attention(op, h, q, inputs)
    added = Nx.add(Nx.add(h, context), Nx.multiply(constant(op.v_mix, v), v))
    r = Nx.add(x, drop.(added, 0))
    hidden = linear(op, norm(op, r, inputs["n2"]), inputs, "f1")
    u = drop.(part(op, %Sidewinder.Block.Activations{fn: :gelu_erf}, [{"x", hidden}]), 1)
    y = Nx.add(r, drop.(linear(op, u, inputs, "f2"), 2))
    summary = y |> wide() |> Nx.mean(axes: [1]) |> Nx.as_type(y.type)

    [y: y, h: h, h_last: h_last, gamma: gamma, context: context, summary: summary] ++
      [q: q, k: k, v: v, z: z, hidden: hidden]
  end

  defp part(op, part, inputs) do
    [{_, t} | _] = Op.part(op, part, inputs)
    t
  end

  defp norm(op, x, w),
    do: part(op, %RmsNorm{eps: op.eps, eps_mode: op.norm}, [{"x", x}, {"w", w}])

  defp linear(op, x, inputs, name) do
    part(op, %Linear{}, [{"x", x}, {"w", inputs["w" <> name]}, {"b", inputs["b" <> name]}])
  end

  defp gamma(op, z, k, inputs) do
    part(op, %MdiGamma{}, [{"z", z}, {"context", k} | for(n <- @gamma, do: {n, inputs[n]})])
  end

  defp recurrence(op, z, gamma, inputs) do
    names = [{"Wg", "wgate"}, {"bg", "bgate"}, {"Wm", "wm"}, {"bm", "bm"}, {"h0", "h0"}]
    weights = for {name, here} <- names, do: {name, inputs[here]}
    options = op |> Map.take([:mix, :state_clip, :state_norm]) |> Map.put(:return_state, true)
    Op.part(op, struct(BlockRecurrence, options), [{"z", z}, {"gamma", gamma} | weights])
  end

  ## The memory

  defp attention(op, h, q_in, inputs) do
    {batch, length, width} = h.shape
    q = Nx.add(linear(op, h, inputs, "aq"), Nx.multiply(constant(0.5, q_in), q_in))

    [k, v] =
      for name <- ~w(k_mem v_mem) do
        top = top(op, inputs[name])
        slots = Nx.axis_size(top, 1)
        top |> Nx.broadcast({batch, slots, width}) |> heads(op)
      end

    given = [{"q", heads(q, op)}, {"k", k}, {"v", v}]
    y = part(op, %Attention{layout: :heads_last}, given)
    linear(op, Nx.reshape(y, {batch, length, width}), inputs, "ao")
  end

  defp heads(t, %{heads: heads}) do
    {batch, rows, width} = t.shape
    Nx.reshape(t, {batch, rows, heads, div(width, heads)})
  end

  # The top level over a bank, whose oldest slot comes first.
  defp top(op, bank) do
    slots = Nx.axis_size(bank, 1)
    oldest = rem(op.cursor, slots)

    1..(op.levels - 1)//1
    |> Enum.map(&max(div(slots, Integer.pow(op.ratio, &1)), 1))
    |> Enum.reduce(roll(wide(bank), oldest, slots), &pool(&2, &1))
    |> Nx.as_type(bank.type)
  end

  defp roll(bank, 0, _slots), do: bank

  defp roll(bank, oldest, slots) do
    [old, new] = for {at, n} <- [{oldest, slots - oldest}, {0, oldest}], do: {at, n}

    Nx.concatenate(for({at, n} <- [old, new], do: Nx.slice_along_axis(bank, at, n, axis: 1)),
      axis: 1
    )
  end

  # Row j of so many is the average of rows j S / T to (j + 1) S / T, rounded down and up, of S.
  defp pool(level, to) do
    from = Nx.axis_size(level, 1)
    [row, of] = for axis <- [0, 1], do: Nx.iota({to, from}, axis: axis)
    first = Nx.quotient(Nx.multiply(row, from), to)
    behind = Nx.quotient(Nx.add(Nx.multiply(Nx.add(row, 1), from), to - 1), to)
    inside = Nx.logical_and(Nx.greater_equal(of, first), Nx.less(of, behind))
    weights = Nx.divide(Nx.as_type(inside, level.type), Nx.subtract(behind, first))

    [[1], [1]]
    |> then(fn [a, b] -> Nx.dot(Nx.as_type(weights, level.type), a, level, b) end)
    |> Nx.transpose(axes: [1, 0, 2])
  end

  ## Dropout

  @doc "The options without those of dropout, and what they say: `{rate, key}`, or nil for none."
  def dropout!(opts) do
    if Keyword.keyword?(opts) do
      {rate, opts} = Keyword.pop(opts, :dropout, 0)
      {key, opts} = Keyword.pop(opts, :dropout_key)
      {dropout(rate, key), opts}
    else
      {nil, opts}
    end
  end

  @doc "The block with dropout, as its parts."
  def with_dropout(op, inputs, opts, {rate, key}) do
    keys = Nx.Random.split(key, parts: 3)

    Op.compose(op, inputs, opts, fn op, inputs ->
      outputs = compose(op, inputs, &drop(&1, rate, keys[&2]))
      names = [:y | if(op.return_state, do: [:h, :h_last, :gamma, :context, :summary], else: [])]
      Keyword.take(outputs, names)
    end)
  end

  # What is left is made larger, so that sums stay what they are on average.
  defp drop(t, rate, key) do
    {chance, _key} = Nx.Random.uniform(key, shape: t.shape, type: :f32)
    kept = Nx.divide(t, constant(1 - rate, t))
    Nx.select(Nx.less(chance, 1 - rate), kept, constant(0, t))
  end

  defp dropout(rate, _key) when rate in [nil, 0, 0.0], do: nil

  defp dropout(rate, %Nx.Tensor{} = key) when is_number(rate) and rate > 0 and rate < 1,
    do: {rate, key}

  defp dropout(rate, nil) when is_number(rate) and rate > 0 and rate < 1,
    do: raise(wrong(:argument, "dropout_key", "a key of Nx.Random", nil))

  defp dropout(rate, _key),
    do: raise(wrong(:option, "dropout", "a number from 0 on, below 1", rate))

  defp wrong(kind, name, expected, got) do
    Error.new(kind, name, op: "mmrec_block", expected: expected, got: Error.show(got))
  end
end
