defmodule Sidewinder.Axon.Layers do
  @moduledoc false
  # The layers' functions, one each as in `Axon.Layers`, since errors of Axon show their names. All are built by `layer/5`
  # and run by `run/2`, which casts their inputs to a common type.

  alias Axon.StatefulOutput
  alias Sidewinder.Axon.{Embedding, GatedDeltaNet, LinearAttention, Mamba2, MambaBlock}
  alias Sidewinder.Op.Gradient

  @names ~w(mamba_block mamba2_block gated_delta_net_block linear_attention mm_rec_block causal_conv1d selective_scan rms_norm gated_rms_norm layer_norm linear
            ternary_dense attention mha swiglu_mlp transformer_block tied_embedding tied_logits rows table last of_block
            y last_state summary states)a

  # Indices, masks, keys and ends of sequences, which do not take part in the common type.
  @uncast [:tokens, :mask, :dropout_key, :cu_seqlens]
  # Inputs in the type of the arithmetic, also for sequences of 16 bits.
  @carried [:initial_state]

  ## Building

  @doc """
  Adds a layer. `inputs` are layers by name, or nil, `params` are `{name, shape by the inputs' shapes, initializer}`, or
  false, and `options` are those of the layer's function.
  """
  def layer(op_name, inputs, params, names, options \\ []) do
    {inputs, layers} = inputs |> Enum.filter(&elem(&1, 1)) |> Enum.unzip()
    params = Enum.filter(params, & &1)
    told = [inputs: inputs, parameters: for({name, _, _} <- params, do: name)]

    params =
      for {name, shape, initializer} <- params,
          do: Axon.param(name, by_position(length(layers), shape), initializer: initializer)

    op = Function.capture(__MODULE__, op_name, length(layers ++ params) + 1)
    names = [name: names[:name] || numbered(op_name), meta: names[:meta], op_name: op_name]
    Axon.layer(op, stateful(layers) ++ params, names ++ told ++ options)
  end

  # Axon seeds initializers by layer names, which it numbers for each function. A layer here has a function for each
  # number of inputs, so two layers could get one name, and the same initial numbers.
  defp numbered(op_name) do
    fn _op, counts ->
      same = for {op, count} <- counts, op_name(op) == op_name, do: count
      "#{op_name}_#{Enum.sum(same)}"
    end
  end

  defp op_name(op) when is_function(op), do: op |> Function.info(:name) |> elem(1)
  defp op_name(op), do: op

  # Axon loses the states of a layer's first inputs if a later input was computed before. In training these identity
  # layers belong to this layer alone, so they were not computed before.
  defp stateful([first | others]) do
    [first | for(layer <- others, do: Axon.layer(&kept/2, [layer], op_name: :kept, mode: :train))]
  end

  @doc """
  A layer whose state is a key of random numbers, which is split at each step of training.
  """
  def key(x, name) do
    start = fn _shape, _type, key -> key end
    shape = fn _ -> {2} end
    key = Axon.param("key", shape, type: {:u, 32}, initializer: start, kind: :state)
    Axon.layer(&dropout_key/3, [x, key], name: name, op_name: :dropout_key)
  end

  # Axon calls functions with an argument for each input.
  for arity <- 1..8 do
    args = Macro.generate_arguments(arity, __MODULE__)

    defp by_position(unquote(arity), fun),
      do: fn unquote_splicing(args) -> fun.(unquote(args)) end
  end

  ## Running

  for name <- @names, arity <- 2..40 do
    args = Macro.generate_arguments(arity, __MODULE__)
    def unquote(name)(unquote_splicing(args)), do: run(unquote(name), unquote(args))
  end

  def kept(x, _opts), do: x

  def dropout_key(_x, key, _opts) do
    keys = Nx.Random.split(key)
    %StatefulOutput{output: keys[0], state: %{"key" => keys[1]}}
  end

  defp run(name, args) do
    {tensors, [opts]} = Enum.split(args, -1)
    opts = Map.new(opts)
    {inputs, params} = Enum.split(tensors, length(opts.inputs))
    inputs = Enum.zip(opts.inputs, inputs)
    params = Enum.zip(opts.parameters, params)

    promoted(inputs, params, &compute(name, &1, &2, opts))
  end

  # Inputs and parameters are cast to the type of the result of Axon's own layers.
  defp promoted(inputs, params, fun) do
    case type(Keyword.drop(inputs, @uncast ++ @carried) ++ params) do
      nil ->
        fun.(Map.new(inputs), Map.new(params))

      type ->
        computed = computed(type)
        inputs = for {name, t} <- inputs, into: %{}, do: {name, cast_input(name, t, computed)}
        params = for {name, t} <- params, into: %{}, do: {name, cast(t, computed)}
        out = fun.(inputs, params)
        if type == computed, do: out, else: Nx.Defn.Composite.traverse(out, &Nx.as_type(&1, type))
    end
  end

  # Kernels have no floats of 8 bits.
  defp computed({_kind, 8}), do: {:f, 32}
  defp computed(type), do: type

  defp type(tensors) do
    types = for {_name, %Nx.Tensor{type: type}} <- tensors, do: type
    if types != [], do: types |> Enum.reduce(&Nx.Type.merge(&2, &1)) |> Nx.Type.to_floating()
  end

  defp cast_input(name, t, _type) when name in @uncast, do: t
  defp cast_input(name, t, {:f, 64}) when name in @carried, do: cast(t, {:f, 64})
  defp cast_input(name, t, _type) when name in @carried, do: cast(t, {:f, 32})
  defp cast_input(_name, t, type), do: cast(t, type)

  defp cast(%Nx.Tensor{type: type} = t, type), do: t
  defp cast(%Nx.Tensor{} = t, type), do: Gradient.cast(t, type)
  defp cast(container, _type), do: container

  ## Layers

  defp compute(:mamba_block, %{x: x, cu_seqlens: ends}, params, _opts),
    do: MambaBlock.packed(x, params, ends)

  defp compute(:mamba_block, %{x: x}, params, _opts), do: Sidewinder.mamba_block(x, params)

  defp compute(:mamba2_block, inputs, params, opts), do: Mamba2.compute(inputs, params, opts)

  defp compute(:gated_delta_net_block, inputs, params, opts),
    do: GatedDeltaNet.compute(inputs, params, opts)

  defp compute(:linear_attention, inputs, params, opts),
    do: LinearAttention.compute(inputs, params, opts)

  defp compute(:mm_rec_block, %{x: x} = inputs, params, opts) do
    {key, inputs} = Map.pop(inputs, :dropout_key)
    dropout = if key && opts.mode == :train, do: [dropout: opts.dropout, dropout_key: key]

    options =
      Map.drop(opts, [:mode, :inputs, :parameters, :epsilon, :dropout])
      |> Map.merge(Map.delete(inputs, :x))
      |> Map.put(:eps, opts.epsilon)
      |> Map.to_list()

    case Sidewinder.mmrec_block(x, params, options ++ List.wrap(dropout)) do
      {y, state} -> %{y: y, last_state: state.last_state, summary: state.summary}
      y -> y
    end
  end

  defp compute(:causal_conv1d, %{x: x} = inputs, params, %{activation: activation}) do
    options = [bias: params["bias"], activation: activation, cu_seqlens: inputs[:cu_seqlens]]
    Sidewinder.causal_conv1d(x, params["kernel"], options)
  end

  defp compute(:selective_scan, %{x: x, dt: dt, b: b, c: c} = inputs, params, _opts) do
    a = Nx.negate(Nx.exp(params["A_log"]))
    given = [z: inputs[:gate], cu_seqlens: inputs[:cu_seqlens]]
    options = [d: params["D"], dt_bias: params["dt_b"], dt_softplus: true] ++ given
    Sidewinder.selective_scan(x, dt, a, b, c, options)
  end

  defp compute(:rms_norm, %{x: x}, %{"gamma" => gamma}, %{epsilon: epsilon} = opts) do
    Sidewinder.rms_norm(x, gamma, eps: epsilon, eps_mode: opts[:eps_mode] || :inside)
  end

  defp compute(:gated_rms_norm, %{x: x, z: z}, %{"gamma" => gamma}, opts) do
    options = opts |> Map.take([:groups, :norm_before_gate]) |> Map.to_list()
    Sidewinder.gated_rms_norm(x, z, gamma, [eps: opts.epsilon] ++ options)
  end

  defp compute(:layer_norm, %{x: x}, %{"gamma" => gamma, "beta" => beta}, opts) do
    case opts.activation do
      nil -> Sidewinder.layer_norm(x, gamma, beta, eps: opts.epsilon)
      :gelu_erf -> Sidewinder.layer_norm_gelu(x, gamma, beta, eps: opts.epsilon, gelu: :erf)
      _ -> Sidewinder.layer_norm_gelu(x, gamma, beta, eps: opts.epsilon)
    end
  end

  defp compute(:linear, %{x: x}, params, %{activation: activation}) do
    Sidewinder.linear(x, params["kernel"], bias: params["bias"], activation: activation)
  end

  defp compute(:ternary_dense, %{x: x}, params, opts) do
    rule = for key <- [:rule, :threshold, :per_row], opts[key] != nil, do: {key, opts[key]}
    Sidewinder.Ternary.dense(x, params["kernel"], [bias: params["bias"]] ++ rule)
  end

  defp compute(:attention, %{q: q, k: k, v: v} = inputs, _params, opts) do
    options = Map.to_list(Map.take(opts, [:causal, :scale, :q_offset, :layout]))
    given = [mask: inputs[:mask], cu_seqlens: inputs[:cu_seqlens]]
    Sidewinder.attention(q, k, v, given ++ options)
  end

  defp compute(:mha, %{x: x} = inputs, params, opts),
    do: Sidewinder.mha(x, params, heads(inputs, opts))

  defp compute(:swiglu_mlp, %{x: x}, params, %{activation: activation}),
    do: Sidewinder.swiglu_mlp(x, params, activation: activation)

  defp compute(:transformer_block, %{x: x} = inputs, params, opts),
    do: Sidewinder.transformer_block(x, params, [eps: opts.epsilon] ++ heads(inputs, opts))

  defp compute(:tied_embedding, %{tokens: tokens}, %{"kernel" => kernel}, _opts),
    do: {Embedding.take(kernel, tokens), kernel}

  defp compute(:tied_logits, %{x: x, table: kernel}, _params, _opts),
    do: Sidewinder.linear(x, kernel)

  defp compute(:rows, %{x: {rows, _table}}, _params, _opts), do: rows
  defp compute(:table, %{x: {_rows, table}}, _params, _opts), do: table
  defp compute(:last, %{x: x, cu_seqlens: ends}, _params, _opts), do: last_of_each(x[0], ends)
  defp compute(:last, %{x: x}, _params, %{count: nil}), do: x[[.., -1]]
  defp compute(:last, %{x: x}, _params, %{count: count}), do: Embedding.last(x, count)
  defp compute(:of_block, %{x: x}, _params, %{block: block}), do: x[block]
  defp compute(:states, %{x: states}, _params, _opts), do: Nx.stack(Tuple.to_list(states))
  defp compute(part, %{x: parts}, _params, _opts), do: Map.fetch!(parts, part)

  # An empty sequence has none: zeros. The axis of steps becomes that of sequences, which has no name.
  defp last_of_each(x, ends) do
    [_steps, width] = Nx.names(x)
    [x, ends] = [Nx.rename(x, [nil, width]), Nx.rename(ends, [nil])]
    {from, to} = {ends[0..-2//1], ends[1..-1//1]}
    rows = Nx.take(x, Nx.subtract(Nx.max(to, 1), 1))
    some = Nx.broadcast(Nx.new_axis(Nx.less(from, to), 1), rows)
    Nx.select(some, rows, Nx.tensor(0, type: x.type))
  end

  defp heads(inputs, opts) do
    options = Map.take(opts, [:heads, :causal, :rope_theta, :pairing])
    [mask: inputs[:mask]] ++ Map.to_list(options)
  end
end
