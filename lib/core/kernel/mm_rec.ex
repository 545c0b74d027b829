defmodule Sidewinder.Kernel.MMRec do
  @moduledoc """
  MM-Rec's parts and its block: cumulative products, sums and log-sums; memory decay integration; the gated recurrence;
  memory banks, the hierarchy over them and attention over memories; and their gradients.

  Sequences of the scans are `{B, H, L, W}`: batch, heads, length, and the channels of a head; their states are
  `{B, H, W}`. Time runs from 1 to L, or from L to 1 where a scan is reversed:

      exp_product_scan   l[t] = max(ln(min(max(gamma[t], eps), 1)), log_min)
                         log_y[t] = state + sum_{i<=t} l[i]        y[t] = exp(log_y[t])
      cumprod_scan       y[t] = state * prod_{i<=t} gamma[i]
      logcumsumexp       y[t] = ln(exp(state) + sum_{i<=t} exp(x[i]))
      cumsum             y[t] = state + sum_{i<=t} x[i]            reverse_cumsum: over i >= t

  In the shapes B is the batch, L the length, D the width, M the slots of a bank and S those of any memory. `B|1` says
  that one memory may serve the whole batch. Weights are stored `{out, in}`.

  All tensors have the storage type of the first: `:f32`, `:bf16`, `:f16`, or `:f64`; states and scales of norms are
  `:f32` (`:f64` for `:f64`). The arithmetic is `:f32` (`:f64` for `:f64`), never narrower, and results are rounded once.

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as
  `Sidewinder.Kernel.Scan` tells.
  """

  alias Sidewinder.{Kernel, Ops, Options, Tensor}

  ## Cumulative products, sums and log-sums

  @doc """
  The cumulative product of decays by the sum of their logarithms, which stays exact where the product underflows to 0.

    * `gamma` - `{B, H, L, W}`, meant to be in 0 to 1

  Options besides those of `Sidewinder.Kernel`:

    * `:initial_state` - `{B, H, W}`, the logarithm of the product so far; zeros by default
    * `:eps` - the lower bound of decays, 1.0e-8 by default; the upper bound is 1
    * `:log_min` - the lower bound of logarithms; -50 by default
    * `:reverse` - whether time runs from the end; `false` by default
    * `:return_state` - also returns the last state, `{B, H, W}`

  Returns `{y, log_y}`, or `{y, log_y, last_state}`. For decays that are exactly 0, use `cumprod_scan/2`.

      iex> gamma = Sidewinder.Tensor.from_list([0.5, 0.5, 1, 0], :f32, {1, 1, 4, 1})
      iex> {y, log_y} = Sidewinder.Kernel.MMRec.exp_product_scan(gamma)
      iex> for t <- Enum.take(Sidewinder.Tensor.to_list(y), 3), do: Float.round(t, 5)
      [0.5, 0.25, 0.25]
      iex> for t <- Sidewinder.Tensor.to_list(log_y), do: Float.round(t, 4)
      [-0.6931, -1.3863, -1.3863, -19.807]
  """
  @spec exp_product_scan(Tensor.t(), keyword) ::
          {Tensor.t(), Tensor.t()} | {Tensor.t(), Tensor.t(), Tensor.t()}
  def exp_product_scan(gamma, options \\ []),
    do: Kernel.outputs(:exp_product_scan, [{"gamma", gamma}], options)

  @doc """
  The cumulative product of any numbers; after an exact 0 it is 0.

    * `gamma` - `{B, H, L, W}`

  Options besides those of `Sidewinder.Kernel`:

    * `:initial_state` - `{B, H, W}`, the product so far; ones by default
    * `:reverse` - whether time runs from the end; `false` by default
    * `:return_state` - returns `{y, last_state}`, the second `{B, H, W}`

  Returns `y`, `{B, H, L, W}`, unless an option returns more.

      iex> gamma = Sidewinder.Tensor.from_list([0.5, -2, -3, 0], :f32, {1, 1, 4, 1})
      iex> Sidewinder.Kernel.MMRec.cumprod_scan(gamma)
      #Sidewinder.Tensor<f32 (1, 1, 4, 1) [0.5, -1.0, 3.0, 0.0]>
  """
  @spec cumprod_scan(Tensor.t(), keyword) :: Tensor.t() | {Tensor.t(), Tensor.t()}
  def cumprod_scan(gamma, options \\ []),
    do: Kernel.outputs(:cumprod_scan, [{"gamma", gamma}], options)

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
  def logcumsumexp(x, options \\ []), do: Kernel.outputs(:logcumsumexp, [{"x", x}], options)

  @doc """
  The cumulative sum, such as that of logarithms; compensated, so that a long one is about as exact as a short one.

    * `x` - `{B, H, L, W}`

  Options besides those of `Sidewinder.Kernel`: `:initial_state` - `{B, H, W}`, zeros by default, and `:return_state`,
  as in `cumprod_scan/2`. `reverse_cumsum/2` has the sums from the end.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3], :f32, {1, 1, 3, 1})
      iex> Sidewinder.Kernel.MMRec.cumsum(x)
      #Sidewinder.Tensor<f32 (1, 1, 3, 1) [1.0, 3.0, 6.0]>
  """
  @spec cumsum(Tensor.t(), keyword) :: Tensor.t() | {Tensor.t(), Tensor.t()}
  def cumsum(x, options \\ []), do: Kernel.outputs(:cumsum, [{"x", x}], options)

  @doc """
  The cumulative sum from the end: `cumsum/2` with time reversed. The initial state comes from the right, and the last
  state is that at the first step.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3], :f32, {1, 1, 3, 1})
      iex> Sidewinder.Kernel.MMRec.reverse_cumsum(x)
      #Sidewinder.Tensor<f32 (1, 1, 3, 1) [6.0, 5.0, 3.0]>
  """
  @spec reverse_cumsum(Tensor.t(), keyword) :: Tensor.t() | {Tensor.t(), Tensor.t()}
  def reverse_cumsum(x, options \\ []),
    do: Kernel.outputs(:reverse_cumsum, [{"x", x}], options)

  @doc """
  The gradient of `exp_product_scan/2`.

    * `gamma` - as it was given to the scan
    * `y` - what the scan returned
    * `dy` - `{B, H, L, W}`, the cotangent of `y`

  Options besides those of `Sidewinder.Kernel`: `:initial_state`, `:eps`, `:log_min` and `:reverse` as in the scan, and the
  cotangents `:dlog_y`, `{B, H, L, W}`, and `:dlast_state`, `{B, H, W}`, zero by default.

  Returns a map of `:dgamma`, and `:dinitial_state` if there is an initial state. Where a decay was out of its bounds, its
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
    given = [{"gamma", gamma}, {"y", y}, {"dy", dy}]
    Kernel.gradients(:exp_product_scan_backward, given, options)
  end

  @doc """
  The gradient of `cumprod_scan/2`, without a division: exact where decays are 0.

    * `gamma` - as it was given to the scan
    * `y` - what the scan returned
    * `dy` - `{B, H, L, W}`, the cotangent of `y`

  Options besides those of `Sidewinder.Kernel`: `:initial_state` and `:reverse` as in the scan, and `:dlast_state`,
  `{B, H, W}`, the cotangent of the last state, zero by default.

  Returns a map of `:dgamma`, and `:dinitial_state` if there is an initial state.

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
    given = [{"gamma", gamma}, {"y", y}, {"dy", dy}]
    Kernel.gradients(:cumprod_scan_backward, given, options)
  end

  @doc """
  The gradient of `logcumsumexp/2`, of `x` as it was given and the cotangent `dy` of `y`.

  Options besides those of `Sidewinder.Kernel`: `:initial_state`, `:reverse` and `:dlast_state`, as in
  `cumprod_scan_backward/4`. Returns a map of `:dx`, and `:dinitial_state` if there is an initial state. Where `x` is minus
  infinity, its gradient is 0.

      iex> [x, dy] = for v <- [[0, 0], [0, 1]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 1, 2, 1})
      iex> %{dx: dx} = Sidewinder.Kernel.MMRec.logcumsumexp_backward(x, dy)
      iex> for t <- Sidewinder.Tensor.to_list(dx), do: Float.round(t, 5)
      [0.5, 0.5]
  """
  @spec logcumsumexp_backward(Tensor.t(), Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def logcumsumexp_backward(x, dy, options \\ []),
    do: Kernel.gradients(:logcumsumexp_backward, [{"x", x}, {"dy", dy}], options)

  @doc """
  The gradient of `cumsum/2`, of `x` as it was given and the cotangent `dy` of `y`. Options and what it returns are those
  of `logcumsumexp_backward/3`, but for `:reverse`.

      iex> [x, dy] = for v <- [[0, 0], [1, 2]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 1, 2, 1})
      iex> Sidewinder.Kernel.MMRec.cumsum_backward(x, dy)
      %{dx: Sidewinder.Tensor.from_list([3, 2], :f32, {1, 1, 2, 1})}
  """
  @spec cumsum_backward(Tensor.t(), Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def cumsum_backward(x, dy, options \\ []),
    do: Kernel.gradients(:cumsum_backward, [{"x", x}, {"dy", dy}], options)

  @doc """
  The gradient of `reverse_cumsum/2`, as `cumsum_backward/3` is that of `cumsum/2`.

      iex> [x, dy] = for v <- [[0, 0], [1, 2]], do: Sidewinder.Tensor.from_list(v, :f32, {1, 1, 2, 1})
      iex> Sidewinder.Kernel.MMRec.reverse_cumsum_backward(x, dy)
      %{dx: Sidewinder.Tensor.from_list([1, 3], :f32, {1, 1, 2, 1})}
  """
  @spec reverse_cumsum_backward(Tensor.t(), Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def reverse_cumsum_backward(x, dy, options \\ []),
    do: Kernel.gradients(:reverse_cumsum_backward, [{"x", x}, {"dy", dy}], options)

  ## Memory decay integration

  @doc """
  The element-wise core of memory decay integration: `gate * z + (1 - gate) * h_old + gamma * h_old`, of four tensors of
  one shape.

      iex> [z, h, gate, gamma] = for v <- [2, 1, 0.25, 0.5], do: Sidewinder.Tensor.from_list([v], :f32, {1})
      iex> Sidewinder.Kernel.MMRec.mdi_update(z, h, gate, gamma)
      #Sidewinder.Tensor<f32 (1) [1.75]>
  """
  @spec mdi_update(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def mdi_update(z, h_old, gate, gamma, options \\ []) do
    given = [{"z", z}, {"h_old", h_old}, {"gate", gate}, {"gamma", gamma}]
    Kernel.outputs(:mdi_update, given, options)
  end

  @doc """
  The gradient of `mdi_update/5`, of the cotangent `dh`: a map of `:dz`, `:dh_old`, `:dgate` and `:dgamma`.

      iex> [z, h, gate, gamma, dh] = for v <- [2, 1, 0.25, 0.5, 1], do: Sidewinder.Tensor.from_list([v], :f32, {1})
      iex> gradients = Sidewinder.Kernel.MMRec.mdi_update_backward(z, h, gate, gamma, dh)
      iex> for name <- [:dz, :dh_old, :dgate, :dgamma], do: Sidewinder.Tensor.to_list(gradients[name])
      [[0.25], [1.25], [1.0], [1.0]]
  """
  @spec mdi_update_backward(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          %{atom => Tensor.t()}
  def mdi_update_backward(z, h_old, gate, gamma, dh, options \\ []) do
    given = [{"z", z}, {"h_old", h_old}, {"gate", gate}, {"gamma", gamma}, {"dh", dh}]
    Kernel.gradients(:mdi_update_backward, given, options)
  end

  @doc """
  The coefficient of decay of a memory: with the logistic function s and the erf form of GELU,

      a = gelu(z wg1' + bg1) wg2' + bg2        c = gelu(context wc1' + bc1) wc2' + bc2
      gamma = clamp(s(a) * s(c), 1.0e-6, 1 - 1.0e-6)

    * `z` - `{..., D}`
    * `weights` - a map of `wg1` `{I, D}`, `bg1` `{I}`, `wg2` `{D, I}`, `bg2` `{D}`, and `wc1` to `bc2` of the same shapes if there
      is a context

  Options besides those of `Sidewinder.Kernel`: `:context` - `{..., D}`, none by default. Returns `gamma`, shaped like `z`.

      iex> [one, zero] = for v <- [1, 0], do: Sidewinder.Tensor.from_list([v], :f32, {1})
      iex> matrix = Sidewinder.Tensor.from_list([1], :f32, {1, 1})
      iex> weights = %{wg1: matrix, bg1: zero, wg2: matrix, bg2: zero}
      iex> [gamma] = Sidewinder.Tensor.to_list(Sidewinder.Kernel.MMRec.mdi_gamma(one, weights))
      iex> Float.round(gamma, 5)
      0.69875
  """
  @spec mdi_gamma(Tensor.t(), Kernel.weights(), keyword) :: Tensor.t()
  def mdi_gamma(z, weights, options \\ []) do
    op = :mdi_gamma
    Kernel.outputs(op, Kernel.with_weights(op, [{"z", z}], weights), options)
  end

  @doc """
  The gradient of `mdi_gamma/3`, with its options, of the cotangent `dgamma`: a map of a gradient for each input.

      iex> [one, zero] = for v <- [1, 0], do: Sidewinder.Tensor.from_list([v], :f32, {1})
      iex> matrix = Sidewinder.Tensor.from_list([1], :f32, {1, 1})
      iex> weights = %{wg1: matrix, bg1: zero, wg2: matrix, bg2: zero}
      iex> gradients = Sidewinder.Kernel.MMRec.mdi_gamma_backward(one, weights, one)
      iex> gradients |> Map.keys() |> Enum.sort()
      [:dbg1, :dbg2, :dwg1, :dwg2, :dz]
  """
  @spec mdi_gamma_backward(Tensor.t(), Kernel.weights(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def mdi_gamma_backward(z, weights, dgamma, options \\ []) do
    op = :mdi_gamma_backward
    given = Kernel.with_weights(op, [{"z", z}, {"dgamma", dgamma}], weights)
    Kernel.gradients(op, given, options)
  end

  @doc """
  One step of memory decay integration: `gate = s([z; h_prev] wm' + bm)`, `gamma` of `mdi_gamma/3`, and `h_new` of
  `mdi_update/5`.

    * `z`, `h_prev` - `{..., D}`
    * `weights` - a map of those of `mdi_gamma/3`, `wm` `{D, 2 D}` and `bm` `{D}`

  Options besides those of `Sidewinder.Kernel`: `:context` as in `mdi_gamma/3`. Returns a map of `:h_new`, `:gamma` and
  `:gate`.

      iex> [one, half] = for v <- [1, 0.5], do: Sidewinder.Tensor.from_list([v], :f32, {1, 1})
      iex> zero = Sidewinder.Tensor.from_list([0], :f32, {1})
      iex> wm = Sidewinder.Tensor.from_list([1, 1], :f32, {1, 2})
      iex> weights = %{wg1: one, bg1: zero, wg2: one, bg2: zero, wm: wm, bm: zero}
      iex> %{h_new: h} = Sidewinder.Kernel.MMRec.mdi(one, half, weights)
      iex> Enum.map(Sidewinder.Tensor.to_list(h), &Float.round(&1, 5))
      [1.25816]
  """
  @spec mdi(Tensor.t(), Tensor.t(), Kernel.weights(), keyword) :: %{atom => Tensor.t()}
  def mdi(z, h_prev, weights, options \\ []) do
    given = Kernel.with_weights(:mdi, [{"z", z}, {"h_prev", h_prev}], weights)
    Kernel.atoms(Kernel.call(:mdi, given, options))
  end

  @doc """
  The gradient of `mdi/4`, with its options and `:dgamma` and `:dgate`, the cotangents of its other results, which are
  zero by default; `dh_new` is that of the first. Returns a map of a gradient for each input.

      iex> [one, half] = for v <- [1, 0.5], do: Sidewinder.Tensor.from_list([v], :f32, {1, 1})
      iex> zero = Sidewinder.Tensor.from_list([0], :f32, {1})
      iex> wm = Sidewinder.Tensor.from_list([1, 1], :f32, {1, 2})
      iex> weights = %{wg1: one, bg1: zero, wg2: one, bg2: zero, wm: wm, bm: zero}
      iex> gradients = Sidewinder.Kernel.MMRec.mdi_backward(one, half, weights, one)
      iex> {gradients.dz.shape, gradients.dwm.shape}
      {{1, 1}, {1, 2}}
  """
  @spec mdi_backward(Tensor.t(), Tensor.t(), Kernel.weights(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def mdi_backward(z, h_prev, weights, dh_new, options \\ []) do
    op = :mdi_backward
    given = [{"z", z}, {"h_prev", h_prev}, {"dh_new", dh_new}]
    Kernel.gradients(op, Kernel.with_weights(op, given, weights), options)
  end

  ## The recurrence

  @doc """
  The gated recurrence of the MM-Rec block. For each batch and time, with the logistic function s and h of the time
  before:

      m = s([z[t]; h] w_mix' + b_mix)
      n = m * z[t] + (1 - m) * h + gamma[t] * h
      h = z[t] * s(h w_gate' + b_gate) + gamma[t] * h + mix * n

    * `z`, `gamma` - `{B, L, D}`
    * `w_gate` - `{D, D}`, `b_gate` - `{D}`

  Options besides those of `Sidewinder.Kernel`:

    * `:wm` and `:bm` - `w_mix`, `{D, 2 D}`, and `b_mix`, `{D}`: both, or none
    * `:mix` - `0.1` by default; without them it can only be 0, as it then is by default
    * `:initial_state` - `{B, D}`; zeros by default
    * `:state_norm` - divide h by `sqrt(mean(h^2)) + 1.0e-6` after each step
    * `:state_clip` - keep each number of h within plus and minus this after each step; none by default

  Returns `{h, last_state}`, `{B, L, D}` and `{B, D}`.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> [z, gamma] = for v <- [1, 0.5], do: from_list([v, v, v], :f32, {1, 3, 1})
      iex> [w_gate, b_gate, wm] = for shape <- [{1, 1}, {1}, {1, 2}], do: Sidewinder.RandomInputs.tensor(shape, :f32, {0, 0}, 1)
      iex> {h, _last_state} = Sidewinder.Kernel.MMRec.block_recurrence(z, gamma, w_gate, b_gate, mix: 0)
      iex> Sidewinder.Tensor.to_list(h)
      [0.5, 0.75, 0.875]
      iex> {_h, last_state} = Sidewinder.Kernel.MMRec.block_recurrence(z, gamma, w_gate, b_gate, wm: wm, bm: b_gate)
      iex> Enum.map(Sidewinder.Tensor.to_list(last_state), &Float.round(&1, 5))
      [1.078]
  """
  @spec block_recurrence(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          {Tensor.t(), Tensor.t()}
  def block_recurrence(z, gamma, w_gate, b_gate, options \\ []) do
    given = [{"z", z}, {"gamma", gamma}, {"w_gate", w_gate}, {"b_gate", b_gate}]
    Kernel.outputs(:block_recurrence, given, options)
  end

  @doc """
  The gradient of `block_recurrence/5`, with its options.

    * `z`, `gamma`, `w_gate`, `b_gate` - as they were given to the recurrence
    * `h` - what the recurrence returned
    * `dh` - the cotangent of it; with the option `:dlast_state` that of `last_state`, zero by default

  Returns a map of `:dz`, `:dgamma`, `:dw_gate`, `:db_gate`, and of `:dw_mix`, `:db_mix` and `:dinitial_state` as far as
  their inputs are there.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> [z, gamma, dh] = for v <- [1, 0.5, 1], do: from_list([v, v, v], :f32, {1, 3, 1})
      iex> [w_gate, b_gate] = for shape <- [{1, 1}, {1}], do: Sidewinder.RandomInputs.tensor(shape, :f32, {0, 0}, 1)
      iex> h = from_list([0.5, 0.75, 0.875], :f32, {1, 3, 1})
      iex> %{dz: dz} = Sidewinder.Kernel.MMRec.block_recurrence_backward(z, gamma, w_gate, b_gate, h, dh, mix: 0)
      iex> Sidewinder.Tensor.to_list(dz)
      [0.875, 0.75, 0.5]
  """
  @spec block_recurrence_backward(
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          keyword
        ) :: %{atom => Tensor.t()}
  def block_recurrence_backward(z, gamma, w_gate, b_gate, h, dh, options \\ []) do
    given = [{"z", z}, {"gamma", gamma}, {"w_gate", w_gate}, {"b_gate", b_gate}]
    given = given ++ [{"h", h}, {"dh", dh}]
    Kernel.gradients(:block_recurrence_backward, given, options)
  end

  ## Memory

  @doc """
  The hierarchy over a memory bank: levels of fewer and fewer slots, each the adaptive average of the one below.

    * `k`, `v` - `{B, M, D}`, level 0

  Level i has `max(1, div(M, ratio^i))` slots. From S slots to T, slot `j` is the mean of those from `j S / T`, rounded
  down, to before `(j + 1) S / T`, rounded up.

  Options besides those of `Sidewinder.Kernel`:

    * `:levels` - how many there are with the bank, 2 to 16; 3 by default
    * `:ratio` - 2 or more; 4 by default
    * `:cursor` - the number of writes to a ring, whose pooling starts at its oldest slot. 0 by default

  Returns a list of `{k, v}`, from level 1 on.

      iex> bank = Sidewinder.Tensor.from_list(Enum.to_list(1..16), :f32, {1, 16, 1})
      iex> for {k, _v} <- Sidewinder.Kernel.MMRec.hds_construct(bank, bank), do: Sidewinder.Tensor.to_list(k)
      [[2.5, 6.5, 10.5, 14.5], [8.5]]
  """
  @spec hds_construct(Tensor.t(), Tensor.t(), keyword) :: [{Tensor.t(), Tensor.t()}]
  def hds_construct(k, v, options \\ []) do
    levels = Kernel.call(:hds_construct, [{"k", k}, {"v", v}], options)
    for level <- 1..div(map_size(levels), 2), do: {levels["k#{level}"], levels["v#{level}"]}
  end

  # Cotangents are no options.
  @cotangents Ops.find!(Ops.all(), :hds_construct).cotangents

  @doc """
  The gradient of `hds_construct/3`, with its options: a map of `:dk` and `:dv`.

  `cotangents` are a list of `{dk, dv}`, from level 1 on; what is nil or missing at the end is zero.

      iex> bank = Sidewinder.Tensor.from_list([1, 2, 3, 4], :f32, {1, 4, 1})
      iex> dk = Sidewinder.Tensor.from_list([2], :f32, {1, 1, 1})
      iex> Sidewinder.Kernel.MMRec.hds_construct_backward(bank, bank, [{dk, nil}], levels: 2).dk
      #Sidewinder.Tensor<f32 (1, 4, 1) [0.5, 0.5, 0.5, 0.5]>
  """
  @spec hds_construct_backward(
          Tensor.t(),
          Tensor.t(),
          [{Tensor.t() | nil, Tensor.t() | nil}],
          keyword
        ) :: %{dk: Tensor.t(), dv: Tensor.t()}
  def hds_construct_backward(k, v, cotangents, options \\ []) do
    op = :hds_construct_backward
    given = @cotangents ++ [{"k", k}, {"v", v} | cotangents!(op, cotangents)]
    Kernel.gradients(op, given, options)
  end

  defp cotangents!(op, cotangents) do
    unless Options.list?(cotangents) and Enum.all?(cotangents, &match?({_, _}, &1)),
      do: Options.wrong_argument!("cotangents", "a list of {dk, dv}", cotangents, op: "#{op}")

    for {{dk, dv}, level} <- Enum.with_index(cotangents, 1),
        {name, t} <- [{"dk#{level}", dk}, {"dv#{level}", dv}],
        t != nil,
        do: {name, t}
  end

  @doc """
  Attention over the slots that a walk down the hierarchy of a memory finds for each query. At each level above the
  bank, the `:ratio` children of the `:top_k` best candidates are the next candidates. Of equal scores the lower slot
  ranks first, and NaN ranks last.

    * `q` - `{B, L, D}`, `k`, `v` - `{B|1, M, D}`, where M is a multiple of `ratio^(levels - 1)`

  Options besides those of `Sidewinder.Kernel`: `:levels` - 3 by default, `:ratio` - 4 by default, `:top_k` - 4 by default.

  Returns `{context, slots}`: `{B, L, D}`, and the slots in order, `{B, L, C}` of `:i32`. It has no gradient.

      iex> bank = Sidewinder.Tensor.from_list(Enum.to_list(0..15), :f32, {1, 16, 1})
      iex> q = Sidewinder.Tensor.from_list([1], :f32, {1, 1, 1})
      iex> {_context, slots} = Sidewinder.Kernel.MMRec.hds_query_topk(q, bank, bank, top_k: 1)
      iex> slots
      #Sidewinder.Tensor<i32 (1, 1, 4) [12, 13, 14, 15]>
  """
  @spec hds_query_topk(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: {Tensor.t(), Tensor.t()}
  def hds_query_topk(q, k, v, options \\ []) do
    outputs = Kernel.call(:hds_query_topk, [{"q", q}, {"k", k}, {"v", v}], options)
    {outputs["context"], outputs["slots"]}
  end

  @doc """
  Attention of a sequence over a memory that is not part of it:

      q = h waq' + baq + q_in / 2          y = attention(q, k_mem, v_mem) wao' + bao

    * `h` - `{B, L, D}`, `k_mem`, `v_mem` - `{B|1, S, D}`
    * `weights` - a map of `:waq` and `:wao`, `{D, D}`, and maybe `:baq` and `:bao`, `{D}`

  Options besides those of `Sidewinder.Kernel`:

    * `:heads` - how many there are, a divisor H of D; 1 by default
    * `:q_in` - `{B, L, D}`
    * `:return_lse` - returns `{y, lse}`, the second `{B, H, L}`

  Returns `y`, `{B, L, D}`.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> eye = from_list([1, 0, 0, 1], :f32, {2, 2})
      iex> [h, q_in] = for list <- [[1, 0], [0, 2]], do: from_list(list, :f32, {1, 1, 2})
      iex> [k, v] = for list <- [[1, 0, 0, 1], [10, 0, 0, 20]], do: from_list(list, :f32, {1, 2, 2})
      iex> y = Sidewinder.Kernel.MMRec.multi_memory_attention(h, k, v, %{waq: eye, wao: eye}, q_in: q_in)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 4))
      [5.0, 10.0]
  """
  @spec multi_memory_attention(Tensor.t(), Tensor.t(), Tensor.t(), Kernel.weights(), keyword) ::
          Tensor.t() | {Tensor.t(), Tensor.t()}
  def multi_memory_attention(h, k_mem, v_mem, weights, options \\ []) do
    op = :multi_memory_attention
    given = Kernel.with_weights(op, [{"h", h}, {"k_mem", k_mem}, {"v_mem", v_mem}], weights)
    {lse?, %{"y" => y, "lse" => lse}} = Kernel.call_asked(op, given, options, :return_lse)
    if lse?, do: {y, lse}, else: y
  end

  @doc """
  The gradient of `multi_memory_attention/5`: a map of `:dh`, `:dk_mem`, `:dv_mem` and those of the weights, and `:dq_in`
  where that is given. `dy` is `{B, L, D}`. Options are `:heads` and `:q_in` as there, and `:dlse`, the cotangent of `lse`.
  """
  @spec multi_memory_attention_backward(
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Kernel.weights(),
          Tensor.t(),
          keyword
        ) :: %{atom => Tensor.t()}
  def multi_memory_attention_backward(h, k_mem, v_mem, weights, dy, options \\ []) do
    op = :multi_memory_attention_backward
    given = [{"h", h}, {"k_mem", k_mem}, {"v_mem", v_mem}, {"dy", dy}]
    Kernel.gradients(op, Kernel.with_weights(op, given, weights), options)
  end

  @doc """
  Rows into a bank: slot `start + i` gets row `i`.

    * `bank` - `{B, S, D}`, `rows` - `{B, N, D}`

  Options besides those of `Sidewinder.Kernel`: `:start` - 0 by default, and `:mode` - `:ring`, the default, where slot
  numbers wrap around, or `:strict`, where rows past the last slot raise.

  Returns the bank with them. `Sidewinder.MMRec.Memory` has banks that are written in place.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> bank = from_list([0, 0, 0], :f32, {1, 3, 1})
      iex> Sidewinder.Kernel.MMRec.write_short(bank, from_list([1, 2], :f32, {1, 2, 1}), start: 2)
      #Sidewinder.Tensor<f32 (1, 3, 1) [2.0, 0.0, 1.0]>
  """
  @spec write_short(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def write_short(bank, rows, options \\ []),
    do: Kernel.outputs(:write_short, [{"bank", bank}, {"rows", rows}], options)

  @doc """
  A summary into a bank.

    * `bank` - `{B, M, D}`, `summary` - `{B, D}`

  Options besides those of `Sidewinder.Kernel`:

    * `:policy` - `:ring`, the default: into the slot at the `:cursor` modulo M, 0 by default;
      `:ema`: each slot becomes `decay slot + (1 - decay) summary`; or `:broadcast`: into all slots, which makes
      attention over them the same for all queries
    * `:decay` - 0.99 by default

  Returns the bank with it.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> bank = from_list([1, 2], :f32, {1, 2, 1})
      iex> Sidewinder.Kernel.MMRec.write_long(bank, from_list([3], :f32, {1, 1}), policy: :ema, decay: 0.5)
      #Sidewinder.Tensor<f32 (1, 2, 1) [2.0, 2.5]>
  """
  @spec write_long(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def write_long(bank, summary, options \\ []),
    do: Kernel.outputs(:write_long, [{"bank", bank}, {"summary", summary}], options)

  ## The block

  @doc """
  The block of MM-Rec: a gated recurrence, attention over a memory and a feed-forward layer, with norms and residual
  connections. `Sidewinder.mmrec_block/3` has its formula and weights.

    * `x` - `{B, L, D}`
    * `memory` - `{k_mem, v_mem}`, each `{B, M, D}`, or `{1, M, D}` for all sequences
    * `weights` - a map

  Options besides those of `Sidewinder.Kernel`: `:initial_state` - `{B, D}`, zeros by default, `:heads`, `:mix`, `:v_mix`,
  `:eps`, `:norm` (`:outside` or `:inside`), `:levels`, `:ratio`, `:cursor`, `:state_clip`, `:state_norm`, and
  `:checkpoint`, true by default: if false, the result has `:q`, `:k`, `:v`, `:z` and `:hidden` too, which with `:h`,
  `:gamma` and `:context` save `mmrec_block_backward/5` from computing them again.

  Returns a map of `:y`, `:h`, `:last_state`, `:gamma`, `:context` and `:summary`.

      iex> [{"x", x} | weights] = Sidewinder.RandomInputs.make(:mmrec_block, shape: "B=1,L=4,M=3,D=2,I=1,F=3")
      iex> {k_mem, weights} = Map.pop(Map.new(weights), "k_mem")
      iex> weights = Map.drop(weights, ["v_mem"])
      iex> result = Sidewinder.Kernel.MMRec.mmrec_block(x, {k_mem, k_mem}, weights)
      iex> {result.y.shape, result.last_state.shape}
      {{1, 4, 2}, {1, 2}}
  """
  @spec mmrec_block(Tensor.t(), {Tensor.t(), Tensor.t()}, Kernel.weights(), keyword) :: %{
          atom => Tensor.t()
        }
  def mmrec_block(x, {k_mem, v_mem}, weights, options \\ []) do
    op = :mmrec_block
    given = Kernel.with_weights(op, [{"x", x}, {"k_mem", k_mem}, {"v_mem", v_mem}], weights)
    Kernel.atoms(Kernel.call(op, given, options))
  end

  @doc """
  The gradient of `mmrec_block/4`, with its options, of the cotangent `dy`; those of its other results are the options
  `:dh`, `:dlast_state`, `:dgamma`, `:dcontext` and `:dsummary`, zero by default. What the block returned may be given as
  `:h`, `:gamma`, `:context`, `:q`, `:k`, `:v`, `:z` and `:hidden`, to save their computation: the gradient is the same
  to the last bit.

  Returns a map of a gradient for each input.
  """
  @spec mmrec_block_backward(
          Tensor.t(),
          {Tensor.t(), Tensor.t()},
          Kernel.weights(),
          Tensor.t(),
          keyword
        ) :: %{atom => Tensor.t()}
  def mmrec_block_backward(x, {k_mem, v_mem}, weights, dy, options \\ []) do
    op = :mmrec_block_backward
    given = [{"x", x}, {"k_mem", k_mem}, {"v_mem", v_mem}, {"dy", dy}]
    Kernel.gradients(op, Kernel.with_weights(op, given, weights), options)
  end
end
