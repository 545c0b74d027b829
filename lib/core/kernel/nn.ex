defmodule Sidewinder.Kernel.NN do
  @moduledoc """
  The dense layer and its gradient, with weights stored `{out, in}`:

      y = x w^T + bias
      dx = dy w        dw = dy^T x        db = sum dy        sums over all rows of x

  All tensors have the storage type of `x`: `:f32`, `:bf16`, `:f16`, or `:f64`. Products are summed in
  `:f32` (`:f64` for `:f64`), never in a narrower type, and results are rounded once.

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as
  `Sidewinder.Kernel.Scan` tells.
  """

  alias Sidewinder.{Kernel, Tensor}

  @doc """
  Applies the layer to the last axis.

    * `x` - `{..., I}`
    * `w` - `{O, I}`

  Options beside those of `Sidewinder.Kernel`: `:bias` - `{O}`. Returns `y`, `{..., O}`.

      iex> x = Sidewinder.Tensor.from_list([1, 2], :f32, {2, 1})
      iex> w = Sidewinder.Tensor.from_list([3, 4], :f32, {2, 1})
      iex> bias = Sidewinder.Tensor.from_list([0, 1], :f32, {2})
      iex> Sidewinder.Kernel.NN.linear(x, w, bias: bias)
      #Sidewinder.Tensor<f32 (2, 2) [3.0, 5.0, 6.0, 9.0]>
  """
  @spec linear(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def linear(x, w, options \\ []) do
    {inputs, own, where} = Kernel.sort_options!(:linear, options, [bias: "b"], [])
    %{"y" => y} = Kernel.run(:linear, [{"x", x}, {"w", w} | inputs], own, where)
    y
  end

  @doc """
  The gradient of `linear/3`.

    * `x`, `w` - as they were given to the layer
    * `dy` - `{..., O}`, the cotangent of `y`

  Options beside those of `Sidewinder.Kernel`: `:bias`, as in the layer; only whether it is there
  matters. Returns a map of `:dx`, `:dw`, and `:db` if there is a bias.

      iex> x = Sidewinder.Tensor.from_list([1, 2], :f32, {2, 1})
      iex> w = Sidewinder.Tensor.from_list([3], :f32, {1, 1})
      iex> dy = Sidewinder.Tensor.from_list([1, 10], :f32, {2, 1})
      iex> Sidewinder.Kernel.NN.linear_backward(x, w, dy)
      %{
        dx: Sidewinder.Tensor.from_list([3, 30], :f32, {2, 1}),
        dw: Sidewinder.Tensor.from_list([21], :f32, {1, 1})
      }
  """
  @spec linear_backward(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def linear_backward(x, w, dy, options \\ []) do
    {inputs, own, where} = Kernel.sort_options!(:linear_backward, options, [bias: "b"], [])
    Kernel.gradients(:linear_backward, [{"x", x}, {"w", w}, {"dy", dy} | inputs], own, where)
  end
end
