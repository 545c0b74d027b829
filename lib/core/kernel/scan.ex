defmodule Sidewinder.Kernel.Scan do
  @moduledoc """
  Recurrences over whole sequences, and their gradients:

    * `selective_scan/6`, the selective scan of Mamba, with `selective_state_update/7` for one token at a time
    * `ssd/6`, the scan of Mamba-2
    * `gated_delta_rule/5`, the recurrence of Gated DeltaNet
    * `linear_attention/4`, attention without softmax: linear transformer, retention, GLA
    * `linear_scan/3`, `h = a * h + b` for each element

  `x` of the first three functions, `q` of the next two and `a` of the last decide the storage type: `:f32`, `:bf16`,
  `:f16`, or `:f64`. `dt`, `b`, `c`, `:z`, `k`, `v`, `beta` and the main output have that type too. States, `:g`, `:d`,
  `:dt_bias`, and `a` of the first three functions have the type of the arithmetic: `:f32`, or `:f64` for `:f64`. Results
  are rounded once.

  ## The selective scan

  In its shapes B is the batch, L the length, D the channels, N the states of a channel, and G the
  number of groups that the channels fall into, in order. All tensors are channel-last.

  For each batch, channel `d`, state `n` and time `t`:

      s = dt + dt_bias             delta = clamp(softplus(s))      each part where it is asked for
      h = exp(delta * a[d,n]) * h + delta * b[t,n] * x[t]          h starts as the initial state, or 0
      y = sum_n c[t,n] * h[n] + d[d] * x[t]                        `d` where it is given
      y = y * silu(z)                                              `z` where it is given

  ## Packed sequences

  Functions of whole sequences, and their gradients, take sequences of different lengths one after the other in a batch of
  1, with their ends as the option `:cu_seqlens`: `:i32` numbers `{S + 1}` from 0 to the length L that do not decrease. No
  state crosses an end, and states have S in place of the batch. Results are those of one call for each sequence;
  gradients of weights are summed over the sequences.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> a = from_list([1, 1, 1], :f32, {1, 3, 1})
      iex> b = from_list([1, 2, 3], :f32, {1, 3, 1})
      iex> Sidewinder.Kernel.Scan.linear_scan(a, b, cu_seqlens: from_list([0, 2, 3], :i32, {3}))
      #Sidewinder.Tensor<f32 (1, 3, 1) [1.0, 3.0, 3.0]>

  ## Options and errors

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`: of kind
  `:shape`, `:dtype`, `:size` or `:argument` for tensors that do not fit each other, `:option` for
  options, `:unavailable` for a device or level that is not there.
  """

  alias Sidewinder.{Kernel, Tensor}

  @doc """
  Scans whole sequences.

    * `x`, `dt` - `{B, L, D}`
    * `a` - `{D, N}`, negative where the system is stable
    * `b`, `c` - `{B, L, N}`, `{B, L, G, N}`, or `{D, N}`: the same at every step

  Options besides those of `Sidewinder.Kernel`:

    * `:d` - `{D}`, `:z` - `{B, L, D}`, `:dt_bias` - `{D}`, `:initial_state` - `{B, D, N}`
    * `:dt_softplus` - whether to apply softplus to `dt + dt_bias`; `false` by default
    * `:dt_clamp` - `{lo, hi}`, bounds of the step, both inside; none by default
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder.Kernel.Scan`
    * `:return_state` - returns `{y, last_state}`, the second `{B, D, N}`
    * `:return_states` - returns `%{y: y, last_state: last_state, states: states}`, the last
      `{B, L, D, N}`: the state after every step

  Returns `y`, `{B, L, D}`, unless an option returns more.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> x = from_list([1, 2], :f32, {1, 2, 1})
      iex> dt = from_list([0.5, 1], :f32, {1, 2, 1})
      iex> a = from_list([-1], :f32, {1, 1})
      iex> b = from_list([1, 0.5], :f32, {1, 2, 1})
      iex> c = from_list([1, 2], :f32, {1, 2, 1})
      iex> {y, last_state} = Sidewinder.Kernel.Scan.selective_scan(x, dt, a, b, c, return_state: true)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 5))
      [0.5, 2.36788]
      iex> Enum.map(Sidewinder.Tensor.to_list(last_state), &Float.round(&1, 5))
      [1.18394]
  """
  @spec selective_scan(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          Tensor.t()
          | {Tensor.t(), Tensor.t()}
          | %{y: Tensor.t(), last_state: Tensor.t(), states: Tensor.t()}
  def selective_scan(x, dt, a, b, c, options \\ []) do
    given = [{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}]

    # Only the gradient uses `clamp_grad`.
    case Kernel.outputs(:selective_scan, given, complete(options), %{clamp_grad: "mask"}) do
      {y, last_state, states} -> %{y: y, last_state: last_state, states: states}
      other -> other
    end
  end

  @doc false
  # `return_states` includes the last state.
  def complete(options) do
    if is_list(options) and {:return_states, true} in options,
      do: [{:return_state, true} | options],
      else: options
  end

  @doc """
  The scan of Mamba-2 (state space dual), in which a head has one decay for each step. In the shapes H are the heads, each of
  width P, and N the states of a row; `Sidewinder.ssd/6` has the formula.

    * `x` - `{B, L, H, P}`
    * `dt` - `{B, L, H}`
    * `a` - `{H}`, negative where the system is stable
    * `b`, `c` - `{B, L, G, N}`, where G divides H

  Options beside those of `Sidewinder.Kernel`:

    * `:d` - `{H}` or `{H, P}`, `:z` - `{B, L, H, P}`, `:dt_bias` - `{H}`, `:initial_state` - `{B, H, P, N}`
    * `:dt_softplus` and `:dt_clamp`, as in `selective_scan/6`
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder.Kernel.Scan`
    * `:return_state` - returns `{y, last_state}`, the second `{B, H, P, N}`

  Returns `y`, `{B, L, H, P}`, unless an option asks for more outputs.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> x = from_list([1, 2, 2, -1], :f32, {1, 2, 1, 2})
      iex> dt = from_list([0.5, 1], :f32, {1, 2, 1})
      iex> a = from_list([-1], :f32, {1})
      iex> b = from_list([1, 0.5], :f32, {1, 2, 1, 1})
      iex> c = from_list([1, 2], :f32, {1, 2, 1, 1})
      iex> y = Sidewinder.Kernel.Scan.ssd(x, dt, a, b, c)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 5))
      [0.5, 1.0, 2.36788, -0.26424]
  """
  @spec ssd(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          Tensor.t() | {Tensor.t(), Tensor.t()}
  def ssd(x, dt, a, b, c, options \\ []) do
    given = [{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}]
    # The rule for clamped steps is that of the gradient.
    Kernel.outputs(:ssd, given, options, %{clamp_grad: "mask"})
  end

  @doc """
  The gradient of `ssd/6`.

    * `x`, `dt`, `a`, `b`, `c` - as they were given to the scan
    * `dy` - `{B, L, H, P}`, the cotangent of `y`

  Options beside those of `Sidewinder.Kernel` are those of the scan but for `:return_state`, and `:dlast_state`
  (`{B, H, P, N}`, zero by default) and `:clamp_grad`, as in `selective_scan_backward/7`.

  Returns a map of `:dx`, `:ddt`, `:dA`, `:dB`, `:dC`, and of `:dD`, `:dz`, `:ddt_bias` and `:dinitial_state` as far as
  their inputs are there, each of the type and shape of its input.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> x = from_list([1, 2, 2, -1], :f32, {1, 2, 1, 2})
      iex> dt = from_list([0.5, 1], :f32, {1, 2, 1})
      iex> a = from_list([-1], :f32, {1})
      iex> b = from_list([1, 0.5], :f32, {1, 2, 1, 1})
      iex> c = from_list([1, 2], :f32, {1, 2, 1, 1})
      iex> dy = from_list([1, 1, 1, 1], :f32, {1, 2, 1, 2})
      iex> gradients = Sidewinder.Kernel.Scan.ssd_backward(x, dt, a, b, c, dy)
      iex> Enum.map(Sidewinder.Tensor.to_list(gradients.dx), &Float.round(&1, 5))
      [0.86788, 0.86788, 1.0, 1.0]
  """
  @spec ssd_backward(
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          keyword
        ) ::
          %{atom => Tensor.t()}
  def ssd_backward(x, dt, a, b, c, dy, options \\ []) do
    given = [{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}, {"dy", dy}]
    Kernel.gradients(:ssd_backward, given, options)
  end

  @doc """
  The gated delta rule (Gated DeltaNet). In the shapes H are the heads, which fall into G groups with the same `q` and `k`,
  K is the width of keys and V that of values; `Sidewinder.gated_delta_rule/5` has the formula.

    * `q`, `k` - `{B, L, G, K}`, where G divides H
    * `v` - `{B, L, H, V}`
    * `beta` - `{B, L, H}`, the size of the step, mostly from 0 to 1

  Options beside those of `Sidewinder.Kernel`:

    * `:g` - `{B, L, H}`, the logarithm of the decay, of the type of the arithmetic; 0 by default
    * `:initial_state` - `{B, H, K, V}`
    * `:scale` - `1 / sqrt(K)` by default
    * `:qk_l2norm` - whether `q` and `k` are divided by their L2 norms; `false` by default
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder.Kernel.Scan`
    * `:return_state` - returns `{y, last_state}`, the second `{B, H, K, V}`

  Returns `y`, `{B, L, H, V}`, unless an option asks for more outputs.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> k = from_list([1, 0, 0, 1, 1, 0], :f32, {1, 3, 1, 2})
      iex> v = from_list([1, 2, 3, 4, 5, 6], :f32, {1, 3, 1, 2})
      iex> beta = from_list([1, 1, 0.5], :f32, {1, 3, 1})
      iex> y = Sidewinder.Kernel.Scan.gated_delta_rule(k, k, v, beta, scale: 1.0)
      iex> Sidewinder.Tensor.to_list(y)
      [1.0, 2.0, 3.0, 4.0, 3.0, 4.0]
  """
  @spec gated_delta_rule(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          Tensor.t() | {Tensor.t(), Tensor.t()}
  def gated_delta_rule(q, k, v, beta, options \\ []) do
    given = [{"q", q}, {"k", k}, {"v", v}, {"beta", beta}]
    Kernel.outputs(:gated_delta_rule, given, options)
  end

  @doc """
  The gradient of `gated_delta_rule/5`.

    * `q`, `k`, `v`, `beta` - as they were given to the recurrence
    * `dy` - `{B, L, H, V}`, the cotangent of `y`

  Options beside those of `Sidewinder.Kernel` are those of the recurrence but for `:return_state`, and `:dlast_state`
  (`{B, H, K, V}`, zero by default).

  Returns a map of `:dq`, `:dk`, `:dv`, `:dbeta`, and of `:dg` and `:dinitial_state` as far as their inputs are there, each
  of the type and shape of its input.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> k = from_list([1, 0, 0, 1, 1, 0], :f32, {1, 3, 1, 2})
      iex> v = from_list([1, 2, 3, 4, 5, 6], :f32, {1, 3, 1, 2})
      iex> beta = from_list([1, 1, 0.5], :f32, {1, 3, 1})
      iex> dy = from_list([1, 1, 1, 1, 1, 1], :f32, {1, 3, 1, 2})
      iex> gradients = Sidewinder.Kernel.Scan.gated_delta_rule_backward(k, k, v, beta, dy, scale: 1.0)
      iex> Sidewinder.Tensor.to_list(gradients.dv)
      [1.5, 1.5, 1.0, 1.0, 0.5, 0.5]
  """
  @spec gated_delta_rule_backward(
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          keyword
        ) :: %{atom => Tensor.t()}
  def gated_delta_rule_backward(q, k, v, beta, dy, options \\ []) do
    given = [{"q", q}, {"k", k}, {"v", v}, {"beta", beta}, {"dy", dy}]
    Kernel.gradients(:gated_delta_rule_backward, given, options)
  end

  @doc """
  Linear attention with decays (retention, GLA). In the shapes H are the heads, which fall into G groups with the same `q`
  and `k`, K is the width of keys and V that of values; `Sidewinder.linear_attention/4` has the formula.

    * `q`, `k` - `{B, L, G, K}`, where G divides H
    * `v` - `{B, L, H, V}`

  Options beside those of `Sidewinder.Kernel`:

    * `:g` - `{B, L, H}` or `{B, L, H, K}`, the logarithm of the decay, of the type of the arithmetic; 0 by default
    * `:initial_state` - `{B, H, K, V}`
    * `:initial_z` - `{B, H, K}`, the initial sum of keys
    * `:scale` - `1 / sqrt(K)` by default
    * `:normalize` - whether `y` is divided by the product of `q` and the sum of keys; `false` by default
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder.Kernel.Scan`
    * `:return_state` - returns also `last_state`, `{B, H, K, V}`
    * `:return_z` - returns also `last_z`, `{B, H, K}`

  Returns `y`, `{B, L, H, V}`; with states a tuple of `y` and those in the order above.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> k = from_list([1, 0, 0, 1, 1, 0], :f32, {1, 3, 1, 2})
      iex> v = from_list([1, 2, 3, 4, 5, 6], :f32, {1, 3, 1, 2})
      iex> y = Sidewinder.Kernel.Scan.linear_attention(k, k, v, scale: 1.0)
      iex> Sidewinder.Tensor.to_list(y)
      [1.0, 2.0, 3.0, 4.0, 6.0, 8.0]
  """
  @spec linear_attention(Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          Tensor.t() | {Tensor.t(), Tensor.t()} | {Tensor.t(), Tensor.t(), Tensor.t()}
  def linear_attention(q, k, v, options \\ []) do
    Kernel.outputs(:linear_attention, [{"q", q}, {"k", k}, {"v", v}], options)
  end

  @doc """
  The gradient of `linear_attention/4`.

    * `q`, `k`, `v` - as they were given to the recurrence
    * `dy` - `{B, L, H, V}`, the cotangent of `y`

  Options beside those of `Sidewinder.Kernel` are those of the recurrence but for `:return_state` and `:return_z`, and
  `:dlast_state` (`{B, H, K, V}`) and `:dlast_z` (`{B, H, K}`), zero by default.

  Returns a map of `:dq`, `:dk`, `:dv`, and of `:dg`, `:dinitial_state` and `:dinitial_z` as far as their inputs are there,
  each of the type and shape of its input.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> k = from_list([1, 0, 0, 1, 1, 0], :f32, {1, 3, 1, 2})
      iex> v = from_list([1, 2, 3, 4, 5, 6], :f32, {1, 3, 1, 2})
      iex> dy = from_list([1, 1, 1, 1, 1, 1], :f32, {1, 3, 1, 2})
      iex> gradients = Sidewinder.Kernel.Scan.linear_attention_backward(k, k, v, dy, scale: 1.0)
      iex> Sidewinder.Tensor.to_list(gradients.dv)
      [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
  """
  @spec linear_attention_backward(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          %{atom => Tensor.t()}
  def linear_attention_backward(q, k, v, dy, options \\ []) do
    given = [{"q", q}, {"k", k}, {"v", v}, {"dy", dy}]
    Kernel.gradients(:linear_attention_backward, given, options)
  end

  @doc """
  Advances running sequences by one token: the scan with a length of 1, without the axis of time.

    * `state` - `{B, D, N}`, as `selective_scan/6` or the call before returned it
    * `x`, `dt` - `{B, D}`
    * `a` - `{D, N}`
    * `b`, `c` - `{B, N}` or `{B, G, N}`

  Options besides those of `Sidewinder.Kernel`: `:d`, `:z` (`{B, D}`), `:dt_bias`, `:dt_softplus` and
  `:dt_clamp`, as in `selective_scan/6`.

  Returns `{y, new_state}`, the first `{B, D}`.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> state = from_list([0.5], :f32, {1, 1, 1})
      iex> [x, dt, b, c] = for v <- [2, 1, 0.5, 2], do: from_list([v], :f32, {1, 1})
      iex> a = from_list([-1], :f32, {1, 1})
      iex> {y, _state} = Sidewinder.Kernel.Scan.selective_state_update(state, x, dt, a, b, c)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 5))
      [2.36788]
  """
  @spec selective_state_update(
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          keyword
        ) ::
          {Tensor.t(), Tensor.t()}
  def selective_state_update(state, x, dt, a, b, c, options \\ []) do
    given = [{"x", x}, {"initial_state", state}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}]
    Kernel.outputs(:selective_state_update, given, options)
  end

  @doc """
  The gradient of `selective_scan/6`.

    * `x`, `dt`, `a`, `b`, `c` - as they were given to the scan
    * `dy` - `{B, L, D}`, the cotangent of `y`

  Options besides those of `Sidewinder.Kernel`: `:d`, `:z`, `:dt_bias`, `:initial_state`,
  `:dt_softplus` and `:dt_clamp` as in the scan, and

    * `:dlast_state` - `{B, D, N}`, `:dstates` - `{B, L, D, N}`: the cotangents of the states; zero by
      default
    * `:clamp_grad` - `:mask`, the default: no gradient where a step was clamped; or
      `:straight_through`: as if none had been

  Returns a map of `:dx`, `:ddt`, `:dA`, `:dB`, `:dC`, and of `:dD`, `:dz`, `:ddt_bias` and
  `:dinitial_state` as far as their inputs are there, each of the type and shape of its input.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> x = from_list([1, 2], :f32, {1, 2, 1})
      iex> dt = from_list([0.5, 1], :f32, {1, 2, 1})
      iex> a = from_list([-1], :f32, {1, 1})
      iex> b = from_list([1, 0.5], :f32, {1, 2, 1})
      iex> c = from_list([1, 2], :f32, {1, 2, 1})
      iex> dy = from_list([1, 1], :f32, {1, 2, 1})
      iex> gradients = Sidewinder.Kernel.Scan.selective_scan_backward(x, dt, a, b, c, dy)
      iex> Enum.map(Sidewinder.Tensor.to_list(gradients.ddt), &Float.round(&1, 4))
      [1.7358, 1.6321]
  """
  @spec selective_scan_backward(
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          keyword
        ) :: %{atom => Tensor.t()}
  def selective_scan_backward(x, dt, a, b, c, dy, options \\ []) do
    given = [{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}, {"dy", dy}]
    Kernel.gradients(:selective_scan_backward, given, options)
  end

  @doc """
  The linear recurrence `h[t] = a[t] * h[t-1] + b[t]` for each batch and channel.

    * `a`, `b` - `{B, L, K}`; any `a` is allowed, zero and negative ones too

  Options besides those of `Sidewinder.Kernel`:

    * `:initial_state` - `{B, K}`, what `h` starts from; zeros by default
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder.Kernel.Scan`
    * `:return_state` - returns `{h, last_state}`, the second `{B, K}`

  Returns `h`, `{B, L, K}`, unless an option returns more.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> a = from_list([0.5, 0.5, 0.5, 0.5], :f32, {1, 4, 1})
      iex> b = from_list([1, 1, 1, 1], :f32, {1, 4, 1})
      iex> Sidewinder.Kernel.Scan.linear_scan(a, b)
      #Sidewinder.Tensor<f32 (1, 4, 1) [1.0, 1.5, 1.75, 1.875]>
  """
  @spec linear_scan(Tensor.t(), Tensor.t(), keyword) :: Tensor.t() | {Tensor.t(), Tensor.t()}
  def linear_scan(a, b, options \\ []),
    do: Kernel.outputs(:linear_scan, [{"a", a}, {"b", b}], options)

  @doc """
  The gradient of `linear_scan/3`.

    * `a` - as it was given to the recurrence
    * `h` - what the recurrence returned
    * `dh` - `{B, L, K}`, the cotangent of `h`

  Options besides those of `Sidewinder.Kernel`: `:initial_state` as in the recurrence, and
  `:dlast_state` - `{B, K}`, the cotangent of the last state, zero by default.

  Returns a map of `:da`, `:db`, and `:dinitial_state` if there is an initial state.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> [a, h, dh] =
      ...>   for v <- [[0.5, 0.5, 0.5], [1, 1.5, 1.75], [1, 1, 1]], do: from_list(v, :f32, {1, 3, 1})
      iex> Sidewinder.Kernel.Scan.linear_scan_backward(a, h, dh)
      %{
        da: Sidewinder.Tensor.from_list([0, 1.5, 1.5], :f32, {1, 3, 1}),
        db: Sidewinder.Tensor.from_list([1.75, 1.5, 1], :f32, {1, 3, 1})
      }
  """
  @spec linear_scan_backward(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def linear_scan_backward(a, h, dh, options \\ []) do
    given = [{"a", a}, {"h", h}, {"dh", dh}]
    Kernel.gradients(:linear_scan_backward, given, options)
  end
end
