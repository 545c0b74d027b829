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
  Integers become floats. Any other mix of types raises, since it would round silently. Masks are integers,
  where any number but 0 is true.

  ## Names of axes

  Inputs with different names for one axis raise, as in `Nx.add/2`. The axis of a weight that a product sums over may
  have another name, as in `Nx.dot/2`. Results have the names of the first input.

  ## Vectorized tensors

  Vectorized axes of sequences, states and masks join the batch, and weights without them are shared. Over
  the vectorized axes of a weight, such as an ensemble of models, the kernel is called once for each
  entry.

  ## Packed sequences

  `selective_scan/6`, `ssd/6`, `gated_delta_rule/5`, `linear_attention/4`, `linear_scan/3`, `causal_conv1d/3` and
  `attention/4` take sequences of different lengths, one after the other in a batch of 1, with their ends as the option
  `:cu_seqlens`: integers `{S + 1}` from 0 to the length L that do not decrease. No state and no window crosses an end,
  and initial and last states have S in place of the batch. Results, and gradients, are those of one call for each
  sequence; gradients of weights are summed over the sequences, each in the type of the weight. An empty sequence passes
  its state on.

      iex> x = Nx.tensor([[[1.0], [2.0], [3.0]]])
      iex> a = Nx.broadcast(1.0, {1, 3, 1})
      iex> {h, last_state} = Sidewinder.linear_scan(a, x, cu_seqlens: Nx.tensor([0, 2, 3]), return_state: true)
      iex> {Nx.to_flat_list(h), Nx.to_flat_list(last_state)}
      {[1.0, 3.0, 3.0], [3.0, 3.0]}

  As `:cu_seqlens` is a tensor, a compiled program serves all lengths. Its values are checked when the program runs:
  wrong ones raise `Sidewinder.Error` of kind `:argument`. On a GPU a call waits for them. There `attention/4` and
  `selective_scan/6` take all sequences at once, as do `ssd/6`, `gated_delta_rule/5` and `linear_attention/4` where they
  run on tensor cores, and a gradient shared by all is rounded once only. Other calls queue the kernels of each sequence
  in turn, so a few long sequences suit them better than many short ones. Vectorized tensors cannot be packed.

  ## Gradients

  `Nx.Defn.grad/2` and `Nx.Defn.value_and_grad/2` differentiate all functions, by every input and from
  every output, under every compiler: one call of a kernel forwards and one backwards.

      iex> x = Nx.tensor([[[1.0], [2.0]]])
      iex> a = Nx.tensor([[-1.0]])
      iex> Nx.Defn.grad(a, fn a -> Nx.sum(Sidewinder.selective_scan(x, x, a, x, x)) end)
      ...> |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.54134]

  There are no second derivatives: they raise `Sidewinder.Error` of kind `:unavailable`.

  Nx 0.13 itself computes wrong gradients of any `while` whose steps depend on each other:
  it walks the steps in the order of the loop, not in reverse. A gradient taken inside of the
  body of a `while` is right, and so is one of a loop that Nx unrolls (`while ..., unroll: true`). The
  gradient of any other `while` around these functions gives a warning: it is right only if the steps
  change nothing but sums that no step reads. With types other than f32, which Nx mixes up there, it raises.

  ## Options of every function

    * `:backend` - `:auto`, `:cpu`, `{:cuda, ordinal}` or `:nx` (pure Nx); the default is that of
      `Sidewinder.Device.config/0`
    * `:level` - forces a CPU level, such as `"scalar"`; see `Sidewinder.Device.info/0`
    * `:threads` - how many CPU threads share the work
    * `:allow_tf32` - whether matrix products of f32 on CUDA may round their factors to TF32; see
      `Sidewinder.Kernel`

  ## Under EXLA

  With `compiler: EXLA` an op, and its gradient, is a custom call in XLA's own program (`Sidewinder.CustomCall`): the
  same kernel, on XLA's memory where it lies, on a GPU on XLA's stream. The program runs where its client is, so of the
  options above `backend: :nx` alone matters there: it leaves the op to XLA. `Sidewinder.Device.info/0` says whether
  EXLA runs the kernels.

  Compilers other than EXLA and `Nx.Defn.Evaluator` get an `Nx.block/4`, whose struct they may lower to a call of
  their own; otherwise they compile the pure Nx form.
  """
  import Nx.Defn

  alias Sidewinder.{Block, Cancellation, Op}

  @doc type: :recurrent
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

  Options besides those of `Sidewinder`:

    * `:d` - `{D}`, `:z` - `{B, L, D}`, `:dt_bias` - `{D}`, `:initial_state` - `{B, D, N}`
    * `:dt_softplus` - whether to apply softplus to `dt + dt_bias`; `false` by default
    * `:dt_clamp` - `{lo, hi}`, bounds of the step, both inside; none by default
    * `:clamp_grad` - the gradient of a step outside of these bounds: none with `:mask`, the default,
      and that of a step that is not clamped with `:straight_through`
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder`
    * `:return_state` - returns `{y, last_state}`, the second `{B, D, N}`
    * `:return_states` - returns `%{y: y, last_state: last_state, states: states}`, the last
      `{B, L, D, N}`: the state after every step

  Returns `y`, `{B, L, D}`, unless these options return more. It has the names of `x`'s axes.

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

  @doc type: :recurrent
  @doc """
  The scan of Mamba-2, the state space dual (Dao and Gu 2024, "Transformers are SSMs", section 6;
  `mamba_chunk_scan_combined` of `mamba_ssm`). Each head decays by one number a step.

  For each batch, head `h` with its row `p` and state `n`, and time `t`:

      delta = clamp(softplus(dt[t,h] + dt_bias[h]))                  each part where it is asked for
      S[p,n] = exp(delta * a[h]) * S[p,n] + delta * x[t,h,p] * b[t,g,n]
      y = (sum_n c[t,g,n] * S[p,n] + d[h] * x[t,h,p]) * silu(z)      `d` and `z` where they are given

  `S` starts as the initial state, or 0. Heads fall into `G` equal groups, in order, and `g` is that of `h`. Shapes, with
  batch B, length L, heads H of width P, and N states of a row:

    * `x` - `{B, L, H, P}`
    * `dt` - `{B, L, H}`
    * `a` - `{H}`, negative where the system is stable
    * `b`, `c` - `{B, L, G, N}`, where G divides H

  Options beside those of `Sidewinder`:

    * `:d` - `{H}` or `{H, P}`, `:z` - `{B, L, H, P}`, `:dt_bias` - `{H}`, `:initial_state` - `{B, H, P, N}`
    * `:dt_softplus`, `:dt_clamp`, `:clamp_grad` - as in `selective_scan/6`
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder`
    * `:return_state` - returns `{y, last_state}`, the second `{B, H, P, N}`

  Returns `y`, `{B, L, H, P}`, with the names of `x`'s axes. Raises `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> x = Nx.tensor([[[[1.0, 2.0]], [[2.0, -1.0]]]])
      iex> dt = Nx.tensor([[[0.5], [1.0]]])
      iex> b = Nx.tensor([[[[1.0]], [[0.5]]]])
      iex> c = Nx.tensor([[[[1.0]], [[2.0]]]])
      iex> {y, state} = Sidewinder.ssd(x, dt, Nx.tensor([-1.0]), b, c, return_state: true)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.5, 1.0, 2.36788, -0.26424]
      iex> Nx.shape(state)
      {1, 1, 2, 1}
  """
  @spec ssd(Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) ::
          Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform ssd(x, dt, a, b, c, opts \\ []) do
    inputs = [{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}]

    case Op.call(%Block.Ssd{}, inputs, opts) do
      [y: y] -> y
      [y: y, last_state: last_state] -> {y, last_state}
    end
  end

  @doc type: :recurrent
  @doc """
  The gated delta rule, the recurrence of Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464;
  `fused_recurrent_gated_delta_rule` of flash-linear-attention). A state maps keys to values: each step decays it, and moves
  the value that it has for the step's key towards the step's value.

  For each batch, head `h` and time `t`, with the state `S`, K rows by V columns:

      e[t] = v[t,h] - exp(g[t,h]) * transpose(S) . k[t]
      S = exp(g[t,h]) * S + outer(k[t], beta[t,h] * e[t])
      y[t] = scale * transpose(S) . q[t]

  `S` starts as the initial state, or 0. Heads fall into `G` equal groups, in order, with the same `q` and `k`. Shapes,
  with batch B, length L, heads H, keys of width K and values of width V:

    * `q`, `k` - `{B, L, G, K}`, where G divides H
    * `v` - `{B, L, H, V}`
    * `beta` - `{B, L, H}`, the size of the step, mostly from 0 to 1

  Options beside those of `Sidewinder`:

    * `:g` - `{B, L, H}`, the logarithm of the decay; 0 by default, which is the delta rule of DeltaNet
    * `:initial_state` - `{B, H, K, V}`
    * `:scale` - `1 / sqrt(K)` by default
    * `:qk_l2norm` - whether `q` and `k` are divided by their L2 norms, `sqrt(sum(x * x) + 1.0e-6)`. Defaults to
      `false`.
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder`
    * `:return_state` - returns `{y, last_state}`, the second `{B, H, K, V}`

  Returns `y`, `{B, L, H, V}`, with the names of `v`'s axes. One token of running sequences is a call with a length of 1,
  from the state that the call before returned. Raises `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> k = Nx.tensor([[[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]]])
      iex> v = Nx.tensor([[[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]]])
      iex> beta = Nx.tensor([[[1.0], [1.0], [0.5]]])
      iex> {y, state} = Sidewinder.gated_delta_rule(k, k, v, beta, scale: 1.0, return_state: true)
      iex> y |> Nx.squeeze() |> Nx.to_list()
      [[1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]
      iex> Nx.shape(state)
      {1, 1, 2, 2}
  """
  @spec gated_delta_rule(Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) ::
          Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform gated_delta_rule(q, k, v, beta, opts \\ []) do
    # The first one has the heads that groups divide, and the names of the result's axes.
    inputs = [{"v", v}, {"q", q}, {"k", k}, {"beta", beta}]

    case Op.call(%Block.GatedDeltaRule{}, inputs, opts) do
      [y: y] -> y
      [y: y, last_state: last_state] -> {y, last_state}
    end
  end

  @doc type: :recurrent
  @doc """
  Linear attention with decays: attention without softmax as a recurrence, of which the linear transformer (Katharopoulos et
  al. 2020, arXiv 2006.16236), retention (Sun et al. 2023, arXiv 2307.08621), lightning attention (Qin et al. 2024, arXiv
  2405.17381) and gated linear attention (GLA; Yang et al. 2024, arXiv 2312.06635) are cases. The options are those of
  `fused_recurrent_linear_attn`, `fused_recurrent_simple_gla` and `fused_recurrent_gla` of flash-linear-attention.

  For each batch, head `h` and time `t`, with the state `S`, K rows by V columns, and the sum of keys `z`:

      S = exp(g[t,h]) * S + outer(k[t], v[t,h])
      z = exp(g[t,h]) * z + k[t]
      y[t] = scale * transpose(S) . q[t]
      y[t] = scale * transpose(S) . q[t] / (scale * z . q[t] + 1.0e-10)     with normalize

  where the decay `exp(g)` is a number or one for each row. `S` and `z` start as the initial ones, or 0. Heads fall into `G`
  equal groups, in order, with the same `q` and `k`. Shapes, with batch B, length L, heads H, keys of width K and values of
  width V:

    * `q`, `k` - `{B, L, G, K}`, where G divides H
    * `v` - `{B, L, H, V}`

  Options beside those of `Sidewinder`:

    * `:g` - the logarithm of the decay: `{B, L, H}`, or `{B, L, H, K}` with one for each key, as in GLA; 0 by default
    * `:initial_state` - `{B, H, K, V}`
    * `:initial_z` - `{B, H, K}`
    * `:scale` - `1 / sqrt(K)` by default
    * `:normalize` - whether `y` is divided by the product of `q` and `z`; the feature map of `q` and `k`, which keeps it
      positive, is the caller's. Defaults to `false`.
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder`
    * `:return_state` - returns also `last_state`, `{B, H, K, V}`
    * `:return_z` - returns also `last_z`, `{B, H, K}`

  Returns `y`, `{B, L, H, V}`, with the names of `v`'s axes; with states a tuple of `y` and those in the order above. One
  token of running sequences is a call with a length of 1, from the states that the call before returned. Raises
  `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> k = Nx.tensor([[[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]]])
      iex> v = Nx.tensor([[[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]]])
      iex> {y, state} = Sidewinder.linear_attention(k, k, v, scale: 1.0, return_state: true)
      iex> y |> Nx.squeeze() |> Nx.to_list()
      [[1.0, 2.0], [3.0, 4.0], [6.0, 8.0]]
      iex> Nx.shape(state)
      {1, 1, 2, 2}
      iex> k |> Sidewinder.linear_attention(k, v, normalize: true) |> Nx.squeeze() |> Nx.to_list()
      [[1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]
  """
  @spec linear_attention(Nx.t(), Nx.t(), Nx.t(), keyword) ::
          Nx.Tensor.t()
          | {Nx.Tensor.t(), Nx.Tensor.t()}
          | {Nx.Tensor.t(), Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform linear_attention(q, k, v, opts \\ []) do
    # The first one has the heads that groups divide, and the names of the result's axes.
    inputs = [{"v", v}, {"q", q}, {"k", k}]

    case Op.call(%Block.LinearAttention{}, inputs, opts) do
      [y: y] -> y
      several -> several |> Keyword.values() |> List.to_tuple()
    end
  end

  @doc type: :recurrent
  @doc """
  Advances running sequences by one token: `selective_scan/6` with a length of 1, without the axis
  of time.

    * `state` - `{B, D, N}`, as `selective_scan/6` or the call before returned it
    * `x`, `dt` - `{B, D}`
    * `a` - `{D, N}`
    * `b`, `c` - `{B, N}` or `{B, G, N}`

  Options besides those of `Sidewinder`: `:d`, `:z` (`{B, D}`), `:dt_bias`, `:dt_softplus`,
  `:dt_clamp` and `:clamp_grad`, as in `selective_scan/6`, whose errors it raises too.

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
    inputs = [{"x", x}, {"initial_state", state}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}]
    [y: y, last_state: state] = Op.call(%Block.SelectiveStateUpdate{}, inputs, opts)
    {y, state}
  end

  @clamp [dt_clamp: {0.001, 0.1}]

  @doc type: :recurrent
  @doc """
  `selective_scan/6` with the step clamped to `{0.001, 0.1}`: a drop-in for scans that always clamp it.

  All options of `selective_scan/6`; `dt_clamp: nil` removes the clamp. `dt` is taken as it is: softplus
  has been applied to it already.

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

  @doc type: :recurrent
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

  @doc type: :recurrent
  @doc """
  The gradients of `selective_scan/6`, for code that carries cotangents itself. `Nx.Defn.grad/2` computes
  them without it.

  `dy` is the cotangent of `y`, `{B, L, D}`. Options are the inputs and options of the scan, and
  the cotangents of its other outputs, zero by default: `:dlast_state`, `{B, D, N}`, and `:dstates`,
  `{B, L, D, N}`.

  With `dy' = dy silu(z)`, `y'` the output before its gate, and time running backwards:

      g[t] = dy'[t] c[t] + dstates[t] + a[t+1] g[t+1]          a[L+1] g[L+1] = dlast_state
      dx = sum_n g delta b + d dy'                             dD = sum_{b,t} dy' x
      ddelta = sum_n g (A a h[t-1] + b x)                      dA = sum_{b,t} g delta a h[t-1]
      ddt = ddelta [lo <= s <= hi] sigmoid(dt + dt_bias)       ddt_bias = sum_{b,t} ddt
      dB = sum_d g delta x                                     dC = sum_d dy' h
      dz = dy y' silu'(z)                                      dinitial_state = a[1] g[1]

  `dB` and `dC` sum over the channels of a group, or over batch and time where `b` or `c` is `{D, N}`.

  Returns `%{dx: _, ddt: _, dA: _, dB: _, dC: _}`, and `:dD`, `:dz`, `:ddt_bias` and
  `:dinitial_state` for those inputs that are there, each with the type and shape of its input. Raises what `selective_scan/6`
  raises.

  ## Examples

      iex> x = Nx.tensor([[[1.0], [2.0]]])
      iex> dt = Nx.tensor([[[0.5], [1.0]]])
      iex> b = Nx.tensor([[[1.0], [0.5]]])
      iex> c = Nx.tensor([[[1.0], [2.0]]])
      iex> dy = Nx.tensor([[[1.0], [1.0]]])
      iex> gradients = Sidewinder.selective_scan_backward(dy, x, dt, Nx.tensor([[-1.0]]), b, c)
      iex> gradients.dx |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.86788, 1.0]
      iex> gradients.dA |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.36788]
  """
  @spec selective_scan_backward(Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) ::
          %{atom => Nx.Tensor.t()}
  deftransform selective_scan_backward(dy, x, dt, a, b, c, opts \\ []) do
    inputs = [{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}, {"dy", dy}]
    Map.new(Op.call(%Block.SelectiveScanBackward{}, inputs, opts))
  end

  @doc type: :recurrent
  @doc """
  The gradients of `scan/6` as `{dx, d_dt, dB, dC}`: a drop-in for scans that have such a function.
  `selective_scan_backward/7` has the others too.

  Options are those of `selective_scan_backward/7`, with the clamp of `scan/6`. The `states` of
  `scan_with_states/6` are not needed, and may be nil.

  ## Examples

      iex> x = Nx.tensor([[[1.0], [2.0]]])
      iex> dt = Nx.tensor([[[0.5], [0.0005]]])
      iex> b = Nx.tensor([[[1.0], [0.5]]])
      iex> c = Nx.tensor([[[1.0], [2.0]]])
      iex> dy = Nx.tensor([[[1.0], [1.0]]])
      iex> {_dx, d_dt, _db, _dc} = Sidewinder.backward(dy, x, nil, dt, Nx.tensor([[-1.0]]), b, c,
      ...>   clamp_grad: :straight_through)
      iex> d_dt |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [2.998, 1.8002]
  """
  @spec backward(Nx.t(), Nx.t(), Nx.t() | nil, Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) ::
          {Nx.Tensor.t(), Nx.Tensor.t(), Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform backward(dy, x, _states, dt, a, b, c, opts \\ []) do
    gradients = selective_scan_backward(dy, x, dt, a, b, c, clamped(opts))
    {gradients[:dx], gradients[:ddt], gradients[:dB], gradients[:dC]}
  end

  @doc type: :recurrent
  @doc """
  The linear recurrence `h[t] = a[t] h[t-1] + b[t]`, which many sequence models are made of.

    * `a`, `b` - `{B, L, K}`

  Options besides those of `Sidewinder`:

    * `:initial_state` - `{B, K}`, zeros by default
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder`
    * `:return_state` - returns `{h, last_state}`, the second `{B, K}`

  Returns `h`, `{B, L, K}`. Raises `Sidewinder.Error` as `selective_scan/6` does.

  Its gradients run backwards in time: `g[t] = dh[t] + a[t+1] g[t+1]`, `db = g`, `da[t] = g[t] h[t-1]`.

  ## Examples

      iex> a = Nx.broadcast(0.5, {1, 4, 1})
      iex> b = Nx.broadcast(1.0, {1, 4, 1})
      iex> {h, last_state} = Sidewinder.linear_scan(a, b, return_state: true)
      iex> {Nx.to_flat_list(h), Nx.to_flat_list(last_state)}
      {[1.0, 1.5, 1.75, 1.875], [1.875]}
      iex> Nx.Defn.grad(a, &Nx.sum(Sidewinder.linear_scan(&1, b))) |> Nx.to_flat_list()
      [0.0, 1.75, 2.25, 1.75]
  """
  @spec linear_scan(Nx.t(), Nx.t(), keyword) :: Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform linear_scan(a, b, opts \\ []) do
    Block.LinearScan.call(%Block.LinearScan{}, [a, b], opts)
  end

  @doc type: :cumulative
  @doc """
  The cumulative product of decays over the length, by the sum of their logarithms.

    * `gamma` - `{B, H, L, W}`: batch, heads, length, channels of a head; meant to be in 0 to 1

  With `t` from 1 to L, or from L to 1 if reversed:

      l[t] = max(ln(min(max(gamma[t], eps), 1)), log_min)
      log_y[t] = initial_state + sum_{i<=t} l[i]        y[t] = exp(log_y[t])

  Options besides those of `Sidewinder`:

    * `:initial_state` - `{B, H, W}`, the logarithm of the product so far; zeros by default
    * `:eps` - 1.0e-8 by default, `:log_min` - -50 by default
    * `:reverse` - whether time runs from the end; `false` by default
    * `:return_state` - also returns the last state, `{B, H, W}`, the initial state of the next part of a sequence

  Returns `{y, log_y}`, or `{y, log_y, last_state}`. `log_y` and states are f32, or f64 for f64. Raises
  `Sidewinder.Error` as `selective_scan/6` does.

  `log_y` still distinguishes products that underflow to 0 in `y`. Where no logarithms are needed, or zeros must be
  exact, use `cumprod_scan/2`. Decays outside of their bounds have no gradient.

  ## Examples

      iex> gamma = Nx.tensor([[[[0.5], [0.5], [1.0], [0.0]]]])
      iex> {y, log_y} = Sidewinder.exp_product_scan(gamma)
      iex> y |> Nx.to_flat_list() |> Enum.take(3) |> Enum.map(&Float.round(&1, 5))
      [0.5, 0.25, 0.25]
      iex> log_y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 4))
      [-0.6931, -1.3863, -1.3863, -19.807]
      iex> Nx.Defn.grad(gamma, fn gamma -> Nx.sum(elem(Sidewinder.exp_product_scan(gamma), 0)) end)
      ...> |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [2.0, 1.0, 0.25, 0.0]
  """
  @spec exp_product_scan(Nx.t(), keyword) ::
          {Nx.Tensor.t(), Nx.Tensor.t()} | {Nx.Tensor.t(), Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform exp_product_scan(gamma, opts \\ []) do
    Op.Cumulative.call(%Block.ExpProductScan{}, gamma, opts)
  end

  @doc type: :cumulative
  @doc """
  The cumulative product over the length, of any numbers: after an exact 0 it is 0.

    * `gamma` - `{B, H, L, W}`: batch, heads, length, channels of a head

  Options besides those of `Sidewinder`:

    * `:initial_state` - `{B, H, W}`, the product so far; ones by default
    * `:reverse` - whether time runs from the end; `false` by default
    * `:return_state` - returns `{y, last_state}`, the second `{B, H, W}`

  Returns `y`, `{B, H, L, W}`. Raises `Sidewinder.Error` as `selective_scan/6` does.

  Its gradient does not divide: `T[i] = dy[i] + gamma[i+1] T[i+1]`, `dgamma[i] = y[i-1] T[i]`.

  ## Examples

      iex> gamma = Nx.tensor([[[[0.5], [0.0], [0.75]]]])
      iex> Nx.to_flat_list(Sidewinder.cumprod_scan(gamma))
      [0.5, 0.0, 0.0]
      iex> Nx.to_flat_list(Nx.Defn.grad(gamma, &Nx.sum(Sidewinder.cumprod_scan(&1))))
      [1.0, 0.875, 0.0]
  """
  @spec cumprod_scan(Nx.t(), keyword) :: Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform cumprod_scan(gamma, opts \\ []) do
    Op.Cumulative.call(%Block.CumprodScan{}, gamma, opts)
  end

  @doc type: :cumulative
  @doc """
  The logarithm of the cumulative sum of exponentials over the length, which neither overflows nor loses small numbers.

    * `x` - `{B, H, L, W}`; minus infinity adds nothing, and its gradient is 0

  Options are those of `cumprod_scan/2`; the initial state is minus infinity by default.

  ## Examples

      iex> x = Nx.tensor([[[[0.0], [0.0], [100.0], [100.0]]]])
      iex> Sidewinder.logcumsumexp(x) |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 4))
      [0.0, 0.6931, 100.0, 100.6931]
  """
  @spec logcumsumexp(Nx.t(), keyword) :: Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform logcumsumexp(x, opts \\ []) do
    Op.Cumulative.call(%Block.Logcumsumexp{}, x, opts)
  end

  @doc type: :cumulative
  @doc """
  The cumulative sum over the length; a long one is about as exact as a short one.

    * `x` - `{B, H, L, W}`: batch, heads, length, channels of a head

  Options besides those of `Sidewinder`: `:initial_state` - `{B, H, W}`, zeros by default, and `:return_state`, as in
  `cumprod_scan/2`.

  ## Examples

      iex> x = Nx.tensor([[[[1.0], [2.0], [3.0]]]])
      iex> Nx.to_flat_list(Sidewinder.cumsum(x))
      [1.0, 3.0, 6.0]
  """
  @spec cumsum(Nx.t(), keyword) :: Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform cumsum(x, opts \\ []) do
    Op.Cumulative.call(%Block.Cumsum{}, x, opts)
  end

  @doc type: :cumulative
  @doc """
  The cumulative sum from the end of the length: `cumsum/2` with time reversed. The initial state comes from the right.

  ## Examples

      iex> x = Nx.tensor([[[[1.0], [2.0], [3.0]]]])
      iex> Nx.to_flat_list(Sidewinder.reverse_cumsum(x))
      [6.0, 5.0, 3.0]
  """
  @spec reverse_cumsum(Nx.t(), keyword) :: Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform reverse_cumsum(x, opts \\ []) do
    Op.Cumulative.call(%Block.ReverseCumsum{}, x, opts)
  end

  @doc type: :convolution
  @doc """
  The causal convolution over time of each channel by itself (depthwise).

  With `xp` the W - 1 rows of the initial state followed by `x`:

      y[t,d] = activation(bias[d] + sum_j w[d,j] xp[t+j,d])

  so `w[d,W-1]` is the weight of the present and `w[d,0]` that of the oldest sample.

    * `x` - `{B, L, D}`
    * `w` - `{D, W}`

  Options besides those of `Sidewinder`:

    * `:bias` - `{D}`
    * `:initial_state` - `{B, W - 1, D}`, the samples before `x`, oldest first; zeros by default
    * `:activation` - `:silu`, or nil, the default
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder`
    * `:return_state` - returns `{y, last_state}`, the second the last W - 1 rows of `xp`

  Returns `y`, `{B, L, D}`. Raises `Sidewinder.Error` as `selective_scan/6` does, and of kind `:shape` for
  `:return_state` with a `w` of width 1, as Nx has no empty tensors.

  ## Examples

      iex> x = Nx.tensor([[[1.0], [2.0], [3.0]]])
      iex> w = Nx.tensor([[0.1, 0.2, 0.3, 0.4]])
      iex> {y, state} = Sidewinder.causal_conv1d(x, w, return_state: true)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.4, 1.1, 2.0]
      iex> {y, _state} = Sidewinder.causal_conv1d_update(state, Nx.tensor([[4.0]]), w)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [3.0]
  """
  @spec causal_conv1d(Nx.t(), Nx.t(), keyword) :: Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform causal_conv1d(x, w, opts \\ []) do
    case Op.call(%Block.CausalConv1d{}, [{"x", x}, {"w", w}], opts) do
      [y: y] -> y
      [y: y, last_state: state] -> {y, state}
    end
  end

  @doc type: :convolution
  @doc """
  Advances a running `causal_conv1d/3` by one sample.

    * `state` - `{B, W - 1, D}`, as `causal_conv1d/3` or the call before returned it
    * `x` - `{B, D}`
    * `w` - `{D, W}`

  Options besides those of `Sidewinder`: `:bias` and `:activation`, as in `causal_conv1d/3`, whose errors
  it raises too.

  Returns `{y, new_state}`, the first `{B, D}`. `causal_conv1d/3` has an example.
  """
  @spec causal_conv1d_update(Nx.t(), Nx.t(), Nx.t(), keyword) :: {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform causal_conv1d_update(state, x, w, opts \\ []) do
    inputs = [{"x", x}, {"w", w}, {"initial_state", state}]
    [y: y, last_state: state] = Op.call(%Block.CausalConv1dUpdate{}, inputs, opts)
    {y, state}
  end

  @doc type: :recurrent
  @doc """
  A whole Mamba block (Gu and Dao 2023, section 3.4), without norm and residual connection:

      [u | z] = x in_proj'                           c = silu(causal_conv1d(u, conv_w, conv_b))
      [delta | b | c'] = c x_proj'                   dt = delta dt_w'
      y = selective_scan(c, dt, -exp(A_log), b, c', d: D, z: z, dt_bias: dt_b, dt_softplus: true)
      y = y out_proj'

  With the width M of the model, the inner width I, states of a channel N, a kernel of width W and the
  rank R of the steps, `x` is `{B, L, M}` and `params` a map of tensors, by atoms or strings:

    * `in_proj` - `{2 I, M}`, and `in_proj_b`, `{2 I}`, if wanted
    * `conv_w` - `{I, W}`, and `conv_b`, `{I}`, if wanted
    * `x_proj` - `{R + 2 N, I}`
    * `dt_w` - `{I, R}`, and `dt_b`, `{I}`
    * `A_log` or `a_log` - `{I, N}`
    * `D` - `{I}`
    * `out_proj` - `{M, I}`, and `out_proj_b`, `{M}`, if wanted

  Options besides those of `Sidewinder`:

    * `:conv_state` - `{B, W - 1, I}` and `:ssm_state` - `{B, I, N}`, zeros by default
    * `:return_state` - returns `{y, %{conv_state: _, ssm_state: _}}`, the states after the last step of `x`

  Returns `y`, `{B, L, M}`. Raises `Sidewinder.Error` as `selective_scan/6` does, and of kind `:argument`
  for a parameter that is missing or unknown.

  It is one kernel called eagerly and for `Nx.Defn.Evaluator`. Other compilers multiply the matrices
  themselves, and get `selective_scan/6` and `causal_conv1d/3`.

  ## Examples

      iex> one = Nx.tensor([[1.0]])
      iex> params = %{in_proj: Nx.tensor([[1.0], [0.5]]), conv_w: Nx.tensor([[0.0, 0.0, 0.5, 1.0]]),
      ...>   x_proj: Nx.tensor([[1.0], [1.0], [1.0]]), dt_w: one, dt_b: Nx.tensor([0.0]),
      ...>   a_log: Nx.tensor([[0.0]]), D: Nx.tensor([1.0]), out_proj: Nx.tensor([[2.0]])}
      iex> y = Sidewinder.mamba_block(Nx.tensor([[[1.0], [2.0]]]), params)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 4))
      [0.7284, 46.9249]
  """
  @spec mamba_block(Nx.t(), %{(atom | String.t()) => Nx.t()}, keyword) ::
          Nx.Tensor.t() | {Nx.Tensor.t(), %{conv_state: Nx.Tensor.t(), ssm_state: Nx.Tensor.t()}}
  deftransform mamba_block(x, params, opts \\ []) do
    Block.MambaBlock.call(%Block.MambaBlock{}, x, params, opts)
  end

  @doc type: :activation
  @doc """
  `1 / (1 + exp(-x))`, element by element; `x` may have any shape.

  Options: those of `Sidewinder`. Returns a tensor of the shape and names of `x`.

      iex> Sidewinder.sigmoid(Nx.tensor([-1.0, 2.0])) |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.26894, 0.8808]
  """
  @spec sigmoid(Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform(sigmoid(x, opts \\ []), do: Block.Activations.call(:sigmoid, x, opts))

  @doc type: :activation
  @doc """
  `x sigmoid(x)`, element by element (Elfwing et al. 2017); `x` may have any shape.

  Options: those of `Sidewinder`. Returns a tensor of the shape and names of `x`.

      iex> Sidewinder.silu(Nx.tensor([-1.0, 2.0])) |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [-0.26894, 1.76159]
  """
  @spec silu(Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform(silu(x, opts \\ []), do: Block.Activations.call(:silu, x, opts))

  @doc type: :activation
  @doc """
  `ln(1 + exp(x))`, element by element; `x` may have any shape.

  Options: those of `Sidewinder`. Returns a tensor of the shape and names of `x`.

      iex> Sidewinder.softplus(Nx.tensor([-1.0, 2.0])) |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.31326, 2.12693]
  """
  @spec softplus(Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform(softplus(x, opts \\ []), do: Block.Activations.call(:softplus, x, opts))

  @doc type: :activation
  @doc """
  `max(x, 0)`, element by element; `x` may have any shape. The gradient at 0 is 0.

  Options: those of `Sidewinder`. Returns a tensor of the shape and names of `x`.

      iex> Sidewinder.relu(Nx.tensor([-1.0, 2.0])) |> Nx.to_flat_list()
      [0.0, 2.0]
  """
  @spec relu(Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform(relu(x, opts \\ []), do: Block.Activations.call(:relu, x, opts))

  @doc type: :activation
  @doc """
  GELU, element by element (Hendrycks and Gimpel 2016); `x` may have any shape:

      tanh    x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
      erf     x (1 + erf(x / sqrt(2))) / 2

  Options besides those of `Sidewinder`: `:form` - `:tanh`, the default, or `:erf`. Returns a tensor of
  the shape and names of `x`.

  ## Examples

      iex> x = Nx.tensor([-1.0, 2.0])
      iex> for form <- [:tanh, :erf],
      ...>   do: Sidewinder.gelu(x, form: form) |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [[-0.15881, 1.9546], [-0.15866, 1.9545]]
  """
  @spec gelu(Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform(gelu(x, opts \\ []), do: Block.Activations.gelu(x, opts))

  @doc type: :normalization
  @doc """
  Root mean square normalisation over the last axis (Zhang and Sennrich 2019):

      y = w x / sqrt(mean(x^2) + eps)          eps inside the root
      y = w x / (sqrt(mean(x^2)) + eps)        or outside

    * `x` - `{..., D}`, of any rank from 1 on
    * `w` - `{D}`

  Options besides those of `Sidewinder`:

    * `:eps` - `1.0e-6` by default
    * `:eps_mode` - `:inside`, the default, or `:outside`

  Returns `y`, of the shape and names of `x`. Raises `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> y = Sidewinder.rms_norm(Nx.tensor([3.0, 4.0]), Nx.tensor([1.0, 1.0]))
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.84853, 1.13137]
  """
  @spec rms_norm(Nx.t(), Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform rms_norm(x, w, opts \\ []) do
    [y: y] = Op.call(%Block.RmsNorm{}, [{"x", x}, {"w", w}], opts)
    y
  end

  @doc type: :normalization
  @doc """
  Root mean square normalisation with a gate, of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"; `RMSNormGated` of
  `mamba_ssm`):

      y = w u / sqrt(mean(u^2) + eps), u = x silu(z)         the gate first
      y = w x / sqrt(mean(x^2) + eps) silu(z)                or after the norm

    * `x`, `z` - `{..., D}`, of any rank from 1 on
    * `w` - `{D}`

  Options besides those of `Sidewinder`:

    * `:eps` - positive, `1.0e-5` by default
    * `:groups` - a divisor of D: into how many equal parts a row is cut, each with a mean of its own. `1` by default
    * `:norm_before_gate` - whether the gate comes after the norm, `false` by default

  Returns `y`, of the shape and names of `x`. Raises `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> [x, z, w] = for v <- [[3.0, 4.0], [1.0, -1.0], [1.0, 1.0]], do: Nx.tensor(v)
      iex> for options <- [[], [norm_before_gate: true], [groups: 2]] do
      ...>   y = Sidewinder.gated_rms_norm(x, z, w, options)
      ...>   y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 4))
      ...> end
      [[1.2697, -0.6228], [0.6203, -0.3043], [1.0, -1.0]]
  """
  @spec gated_rms_norm(Nx.t(), Nx.t(), Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform gated_rms_norm(x, z, w, opts \\ []) do
    [y: y] = Op.call(%Block.GatedRmsNorm{}, [{"x", x}, {"z", z}, {"w", w}], opts)
    y
  end

  @doc type: :normalization
  @doc """
  Layer normalisation over the last axis (Ba et al. 2016):

      y = w (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) + b

    * `x` - `{..., D}`, of any rank from 1 on
    * `w`, `b` - `{D}`

  Options besides those of `Sidewinder`:

    * `:eps` - `1.0e-5` by default
    * `:return_statistics` - returns `%{y: y, mean: mean, rstd: rstd}`, the last two `{...}`, where `rstd` is
      what follows `x - mean(x)`: `1 / sqrt(mean((x - mean(x))^2) + eps)`

  Returns `y`, of the shape and names of `x`, unless an option returns more. Raises `Sidewinder.Error` as
  `selective_scan/6` does.

  ## Examples

      iex> one = Nx.broadcast(1.0, {4})
      iex> x = Nx.tensor([1.0, 2.0, 3.0, 4.0])
      iex> y = Sidewinder.layer_norm(x, one, Nx.broadcast(0.0, one))
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [-1.34164, -0.44721, 0.44721, 1.34164]
      iex> %{mean: mean, rstd: rstd} = Sidewinder.layer_norm(x, one, one, return_statistics: true)
      iex> for t <- [mean, rstd], do: Float.round(Nx.to_number(t), 5)
      [2.5, 0.89442]
  """
  @spec layer_norm(Nx.t(), Nx.t(), Nx.t(), keyword) ::
          Nx.Tensor.t() | %{y: Nx.Tensor.t(), mean: Nx.Tensor.t(), rstd: Nx.Tensor.t()}
  deftransform layer_norm(x, w, b, opts \\ []) do
    case Op.call(%Block.LayerNorm{}, [{"x", x}, {"w", w}, {"b", b}], opts) do
      [y: y] -> y
      [_, _, _] = outputs -> Map.new(outputs)
    end
  end

  @doc type: :normalization
  @doc """
  `gelu/2` of `layer_norm/4`, in one pass over memory.

  Options besides those of `layer_norm/4`: `:gelu` - its form, `:tanh`, the default, or `:erf`.

  ## Examples

      iex> one = Nx.broadcast(1.0, {4})
      iex> y = Sidewinder.layer_norm_gelu(Nx.tensor([1.0, 2.0, 3.0, 4.0]), one, Nx.broadcast(0.0, one))
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [-0.12079, -0.14641, 0.3008, 1.22085]
  """
  @spec layer_norm_gelu(Nx.t(), Nx.t(), Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform layer_norm_gelu(x, w, b, opts \\ []) do
    [y: y] = Op.call(%Block.LayerNormGelu{}, [{"x", x}, {"w", w}, {"b", b}], opts)
    y
  end

  @doc type: :linear
  @doc """
  The dense layer over the last axis, with weights stored `{out, in}`:

      y = activation(x w' + bias)

    * `x` - `{..., I}`, of any rank from 1 on
    * `w` - `{O, I}`

  Options besides those of `Sidewinder`:

    * `:bias` - `{O}`
    * `:activation` - `:sigmoid`, `:silu`, `:gelu_tanh` (also `:gelu`), `:gelu_erf`, `:softplus` or
      `:relu`; none by default

  All tensors have the storage type. Products are summed in f32 at least, never in a narrower type.

  Returns `y`, `{..., O}`. Raises `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> w = Nx.tensor([[1.0, 1.0], [1.0, -1.0], [0.0, 2.0]])
      iex> Sidewinder.linear(Nx.tensor([1.0, 2.0]), w, bias: Nx.tensor([0.5, 0.0, 0.0]), activation: :relu)
      ...> |> Nx.to_flat_list()
      [3.5, 0.0, 4.0]
  """
  @spec linear(Nx.t(), Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform linear(x, w, opts \\ []) do
    [y: y] = Op.call(%Block.Linear{}, [{"x", x}, {"w", w}], opts)
    y
  end

  @doc type: :linear
  @doc """
  The product of two matrices, summed in f32 at least.

    * `a` - `{M, K}`
    * `b` - `{K, N}`

  Options: those of `Sidewinder`. Returns `{M, N}`. Raises `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> a = Nx.tensor([[1.0, 2.0], [3.0, 4.0]])
      iex> Sidewinder.matmul(a, a) |> Nx.to_list()
      [[7.0, 10.0], [15.0, 22.0]]
  """
  @spec matmul(Nx.t(), Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform matmul(a, b, opts \\ []) do
    [c: c] = Op.call(%Block.Matmul{}, [{"a", a}, {"b", b}], opts)
    c
  end

  @doc type: :attention
  @doc """
  Rotary position embedding (Su et al. 2021): pairs of elements of a row are rotated by angles that grow
  with the row's position `p`. For pair `i` of `W / 2`:

      angle = p theta^(-2 i / W)          (a, b) -> (a cos - b sin, a sin + b cos)

    * `x` - `{B, H, L, W}` with an even W, or as `:layout` has it

  Options besides those of `Sidewinder`:

    * `:pairing` - `:half`, the default: `x[i]` and `x[i + W / 2]`, or `:interleaved`: `x[2 i]` and
      `x[2 i + 1]`
    * `:theta` - `10_000.0` by default
    * `:first_position` - the position of the first row; 0 by default
    * `:layout` - `:heads_first`, the default, or `:heads_last`: `{B, L, H, W}`
    * `:scaling_factor` - Llama 3's scaling of angles, none by default, with `:low_freq_factor`,
      `:high_freq_factor` and `:original_length`, by default `1.0`, `4.0` and `8192.0`

  Angles are formed in f64. Returns `y`, of the shape and names of `x`. Raises `Sidewinder.Error` as
  `selective_scan/6` does.

  ## Examples

      iex> x = Nx.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
      iex> y = Sidewinder.rope(x, first_position: 1)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [-1.98411, 1.9599, 2.46238, 4.0198]
  """
  @spec rope(Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform rope(x, opts \\ []) do
    [y: y] = Op.call(%Block.Rope{}, [{"x", x}], opts)
    y
  end

  @doc type: :attention
  @doc """
  Sinusoidal positions (Vaswani et al. 2017, section 3.5), added to embeddings. For the row at position `p`
  and the pair `i`:

      angle = p theta^(-2 i / D)          y[2 i] = x[2 i] + sin          y[2 i + 1] = x[2 i + 1] + cos

    * `x` - `{B, L, D}`; the last cosine of an odd D is dropped

  Options besides those of `Sidewinder`:

    * `:theta` - `10_000.0` by default
    * `:first_position` - the position of the first row; 0 by default

  Angles are formed in f64. Returns `y`, of the shape and names of `x`. Raises `Sidewinder.Error` as
  `selective_scan/6` does.

  ## Examples

      iex> x = Nx.tensor([[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]])
      iex> y = Sidewinder.sinusoidal_positions(x)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [1.0, 3.0, 3.0, 1.84147, 2.5403, 3.00215]
  """
  @spec sinusoidal_positions(Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform sinusoidal_positions(x, opts \\ []) do
    [y: y] = Op.call(%Block.SinusoidalPositions{}, [{"x", x}], opts)
    y
  end

  @doc type: :attention
  @doc """
  Softmax attention (Vaswani et al. 2017). For a query `i` and a key `j` of a head:

      S[i,j] = scale q[i].k[j] + bias[i,j]
      j is visible to i where the mask says so and, if causal, j <= i + q_offset
      P[i,j] = exp(S[i,j]) / sum exp(S[i,j])          over visible j
      y[i] = sum P[i,j] v[j]                          lse[i] = ln sum exp(S[i,j])

  A query with no visible key has `y` 0, `lse` -infinity and no gradient. Shapes, with H heads of queries, L
  queries and M keys of a head, or as `:layout` has them:

    * `q` - `{B, H, L, W}`
    * `k` - `{B, K, M, W}` and `v` - `{B, K, M, V}`, where K divides H: query head `h` reads key head
      `div(h, div(H, K))`

  Options besides those of `Sidewinder`:

    * `:scale` - `1 / sqrt(W)` by default
    * `:causal` - whether a query attends only to keys up to its own position; `false` by default
    * `:q_offset` - the position of the first query among the keys; `M - L` by default, so that the last
      query attends to all keys
    * `:mask` - of integers, best of type u8, not 0 where a query attends to a key. Its shape is
      `{B, H, L, M}` in every layout; each axis may have size 1, and leading axes may be missing.
      It has no gradient.
    * `:bias` - of the same shapes, f32 (f64 for f64)
    * `:layout` - `:heads_first`, the default, or `:heads_last`: `{B, L, H, W}`, as projections leave it
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder`: a query attends only to keys of its own sequence.
      With as many keys as queries, and without `:mask` and `:bias`
    * `:return_lse` - returns `{y, lse}`, the second `{B, H, L}`

  Returns `y`, `{B, H, L, V}` or as the layout has it. Raises `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> q = Nx.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
      iex> v = Nx.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
      iex> {y, lse} = Sidewinder.attention(q, q, v, causal: true, return_lse: true)
      iex> for t <- [y, lse], do: t |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [[1.0, 2.0, 2.33952, 3.33952], [0.70711, 1.10794]]
      iex> Sidewinder.attention(q, q, v, mask: Nx.tensor([[0, 1], [0, 0]])) |> Nx.to_flat_list()
      [3.0, 4.0, 0.0, 0.0]
  """
  @spec attention(Nx.t(), Nx.t(), Nx.t(), keyword) ::
          Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform attention(q, k, v, opts \\ []) do
    case Op.call(%Block.Attention{}, [{"q", q}, {"k", k}, {"v", v}], opts) do
      [y: y] -> y
      [y: y, lse: lse] -> {y, lse}
    end
  end

  @doc type: :attention
  @doc """
  Attention of new tokens over those of a cache and themselves, for generation token by token.

    * `q` - `{B, H, L, W}`, `k` - `{B, K, L, W}` and `v` - `{B, K, L, V}`, as in `attention/4`: of L new tokens
    * `keys` - `{B, K, C, W}` and `values` - `{B, K, C, V}`: a cache with room for C tokens, in every
      layout of the others

  Options besides those of `Sidewinder`: `:scale` and `:layout` as in `attention/4`, `:mask` and `:bias` for the
  tokens of the cache and then the new ones, and

    * `:cached` - how many tokens the cache has; 0 by default
    * `:causal` - whether a token attends only to itself and earlier tokens; `true` by default

  Returns `{y, keys, values}`, the cache with the new tokens in it. Rows of `y` are those of one causal pass of
  `attention/4` over all tokens. Raises `Sidewinder.Error` as `selective_scan/6` does.

  Nx tensors never change, so each call copies the cache. `Sidewinder.Kernel.Attention.decode/5` writes into its
  cache in place.

  ## Examples

      iex> [keys, values] = List.duplicate(Nx.broadcast(0.0, {1, 1, 8, 2}), 2)
      iex> {_y, keys, values} = Sidewinder.decode(Nx.tensor([[[[1.0, 0.0]]]]), Nx.tensor([[[[1.0, 0.0]]]]),
      ...>   Nx.tensor([[[[1.0, 2.0]]]]), keys, values)
      iex> {y, _keys, _values} = Sidewinder.decode(Nx.tensor([[[[0.0, 1.0]]]]), Nx.tensor([[[[0.0, 1.0]]]]),
      ...>   Nx.tensor([[[[3.0, 4.0]]]]), keys, values, cached: 1)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [2.33952, 3.33952]
  """
  @spec decode(Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) ::
          {Nx.Tensor.t(), Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform decode(q, k, v, keys, values, opts \\ []) do
    inputs = [{"q", q}, {"k", k}, {"v", v}, {"keys", keys}, {"values", values}]
    [y: y, keys: keys, values: values] = Op.call(%Block.Decode{}, inputs, opts)
    {y, keys, values}
  end

  @doc type: :linear
  @doc """
  The gated feed-forward layer of Llama (Shazeer 2020, "GLU Variants Improve Transformer"):

      y = (activation(x wg') * (x wu')) wd'

  With the width D of the model and the hidden width F, `x` is `{..., D}`, of any rank from 1 on, and
  `params` a map of tensors, by atoms or strings, stored `{out, in}`:

    * `wg`, `wu` - `{F, D}`
    * `wd` - `{D, F}`

  Options besides those of `Sidewinder`: `:activation` - `:silu`, the default, or another one of those of
  `linear/3`.

  Returns `y`, of the shape and names of `x`. Raises `Sidewinder.Error` as `mamba_block/3` does.

  It is one kernel called eagerly and for `Nx.Defn.Evaluator`. Other compilers get `linear/3`.

  ## Examples

      iex> params = %{wg: Nx.tensor([[2.0]]), wu: Nx.tensor([[3.0]]), wd: Nx.tensor([[1.0]])}
      iex> y = Sidewinder.swiglu_mlp(Nx.tensor([1.0]), params)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [5.28478]
  """
  @spec swiglu_mlp(Nx.t(), %{(atom | String.t()) => Nx.t()}, keyword) :: Nx.Tensor.t()
  deftransform swiglu_mlp(x, params, opts \\ []) do
    [y: y] = Op.Params.call(%Block.SwigluMlp{}, x, params, opts)
    y
  end

  @doc type: :attention
  @doc """
  Multi-head self-attention with its projections (Vaswani et al. 2017, section 3.2.2):

      [q | k | v] = x wqkv'            each split into H heads of D / H adjacent columns
      q, k = rope(q), rope(k)          if there is a `:rope_theta`
      y = attention(q, k, v) wo' + bo

  With the width D of the model and H heads, `x` is `{B, L, D}` and `params` a map of tensors, by atoms
  or strings, stored `{out, in}`:

    * `wqkv` - `{3 D, D}`
    * `wo` - `{D, D}`, and `bo`, `{D}`, if wanted

  Options besides those of `Sidewinder`:

    * `:heads` - how many there are, a divisor of D; 1 by default
    * `:causal` - whether a token attends only to itself and earlier tokens; `false` by default
    * `:rope_theta` - the base of rotary angles, and `:pairing`, as in `rope/2`; no rotation by default
    * `:mask` - as in `attention/4`, of shapes that repeat to `{B, H, L, L}`

  Returns `y`, of the shape and names of `x`. Raises `Sidewinder.Error` as `mamba_block/3` does.

  It is one kernel called eagerly and for `Nx.Defn.Evaluator`. Other compilers get `linear/3`, `rope/2` and
  `attention/4`.

  ## Examples

      iex> eye = Nx.eye(2, type: :f32)
      iex> params = %{wqkv: Nx.concatenate([eye, eye, eye]), wo: eye}
      iex> y = Sidewinder.mha(Nx.tensor([[[1.0, 0.0], [0.0, 1.0]]]), params, causal: true)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [1.0, 0.0, 0.33024, 0.66976]
  """
  @spec mha(Nx.t(), %{(atom | String.t()) => Nx.t()}, keyword) :: Nx.Tensor.t()
  deftransform mha(x, params, opts \\ []) do
    [y: y] = Op.Params.call(%Block.Mha{}, x, params, opts)
    y
  end

  @doc type: :attention
  @doc """
  A transformer block with the norms before its layers (pre-LN, Xiong et al. 2020):

      h = x + mha(layer_norm(x, ln1_w, ln1_b), wqkv, wo, bo)
      y = h + swiglu_mlp(layer_norm(h, ln2_w, ln2_b), wg, wu, wd)

  `x` is `{B, L, D}`, and `params` a map of the tensors of `mha/3` and `swiglu_mlp/3` and of `ln1_w`,
  `ln1_b`, `ln2_w` and `ln2_b`, each `{D}`.

  Options besides those of `mha/3`: `:eps` - of the norms, `1.0e-5` by default.

  Returns `y`, of the shape and names of `x`. Raises `Sidewinder.Error` as `mamba_block/3` does.

  It is one kernel called eagerly and for `Nx.Defn.Evaluator`. Other compilers get its parts.

  ## Examples

      iex> [eye, one, zero] = [Nx.eye(2, type: :f32), Nx.tensor([1.0, 1.0]), Nx.tensor([0.0, 0.0])]
      iex> params = %{wqkv: Nx.concatenate([eye, eye, eye]), wo: eye, wg: eye, wu: eye, wd: eye,
      ...>   ln1_w: one, ln1_b: zero, ln2_w: one, ln2_b: zero}
      iex> y = Sidewinder.transformer_block(Nx.tensor([[[1.0, 3.0]]]), params)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 3))
      [0.269, 4.731]
  """
  @spec transformer_block(Nx.t(), %{(atom | String.t()) => Nx.t()}, keyword) :: Nx.Tensor.t()
  deftransform transformer_block(x, params, opts \\ []) do
    [y: y] = Op.Params.call(%Block.TransformerBlock{}, x, params, opts)
    y
  end

  @doc type: :mm_rec
  @doc """
  The element-wise core of memory decay integration (MM-Rec):

      h = gate * z + (1 - gate) * h_old + gamma * h_old

  All tensors have the shape of `z`, of any rank. The weight of `h_old` is up to 2.

  Returns `h`, of the shape and names of `z`. Takes the options of `Sidewinder` and raises `Sidewinder.Error` as
  `selective_scan/6` does.

  ## Examples

      iex> [z, h_old, gate, gamma] = for v <- [2.0, 1.0, 0.25, 0.5], do: Nx.tensor([v])
      iex> Sidewinder.mdi_update(z, h_old, gate, gamma) |> Nx.to_flat_list()
      [1.75]
      iex> Nx.Defn.grad(gate, &Nx.sum(Sidewinder.mdi_update(z, h_old, &1, gamma))) |> Nx.to_flat_list()
      [1.0]
  """
  @spec mdi_update(Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) :: Nx.Tensor.t()
  deftransform mdi_update(z, h_old, gate, gamma, opts \\ []) do
    inputs = [{"z", z}, {"h_old", h_old}, {"gate", gate}, {"gamma", gamma}]
    [h: h] = Op.call(%Block.MdiUpdate{}, inputs, opts)
    h
  end

  @doc type: :mm_rec
  @doc """
  The coefficient of decay of a memory (MM-Rec): with the logistic function s,

      a = gelu(z wg1' + bg1) wg2' + bg2
      c = gelu(context wc1' + bc1) wc2' + bc2          if there is a context
      gamma = clamp(s(a) * s(c), 1.0e-6, 1 - 1.0e-6)   with no gradient beyond

  With the width D and the inner width I, `z` is `{..., D}`, of any rank from 1 on, and `params` a map of tensors, by
  atoms or strings, stored `{out, in}`:

    * `wg1` - `{I, D}`, `bg1` - `{I}`, `wg2` - `{D, I}`, `bg2` - `{D}`
    * `wc1`, `bc1`, `wc2`, `bc2` - of the same shapes, if there is a context

  Options besides those of `Sidewinder`: `:context` - of the shape of `z`. GELU is the erf form.

  Returns `gamma`, of the shape and names of `z`. Raises `Sidewinder.Error` as `mamba_block/3` does.

  It is one kernel called eagerly and for `Nx.Defn.Evaluator`. Other compilers get its layers.

  ## Examples

      iex> params = %{wg1: Nx.tensor([[1.0]]), bg1: Nx.tensor([0.0]), wg2: Nx.tensor([[1.0]]), bg2: Nx.tensor([0.0])}
      iex> Sidewinder.mdi_gamma(Nx.tensor([1.0]), params) |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.69875]
  """
  @spec mdi_gamma(Nx.t(), %{(atom | String.t()) => Nx.t()}, keyword) :: Nx.Tensor.t()
  deftransform mdi_gamma(z, params, opts \\ []) do
    Block.MdiGamma.complete!("mdi_gamma", params, opts)
    [gamma: gamma] = Op.Params.call(%Block.MdiGamma{}, [{"z", z}], params, opts)
    gamma
  end

  @doc type: :mm_rec
  @doc """
  One step of memory decay integration for each row (MM-Rec):

      gate = s([z; h_prev] wm' + bm)
      gamma = mdi_gamma(z, context)
      h_new = mdi_update(z, h_prev, gate, gamma)

  With the width D, `z` and `h_prev` are `{..., D}`, and `params` is a map of the tensors of `mdi_gamma/3` and of `wm`,
  `{D, 2 D}`, and `bm`, `{D}`.

  Options besides those of `Sidewinder`: `:context` as in `mdi_gamma/3`, and

    * `:return_parts` - returns `{h_new, %{gamma: gamma, gate: gate}}`

  Returns `h_new`, of the shape and names of `z`, unless an option returns more. Raises `Sidewinder.Error` as
  `mamba_block/3` does.

  It is one kernel called eagerly and for `Nx.Defn.Evaluator`. Other compilers get its parts.

  ## Examples

      iex> one = Nx.tensor([[1.0]])
      iex> zero = Nx.tensor([0.0])
      iex> params = %{wm: Nx.tensor([[1.0, 1.0]]), bm: zero, wg1: one, bg1: zero, wg2: one, bg2: zero}
      iex> {h, %{gate: gate}} = Sidewinder.mdi(one, Nx.tensor([[0.5]]), params, return_parts: true)
      iex> for t <- [h, gate], do: t |> Nx.to_flat_list() |> hd() |> Float.round(5)
      [1.25816, 0.81757]
  """
  @spec mdi(Nx.t(), Nx.t(), %{(atom | String.t()) => Nx.t()}, keyword) ::
          Nx.Tensor.t() | {Nx.Tensor.t(), %{gamma: Nx.Tensor.t(), gate: Nx.Tensor.t()}}
  deftransform mdi(z, h_prev, params, opts \\ []) do
    Block.MdiGamma.complete!("mdi", params, opts)

    case Op.Params.call(%Block.Mdi{}, [{"z", z}, {"h_prev", h_prev}], params, opts) do
      [h_new: h_new] -> h_new
      [{:h_new, h_new} | parts] -> {h_new, Map.new(parts)}
    end
  end

  @doc type: :mm_rec
  @doc """
  The gated recurrence of the MM-Rec block. For each batch and time, with the logistic function s and h of the time
  before, which starts as the initial state or 0:

      m = s([z[t]; h] w_mix' + b_mix)
      n = m * z[t] + (1 - m) * h + gamma[t] * h
      h = z[t] * s(h w_gate' + b_gate) + gamma[t] * h + mix * n

  The steps depend on each other through s, so this is no scan: a sequence takes `L` steps, one after the other. What
  can be computed for all steps at once (`gamma`, and what `w_mix` makes of `z`) is.

    * `z`, `gamma` - `{B, L, D}`
    * `w_gate` - `{D, D}` and `b_gate` - `{D}`, stored `{out, in}`

  Options besides those of `Sidewinder`:

    * `:wm` and `:bm` - `w_mix`, `{D, 2 D}`, and `b_mix`, `{D}`: both, or none if nothing is mixed in
    * `:mix` - the weight of n, by default `0.1`, or 0 where there are no `:wm` and `:bm`
    * `:initial_state` - `{B, D}`
    * `:state_norm` - whether h is divided by `sqrt(mean(h^2)) + 1.0e-6` after each step; `false` by default
    * `:state_clip` - the bound, plus and minus, of each number of h after each step; none by default. A clipped
      number has no gradient
    * `:return_state` - returns `{h, last_state}`, the second `{B, D}`

  The weight of h on itself is `(1 + mix) * gamma + mix * (1 - m)`, up to 1.2: without `:state_norm` or `:state_clip` a
  model is stable only where `gamma` is small.

  Returns `h` at all times, `{B, L, D}`, with the names of `z`. Raises `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> ones = Nx.broadcast(1.0, {1, 3, 1})
      iex> [w_gate, b_gate, wm] = for shape <- [{1, 1}, {1}, {1, 2}], do: Nx.broadcast(0.0, shape)
      iex> h = Sidewinder.block_recurrence(ones, Nx.divide(ones, 2), w_gate, b_gate, wm: wm, bm: b_gate)
      iex> h |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.55, 0.88, 1.078]
      iex> Sidewinder.block_recurrence(ones, Nx.divide(ones, 2), w_gate, b_gate) |> Nx.to_flat_list()
      [0.5, 0.75, 0.875]
  """
  @spec block_recurrence(Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) ::
          Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform block_recurrence(z, gamma, w_gate, b_gate, opts \\ []) do
    Block.BlockRecurrence.call([z, gamma, w_gate, b_gate], opts)
  end

  @doc type: :mm_rec
  @doc """
  The hierarchy over a memory bank (MM-Rec): levels of fewer and fewer slots, each the adaptive average of the one
  below.

    * `k`, `v` - `{B, M, D}`, level 0

  Level i has `max(1, div(M, ratio^i))` slots. From S slots to T, slot `j` is the mean of those from `j S / T`, rounded
  down, to before `(j + 1) S / T`, rounded up.

  Options besides those of `Sidewinder`:

    * `:levels` - how many there are with the bank, 2 to 16; 3 by default
    * `:ratio` - 2 or more; 4 by default
    * `:cursor` - the number of writes to a ring, whose pooling starts at its oldest slot. 0 by default

  Returns a tuple of `{k, v}`, from level 1 on. Raises `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> bank = Nx.iota({1, 16, 1}, type: :f32)
      iex> {{k1, _v1}, {k2, _v2}} = Sidewinder.hds_construct(bank, bank)
      iex> {Nx.to_flat_list(k1), Nx.to_flat_list(k2)}
      {[1.5, 5.5, 9.5, 13.5], [7.5]}
  """
  @spec hds_construct(Nx.t(), Nx.t(), keyword) :: tuple
  deftransform hds_construct(k, v, opts \\ []) do
    Block.HdsConstruct.call(%Block.HdsConstruct{}, k, v, opts)
  end

  @doc type: :mm_rec
  @doc """
  Attention over the slots that a walk down the hierarchy of a memory finds for each query (MM-Rec): at each level above
  the bank, the `:ratio` children of the `:top_k` best candidates are the next candidates. Of equal scores the lower
  slot ranks first, and NaN ranks last.

    * `q` - `{B, L, D}`
    * `k`, `v` - `{B, M, D}`, or `{1, M, D}` for all of the batch, where M is a multiple of `ratio^(levels - 1)`

  Options besides those of `Sidewinder`:

    * `:levels` - how many there are with the bank, 1 to 16; 3 by default
    * `:ratio` - 2 or more; 4 by default
    * `:top_k` - 4 by default

  Returns `{context, slots}`: `{B, L, D}`, and the slots in order, `{B, L, C}` of s32. Gradients go from `context` to `q`, `k`
  and `v`, with the slots held fixed. Raises `Sidewinder.Error` as `selective_scan/6` does.

  ## Examples

      iex> bank = Nx.iota({1, 16, 1}, type: :f32)
      iex> {context, slots} = Sidewinder.hds_query_topk(Nx.tensor([[[1.0]]]), bank, bank, top_k: 1)
      iex> Nx.to_flat_list(slots)
      [12, 13, 14, 15]
      iex> context |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 4))
      [14.4927]
  """
  @spec hds_query_topk(Nx.t(), Nx.t(), Nx.t(), keyword) :: {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform hds_query_topk(q, k, v, opts \\ []) do
    inputs = [{"q", q}, {"k", k}, {"v", v}]
    [context: context, slots: slots] = Op.call(%Block.HdsQueryTopk{}, inputs, opts)
    {context, slots}
  end

  @doc type: :mm_rec
  @doc """
  Attention of a sequence over a memory that is not part of it (MM-Rec):

      q = h waq' + baq + q_in / 2                     each split into H heads of D / H adjacent columns
      y = attention(q, k_mem, v_mem) wao' + bao

  The memory is not projected, and every row attends to all of its slots. With the width D of the model and H heads:

    * `h` - `{B, L, D}`
    * `k_mem`, `v_mem` - `{B, S, D}`, or `{1, S, D}` for all of the batch, such as a level of `hds_construct/3`
    * `params` - a map of tensors, by atoms or strings, stored `{out, in}`: `waq` and `wao`, `{D, D}`, and if wanted `baq`
      and `bao`, `{D}`

  Options besides those of `Sidewinder`:

    * `:heads` - how many there are, a divisor of D; 1 by default
    * `:q_in` - `{B, L, D}`
    * `:return_lse` - returns `{y, lse}`, the second `{B, H, L}`, as in `attention/4`

  Returns `y`, of the shape and names of `h`. Raises `Sidewinder.Error` as `mamba_block/3` does.

  It is one kernel called eagerly and for `Nx.Defn.Evaluator`. Other compilers get `linear/3` and `attention/4`.

  ## Examples

      iex> eye = Nx.eye(2, type: :f32)
      iex> {h, q_in} = {Nx.tensor([[[1.0, 0.0]]]), Nx.tensor([[[0.0, 2.0]]])}
      iex> {k, v} = {Nx.new_axis(eye, 0), Nx.tensor([[[10.0, 0.0], [0.0, 20.0]]])}
      iex> y = Sidewinder.multi_memory_attention(h, k, v, %{waq: eye, wao: eye}, q_in: q_in)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 4))
      [5.0, 10.0]
  """
  @spec multi_memory_attention(
          Nx.t(),
          Nx.t(),
          Nx.t(),
          %{(atom | String.t()) => Nx.t()},
          keyword
        ) :: Nx.Tensor.t() | {Nx.Tensor.t(), Nx.Tensor.t()}
  deftransform multi_memory_attention(h, k_mem, v_mem, params, opts \\ []) do
    inputs = [{"h", h}, {"k_mem", k_mem}, {"v_mem", v_mem}]

    case Op.Params.call(%Block.MultiMemoryAttention{}, inputs, params, opts) do
      [y: y] -> y
      [y: y, lse: lse] -> {y, lse}
    end
  end

  @doc type: :mm_rec
  @doc """
  The block of MM-Rec: a gated recurrence, attention over a memory from before the sequence, and a feed-forward layer:

      xn = rms_norm(x, n1)                       q = xn wq' + bq, and so for k, v and z
      gamma = mdi_gamma(z, context: k)           h = block_recurrence(z, gamma, wgate, bgate, wm: wm, bm: bm)
      context = attention of h waq' + baq + q / 2 over the memory's top level, times wao' + bao
      r = x + h + context + v_mix * v            y = r + gelu(rms_norm(r, n2) wf1' + bf1) wf2' + bf2

  With the width D, the inner width I and that of the feed-forward layer F, `x` is `{B, L, D}` and `params` a map of
  tensors, by atoms or strings, stored `{out, in}`:

    * `n1`, `n2` - `{D}`, scales of the norms
    * `wq`, `wk`, `wv`, `wz`, `wgate`, `waq`, `wao` - `{D, D}`, and with a `b` in place of the `w`, `{D}`
    * `wg1`, `bg1`, `wg2`, `bg2`, `wc1`, `bc1`, `wc2`, `bc2` - those of `mdi_gamma/3`
    * `wm` - `{D, 2 D}` and `bm` - `{D}`: both, or none if nothing is mixed in
    * `wf1` - `{F, D}`, `bf1` - `{F}`, `wf2` - `{D, F}`, `bf2` - `{D}`

  Options besides those of `Sidewinder`:

    * `:k_mem`, `:v_mem` - the memory, `{B, M, D}`, or `{1, M, D}` for all sequences; zeros by default
    * `:initial_state` - `{B, D}`, the state that the recurrence starts from
    * `:return_state` - returns `{y, state}`, a map of `:h`, `:last_state`, `:gamma`, `:context` and `:summary`, which is
      `{B, D}`, the mean of `y` over time
    * `:heads` - of attention, a divisor of D; 1 by default
    * `:mix`, `:state_norm`, `:state_clip` - those of `block_recurrence/5`
    * `:v_mix` - 0.1 by default
    * `:eps` - of the norms, `1.0e-6` by default
    * `:norm` - where `:eps` is added: `:outside` of the root, the default, or `:inside`
    * `:levels` - the number of levels of the memory; attention sees the top one. 3 by default
    * `:ratio` - slots of a level that are averaged to one of the level above; 4 by default
    * `:cursor` - the number of writes to a memory that is a ring, so that its oldest slot comes first; 0 by default
    * `:checkpoint` - whether a gradient recomputes intermediate tensors, the default. `false` keeps them: about
      `B L (7 D + F)` numbers for each block. The gradient is bitwise the same, and faster
    * `:dropout` - a rate, for training: of what is added to `x` and of both sides of the last layer, and
      `:dropout_key` - a key of `Nx.Random`. Blocks with dropout are computed as their parts.

  Returns `y`, of the shape and names of `x`. Raises `Sidewinder.Error` as `mamba_block/3` does.

  It is one kernel called eagerly and for `Nx.Defn.Evaluator`. Other compilers get its parts.

  ## From call to call

  A call changes no memory. A sequence may be split into parts: with the `:last_state` of a part as the `:initial_state` of
  the next, results are those of the whole sequence. What a model shall remember beyond that is written into the memory
  between two calls, for example the summary into a ring of slots:

      {y, state} = Sidewinder.mmrec_block(x, params, k_mem: k, v_mem: v, cursor: n, return_state: true)
      slot = Nx.new_axis(state.summary, 1)
      [k, v] = for bank <- [k, v], do: Nx.put_slice(bank, [0, rem(n, slots), 0], slot)
      {y, _} = Sidewinder.mmrec_block(next, params, k_mem: k, v_mem: v, cursor: n + 1,
        initial_state: state.last_state, return_state: true)

  ## Examples

      iex> [eye, row, one] = [Nx.eye(2, type: :f32), Nx.broadcast(0.0, {1, 2}), Nx.tensor([1.0, 1.0])]
      iex> zero = Nx.tensor([0.0, 0.0])
      iex> squares = for name <- ~w(wq wk wv wz wgate waq wao)a, do: {name, eye}
      iex> zeros = for name <- ~w(bq bk bv bz bgate baq bao bf2 bg2 bc2)a, do: {name, zero}
      iex> inner = for name <- ~w(g1 c1 f1), {kind, t} <- [w: row, b: Nx.tensor([0.0])], do: {:"\#{kind}\#{name}", t}
      iex> outer = for name <- ~w(wg2 wc2 wf2)a, do: {name, Nx.transpose(row)}
      iex> params = Map.new(squares ++ zeros ++ inner ++ outer ++ [n1: one, n2: one])
      iex> {y, state} = Sidewinder.mmrec_block(Nx.tensor([[[3.0, 4.0]]]), params, return_state: true)
      iex> for t <- [y, state.last_state], do: t |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 4))
      [[3.5091, 4.6788], [0.4243, 0.5657]]
  """
  @spec mmrec_block(Nx.t(), %{(atom | String.t()) => Nx.t()}, keyword) ::
          Nx.Tensor.t() | {Nx.Tensor.t(), %{atom => Nx.Tensor.t()}}
  deftransform(mmrec_block(x, params, opts \\ []), do: Block.MmrecBlock.call(x, params, opts))

  @doc type: :call
  @doc """
  A cancellation for long calls, such as loading a model: their option `:cancel`. With an `owner`, a process of this node,
  it is also cancelled when the owner ends. See `Sidewinder.Cancellation`.

  ## Examples

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> cancellation = Sidewinder.cancellation()
      iex> Sidewinder.cancel(cancellation)
      iex> Sidewinder.Mamba.loss(model, [1, 2, 3], cancel: cancellation)
      ** (Sidewinder.Error) loss: a cancellation after 0 of 2 parts. What the call was to change is as it was before
  """
  @spec cancellation(pid | nil) :: Cancellation.t()
  defdelegate cancellation(owner \\ nil), to: Cancellation, as: :new

  @doc type: :call
  @doc """
  Ends the calls that have a cancellation; they raise `Sidewinder.Error` of kind `:cancelled`. See
  `Sidewinder.Cancellation.cancel/1`.
  """
  @spec cancel(Cancellation.t()) :: :ok
  defdelegate cancel(cancellation), to: Cancellation
end
