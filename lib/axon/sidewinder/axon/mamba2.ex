defmodule Sidewinder.Axon.Mamba2 do
  @moduledoc false
  # The block of Mamba-2, which `Sidewinder.Axon` documents, as a composition of ops.

  import Sidewinder.Axon.Options, only: [divides!: 4, options!: 3]
  import Sidewinder.Axon.Layers, only: [layer: 5]
  alias Sidewinder.Axon.Mixer

  @doc "The options of a block, but for its names."
  def known do
    [
      state_size: {128, :size},
      head_size: {64, :size},
      groups: {1, :size},
      norm_groups: {nil, :size},
      expand: {2, :size},
      dt_clamp: {nil, :range}
    ] ++ Mixer.options(true)
  end

  def block(%Axon{} = x, opts \\ []) do
    opts = options!(:mamba2_block, opts, [name: {nil, :name}, meta: {nil, :any}] ++ known())
    options = Map.take(opts, [:state_size, :groups, :norm_groups, :epsilon, :dt_clamp])
    params = Mixer.params(opts, &sizes!(&1, opts), ["D"])
    layer(:mamba2_block, [x: x, cu_seqlens: opts.cu_seqlens], params, opts, Map.to_list(options))
  end

  defp sizes!(width, %{head_size: size, groups: groups} = opts) do
    inner = opts.expand * width
    divides!(:mamba2_block, :head_size, size, {inner, "the inner width"})
    heads = div(inner, size)
    divides!(:mamba2_block, :groups, groups, {heads, "the heads"})
    convolved = inner + 2 * groups * opts.state_size
    projected = inner + convolved + heads
    %{inner: inner, norm: inner, heads: heads, convolved: convolved, projected: projected}
  end

  ## The computation

  @doc """
  The block of `x`, `{B, L, M}`, whose sequences end at `cu_seqlens` if they are packed:

      z, u, dt = split(in_proj x)
      x, B, C = split(silu(causal_conv1d(u)))
      y = out_proj gated_rms_norm(ssd(x, dt, -exp(A_log), B, C; D, dt_b, softplus, clamp), z; norm)
  """
  def compute(%{x: x} = inputs, params, %{groups: groups, state_size: state} = opts) do
    ends = inputs[:cu_seqlens]
    {batch, length, _width} = Nx.shape(x)
    {inner, heads, states} = {Nx.size(params["norm"]), Nx.size(params["D"]), groups * state}
    [z, u, dt] = Mixer.project(x, params, [inner, inner + 2 * states, heads])
    [x, b, c] = u |> Mixer.convolve(params, ends) |> Mixer.split(2, [inner, states, states])
    [b, c] = for t <- [b, c], do: Nx.reshape(t, {batch, length, groups, state})

    y =
      x
      |> Nx.reshape({batch, length, heads, div(inner, heads)})
      |> Sidewinder.ssd(dt, Nx.negate(Nx.exp(params["A_log"])), b, c,
        d: params["D"],
        dt_bias: params["dt_b"],
        dt_softplus: true,
        dt_clamp: opts.dt_clamp,
        cu_seqlens: ends
      )
      |> Nx.reshape({batch, length, inner})

    y
    |> Sidewinder.gated_rms_norm(z, params["norm"],
      eps: opts.epsilon,
      groups: opts.norm_groups || groups
    )
    |> Sidewinder.linear(params["out_proj"], bias: params["out_proj_b"])
  end
end
