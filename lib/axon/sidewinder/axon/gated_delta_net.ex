defmodule Sidewinder.Axon.GatedDeltaNet do
  @moduledoc false
  # The block of Gated DeltaNet, which `Sidewinder.Axon` documents, as a composition of ops.

  import Sidewinder.Axon.Options, only: [divides!: 4, options!: 3]
  import Sidewinder.Axon.Layers, only: [layer: 5]
  alias Sidewinder.Axon.Mixer

  @doc "The options of a block, but for its names."
  def known do
    [
      heads: {nil, :size},
      groups: {nil, :size},
      head_size: {128, :size},
      value_size: {nil, :size},
      negative_eigenvalues: {false, :flag}
    ] ++ Mixer.options(false)
  end

  def block(%Axon{} = x, opts \\ []) do
    known = [name: {nil, :name}, meta: {nil, :any}] ++ known()
    opts = options!(:gated_delta_net_block, opts, known)
    options = Map.take(opts, [:head_size, :negative_eigenvalues, :epsilon])
    params = Mixer.params(opts, &sizes!(&1, opts))
    inputs = [x: x, cu_seqlens: opts.cu_seqlens]
    layer(:gated_delta_net_block, inputs, params, opts, Map.to_list(options))
  end

  defp sizes!(width, %{head_size: head_size} = opts) do
    heads = opts.heads || max(div(width, head_size), 1)
    groups = opts.groups || heads
    divides!(:gated_delta_net_block, :groups, groups, {heads, "the heads"})
    value_size = opts.value_size || head_size
    inner = heads * value_size
    convolved = 2 * groups * head_size + inner
    projected = convolved + inner + 2 * heads
    %{inner: inner, norm: value_size, heads: heads, convolved: convolved, projected: projected}
  end

  ## The computation

  @doc """
  The block of `x`, `{B, L, M}`, whose sequences end at `cu_seqlens` if they are packed:

      u, z, b, a = split(in_proj x)
      q, k, v = split(silu(causal_conv1d(u)))
      y = gated_delta_rule(q, k, v, sigmoid(b); g: -exp(A_log) softplus(a + dt_b), qk_l2norm)
      out_proj gated_rms_norm(y, z; norm, before the gate)
  """
  def compute(%{x: x} = inputs, params, %{head_size: head_size} = opts) do
    ends = inputs[:cu_seqlens]
    {batch, length, _width} = Nx.shape(x)
    {heads, value_size} = {Nx.size(params["A_log"]), Nx.size(params["norm"])}
    {inner, convolved} = {heads * value_size, Nx.axis_size(params["conv_w"], 0)}
    keys = div(convolved - inner, 2)
    [u, z, b, a] = Mixer.project(x, params, [convolved, inner, heads, heads])
    [q, k, v] = u |> Mixer.convolve(params, ends) |> Mixer.split(2, [keys, keys, inner])
    by_head = fn t, size -> Nx.reshape(t, {batch, length, :auto, size}) end
    [q, k] = for t <- [q, k], do: by_head.(t, head_size)
    [v, z] = for t <- [v, z], do: by_head.(t, value_size)

    options = [g: decay(a, params), qk_l2norm: true, cu_seqlens: ends]

    q
    |> Sidewinder.gated_delta_rule(k, v, beta(b, opts), options)
    |> Sidewinder.gated_rms_norm(z, params["norm"], eps: opts.epsilon, norm_before_gate: true)
    |> Nx.reshape({batch, length, inner})
    |> Sidewinder.linear(params["out_proj"], bias: params["out_proj_b"])
  end

  # With a beta up to 2, I - beta k k^T has eigenvalues from -1 on.
  defp beta(b, %{negative_eigenvalues: false}), do: Sidewinder.sigmoid(b)
  defp beta(b, %{negative_eigenvalues: true}), do: Nx.multiply(Sidewinder.sigmoid(b), 2)

  # Decays multiply over the whole sequence, so their logarithms keep f32 among 16-bit numbers.
  defp decay(a, params) do
    wide = &Nx.as_type(&1, Mixer.wide(&1.type))
    rate = Nx.negate(Nx.exp(wide.(params["A_log"])))
    a |> wide.() |> Nx.add(wide.(params["dt_b"])) |> Sidewinder.softplus() |> Nx.multiply(rate)
  end
end
