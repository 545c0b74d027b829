defmodule Sidewinder.Kernel.Mamba do
  @moduledoc """
  The Mamba block, from projection to projection, and its gradient. There is no normalisation and no
  residual in it.

  In the shapes B is the batch, L the length, M the width of the model, D the inner width, N the
  states of a channel, W the width of the convolution and R the rank of the steps. With weights stored
  `{out, in}` and `linear(v, m) = v m^T`:

      [u | z] = linear(x, in_proj) + in_proj_b
      c, conv_state = causal_conv1d(u, conv_w, conv_b, silu, conv_state)
      [delta | b | c'] = linear(c, x_proj)                         of widths R, N, N
      dt = linear(delta, dt_w)                                     its bias dt_b goes into the scan
      s, ssm_state = selective_scan(c, dt, -exp(A_log), b, c', D, z, dt_b, softplus, ssm_state)
      y = linear(s, out_proj) + out_proj_b

  The weights come as a map, by these names as atoms or strings:

    * `in_proj` - `{2D, M}`, `conv_w` - `{D, W}`, `x_proj` - `{R + 2N, D}`, `dt_w` - `{D, R}`, `dt_b` -
      `{D}`, `A_log` - `{D, N}`, `D` - `{D}`, `out_proj` - `{M, D}`
    * which may be absent: `conv_b` - `{D}`, `in_proj_b` - `{2D}`, `out_proj_b` - `{M}`

  `x` decides the storage type: `:f32`, `:bf16`, `:f16`, or `:f64`. The projections, their biases and
  `conv_state` have that type too; `conv_w`, `conv_b`, `dt_b`, `A_log`, `D`, `ssm_state` and the
  arithmetic are `:f32` (`:f64` for `:f64`). With 16-bit storage intermediate tensors are rounded after
  each step.

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as
  `Sidewinder.Kernel.Scan` tells.
  """

  alias Sidewinder.{Kernel, Tensor}

  @typedoc "Weights by name."
  @type weights :: Kernel.weights()

  @doc """
  Applies the block to sequences, `{B, L, M}`; with L = 1 and the states of the call before it is the
  step of one token.

  Options besides those of `Sidewinder.Kernel`:

    * `:conv_state` - `{B, W - 1, D}`, `:ssm_state` - `{B, D, N}`: the states of the sequences; zeros by
      default
    * `:return_state` - returns `{y, states}`, the second a map of `:conv_state` and `:ssm_state`
    * `:expand`, `:d_state`, `:dt_rank`, `:d_conv` - sizes that follow from the weights; if given, they
      must agree with them

  Returns `y`, `{B, L, M}`, unless an option returns more.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> weights = %{
      ...>   in_proj: from_list([1, 0.5], :f32, {2, 1}),
      ...>   conv_w: from_list([0, 0, 0.5, 1], :f32, {1, 4}),
      ...>   x_proj: from_list([1, 1, 1], :f32, {3, 1}),
      ...>   dt_w: from_list([1], :f32, {1, 1}),
      ...>   dt_b: from_list([0], :f32, {1}),
      ...>   A_log: from_list([0], :f32, {1, 1}),
      ...>   D: from_list([1], :f32, {1}),
      ...>   out_proj: from_list([2], :f32, {1, 1})
      ...> }
      iex> x = from_list([1, 2], :f32, {1, 2, 1})
      iex> {y, states} = Sidewinder.Kernel.Mamba.mamba_block(x, weights, return_state: true)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 3))
      [0.728, 46.925]
      iex> states.conv_state
      #Sidewinder.Tensor<f32 (1, 3, 1) [0.0, 1.0, 2.0]>
  """
  @spec mamba_block(Tensor.t(), weights, keyword) ::
          Tensor.t() | {Tensor.t(), %{conv_state: Tensor.t(), ssm_state: Tensor.t()}}
  def mamba_block(x, weights, options \\ []) do
    op = :mamba_block

    case Kernel.outputs(op, Kernel.with_weights(op, [{"x", x}], weights), options) do
      {y, conv_state, ssm_state} -> {y, %{conv_state: conv_state, ssm_state: ssm_state}}
      y -> y
    end
  end

  @doc """
  The gradient of `mamba_block/3`.

    * `x`, `weights` - as they were given to the block
    * `dy` - `{B, L, M}`, the cotangent of `y`

  Options besides those of `Sidewinder.Kernel`: `:conv_state` and `:ssm_state` as in the block, and
  `:dconv_state` and `:dssm_state`, the cotangents of the states that came out, zero by default.

  Returns a map of gradients by the names of their inputs with a `d` before: `:dx`, `:din_proj`,
  `:dA_log` and so on; `:dconv_state` and `:dssm_state` are those of the states that went in.

      iex> [{"x", x} | weights] = Sidewinder.RandomInputs.make(:mamba_block, shape: "B=1,L=3,M=4,D=8,N=2,R=1,W=4")
      iex> dy = Sidewinder.RandomInputs.normal({1, 3, 4}, :f32, 1, :dy)
      iex> gradients = Sidewinder.Kernel.Mamba.mamba_block_backward(x, Map.new(weights), dy)
      iex> {gradients.dx.shape, gradients.dA_log.shape}
      {{1, 3, 4}, {8, 2}}
  """
  @spec mamba_block_backward(Tensor.t(), weights, Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def mamba_block_backward(x, weights, dy, options \\ []) do
    op = :mamba_block_backward
    given = Kernel.with_weights(op, [{"x", x}, {"dy", dy}], weights)
    Kernel.gradients(op, given, options)
  end
end
