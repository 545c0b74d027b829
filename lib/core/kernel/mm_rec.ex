defmodule Sidewinder.Kernel.MMRec do
  @moduledoc """
  The parts of MM-Rec: cumulative products, sums and log-sums, and their gradients.

  Sequences of the scans are `{B, H, L, W}`: batch, heads, length, and the channels of a head; their states are
  `{B, H, W}`. Time runs from 1 to L, or from L to 1 where a scan is reversed:

      exp_product_scan   l[t] = max(ln(min(max(gamma[t], eps), 1)), log_min)
                         log_y[t] = state + sum_{i<=t} l[i]        y[t] = exp(log_y[t])
      cumprod_scan       y[t] = state * prod_{i<=t} gamma[i]
      logcumsumexp       y[t] = ln(exp(state) + sum_{i<=t} exp(x[i]))
      cumsum             y[t] = state + sum_{i<=t} x[i]            reverse_cumsum: over i >= t

  The first tensor decides the storage type: `:f32`, `:bf16`, `:f16`, or `:f64`; the other sequences and `y` have that
  type too. States, `log_y` and the arithmetic are `:f32` (`:f64` for `:f64`), and results are rounded once.

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as `Sidewinder.Kernel.Scan`
  tells.
  """

  alias Sidewinder.{Kernel, Tensor}

  ## Cumulative products, sums and log-sums

  @exp_product [:eps, :log_min, :reverse]

  @doc """
  The cumulative product of decays by the sum of their logarithms, which says how small a product is that is 0 itself.

    * `gamma` - `{B, H, L, W}`, meant to be in 0 to 1

  Options beside those of `Sidewinder.Kernel`:

    * `:initial_state` - `{B, H, W}`, the logarithm of what came before; zeros by default
    * `:eps` - decays below count as this, 1.0e-8 by default, and those above 1 as 1
    * `:log_min` - logarithms below count as this; -50 by default
    * `:reverse` - whether time runs from the end; `false` by default
    * `:return_state` - also returns the last state, `{B, H, W}`

  Returns `{y, log_y}`, or `{y, log_y, last_state}`. Of an exact 0 a product of `cumprod_scan/2` is 0.

      iex> gamma = Sidewinder.Tensor.from_list([0.5, 0.5, 1, 0], :f32, {1, 1, 4, 1})
      iex> {y, log_y} = Sidewinder.Kernel.MMRec.exp_product_scan(gamma)
      iex> for t <- Enum.take(Sidewinder.Tensor.to_list(y), 3), do: Float.round(t, 5)
      [0.5, 0.25, 0.25]
      iex> for t <- Sidewinder.Tensor.to_list(log_y), do: Float.round(t, 4)
      [-0.6931, -1.3863, -1.3863, -19.807]
  """
  @spec exp_product_scan(Tensor.t(), keyword) ::
          {Tensor.t(), Tensor.t()} | {Tensor.t(), Tensor.t(), Tensor.t()}
  def exp_product_scan(gamma, options \\ []) do
    case cumulative(:exp_product_scan, {"gamma", gamma}, "carry", options, @exp_product) do
      %{"y" => y, "log_y" => log_y, "last_state" => last_state} -> {y, log_y, last_state}
      %{"y" => y, "log_y" => log_y} -> {y, log_y}
    end
  end

  @doc """
  The cumulative product of any numbers; after an exact 0 it is 0.

    * `gamma` - `{B, H, L, W}`

  Options beside those of `Sidewinder.Kernel`:

    * `:initial_state` - `{B, H, W}`, the product of what came before; ones by default
    * `:reverse` - whether time runs from the end; `false` by default
    * `:return_state` - returns `{y, last_state}`, the second `{B, H, W}`

  Returns `y`, `{B, H, L, W}`, unless it asks for more.

      iex> gamma = Sidewinder.Tensor.from_list([0.5, -2, -3, 0], :f32, {1, 1, 4, 1})
      iex> Sidewinder.Kernel.MMRec.cumprod_scan(gamma)
      #Sidewinder.Tensor<f32 (1, 1, 4, 1) [0.5, -1.0, 3.0, 0.0]>
  """
  @spec cumprod_scan(Tensor.t(), keyword) :: Tensor.t() | {Tensor.t(), Tensor.t()}
  def cumprod_scan(gamma, options \\ []) do
    one(cumulative(:cumprod_scan, {"gamma", gamma}, "init", options, [:reverse]))
  end

  @doc """
  The logarithm of the cumulative sum of exponentials, which neither overflows nor loses small numbers.

    * `x` - `{B, H, L, W}`; minus infinity adds nothing

  Options are those of `cumprod_scan/2`; the initial state is minus infinity by default.

      iex> x = Sidewinder.Tensor.from_list([0, 0, 100, 100], :f32, {1, 1, 4, 1})
      iex> y = Sidewinder.Kernel.MMRec.logcumsumexp(x)
      iex> for t <- Sidewinder.Tensor.to_list(y), do: Float.round(t, 4)
      [0.0, 0.6931, 100.0, 100.6931]
  """
  @spec logcumsumexp(Tensor.t(), keyword) :: Tensor.t() | {Tensor.t(), Tensor.t()}
  def logcumsumexp(x, options \\ []) do
    one(cumulative(:logcumsumexp, {"x", x}, "carry", options, [:reverse]))
  end

  @doc """
  The cumulative sum, such as that of logarithms; compensated, so that a long one is about as exact as a short one.

    * `x` - `{B, H, L, W}`

  Options beside those of `Sidewinder.Kernel`: `:initial_state` - `{B, H, W}`, zeros by default, and `:return_state`,
  as in `cumprod_scan/2`. `reverse_cumsum/2` has the sums from the end.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3], :f32, {1, 1, 3, 1})
      iex> Sidewinder.Kernel.MMRec.cumsum(x)
      #Sidewinder.Tensor<f32 (1, 1, 3, 1) [1.0, 3.0, 6.0]>
  """
  @spec cumsum(Tensor.t(), keyword) :: Tensor.t() | {Tensor.t(), Tensor.t()}
  def cumsum(x, options \\ []), do: one(cumulative(:cumsum, {"x", x}, "carry", options, []))

  @doc """
  The cumulative sum from the end: `cumsum/2` with time the other way round. The initial state comes from the right, and
  the last one is what is left of the first step.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3], :f32, {1, 1, 3, 1})
      iex> Sidewinder.Kernel.MMRec.reverse_cumsum(x)
      #Sidewinder.Tensor<f32 (1, 1, 3, 1) [6.0, 5.0, 3.0]>
  """
  @spec reverse_cumsum(Tensor.t(), keyword) :: Tensor.t() | {Tensor.t(), Tensor.t()}
  def reverse_cumsum(x, options \\ []),
    do: one(cumulative(:reverse_cumsum, {"x", x}, "carry", options, []))

  defp cumulative(op, sequence, state, options, names) do
    tensors = [initial_state: state]
    {inputs, own, where} = Kernel.sort_options!(op, options, tensors, [:return_state | names])
    Kernel.run(op, [sequence | inputs], own, where)
  end

  defp one(%{"y" => y, "last_state" => last_state}), do: {y, last_state}
  defp one(%{"y" => y}), do: y

  @doc """
  The gradient of `exp_product_scan/2`.

    * `gamma` - as it was given to the scan
    * `y` - what the scan returned
    * `dy` - `{B, H, L, W}`, the cotangent of `y`

  Options beside those of `Sidewinder.Kernel`: `:initial_state`, `:eps`, `:log_min` and `:reverse` as in the scan, and the
  cotangents `:dlog_y`, `{B, H, L, W}`, and `:dlast_state`, `{B, H, W}`, zero by default.

  Returns a map of `:dgamma`, and `:dcarry` if there is an initial state. Where a decay was out of its bounds, its
  gradient is 0.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> [gamma, y, dy] =
      ...>   for v <- [[0.5, 0.5, 1, 0], [0.5, 0.25, 0.25, 0], [1, 1, 1, 1]], do: from_list(v, :f32, {1, 1, 4, 1})
      iex> %{dgamma: dgamma} = Sidewinder.Kernel.MMRec.exp_product_scan_backward(gamma, y, dy)
      iex> for t <- Sidewinder.Tensor.to_list(dgamma), do: Float.round(t, 5)
      [2.0, 1.0, 0.25, 0.0]
  """
  @spec exp_product_scan_backward(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def exp_product_scan_backward(gamma, y, dy, options \\ []) do
    tensors = [initial_state: "carry", dlog_y: "dlog_y", dlast_state: "dlast_state"]
    given = [{"gamma", gamma}, {"y", y}, {"dy", dy}]
    cumulative_backward(:exp_product_scan_backward, given, options, tensors, @exp_product)
  end

  @doc """
  The gradient of `cumprod_scan/2`, without a division: exact where decays are 0.

    * `gamma` - as it was given to the scan
    * `y` - what the scan returned
    * `dy` - `{B, H, L, W}`, the cotangent of `y`

  Options beside those of `Sidewinder.Kernel`: `:initial_state` and `:reverse` as in the scan, and `:dlast_state`,
  `{B, H, W}`, the cotangent of the last state, zero by default.

  Returns a map of `:dgamma`, and `:dinit` if there is an initial state.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> [gamma, y, dy] =
      ...>   for v <- [[0.5, 0, 0.75], [0.5, 0, 0], [1, 2, 4]], do: from_list(v, :f32, {1, 1, 3, 1})
      iex> Sidewinder.Kernel.MMRec.cumprod_scan_backward(gamma, y, dy)
      %{dgamma: Sidewinder.Tensor.from_list([1, 2.5, 0], :f32, {1, 1, 3, 1})}
  """
  @spec cumprod_scan_backward(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def cumprod_scan_backward(gamma, y, dy, options \\ []) do
    tensors = [initial_state: "init", dlast_state: "dlast_state"]
    given = [{"gamma", gamma}, {"y", y}, {"dy", dy}]
    cumulative_backward(:cumprod_scan_backward, given, options, tensors, [:reverse])
  end

  @doc """
  The gradient of `logcumsumexp/2`, of `x` as it was given and the cotangent `dy` of `y`.

  Options beside those of `Sidewinder.Kernel`: `:initial_state`, `:reverse` and `:dlast_state`, as in
  `cumprod_scan_backward/4`. Returns a map of `:dx`, and `:dcarry` if there is an initial state. Where `x` is minus
  infinity, its gradient is 0.

      iex> [x, dy] = for v <- [[0, 0], [0, 1]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 1, 2, 1})
      iex> %{dx: dx} = Sidewinder.Kernel.MMRec.logcumsumexp_backward(x, dy)
      iex> for t <- Sidewinder.Tensor.to_list(dx), do: Float.round(t, 5)
      [0.5, 0.5]
  """
  @spec logcumsumexp_backward(Tensor.t(), Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def logcumsumexp_backward(x, dy, options \\ []),
    do: sum_backward(:logcumsumexp_backward, x, dy, options, [:reverse])

  @doc """
  The gradient of `cumsum/2`, of `x` as it was given and the cotangent `dy` of `y`. Options and what it returns are those
  of `logcumsumexp_backward/3`, but for `:reverse`.

      iex> [x, dy] = for v <- [[0, 0], [1, 2]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 1, 2, 1})
      iex> Sidewinder.Kernel.MMRec.cumsum_backward(x, dy)
      %{dx: Sidewinder.Tensor.from_list([3, 2], :f32, {1, 1, 2, 1})}
  """
  @spec cumsum_backward(Tensor.t(), Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def cumsum_backward(x, dy, options \\ []),
    do: sum_backward(:cumsum_backward, x, dy, options, [])

  @doc """
  The gradient of `reverse_cumsum/2`, as `cumsum_backward/3` is that of `cumsum/2`.

      iex> [x, dy] = for v <- [[0, 0], [1, 2]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 1, 2, 1})
      iex> Sidewinder.Kernel.MMRec.reverse_cumsum_backward(x, dy)
      %{dx: Sidewinder.Tensor.from_list([1, 3], :f32, {1, 1, 2, 1})}
  """
  @spec reverse_cumsum_backward(Tensor.t(), Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def reverse_cumsum_backward(x, dy, options \\ []),
    do: sum_backward(:reverse_cumsum_backward, x, dy, options, [])

  defp sum_backward(op, x, dy, options, names) do
    tensors = [initial_state: "carry", dlast_state: "dlast_state"]
    cumulative_backward(op, [{"x", x}, {"dy", dy}], options, tensors, names)
  end

  defp cumulative_backward(op, given, options, tensors, names) do
    {inputs, own, where} = Kernel.sort_options!(op, options, tensors, names)
    Kernel.gradients(op, given ++ inputs, own, where)
  end
end
