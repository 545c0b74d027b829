defmodule Sidewinder.Ternary do
  @moduledoc """
  Training of layers that quantize their weights to ternary numbers: plain Nx, which works eagerly, in `defn`, under `grad`
  and with every compiler.

  Weights stay floats during training. `quantize/2` rounds them to `s q`, with q of -1, 0 and 1, and passes the gradient
  through unchanged (straight through; Bengio et al. 2013). `Sidewinder.Kernel.Ternary.quantize/2` quantizes the trained
  weights, by the same rule to the same numbers.
  """

  import Nx.Defn

  alias Sidewinder.Options

  @rules [:absmean, :twn, :threshold]

  @doc """
  Weights `{out, in}` as `s q`, by a rule of `Sidewinder.Kernel.Ternary.quantize/2`; with a straight-through gradient.

  ## Options

    * `:rule` - `:absmean` (default), `:twn` or `:threshold`
    * `:threshold` - that of the rule `:threshold`
    * `:per_row` - whether each row has its own scale. Defaults to `false`.

  ## Examples

      iex> w = Nx.tensor([[0.9, -0.1, 0.4, -0.6]])
      iex> Nx.to_flat_list(Sidewinder.Ternary.quantize(w))
      [0.5, 0.0, 0.5, -0.5]
      iex> Nx.to_flat_list(Nx.Defn.grad(w, &Nx.sum(Nx.multiply(Sidewinder.Ternary.quantize(&1), 3))))
      [3.0, 3.0, 3.0, 3.0]
  """
  @spec quantize(Nx.Tensor.t(), keyword) :: Nx.Tensor.t()
  defn quantize(w, opts \\ []) do
    straight_through(w, opts)
  end

  deftransformp straight_through(w, opts) do
    # A captured tensor is no expression yet.
    w = Nx.Defn.Expr.tensor(w)
    {q, scale} = cells(w, opts)
    Nx.Defn.Kernel.custom_grad(Nx.multiply(q, scale), [w], &[&1])
  end

  @doc """
  The dense layer `x w^T + bias` with weights that are ternary: `quantize/2` of `w`, `{out, in}`.

  `x` is `{..., in}`; `:bias`, `{out}`, is an option, the others are those of `quantize/2`.

  ## Examples

      iex> w = Nx.tensor([[0.9, -0.1, 0.4, -0.6]])
      iex> y = Sidewinder.Ternary.dense(Nx.tensor([[1.0, 1.0, 1.0, -1.0]]), w, bias: Nx.tensor([1.0]))
      iex> Nx.to_flat_list(y)
      [2.5]
  """
  @spec dense(Nx.Tensor.t(), Nx.Tensor.t(), keyword) :: Nx.Tensor.t()
  deftransform dense(x, w, opts \\ []) do
    {bias, opts} = Keyword.pop(opts, :bias)
    y = Nx.dot(x, [-1], quantize(w, opts), [1])
    if bias, do: Nx.add(y, bias), else: y
  end

  # -1, 0 and 1, and their scale, which no gradient passes.
  defp cells(w, opts) do
    Options.known!(opts, [:rule, :threshold, :per_row], op: "ternary")
    rule = Options.check!(opts[:rule] || :absmean, opts[:rule] in [nil | @rules], "rule", rules())
    size = Nx.as_type(Nx.abs(w), :f32)
    {threshold, scale} = threshold(rule, size, opts[:threshold], opts[:per_row] || false)

    [plus, minus] =
      for sign <- [Nx.greater(w, threshold), Nx.less(w, Nx.negate(threshold))],
          do: Nx.as_type(sign, :s8)

    {plus |> Nx.subtract(minus) |> Nx.as_type(Nx.type(w)), Nx.as_type(scale, Nx.type(w))}
  end

  defp rules, do: "one of #{Enum.join(@rules, ", ")}"

  defp threshold(:threshold, _size, given, _per_row) when is_number(given) and given >= 0,
    do: {Nx.tensor(given, type: :f32), Nx.tensor(1.0)}

  defp threshold(:threshold, _size, given, _per_row),
    do: Options.wrong!("threshold", "a number, 0 or more, which this rule needs", given)

  defp threshold(_rule, _size, given, _per_row) when given != nil,
    do: Options.wrong!("threshold", "none: only the rule threshold has one", given)

  defp threshold(:absmean, size, nil, per_row) do
    scale = size |> Nx.mean(over(per_row)) |> Nx.max(1.0e-5)
    {Nx.divide(scale, 2), scale}
  end

  defp threshold(:twn, size, nil, per_row) do
    threshold = size |> Nx.mean(over(per_row)) |> Nx.multiply(0.7)
    above = Nx.greater(size, threshold)
    count = above |> Nx.sum(over(per_row)) |> Nx.max(1)
    {threshold, size |> Nx.multiply(above) |> Nx.sum(over(per_row)) |> Nx.divide(count)}
  end

  defp over(false), do: []
  defp over(true), do: [axes: [-1], keep_axes: true]
end
