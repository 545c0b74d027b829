defmodule Sidewinder.Axon.Params do
  @moduledoc false
  # Parameters of layers, `{name, shape, initializer}`, and initializers.

  @doc "Parameters whose shapes follow from the width of the first input."
  def by_width(params) do
    for {name, shape, initializer} <- params,
        do: {name, fn [x | _] -> shape.(width(x)) end, initializer}
  end

  @doc "The width of a shape: its last axis."
  def width(shape), do: elem(shape, tuple_size(shape) - 1)

  @doc "Those of a dense layer."
  def dense(units, opts) do
    by_width([
      {"kernel", &{units, &1}, opts.kernel_initializer || (&uniform/3)},
      opts.use_bias && {"bias", fn _ -> {units} end, opts.bias_initializer || :zeros}
    ])
  end

  @doc "Those of multi-head attention."
  def mha(opts) do
    kernel = opts.kernel_initializer || (&uniform/3)

    [
      {"wqkv", &{3 * &1, &1}, kernel},
      {"wo", &{&1, &1}, kernel},
      opts.use_bias && {"bo", &{&1}, opts.bias_initializer || :zeros}
    ]
  end

  @doc "Those of a gated feed-forward layer."
  def mlp(%{hidden: hidden} = opts) do
    kernel = opts.kernel_initializer || (&uniform/3)
    size = &(hidden || 4 * &1)

    [
      {"wg", &{size.(&1), &1}, kernel},
      {"wu", &{size.(&1), &1}, kernel},
      {"wd", &{&1, size.(&1)}, kernel}
    ]
  end

  ## Initializers

  @doc "Draws a matrix `{out, in}`."
  def uniform(shape, type, key),
    do: uniform(shape, type, key, width(shape))

  @doc "Draws a vector of a layer that has `inputs.(size)` inputs."
  def uniform(inputs), do: fn {size}, type, key -> uniform({size}, type, key, inputs.(size)) end

  defp uniform(shape, type, key, inputs) do
    Axon.Initializers.uniform(scale: 1 / :math.sqrt(inputs)).(shape, type, key)
  end

  @doc "Draws the v of softplus(v) = dt."
  def steps(%{dt_min: min, dt_max: max, dt_init_floor: floor}) do
    fn shape, type, key ->
      wide = Nx.Type.merge(type, {:f, 32})

      exponent =
        Nx.Random.uniform_split(key, :math.log(min), :math.log(max), shape: shape, type: wide)

      dt = exponent |> Nx.exp() |> Nx.max(Nx.tensor(floor, type: wide))
      inverse = Nx.add(dt, Nx.log(Nx.negate(Nx.expm1(Nx.negate(dt)))))
      Nx.as_type(inverse, type)
    end
  end

  @doc "The logarithms of 1, 2 and so on in each row."
  def decays(shape, type), do: Nx.log(Nx.add(Nx.iota(shape, axis: 1, type: type), 1))
end
