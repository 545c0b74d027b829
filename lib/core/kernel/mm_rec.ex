defmodule Sidewinder.Kernel.MMRec do
  @moduledoc """
  MM-Rec's parts and its block: memory decay integration, the gated recurrence, attention over a memory; and their
  gradients. Sequences are `{batch, length, width}`, weights are stored `{out, in}`.

  All tensors have the storage type of the first: `:f32`, `:bf16`, `:f16`, or `:f64`; states and scales of norms are
  `:f32` (`:f64` for `:f64`). The arithmetic is `:f32` (`:f64` for `:f64`), never narrower, and results are rounded once.

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as
  `Sidewinder.Kernel.Scan` tells.
  """

  alias Sidewinder.{Kernel, Tensor}

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
    {[], own, where} = Kernel.sort_options!(:mdi_update, options, [], [])
    inputs = [{"z", z}, {"h_old", h_old}, {"gate", gate}, {"gamma", gamma}]
    %{"h" => h} = Kernel.run(:mdi_update, inputs, own, where)
    h
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
    {[], own, where} = Kernel.sort_options!(:mdi_update_backward, options, [], [])
    inputs = [{"z", z}, {"h_old", h_old}, {"gate", gate}, {"gamma", gamma}, {"dh", dh}]
    Kernel.gradients(:mdi_update_backward, inputs, own, where)
  end

  @doc """
  How much of a memory is kept: with the logistic function s and the erf form of GELU,

      a = gelu(z wg1' + bg1) wg2' + bg2        c = gelu(context wc1' + bc1) wc2' + bc2
      gamma = clamp(s(a) * s(c), 1.0e-6, 1 - 1.0e-6)

    * `z` - `{..., D}`
    * `weights` - a map of `wg1` `{I, D}`, `bg1` `{I}`, `wg2` `{D, I}`, `bg2` `{D}`, and likewise `wc1` to `bc2` if there
      is a context

  Options beside those of `Sidewinder.Kernel`: `:context` - `{..., D}`, none by default. Returns `gamma`, shaped like `z`.

      iex> [one, zero] = for v <- [1, 0], do: Sidewinder.Tensor.from_list([v], :f32, {1})
      iex> matrix = Sidewinder.Tensor.from_list([1], :f32, {1, 1})
      iex> weights = %{wg1: matrix, bg1: zero, wg2: matrix, bg2: zero}
      iex> [gamma] = Sidewinder.Tensor.to_list(Sidewinder.Kernel.MMRec.mdi_gamma(one, weights))
      iex> Float.round(gamma, 5)
      0.69875
  """
  @spec mdi_gamma(Tensor.t(), Kernel.weights(), keyword) :: Tensor.t()
  def mdi_gamma(z, weights, options \\ []) do
    %{"gamma" => gamma} = with_context(:mdi_gamma, [{"z", z}], weights, options)
    gamma
  end

  @doc """
  The gradient of `mdi_gamma/3`, with its options, of the cotangent `dgamma`: a map of a gradient for each input.
  """
  @spec mdi_gamma_backward(Tensor.t(), Kernel.weights(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def mdi_gamma_backward(z, weights, dgamma, options \\ []) do
    op = :mdi_gamma_backward
    atoms(with_context(op, [{"z", z}], weights, options, [{"dgamma", dgamma}]))
  end

  @doc """
  One step of memory decay integration: `gate = s([z; h_prev] wm' + bm)`, `gamma` of `mdi_gamma/3`, and `h_new` of
  `mdi_update/5`.

    * `z`, `h_prev` - `{..., D}`
    * `weights` - a map of those of `mdi_gamma/3`, `wm` `{D, 2 D}` and `bm` `{D}`

  Options beside those of `Sidewinder.Kernel`: `:context` as in `mdi_gamma/3`. Returns a map of `:h_new`, `:gamma` and
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
    atoms(with_context(:mdi, [{"z", z}, {"h_prev", h_prev}], weights, options))
  end

  @doc """
  The gradient of `mdi/4`, with its options and `:dgamma` and `:dgate`, the cotangents of its other results, which are
  zero by default; `dh_new` is that of the first. Returns a map of a gradient for each input.
  """
  @spec mdi_backward(Tensor.t(), Tensor.t(), Kernel.weights(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def mdi_backward(z, h_prev, weights, dh_new, options \\ []) do
    given = [{"z", z}, {"h_prev", h_prev}]
    cotangents = [dgamma: "dgamma", dgate: "dgate"]
    atoms(with_context(:mdi_backward, given, weights, options, [{"dh_new", dh_new}], cotangents))
  end

  defp with_context(op, given, weights, options, more \\ [], tensors \\ []) do
    tensors = [{:context, "context"} | tensors]
    {inputs, own, where} = Kernel.sort_options!(op, options, tensors, [])
    Kernel.run(op, given ++ inputs ++ Kernel.weights!(op, weights) ++ more, own, where)
  end

  # There are few names.
  defp atoms(outputs), do: Map.new(outputs, fn {name, t} -> {String.to_atom(name), t} end)

  ## The recurrence

  @recurrence [wm: "Wm", bm: "bm", initial_state: "h0"]
  @steps [:mix, :state_clip, :state_norm]

  @doc """
  The gated recurrence of the MM-Rec block. For each batch and time, with the logistic function s and h of the time
  before:

      m = s([z[t]; h] wm' + bm)
      n = m * z[t] + (1 - m) * h + gamma[t] * h
      h = z[t] * s(h wg' + bg) + gamma[t] * h + mix * n

    * `z`, `gamma` - `{B, L, D}`
    * `wg` - `{D, D}`, `bg` - `{D}`

  Options beside those of `Sidewinder.Kernel`:

    * `:wm` - `{D, 2 D}` and `:bm` - `{D}`: both, or none, where `:mix` must be 0
    * `:mix` - `0.1` by default
    * `:initial_state` - `{B, D}`; zeros by default
    * `:state_norm` - divide h by `sqrt(mean(h^2)) + 1.0e-6` after each step
    * `:state_clip` - keep each number of h within plus and minus this after each step; none by default

  Returns `{h, h_last}`, `{B, L, D}` and `{B, D}`.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> [z, gamma] = for v <- [1, 0.5], do: from_list([v, v, v], :f32, {1, 3, 1})
      iex> [wg, bg, wm] = for shape <- [{1, 1}, {1}, {1, 2}], do: Sidewinder.RandomInputs.tensor(shape, :f32, {0, 0}, 1)
      iex> {h, _h_last} = Sidewinder.Kernel.MMRec.block_recurrence(z, gamma, wg, bg, mix: 0)
      iex> Sidewinder.Tensor.to_list(h)
      [0.5, 0.75, 0.875]
      iex> {_h, h_last} = Sidewinder.Kernel.MMRec.block_recurrence(z, gamma, wg, bg, wm: wm, bm: bg)
      iex> Enum.map(Sidewinder.Tensor.to_list(h_last), &Float.round(&1, 5))
      [1.078]
  """
  @spec block_recurrence(Tensor.t(), Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          {Tensor.t(), Tensor.t()}
  def block_recurrence(z, gamma, wg, bg, options \\ []) do
    {inputs, own, where} = Kernel.sort_options!(:block_recurrence, options, @recurrence, @steps)
    given = [{"z", z}, {"gamma", gamma}, {"Wg", wg}, {"bg", bg}]
    %{"h" => h, "h_last" => last} = Kernel.run(:block_recurrence, given ++ inputs, own, where)
    {h, last}
  end

  @doc """
  The gradient of `block_recurrence/5`, with its options.

    * `z`, `gamma`, `wg`, `bg` - as they were given to the recurrence
    * `h` - what the recurrence returned
    * `dh` - the cotangent of it; with the option `:dh_last` that of `h_last`, zero by default

  Returns a map of `:dz`, `:dgamma`, `:dWg`, `:dbg`, and of `:dWm`, `:dbm` and `:dh0` as far as their inputs are there.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> [z, gamma, dh] = for v <- [1, 0.5, 1], do: from_list([v, v, v], :f32, {1, 3, 1})
      iex> [wg, bg] = for shape <- [{1, 1}, {1}], do: Sidewinder.RandomInputs.tensor(shape, :f32, {0, 0}, 1)
      iex> h = from_list([0.5, 0.75, 0.875], :f32, {1, 3, 1})
      iex> %{dz: dz} = Sidewinder.Kernel.MMRec.block_recurrence_backward(z, gamma, wg, bg, h, dh, mix: 0)
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
  def block_recurrence_backward(z, gamma, wg, bg, h, dh, options \\ []) do
    op = :block_recurrence_backward
    tensors = @recurrence ++ [dh_last: "dh_last"]
    {inputs, own, where} = Kernel.sort_options!(op, options, tensors, @steps)
    given = [{"z", z}, {"gamma", gamma}, {"Wg", wg}, {"bg", bg}, {"h", h}, {"dh", dh}]
    Kernel.gradients(op, given ++ inputs, own, where)
  end

  ## The block

  @block [:heads, :mix, :v_mix, :eps, :norm, :levels, :ratio, :cursor] ++
           [:state_clip, :state_norm, :checkpoint]

  @doc """
  The block of MM-Rec: a gated recurrence, attention over a memory and a feed-forward layer, each with what lies around
  it. `Sidewinder.mmrec_block/3` of the functions for Nx tells its formula and weights.

    * `x` - `{B, L, D}`
    * `memory` - `{k_mem, v_mem}`, each `{B, M, D}`, or `{1, M, D}` for all sequences
    * `weights` - a map

  Options beside those of `Sidewinder.Kernel`: `:initial_state` - `{B, D}`, zeros by default, `:heads`, `:mix`, `:v_mix`,
  `:eps`, `:norm` (`:outside` or `:inside`), `:levels`, `:ratio`, `:cursor`, `:state_clip`, `:state_norm`, and
  `:checkpoint`, true by default: if false, the result has `:q`, `:k`, `:v`, `:z` and `:hidden` too, which with `:h`,
  `:gamma` and `:context` save `mmrec_block_backward/5` the computation of what they are.

  Returns a map of `:y`, `:h`, `:h_last`, `:gamma`, `:context` and `:summary`.
  """
  @spec mmrec_block(Tensor.t(), {Tensor.t(), Tensor.t()}, Kernel.weights(), keyword) :: %{
          atom => Tensor.t()
        }
  def mmrec_block(x, {k_mem, v_mem}, weights, options \\ []) do
    op = :mmrec_block
    {inputs, own, where} = Kernel.sort_options!(op, options, [initial_state: "h0"], @block)
    given = [{"x", x}, {"k_mem", k_mem}, {"v_mem", v_mem}]
    atoms(Kernel.run(op, given ++ inputs ++ Kernel.weights!(op, weights), own, where))
  end

  @cotangents [dh: "dh", dh_last: "dh_last", dgamma: "dgamma", dcontext: "dcontext"] ++
                [dsummary: "dsummary"]
  @kept for name <- ~w(h gamma context q k v z hidden)a, do: {name, Atom.to_string(name)}

  @doc """
  The gradient of `mmrec_block/4`, with its options, of the cotangent `dy`; those of its other results are the options
  `:dh`, `:dh_last`, `:dgamma`, `:dcontext` and `:dsummary`, zero by default. What the block returned may be given as
  `:h`, `:gamma`, `:context`, `:q`, `:k`, `:v`, `:z` and `:hidden`, which is then not computed again: the gradient is
  the same to the last bit.

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
    tensors = [{:initial_state, "h0"} | @kept ++ @cotangents]
    {inputs, own, where} = Kernel.sort_options!(op, options, tensors, @block)
    given = [{"x", x}, {"k_mem", k_mem}, {"v_mem", v_mem}]
    all = given ++ inputs ++ Kernel.weights!(op, weights) ++ [{"dy", dy}]
    Kernel.gradients(op, all, own, where)
  end
end
