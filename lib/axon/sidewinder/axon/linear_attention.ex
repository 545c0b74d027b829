defmodule Sidewinder.Axon.LinearAttention do
  @moduledoc false
  # A layer of linear attention, which `Sidewinder.Axon` documents, as a composition of ops.

  import Sidewinder.Axon.Layers, only: [layer: 5]
  import Sidewinder.Axon.Options, only: [divides!: 4, options!: 3]
  import Sidewinder.Axon.Params, only: [by_width: 1, uniform: 3]
  alias Sidewinder.Axon.Mixer

  # GLA divides the logarithms of its decays by this number, so that they start near 1 (section 5 of the paper).
  @temperature 16

  @known [
    name: {nil, :name},
    meta: {nil, :any},
    heads: {nil, :size},
    groups: {nil, :size},
    head_size: {128, :size},
    value_size: {nil, :size},
    feature_map: {:elu, [:elu, :relu, :silu, :identity]},
    decay: {:none, [:none, :retention, :head, :key]},
    normalize: {false, :flag},
    gate: {true, :flag},
    epsilon: {1.0e-5, :positive},
    use_bias: {false, :flag},
    kernel_initializer: {nil, :initializer},
    bias_initializer: {nil, :initializer},
    cu_seqlens: {nil, :layer}
  ]
  @computed ~w(heads groups head_size value_size feature_map decay normalize gate epsilon)a

  def block(%Axon{} = x, opts \\ []) do
    opts = options!(:linear_attention, opts, @known)
    inputs = [x: x, cu_seqlens: opts.cu_seqlens]
    layer(:linear_attention, inputs, params(opts), opts, Map.to_list(Map.take(opts, @computed)))
  end

  defp params(opts) do
    kernel = opts.kernel_initializer || (&uniform/3)
    bias = opts.bias_initializer || :zeros
    projected = &Enum.sum(parts(sizes!(&1, opts)))

    by_width([
      {"in_proj", &{projected.(&1), &1}, kernel},
      opts.use_bias && {"in_proj_b", &{projected.(&1)}, bias},
      opts.decay in [:head, :key] && {"decay_b", &{sizes!(&1, opts).decays}, :zeros},
      {"norm", &{sizes!(&1, opts).value_size}, :ones},
      {"out_proj", &{&1, sizes!(&1, opts).inner}, kernel},
      opts.use_bias && {"out_proj_b", &{&1}, bias}
    ])
  end

  defp sizes!(width, %{head_size: head_size} = opts) do
    heads = opts.heads || max(div(width, head_size), 1)
    groups = opts.groups || heads
    divides!(:linear_attention, :groups, groups, {heads, "the heads"})
    value_size = opts.value_size || head_size
    inner = heads * value_size

    %{
      heads: heads,
      keys: groups * head_size,
      value_size: value_size,
      inner: inner,
      gate: if(opts.gate, do: inner, else: 0),
      decays: decays(opts.decay, heads, head_size)
    }
  end

  defp decays(:head, heads, _), do: heads
  defp decays(:key, heads, head_size), do: heads * head_size
  defp decays(_, _, _), do: 0

  # Rows of in_proj. Parts without rows are left out.
  defp parts(sizes) do
    Enum.reject([sizes.keys, sizes.keys, sizes.inner, sizes.gate, sizes.decays], &(&1 == 0))
  end

  ## The computation

  @doc """
  The layer of `x`, `{B, L, M}`, whose sequences end at `cu_seqlens` if they are packed:

      q, k, v, z, a = split(in_proj x)
      y = linear_attention(feature_map(q), feature_map(k), v; g)
      out_proj gated_rms_norm(y, z; norm, before the gate)
  """
  def compute(%{x: x} = inputs, params, %{head_size: head_size} = opts) do
    {batch, length, width} = Nx.shape(x)
    %{value_size: value_size} = sizes = sizes!(width, opts)
    [q, k, v | rest] = Mixer.project(x, params, parts(sizes))
    {z, rest} = if opts.gate, do: List.pop_at(rest, 0), else: {nil, rest}
    by_head = &Nx.reshape(&1, {batch, length, :auto, &2})
    [q, k] = for t <- [q, k], do: t |> map(opts.feature_map) |> by_head.(head_size)
    g = decay(opts.decay, q, rest, params, sizes)
    options = [g: g, normalize: opts.normalize, cu_seqlens: inputs[:cu_seqlens]]

    q
    |> Sidewinder.linear_attention(k, by_head.(v, value_size), options)
    |> norm(z && by_head.(z, value_size), params["norm"], opts)
    |> Nx.reshape({batch, length, sizes.inner})
    |> Sidewinder.linear(params["out_proj"], bias: params["out_proj_b"])
  end

  defp norm(y, nil, norm, opts), do: Sidewinder.rms_norm(y, norm, eps: opts.epsilon)

  defp norm(y, z, norm, opts),
    do: Sidewinder.gated_rms_norm(y, z, norm, eps: opts.epsilon, norm_before_gate: true)

  # elu(x) + 1, which is positive. The exponential is of numbers that are not, as the gradient has both branches.
  defp map(x, :elu),
    do: Nx.select(Nx.greater(x, 0), Nx.add(x, 1), Nx.exp(Nx.min(x, Nx.tensor(0, type: x.type))))

  defp map(x, :relu), do: Sidewinder.relu(x)
  defp map(x, :silu), do: Sidewinder.silu(x)
  defp map(x, :identity), do: x

  # Decays multiply over the whole sequence, so their logarithms keep f32 among 16-bit numbers.
  defp decay(:none, _q, [], _params, _sizes), do: nil

  defp decay(:retention, q, [], _params, %{heads: heads}) do
    {batch, length, _, _} = q.shape
    logarithms = for h <- 0..(heads - 1), do: :math.log(1 - :math.pow(2, -5 - h))
    logarithms |> Nx.tensor(type: Mixer.wide(q.type)) |> Nx.broadcast({batch, length, heads})
  end

  defp decay(sort, _q, [a], params, %{heads: heads}) do
    {batch, length, _} = a.shape
    type = Mixer.wide(a.type)
    a = Nx.add(Nx.as_type(a, type), Nx.as_type(params["decay_b"], type))
    g = Nx.divide(Sidewinder.softplus(Nx.negate(a)), -@temperature)
    if sort == :head, do: g, else: Nx.reshape(g, {batch, length, heads, :auto})
  end
end
