defmodule Sidewinder.Kernel.Scan do
  @moduledoc """
  The selective scan of Mamba: over whole sequences, and one token at a time.

  In the shapes B is the batch, L the length, D the channels, N the states of a channel, and G the
  number of groups that the channels fall into, in order. All tensors are channel-last.

  For each batch, channel `d`, state `n` and time `t`:

      s = dt + dt_bias             delta = clamp(softplus(s))      each part where it is asked for
      h = exp(delta * a[d,n]) * h + delta * b[t,n] * x[t]          h starts as the initial state, or 0
      y = sum_n c[t,n] * h[n] + d[d] * x[t]                        `d` where it is given
      y = y * silu(z)                                              `z` where it is given

  `x` decides the storage type: `:f32`, `:bf16`, `:f16`, or `:f64`. `dt`, `b`, `c`,
  `z` and `y` have that type too; `a`, `d`, `dt_bias`, all states and the arithmetic are `:f32`
  (`:f64` for `:f64`), and results are rounded once.

  Both functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`: of kind
  `:shape`, `:dtype`, `:size` or `:argument` for tensors that do not fit each other, `:option` for
  options, `:unavailable` for a device or level that is not there.
  """

  alias Sidewinder.{Kernel, Tensor}

  @tensors [d: "D", z: "z", dt_bias: "dt_bias"]
  @step [:dt_softplus, :dt_clamp]

  @doc """
  Scans whole sequences.

    * `x`, `dt` - `{B, L, D}`
    * `a` - `{D, N}`, negative where the system is stable
    * `b`, `c` - `{B, L, N}`, `{B, L, G, N}`, or `{D, N}`: the same at every step

  Options beside those of `Sidewinder.Kernel`:

    * `:d` - `{D}`, `:z` - `{B, L, D}`, `:dt_bias` - `{D}`, `:initial_state` - `{B, D, N}`
    * `:dt_softplus` - whether to apply softplus to `dt + dt_bias`; `false` by default
    * `:dt_clamp` - `{lo, hi}`, bounds of the step, both inside; none by default
    * `:return_state` - returns `{y, last_state}`, the second `{B, D, N}`
    * `:return_states` - returns `%{y: y, last_state: last_state, states: states}`, the last
      `{B, L, D, N}`: the state after every step

  Returns `y`, `{B, L, D}`, unless they ask for more.

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
    {inputs, own, where} = scan_options(options)
    inputs = [{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c} | inputs]

    case Kernel.run(:selective_scan, inputs, own, where) do
      %{"y" => y, "last_state" => last_state, "states" => states} ->
        %{y: y, last_state: last_state, states: states}

      %{"y" => y, "last_state" => last_state} ->
        {y, last_state}

      %{"y" => y} ->
        y
    end
  end

  defp scan_options(options) do
    tensors = [{:initial_state, "h0"} | @tensors]
    names = @step ++ [:return_state, :return_states]

    case Kernel.sort_options!(:selective_scan, options, tensors, names) do
      {inputs, %{return_states: true} = own, where} ->
        {inputs, Map.put(own, :return_state, true), where}

      sorted ->
        sorted
    end
  end

  @doc """
  Moves running sequences on by one token: the scan with a length of 1, without the axis of time.

    * `state` - `{B, D, N}`, as `selective_scan/6` or the call before returned it
    * `x`, `dt` - `{B, D}`
    * `a` - `{D, N}`
    * `b`, `c` - `{B, N}` or `{B, G, N}`

  Options beside those of `Sidewinder.Kernel`: `:d`, `:z` (`{B, D}`), `:dt_bias`, `:dt_softplus` and
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
    {inputs, own, where} = Kernel.sort_options!(:selective_state_update, options, @tensors, @step)
    inputs = [{"x", x}, {"state", state}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c} | inputs]
    %{"y" => y, "state" => state} = Kernel.run(:selective_state_update, inputs, own, where)
    {y, state}
  end
end
