defmodule Sidewinder.Kernel.Conv do
  @moduledoc """
  The depthwise causal convolution before Mamba's scan: over whole sequences, one token at a time, and
  its gradient.

  In the shapes B is the batch, L the length, D the channels and W the width: how many samples each
  output sees. All tensors are channel-last. With `xp` the initial state followed by `x` in time:

      y[t] = bias + sum_j w[j] * xp[t + j]     j from 0 to W - 1: w[W-1] meets the current sample
      y = silu(y)                              where it is asked for

  `x` decides the storage type: `:f32`, `:bf16`, `:f16`, or `:f64`. States and `y` have that type too;
  `w`, `bias` and the arithmetic are `:f32` (`:f64` for `:f64`), and results are rounded once.

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as
  `Sidewinder.Kernel.Scan` tells.
  """

  alias Sidewinder.{Kernel, Tensor}

  @doc """
  Convolves whole sequences.

    * `x` - `{B, L, D}`
    * `w` - `{D, W}`

  Options besides those of `Sidewinder.Kernel`:

    * `:bias` - `{D}`
    * `:initial_state` - `{B, W - 1, D}`, the samples before the first; zeros by default
    * `:activation` - `:silu`; none by default
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder.Kernel.Scan`
    * `:return_state` - returns `{y, last_state}`, the second `{B, W - 1, D}`: the last samples, the
      initial state of the next call

  Returns `y`, `{B, L, D}`, unless an option returns more.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3], :f32, {1, 3, 1})
      iex> w = Sidewinder.Tensor.from_list([0.25, 0.5], :f32, {1, 2})
      iex> Sidewinder.Kernel.Conv.causal_conv1d(x, w, return_state: true)
      {Sidewinder.Tensor.from_list([0.5, 1.25, 2], :f32, {1, 3, 1}),
       Sidewinder.Tensor.from_list([3], :f32, {1, 1, 1})}
  """
  @spec causal_conv1d(Tensor.t(), Tensor.t(), keyword) :: Tensor.t() | {Tensor.t(), Tensor.t()}
  def causal_conv1d(x, w, options \\ []),
    do: Kernel.outputs(:causal_conv1d, [{"x", x}, {"w", w}], options)

  @doc """
  The gradient of `causal_conv1d/3`.

    * `x`, `w` - as they were given to the convolution
    * `dy` - `{B, L, D}`, the cotangent of `y`

  Options besides those of `Sidewinder.Kernel`: `:bias`, `:initial_state` and `:activation` as in the
  convolution, and `:dlast_state` - `{B, W - 1, D}`, the cotangent of the last state, zero by default.

  Returns a map of `:dx`, `:dw`, and of `:dbias` and `:dinitial_state` as far as their inputs are there.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3], :f32, {1, 3, 1})
      iex> w = Sidewinder.Tensor.from_list([0.25, 0.5], :f32, {1, 2})
      iex> dy = Sidewinder.Tensor.from_list([1, 1, 1], :f32, {1, 3, 1})
      iex> Sidewinder.Kernel.Conv.causal_conv1d_backward(x, w, dy)
      %{
        dx: Sidewinder.Tensor.from_list([0.75, 0.75, 0.5], :f32, {1, 3, 1}),
        dw: Sidewinder.Tensor.from_list([3, 6], :f32, {1, 2})
      }
  """
  @spec causal_conv1d_backward(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def causal_conv1d_backward(x, w, dy, options \\ []) do
    given = [{"x", x}, {"w", w}, {"dy", dy}]
    Kernel.gradients(:causal_conv1d_backward, given, options)
  end

  @doc """
  Advances running sequences by one token: the convolution with a length of 1, without the axis of
  time.

    * `state` - `{B, W - 1, D}`, as `causal_conv1d/3` or the call before returned it
    * `x` - `{B, D}`
    * `w` - `{D, W}`

  Options besides those of `Sidewinder.Kernel`: `:bias` and `:activation`, as in `causal_conv1d/3`.

  Returns `{y, new_state}`, the first `{B, D}`.

      iex> state = Sidewinder.Tensor.from_list([3], :f32, {1, 1, 1})
      iex> x = Sidewinder.Tensor.from_list([4], :f32, {1, 1})
      iex> w = Sidewinder.Tensor.from_list([0.25, 0.5], :f32, {1, 2})
      iex> Sidewinder.Kernel.Conv.causal_conv1d_update(state, x, w)
      {Sidewinder.Tensor.from_list([2.75], :f32, {1, 1}),
       Sidewinder.Tensor.from_list([4], :f32, {1, 1, 1})}
  """
  @spec causal_conv1d_update(Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          {Tensor.t(), Tensor.t()}
  def causal_conv1d_update(state, x, w, options \\ []) do
    given = [{"x", x}, {"initial_state", state}, {"w", w}]
    Kernel.outputs(:causal_conv1d_update, given, options)
  end
end
