defmodule Sidewinder.Reference.MmrecBlock do
  @moduledoc false
  # The block of MM-Rec, composed of its parts.

  alias Sidewinder.{Error, Op}

  alias Sidewinder.Block.{
    BlockRecurrence,
    HdsConstruct,
    Linear,
    MdiGamma,
    MultiMemoryAttention,
    RmsNorm
  }

  import Sidewinder.Reference.Numbers

  @gamma MdiGamma.weights()

  def body(op, inputs), do: compose(op, inputs, fn t, _which -> t end)

  # `drop` applies dropout to the terms added to x, to the activated hidden layer and to its product.
  defp compose(op, %{"x" => x} = inputs, drop) do
    xn = norm(op, x, inputs["n1"])
    [q, k, v, z] = for name <- ~w(q k v z), do: linear(op, xn, inputs, name)
    gamma = gamma(op, z, k, inputs)
    [h: h, last_state: last_state] = recurrence(op, z, gamma, inputs)
    context = attention(op, h, q, inputs)
    added = Nx.add(Nx.add(h, context), Nx.multiply(constant(op.v_mix, v), v))
    r = Nx.add(x, drop.(added, 0))
    hidden = linear(op, norm(op, r, inputs["n2"]), inputs, "f1")
    u = drop.(part(op, %Sidewinder.Block.Activations{fn: :gelu_erf}, [{"x", hidden}]), 1)
    y = Nx.add(r, drop.(linear(op, u, inputs, "f2"), 2))
    summary = y |> wide() |> Nx.mean(axes: [1]) |> Nx.as_type(y.type)

    [y: y, h: h, last_state: last_state, gamma: gamma, context: context, summary: summary] ++
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
    names = [{"w_gate", "wgate"}, {"b_gate", "bgate"}, {"w_mix", "wm"}, {"b_mix", "bm"}]
    weights = for {name, here} <- names, do: {name, inputs[here]}
    given = [{"z", z}, {"gamma", gamma}, {"initial_state", inputs["initial_state"]} | weights]
    options = op |> Map.take([:mix, :state_clip, :state_norm]) |> Map.put(:return_state, true)
    Op.part(op, struct(BlockRecurrence, options), given)
  end

  ## The memory

  defp attention(op, h, q, inputs) do
    [k, v] = top(op, inputs["k_mem"], inputs["v_mem"])
    weights = for name <- ~w(waq baq wao bao), do: {name, inputs[name]}
    given = [{"h", h}, {"k_mem", k}, {"v_mem", v}, {"q_in", q} | weights]
    part(op, %MultiMemoryAttention{heads: op.heads}, given)
  end

  defp top(%{levels: 1}, k, v), do: [k, v]

  defp top(op, k, v) do
    hierarchy = struct(HdsConstruct, Map.take(op, [:levels, :ratio, :cursor]))
    levels = Op.part(op, hierarchy, [{"k", k}, {"v", v}])
    for name <- ~w(k v), do: levels[:"#{name}#{op.levels - 1}"]
  end

  ## Dropout

  @doc "`{rate, key}` of dropout, or nil for none, and the other options."
  def dropout!(opts) do
    if Keyword.keyword?(opts) do
      {rate, opts} = Keyword.pop(opts, :dropout, 0)
      {key, opts} = Keyword.pop(opts, :dropout_key)
      {dropout(rate, key), opts}
    else
      {nil, opts}
    end
  end

  @doc "The block with dropout, composed of its parts."
  def with_dropout(op, inputs, opts, {rate, key}) do
    keys = Nx.Random.split(key, parts: 3)

    Op.compose(op, inputs, opts, fn op, inputs ->
      outputs = compose(op, inputs, &drop(&1, rate, keys[&2]))

      names = [
        :y | if(op.return_state, do: [:h, :last_state, :gamma, :context, :summary], else: [])
      ]

      Keyword.take(outputs, names)
    end)
  end

  # Numbers that are kept are scaled by 1 / (1 - rate), so that sums keep their mean.
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
