defmodule Sidewinder.Kernel.NN do
  @moduledoc """
  Activations, norms, products of matrices, the dense layer and the gated feed-forward layer; and their gradients. Weights are stored `{out, in}`.

  All tensors have the storage type of the first: `:f32`, `:bf16`, `:f16`, or `:f64`; weights of norms
  are `:f32` (`:f64` for `:f64`). The arithmetic is `:f32` (`:f64` for `:f64`), never narrower, and results
  are rounded once.

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as
  `Sidewinder.Kernel.Scan` tells.
  """

  alias Sidewinder.{Kernel, Tensor}

  ## Activations

  @functions [
    sigmoid: {"1 / (1 + exp(-x))", [0.26894, 0.5, 0.88080]},
    silu: {"x / (1 + exp(-x))", [-0.26894, 0.0, 1.76159]},
    gelu_tanh:
      {"x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3)", [-0.15881, 0.0, 1.9546]},
    gelu_erf: {"x (1 + erf(x / sqrt(2))) / 2", [-0.15866, 0.0, 1.9545]},
    softplus: {"ln(1 + exp(x))", [0.31326, 0.69315, 2.12693]},
    relu: {"max(x, 0)", [0.0, 0.0, 2.0]}
  ]

  for {function, {formula, values}} <- @functions do
    @doc """
    `#{formula}` of each element.

        iex> x = Sidewinder.Tensor.from_list([-1, 0, 2], :f32, {3})
        iex> y = Sidewinder.Kernel.NN.#{function}(x)
        iex> Enum.map(Sidewinder.Tensor.to_list(y), &(Float.round(&1, 5) + 0.0))
        #{inspect(values)}
    """
    @spec unquote(function)(Tensor.t(), keyword) :: Tensor.t()
    def unquote(function)(x, options \\ []), do: activation(x, unquote(function), options)
  end

  @doc """
  `gelu_tanh/2`, or `gelu_erf/2` with the option `form: :erf`.

      iex> x = Sidewinder.Tensor.from_list([2], :f32, {1})
      iex> [y] = Sidewinder.Tensor.to_list(Sidewinder.Kernel.NN.gelu(x, form: :erf))
      iex> Float.round(y, 5)
      1.9545
  """
  @spec gelu(Tensor.t(), keyword) :: Tensor.t()
  def gelu(x, options \\ []) do
    {[], own, where} = Kernel.sort_options!(:activations, options, [], [:form])

    case Map.get(own, :form, :tanh) do
      :tanh -> activation(x, :gelu_tanh, where)
      :erf -> activation(x, :gelu_erf, where)
      other -> wrong_form(other)
    end
  end

  defp wrong_form(other) do
    alias Sidewinder.Error

    raise Error.new(:option, "form",
            op: "gelu",
            expected: ":tanh or :erf",
            got: Error.show(other)
          )
  end

  defp activation(x, function, options) do
    set = %{fn: function, return_derivative: false}
    Kernel.outputs(:activations, [{"x", x}], options, set)
  end

  @doc """
  The gradient of an activation, by its name: `f'(x) dy`.

      iex> [x, dy] = for v <- [2, 10], do: Sidewinder.Tensor.from_list([v], :f32, {1})
      iex> %{dx: dx} = Sidewinder.Kernel.NN.activation_backward(:silu, x, dy)
      iex> Enum.map(Sidewinder.Tensor.to_list(dx), &Float.round(&1, 4))
      [10.9078]
  """
  @spec activation_backward(atom, Tensor.t(), Tensor.t(), keyword) :: %{dx: Tensor.t()}
  def activation_backward(function, x, dy, options \\ []) do
    given = [{"x", x}, {"dy", dy}]
    Kernel.gradients(:activations_backward, given, options, %{fn: function})
  end

  ## Norms

  @doc """
  Root mean square normalisation over the last axis (Zhang and Sennrich 2019):
  `w x / sqrt(mean(x^2) + eps)`.

    * `x` - `{..., D}`
    * `w` - `{D}`

  Options besides those of `Sidewinder.Kernel`: `:eps`, `1.0e-6` by default, and `:eps_mode`, `:inside` by
  default, or `:outside`: `w x / (sqrt(mean(x^2)) + eps)`. Returns `y`, shaped like `x`.

      iex> x = Sidewinder.Tensor.from_list([3, 4], :f32, {1, 2})
      iex> w = Sidewinder.Tensor.from_list([1, 1], :f32, {2})
      iex> y = Sidewinder.Kernel.NN.rms_norm(x, w)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 5))
      [0.84853, 1.13137]
  """
  @spec rms_norm(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def rms_norm(x, w, options \\ []),
    do: Kernel.outputs(:rms_norm, [{"x", x}, {"w", w}], options)

  @doc """
  The gradient of `rms_norm/3`, with its options: a map of `:dx` and `:dw`.

      iex> [x, dy] = for v <- [[3, 4], [1, 0]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 2})
      iex> w = Sidewinder.Tensor.from_list([1, 1], :f32, {2})
      iex> %{dx: dx} = Sidewinder.Kernel.NN.rms_norm_backward(x, w, dy)
      iex> Enum.map(Sidewinder.Tensor.to_list(dx), &Float.round(&1, 5))
      [0.18102, -0.13576]
  """
  @spec rms_norm_backward(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def rms_norm_backward(x, w, dy, options \\ []),
    do: Kernel.gradients(:rms_norm_backward, [{"x", x}, {"w", w}, {"dy", dy}], options)

  @doc """
  Root mean square normalisation with a gate, of Mamba-2 (Dao and Gu 2024): `w u / sqrt(mean(u^2) + eps)` with
  `u = x silu(z)`, or with `norm_before_gate: true` `w x / sqrt(mean(x^2) + eps) silu(z)`.

    * `x`, `z` - `{..., D}`
    * `w` - `{D}`

  Options besides those of `Sidewinder.Kernel`: `:eps`, `1.0e-5` by default, `:norm_before_gate`, and `:groups`, `1` by
  default: into how many equal parts a row is cut, each with a mean of its own. Returns `y`, shaped like `x`.

      iex> [x, z] = for v <- [[3, 4], [1, -1]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 2})
      iex> w = Sidewinder.Tensor.from_list([1, 1], :f32, {2})
      iex> y = Sidewinder.Kernel.NN.gated_rms_norm(x, z, w)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 4))
      [1.2697, -0.6228]
  """
  @spec gated_rms_norm(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def gated_rms_norm(x, z, w, options \\ []),
    do: Kernel.outputs(:gated_rms_norm, [{"x", x}, {"z", z}, {"w", w}], options)

  @doc """
  The gradient of `gated_rms_norm/4`, with its options: a map of `:dx`, `:dz` and `:dw`.

      iex> [x, z, dy] = for v <- [[3, 4], [1, -1], [1, 2]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 2})
      iex> w = Sidewinder.Tensor.from_list([1, 1], :f32, {2})
      iex> %{dw: dw} = Sidewinder.Kernel.NN.gated_rms_norm_backward(x, z, w, dy, groups: 2)
      iex> Enum.map(Sidewinder.Tensor.to_list(dw), &Float.round(&1, 4))
      [1.0, -2.0]
  """
  @spec gated_rms_norm_backward(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def gated_rms_norm_backward(x, z, w, dy, options \\ []) do
    tensors = [{"x", x}, {"z", z}, {"w", w}, {"dy", dy}]
    Kernel.gradients(:gated_rms_norm_backward, tensors, options)
  end

  @doc """
  Layer normalisation over the last axis (Ba et al. 2016): `w (x - mean(x)) rstd + b` with
  `rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)`.

    * `x` - `{..., D}`
    * `w`, `b` - `{D}`

  Options besides those of `Sidewinder.Kernel`: `:eps`, `1.0e-5` by default, and `:return_statistics`:
  returns `%{y: y, mean: mean, rstd: rstd}`, the last two without the last axis. Returns `y`, shaped like
  `x`, unless an option returns more.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3, 4], :f32, {1, 4})
      iex> w = Sidewinder.Tensor.from_list([1, 1, 1, 1], :f32, {4})
      iex> b = Sidewinder.Tensor.from_list([0, 0, 0, 1], :f32, {4})
      iex> y = Sidewinder.Kernel.NN.layer_norm(x, w, b)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 4))
      [-1.3416, -0.4472, 0.4472, 2.3416]
  """
  @spec layer_norm(Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          Tensor.t() | %{y: Tensor.t(), mean: Tensor.t(), rstd: Tensor.t()}
  def layer_norm(x, w, b, options \\ []) do
    given = [{"x", x}, {"w", w}, {"b", b}]
    {all?, outputs} = Kernel.call_asked(:layer_norm, given, options, :return_statistics)
    if all?, do: Kernel.atoms(outputs), else: outputs["y"]
  end

  @doc """
  The gradient of `layer_norm/4`, with its `:eps`: a map of `:dx`, `:dw` and `:db`.

      iex> [x, dy] = for v <- [[1, 3], [1, 2]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 2})
      iex> [w, b] = for v <- [[1, 1], [0, 0]], do: Sidewinder.Tensor.from_list(v, :f32, {2})
      iex> %{dw: dw, db: db} = Sidewinder.Kernel.NN.layer_norm_backward(x, w, b, dy)
      iex> for t <- [dw, db], do: Enum.map(Sidewinder.Tensor.to_list(t), &Float.round(&1, 4))
      [[-1.0, 2.0], [1.0, 2.0]]
  """
  @spec layer_norm_backward(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def layer_norm_backward(x, w, b, dy, options \\ []) do
    given = [{"x", x}, {"w", w}, {"b", b}, {"dy", dy}]
    Kernel.gradients(:layer_norm_backward, given, options)
  end

  @doc """
  GELU of `layer_norm/4`, in one pass over memory.

  Its arguments and `:eps`, and `:gelu`: `:tanh`, the default, or `:erf`. Returns `y`, shaped like `x`.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3, 4], :f32, {1, 4})
      iex> [w, b] = for v <- [1, 0], do: Sidewinder.Tensor.from_list([v, v, v, v], :f32, {4})
      iex> y = Sidewinder.Kernel.NN.layer_norm_gelu(x, w, b)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 4))
      [-0.1208, -0.1464, 0.3008, 1.2208]
  """
  @spec layer_norm_gelu(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def layer_norm_gelu(x, w, b, options \\ []),
    do: Kernel.outputs(:layer_norm_gelu, [{"x", x}, {"w", w}, {"b", b}], options)

  @doc """
  The gradient of `layer_norm_gelu/4`, with its options: a map of `:dx`, `:dw` and `:db`.

      iex> [x, dy] = for v <- [[1, 3], [1, 2]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 2})
      iex> [w, b] = for v <- [[1, 1], [0, 0]], do: Sidewinder.Tensor.from_list(v, :f32, {2})
      iex> %{db: db} = Sidewinder.Kernel.NN.layer_norm_gelu_backward(x, w, b, dy)
      iex> Enum.map(Sidewinder.Tensor.to_list(db), &Float.round(&1, 2))
      [-0.08, 2.17]
  """
  @spec layer_norm_gelu_backward(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def layer_norm_gelu_backward(x, w, b, dy, options \\ []) do
    given = [{"x", x}, {"w", w}, {"b", b}, {"dy", dy}]
    Kernel.gradients(:layer_norm_gelu_backward, given, options)
  end

  ## Products

  @doc """
  The product of two matrices.

    * `a` - `{M, K}`
    * `b` - `{K, N}`

  Returns `{M, N}`.

      iex> a = Sidewinder.Tensor.from_list([1, 2, 3, 4], :f32, {2, 2})
      iex> Sidewinder.Kernel.NN.matmul(a, a)
      #Sidewinder.Tensor<f32 (2, 2) [7.0, 10.0, 15.0, 22.0]>
  """
  @spec matmul(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def matmul(a, b, options \\ []), do: Kernel.outputs(:matmul, [{"a", a}, {"b", b}], options)

  @doc """
  The gradient of `matmul/3`: a map of `:da = dc b^T` and `:db = a^T dc`.

      iex> [a, b, dc] = for v <- [2, 3, 10], do: Sidewinder.Tensor.from_list([v], :f32, {1, 1})
      iex> Sidewinder.Kernel.NN.matmul_backward(a, b, dc)
      %{
        da: Sidewinder.Tensor.from_list([30], :f32, {1, 1}),
        db: Sidewinder.Tensor.from_list([20], :f32, {1, 1})
      }
  """
  @spec matmul_backward(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def matmul_backward(a, b, dc, options \\ []),
    do: Kernel.gradients(:matmul_backward, [{"a", a}, {"b", b}, {"dc", dc}], options)

  @doc """
  Applies the dense layer `activation(x w^T + bias)` to the last axis.

    * `x` - `{..., I}`
    * `w` - `{O, I}`

  Options besides those of `Sidewinder.Kernel`:

    * `:bias` - `{O}`
    * `:activation` - `:sigmoid`, `:silu`, `:gelu_tanh` (or `:gelu`), `:gelu_erf`, `:softplus` or `:relu`; none
      by default

  Returns `y`, `{..., O}`.

      iex> x = Sidewinder.Tensor.from_list([1, 2], :f32, {2, 1})
      iex> w = Sidewinder.Tensor.from_list([3, -4], :f32, {2, 1})
      iex> bias = Sidewinder.Tensor.from_list([0, 5], :f32, {2})
      iex> Sidewinder.Kernel.NN.linear(x, w, bias: bias)
      #Sidewinder.Tensor<f32 (2, 2) [3.0, 1.0, 6.0, -3.0]>
      iex> Sidewinder.Kernel.NN.linear(x, w, bias: bias, activation: :relu)
      #Sidewinder.Tensor<f32 (2, 2) [3.0, 1.0, 6.0, 0.0]>
  """
  @spec linear(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def linear(x, w, options \\ []),
    do: Kernel.outputs(:linear, [{"x", x}, {"w", w}], options)

  @doc """
  The gradient of `linear/3`.

    * `x`, `w` - as they were given to the layer
    * `dy` - `{..., O}`, the cotangent of `y`

  Options besides those of `Sidewinder.Kernel`: `:bias` and `:activation`, as in the layer. Returns a map of
  `:dx`, `:dw`, and `:db` if there is a bias.

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
    given = [{"x", x}, {"w", w}, {"dy", dy}]
    Kernel.gradients(:linear_backward, given, options)
  end

  @doc """
  The gated feed-forward layer of Llama (Shazeer 2020): `(silu(x wg^T) * (x wu^T)) wd^T`.

    * `x` - `{..., D}`
    * `weights` - a map of `:wg` and `:wu`, `{F, D}`, and `:wd`, `{D, F}`

  Options besides those of `Sidewinder.Kernel`: `:activation` in place of silu, as in `linear/3`. Returns `y`,
  shaped like `x`.

      iex> one = fn v -> Sidewinder.Tensor.from_list([v], :f32, {1, 1}) end
      iex> y = Sidewinder.Kernel.NN.swiglu_mlp(one.(1), %{wg: one.(2), wu: one.(3), wd: one.(1)})
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 5))
      [5.28478]
  """
  @spec swiglu_mlp(Tensor.t(), Kernel.weights(), keyword) :: Tensor.t()
  def swiglu_mlp(x, weights, options \\ []) do
    op = :swiglu_mlp
    Kernel.outputs(op, Kernel.with_weights(op, [{"x", x}], weights), options)
  end

  @doc """
  The gradient of `swiglu_mlp/3`, with its options: a map of `:dx`, `:dwg`, `:dwu` and `:dwd`.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> weights = %{wg: from_list([0], :f32, {1, 1}), wu: from_list([2], :f32, {1, 1}), wd: from_list([3], :f32, {1, 1})}
      iex> [x, dy] = for v <- [1, 1], do: from_list([v], :f32, {1, 1})
      iex> Sidewinder.Kernel.NN.swiglu_mlp_backward(x, weights, dy).dwg
      #Sidewinder.Tensor<f32 (1, 1) [3.0]>
  """
  @spec swiglu_mlp_backward(Tensor.t(), Kernel.weights(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def swiglu_mlp_backward(x, weights, dy, options \\ []) do
    op = :swiglu_mlp_backward
    given = Kernel.with_weights(op, [{"x", x}, {"dy", dy}], weights)
    Kernel.gradients(op, given, options)
  end
end
