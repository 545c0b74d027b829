defmodule Sidewinder.Axon.Mixer do
  @moduledoc false
  # What the blocks of Mamba-2 and of Gated DeltaNet share: a projection by one matrix, a short convolution over part of
  # its outputs, a recurrence of heads with a decay each, a gated norm and a projection back.

  import Sidewinder.Axon.Params, only: [by_width: 1, uniform: 1, uniform: 3, steps: 1]

  @doc "The options that all of them have, with the default of `:conv_bias`."
  def options(conv_bias) do
    [
      kernel_size: {4, :size},
      epsilon: {1.0e-5, :positive},
      use_bias: {false, :flag},
      conv_bias: {conv_bias, :flag},
      a_min: {1.0, :positive},
      a_max: {16.0, :positive},
      dt_min: {0.001, :positive},
      dt_max: {0.1, :positive},
      dt_init_floor: {1.0e-4, :positive},
      kernel_initializer: {nil, :initializer},
      bias_initializer: {nil, :initializer},
      cu_seqlens: {nil, :layer}
    ]
  end

  @doc """
  The parameters of a block. `sizes.(width)` is a map of the `projected` rows of `in_proj`, the `convolved` channels, the
  `heads`, the weights of the `norm` and the `inner` width; `by_head` are names of further vectors of ones.
  """
  def params(%{kernel_size: w} = opts, sizes, by_head \\ []) do
    of = fn key -> &Map.fetch!(sizes.(&1), key) end
    vector = fn key -> &{of.(key).(&1)} end
    kernel = opts.kernel_initializer || (&uniform/3)
    bias = opts.bias_initializer || :zeros

    by_width(
      [
        {"in_proj", &{of.(:projected).(&1), &1}, kernel},
        opts.use_bias && {"in_proj_b", vector.(:projected), bias},
        {"conv_w", &{of.(:convolved).(&1), w}, kernel},
        opts.conv_bias &&
          {"conv_b", vector.(:convolved), opts.bias_initializer || uniform(fn _ -> w end)},
        {"dt_b", vector.(:heads), steps(opts)},
        {"A_log", vector.(:heads), decays(opts)}
      ] ++
        for(name <- by_head, do: {name, vector.(:heads), :ones}) ++
        [
          {"norm", vector.(:norm), :ones},
          {"out_proj", &{&1, of.(:inner).(&1)}, kernel},
          opts.use_bias && {"out_proj_b", &{&1}, bias}
        ]
    )
  end

  # Draws the logarithms of -A.
  defp decays(%{a_min: min, a_max: max}) do
    fn shape, type, key ->
      Nx.log(Nx.Random.uniform_split(key, min, max, shape: shape, type: type))
    end
  end

  @doc "The products of `x` and parts of `in_proj`, `sizes` rows each, with those of `in_proj_b` if it is there."
  def project(x, params, sizes) do
    # Rows of the matrix are split, which are fewer than rows of x.
    biases =
      if b = params["in_proj_b"], do: split(b, 0, sizes), else: Enum.map(sizes, fn _ -> nil end)

    for {w, b} <- Enum.zip(split(params["in_proj"], 0, sizes), biases),
        do: Sidewinder.linear(x, w, bias: b)
  end

  @doc "The convolution of a block, with SiLU. No window crosses the `ends` of packed sequences, if it has them."
  def convolve(u, %{"conv_w" => w} = params, ends) do
    Sidewinder.causal_conv1d(u, w, bias: params["conv_b"], activation: :silu, cu_seqlens: ends)
  end

  @doc "The type of the arithmetic on numbers of a type."
  def wide(type), do: Nx.Type.merge(type, {:f, 32})

  @doc "Consecutive parts of `t` along `axis`, of the given sizes."
  def split(t, axis, sizes) do
    {parts, _end} =
      Enum.map_reduce(sizes, 0, fn size, at ->
        {Nx.slice_along_axis(t, at, size, axis: axis), at + size}
      end)

    parts
  end
end
