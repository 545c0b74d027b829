defmodule Sidewinder do
  @moduledoc """
  Fast sequence-model kernels for Nx tensors.

  Each function works the same called eagerly and inside `defn`. With the native library it runs on
  the CPU's SIMD units or on an NVIDIA GPU; without it, in pure Nx, slowly and with a warning.

      iex> import Nx.Defn
      iex> fun = fn x, dt, a, b, c -> Nx.sum(Sidewinder.selective_scan(x, dt, a, b, c)) end
      iex> x = Nx.tensor([[[1.0], [2.0]]])
      iex> a = Nx.tensor([[-1.0]])
      iex> Nx.to_number(jit(fun).(x, x, a, x, x)) == Nx.to_number(fun.(x, x, a, x, x))
      true

  ## Types

  `x` sets the storage type, f32, bf16, f16 or f64, and the other sequences have it too. Weights,
  states and the arithmetic are f32, or f64 for f64; weights in the storage type are widened.
  Integers become floats. Any other mix of types raises, for it would round without a word.

  ## Vectorized tensors

  Vectorized axes of sequences and states join the batch, and weights without them are shared. Over
  the vectorized axes of a weight, such as an ensemble of models, the kernel is called once for each
  entry.

  ## Gradients

  They are not there yet. `Nx.Defn.grad/1` through these functions raises `Sidewinder.Error`.

  ## Options of every function

    * `:backend` - `:auto`, `:cpu`, `{:cuda, ordinal}` or `:nx` (pure Nx); the default is that of
      `Sidewinder.Device.config/0`
    * `:level` - forces a CPU level, such as `"scalar"`; see `Sidewinder.Device.info/0`
    * `:threads` - how many CPU threads share the work

  Compilers other than `Nx.Defn.Evaluator` get the op as an `Nx.block/4`, whose struct they may lower
  to a call of their own; else they compile the pure Nx form.
  """
  import Nx.Defn

  alias Sidewinder.{Block, Op}

  @doc """
  The selective scan of Mamba (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective
  State Spaces", section 3).

  For each batch, channel `d`, state `n` and time `t`:

      s = dt + dt_bias             delta = clamp(softplus(s))      each part where it is asked for
      h = exp(delta * a[d,n]) * h + delta * b[t,n] * x[t]          h starts as the initial state, or 0
      y = sum_n c[t,n] * h[n] + d[d] * x[t]                        `d` where it is given
      y = y * silu(z)                                              `z` where it is given

  Shapes, with batch B, length L, channels D, states of a channel N and groups of channels G:

    * `x`, `dt` - `{B, L, D}`
    * `a` - `{D, N}`, negative where the system is stable
    * `b`, `c` - `{B, L, N}`, `{B, L, G, N}`, or `{D, N}`: the same at every step

  Options beside those of `Sidewinder`:

    * `:d` - `{D}`, `:z` - `{B, L, D}`, `:dt_bias` - `{D}`, `:initial_state` - `{B, D, N}`
    * `:dt_softplus` - whether to apply softplus to `dt + dt_bias`; `false` by default
    * `:dt_clamp` - `{lo, hi}`, bounds of the step, both inside; none by default
    * `:return_state` - returns `{y, last_state}`, the second `{B, D, N}`
    * `:return_states` - returns `%{y: y, last_state: last_state, states: states}`, the last
      `{B, L, D, N}`: the state after every step

  Returns `y`, `{B, L, D}`, unless they ask for more. It has the names of `x`'s axes.

  Raises `Sidewinder.Error`: of kind `:shape` or `:dtype` for tensors that do not fit each other,
  `:argument` for what is no tensor, `:option` for options, `:unavailable` for a device or level that
  is not there.

  ## Examples

      iex> x = Nx.tensor([[[1.0], [2.0]]])
      iex> dt = Nx.tensor([[[0.5], [1.0]]])
      iex> a = Nx.tensor([[-1.0]])
      iex> b = Nx.tensor([[[1.0], [0.5]]])
      iex> c = Nx.tensor([[[1.0], [2.0]]])
      iex> {y, state} = Sidewinder.selective_scan(x, dt, a, b, c, return_state: true)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.5, 2.36788]
      iex> state |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [1.18394]

      iex> x = Nx.iota({2, 3, 4}, type: :f32)
      iex> Sidewinder.selective_scan(x, x, Nx.iota({5, 2}), x, x)
      ** (Sidewinder.Error) selective_scan: A: expected shape {4, n}, got {5, 2}. Layout is channel-last: batch, length, channels
  """
  @spec selective_scan(Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) ::
          Nx.Tensor.t()
          | {Nx.Tensor.t(), Nx.Tensor.t()}
          | %{y: Nx.Tensor.t(), last_state: Nx.Tensor.t(), states: Nx.Tensor.t()}
  deftransform selective_scan(x, dt, a, b, c, opts \\ []) do
    Block.SelectiveScan.call(%Block.SelectiveScan{}, [x, dt, a, b, c], opts)
  end

  @doc """
  Moves running sequences on by one token: `selective_scan/6` with a length of 1, without the axis
  of time.

    * `state` - `{B, D, N}`, as `selective_scan/6` or the call before returned it
    * `x`, `dt` - `{B, D}`
    * `a` - `{D, N}`
    * `b`, `c` - `{B, N}` or `{B, G, N}`

  Options beside those of `Sidewinder`: `:d`, `:z` (`{B, D}`), `:dt_bias`, `:dt_softplus` and
  `:dt_clamp`, as in `selective_scan/6`, whose errors it raises too.

  Returns `{y, new_state}`, the first `{B, D}`.

  ## Examples

      iex> [x, dt, b, c] = for v <- [2.0, 1.0, 0.5, 2.0], do: Nx.tensor([[v]])
      iex> state = Nx.tensor([[[0.5]]])
      iex> {y, _state} = Sidewinder.selective_state_update(state, x, dt, Nx.tensor([[-1.0]]), b, c)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [2.36788]
  """
  @spec selective_state_update(Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) ::
          {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform selective_state_update(state, x, dt, a, b, c, opts \\ []) do
    inputs = [{"x", x}, {"state", state}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}]
    [y: y, state: state] = Op.call(%Block.SelectiveStateUpdate{}, inputs, opts)
    {y, state}
  end

  @clamp [dt_clamp: {0.001, 0.1}]

  @doc """
  `selective_scan/6` with the step clamped to `{0.001, 0.1}`: a drop-in for scans that always do so.

  All options of `selective_scan/6`; `dt_clamp: nil` takes the clamp away. `dt` comes as it is, after
  softplus.

  ## Examples

      iex> x = Nx.tensor([[[1.0], [2.0]]])
      iex> dt = Nx.tensor([[[0.5], [0.0005]]])
      iex> b = Nx.tensor([[[1.0], [0.5]]])
      iex> c = Nx.tensor([[[1.0], [2.0]]])
      iex> y = Sidewinder.scan(x, dt, Nx.tensor([[-1.0]]), b, c)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.1, 0.2018]
  """
  @spec scan(Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) :: Nx.Tensor.t() | tuple | map
  deftransform scan(x, dt, a, b, c, opts \\ []) do
    selective_scan(x, dt, a, b, c, clamped(opts))
  end

  defp clamped(opts) when is_list(opts), do: Keyword.merge(@clamp, opts)
  defp clamped(other), do: other

  @doc """
  `scan/6` that returns `{y, states}`, the second `{B, L, D, N}`: the state after every step.

  ## Examples

      iex> x = Nx.broadcast(1.0, {1, 3, 2})
      iex> {_y, states} = Sidewinder.scan_with_states(x, x, Nx.broadcast(-1.0, {2, 4}),
      ...>   Nx.broadcast(1.0, {1, 3, 4}), Nx.broadcast(1.0, {1, 3, 4}))
      iex> Nx.shape(states)
      {1, 3, 2, 4}
  """
  @spec scan_with_states(Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) ::
          {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform scan_with_states(x, dt, a, b, c, opts \\ []) do
    opts = Keyword.put(opts, :return_states, true)
    %{y: y, states: states} = scan(x, dt, a, b, c, opts)
    {y, states}
  end
end
