defmodule Sidewinder.Axon.Mamba2 do
  @moduledoc false
  # The block of Mamba-2, which `Sidewinder.Axon` documents, as a composition of ops.

  import Sidewinder.Axon.Options, only: [options!: 3]
  import Sidewinder.Axon.Params, only: [by_width: 1, uniform: 1, uniform: 3, steps: 1]
  import Sidewinder.Axon.Layers, only: [layer: 5]
  alias Sidewinder.Error

  @sizes [
    state_size: {128, :size},
    head_size: {64, :size},
    groups: {1, :size},
    norm_groups: {nil, :size},
    expand: {2, :size},
    kernel_size: {4, :size},
    epsilon: {1.0e-5, :positive}
  ]
  @start [
    use_bias: {false, :flag},
    conv_bias: {true, :flag},
    a_min: {1.0, :positive},
    a_max: {16.0, :positive},
    dt_min: {0.001, :positive},
    dt_max: {0.1, :positive},
    dt_init_floor: {1.0e-4, :positive},
    kernel_initializer: {nil, :initializer},
    bias_initializer: {nil, :initializer}
  ]

  @doc "The options of a block, but for its names."
  def known, do: @sizes ++ @start

  def block(%Axon{} = x, opts \\ []) do
    opts = options!(:mamba2_block, opts, [name: {nil, :name}, meta: {nil, :any}] ++ known())
    options = Map.take(opts, [:state_size, :groups, :norm_groups, :epsilon])
    layer(:mamba2_block, [x: x], params(opts), opts, Map.to_list(options))
  end

  ## Parameters

  defp params(%{groups: g, state_size: n, kernel_size: w} = opts) do
    inner = &(opts.expand * &1)
    convolved = &(inner.(&1) + 2 * g * n)
    projected = &(inner.(&1) + convolved.(&1) + heads!(inner.(&1), opts))
    kernel = opts.kernel_initializer || (&uniform/3)

    by_width([
      {"in_proj", &{projected.(&1), &1}, kernel},
      opts.use_bias && {"in_proj_b", &{projected.(&1)}, opts.bias_initializer || :zeros},
      {"conv_w", &{convolved.(&1), w}, kernel},
      opts.conv_bias &&
        {"conv_b", &{convolved.(&1)}, opts.bias_initializer || uniform(fn _ -> w end)},
      {"dt_b", &{heads!(inner.(&1), opts)}, steps(opts)},
      {"A_log", &{heads!(inner.(&1), opts)}, decays(opts)},
      {"D", &{heads!(inner.(&1), opts)}, :ones},
      {"norm", &{inner.(&1)}, :ones},
      {"out_proj", &{&1, inner.(&1)}, kernel},
      opts.use_bias && {"out_proj_b", &{&1}, opts.bias_initializer || :zeros}
    ])
  end

  defp heads!(inner, %{head_size: size, groups: groups}) do
    heads = div(inner, size)

    unless rem(inner, size) == 0,
      do: raise(wrong(:head_size, "a divisor of #{inner}, the inner width", size))

    unless rem(heads, groups) == 0,
      do: raise(wrong(:groups, "a divisor of #{heads}, the heads", groups))

    heads
  end

  defp wrong(option, expected, got) do
    Error.new(:option, to_string(option),
      op: "Sidewinder.Axon.mamba2_block",
      expected: expected,
      got: "#{got}"
    )
  end

  # Draws the logarithms of -A.
  defp decays(%{a_min: min, a_max: max}) do
    fn shape, type, key ->
      Nx.log(Nx.Random.uniform_split(key, min, max, shape: shape, type: type))
    end
  end

  ## The computation

  @doc """
  The block of `x`, `{B, L, M}`:

      z, u, dt = split(in_proj x)
      x, B, C = split(silu(causal_conv1d(u)))
      y = out_proj gated_rms_norm(ssd(x, dt, -exp(A_log), B, C; D, dt_b, softplus), z; norm)
  """
  def compute(x, params, %{groups: groups, state_size: state} = opts) do
    {batch, length, _width} = Nx.shape(x)
    {inner, heads, states} = {Nx.size(params["norm"]), Nx.size(params["D"]), groups * state}
    [z, u, dt] = project(x, params, [inner, inner + 2 * states, heads])
    u = Sidewinder.causal_conv1d(u, params["conv_w"], bias: params["conv_b"], activation: :silu)
    [x, b, c] = split(u, 2, [inner, states, states])
    [b, c] = for t <- [b, c], do: Nx.reshape(t, {batch, length, groups, state})

    y =
      x
      |> Nx.reshape({batch, length, heads, div(inner, heads)})
      |> Sidewinder.ssd(dt, Nx.negate(Nx.exp(params["A_log"])), b, c,
        d: params["D"],
        dt_bias: params["dt_b"],
        dt_softplus: true
      )
      |> Nx.reshape({batch, length, inner})

    y
    |> Sidewinder.gated_rms_norm(z, params["norm"],
      eps: opts.epsilon,
      groups: opts.norm_groups || groups
    )
    |> Sidewinder.linear(params["out_proj"], bias: params["out_proj_b"])
  end

  # Rows of the matrix are split, which are fewer than rows of x.
  defp project(x, params, sizes) do
    biases =
      if b = params["in_proj_b"], do: split(b, 0, sizes), else: Enum.map(sizes, fn _ -> nil end)

    for {w, b} <- Enum.zip(split(params["in_proj"], 0, sizes), biases),
        do: Sidewinder.linear(x, w, bias: b)
  end

  defp split(t, axis, sizes) do
    {parts, _end} =
      Enum.map_reduce(sizes, 0, fn size, at ->
        {Nx.slice_along_axis(t, at, size, axis: axis), at + size}
      end)

    parts
  end
end
