defmodule Sidewinder.Reference.Activations do
  @moduledoc false
  # Activation functions and their derivatives. Exponents are never positive, since `Nx.BinaryBackend`
  # raises on overflow.

  import Sidewinder.Reference.Numbers

  @names [:sigmoid, :silu, :gelu, :gelu_tanh, :gelu_erf, :softplus, :relu]

  @doc "All functions; `:gelu` is `:gelu_tanh`."
  def names, do: @names

  def body(%{fn: function}, %{"x" => x}) do
    [y: x |> wide() |> value(function) |> Nx.as_type(x.type)]
  end

  def backward(%{fn: function}, %{"x" => x, "dy" => dy}) do
    [dx: x |> wide() |> slope(function) |> Nx.multiply(wide(dy)) |> Nx.as_type(x.type)]
  end

  @doc "The function of each number of `x`, which has the type of the arithmetic; nil is none."
  def value(x, nil), do: x
  def value(x, :sigmoid), do: sigmoid(x)
  def value(x, :silu), do: Nx.multiply(x, sigmoid(x))
  def value(x, :gelu), do: value(x, :gelu_tanh)
  def value(x, :relu), do: Nx.select(Nx.less(x, 0), constant(0, x), x)
  def value(x, :softplus), do: Nx.add(value(x, :relu), Nx.log1p(decay(x)))

  def value(x, :gelu_tanh) do
    {u, _} = argument(bounded(x, 30))
    Nx.multiply(half(x), Nx.add(1, Nx.tanh(u)))
  end

  def value(x, :gelu_erf), do: Nx.multiply(half(x), tail(x))

  @doc "Its derivative."
  def slope(x, nil), do: Nx.broadcast(constant(1, x), x)
  def slope(x, :sigmoid), do: Nx.multiply(sigmoid(x), sigmoid(Nx.negate(x)))
  def slope(x, :gelu), do: slope(x, :gelu_tanh)
  def slope(x, :relu), do: Nx.select(Nx.greater(x, 0), constant(1, x), constant(0, x))
  def slope(x, :softplus), do: sigmoid(x)

  def slope(x, :silu) do
    Nx.multiply(sigmoid(x), Nx.add(1, Nx.multiply(x, sigmoid(Nx.negate(x)))))
  end

  # Beyond the bound it is 0 or 1, without a product of 0 and infinity, which would be NaN.
  def slope(x, :gelu_tanh) do
    x = bounded(x, 30)
    {u, du} = argument(x)
    tanh = Nx.tanh(u)
    rest = Nx.multiply(half(x), Nx.multiply(Nx.subtract(1, Nx.multiply(tanh, tanh)), du))
    Nx.add(half(Nx.add(1, tanh)), rest)
  end

  def slope(x, :gelu_erf) do
    near = bounded(x, 40)
    density = Nx.exp(Nx.negate(half(Nx.multiply(near, near))))
    density = Nx.multiply(density, constant(1 / :math.sqrt(2 * :math.pi()), x))
    Nx.add(half(tail(x)), Nx.multiply(near, density))
  end

  # exp(-|x|)
  defp decay(x), do: x |> Nx.abs() |> Nx.negate() |> Nx.exp()

  defp sigmoid(x) do
    decay = decay(x)
    Nx.divide(Nx.select(Nx.less(x, 0), decay, constant(1, x)), Nx.add(1, decay))
  end

  # The u of tanh(u) in GELU, and its derivative.
  defp argument(x) do
    [c, cubic, slope] =
      for c <- [:math.sqrt(2 / :math.pi()), 0.044715, 0.134145], do: constant(c, x)

    square = Nx.multiply(x, x)
    u = Nx.multiply(c, Nx.multiply(x, Nx.add(1, Nx.multiply(cubic, square))))
    {u, Nx.multiply(c, Nx.add(1, Nx.multiply(slope, square)))}
  end

  # 1 + erf(x / sqrt(2)), with all its digits where that is small.
  defp tail(x), do: Nx.erfc(Nx.multiply(x, constant(-1 / :math.sqrt(2), x)))

  defp bounded(x, bound), do: x |> Nx.max(-bound) |> Nx.min(bound)
  defp half(x), do: Nx.multiply(x, 0.5)
end
