defmodule Sidewinder.Reference.Cumulative do
  @moduledoc false
  # Cumulative products, sums and log-sums and their gradients, of checked inputs. Sums are in f64 for every type:
  # long sums in f32 would lose digits.

  alias Sidewinder.Reference.{Numbers, Recurrence}
  import Nx.Defn
  import Recurrence, only: [at: 2, put: 3]

  def body(%module{} = op, inputs) do
    %{name: name} = module.table()
    {x, start} = {inputs["gamma"] || inputs["x"], inputs["initial_state"]}
    states = states(name, op, in_time(x, op, name), first(start))
    last_state = Nx.squeeze(at(states, Nx.axis_size(states, 0) - 1), axes: [0])
    y = if name == :exp_product_scan, do: Nx.exp(states), else: states

    [
      y: in_place(y, op, name, x.type),
      log_y: in_place(states, op, name, Numbers.wide(x).type),
      last_state: Nx.as_type(last_state, Numbers.wide(x).type)
    ]
  end

  defp states(:exp_product_scan, op, gamma, start), do: sums(log(op, gamma), start)
  defp states(:cumprod_scan, _op, gamma, start), do: products(gamma, start)
  defp states(:logcumsumexp, _op, x, start), do: log_sums(wider(x), wider(start || none(x)))
  defp states(_sum, _op, x, start), do: sums(x, start)

  defp products(gamma, start) do
    zero = Nx.broadcast(Numbers.constant(0, gamma), gamma)
    Recurrence.forwards(:sequential, {gamma, zero}, start || like_state(gamma, 1))
  end

  defp sums(x, start) do
    ones = Nx.broadcast(Nx.tensor(1, type: :f64), x)
    Recurrence.forwards(:sequential, {ones, wider(x)}, start && wider(start))
  end

  # ln(min(max(gamma, eps), 1)), not below log_min.
  defp log(op, gamma) do
    eps = Numbers.constant(op.eps, gamma)
    gamma = gamma |> Nx.max(eps) |> Nx.min(1)
    Nx.max(Nx.log(wider(gamma)), Nx.tensor(op.log_min, type: :f64))
  end

  defnp log_sums(x, start) do
    {_, _, out, _} =
      while {t = 0, state = start, out = x, x}, t < Nx.axis_size(x, 0) do
        state = log_add_exp(state, at(x, t))
        {t + 1, state, put(out, t, state), x}
      end

    out
  end

  deftransformp log_add_exp(a, b) do
    {low, high} = {Nx.min(a, b), Nx.max(a, b)}
    Nx.add(high, Nx.log1p(Nx.exp(below(low, high))))
  end

  # The difference of the first and the second, 0 for equal infinities.
  defp below(low, high) do
    zero = Numbers.constant(0, low)
    same = Nx.equal(low, high)
    Nx.subtract(Nx.select(same, zero, low), Nx.select(same, zero, high))
  end

  ## Gradients

  @doc """
  With the time of the scan, of its factors f:

      T_i = dy_i + f_{i+1} T_{i+1}       dgamma_i = y_{i-1} T_i       dinitial_state = f_1 T_1

  plus, for a sum of logarithms, the gradient by its cotangents. The factors of a sum are 1; those of a log-sum are
  exp(y_{i-1} - y_i), and dx_i = exp(x_i - y_i) T_i.
  """
  def backward(%module{} = op, inputs) do
    %{name: name} = module.table()
    {x, start} = {inputs["gamma"] || inputs["x"], inputs["initial_state"]}
    ordered = Map.new(inputs, fn {key, t} -> {key, ordered(t, op, name)} end)
    {dx, dstart} = slopes(name, op, ordered, first(start))
    wide = Numbers.wide(x).type
    dstart = Nx.as_type(Nx.squeeze(dstart, axes: [0]), wide)
    dx = in_place(dx, op, name, x.type)
    [dgamma: dx, dx: dx, dinitial_state: dstart]
  end

  defp ordered(%{shape: {_, _, _, _}} = t, op, name), do: in_time(t, op, name)
  defp ordered(t, _op, _name), do: first(t)

  defp slopes(:exp_product_scan_backward, op, %{"gamma" => gamma} = inputs, start) do
    first = Nx.exp(start || like_state(gamma, 0))
    floor = Numbers.constant(max(op.eps, :math.exp(max(op.log_min, -700.0))), gamma)
    f = gamma |> Nx.max(floor) |> Nx.min(1)
    total = Recurrence.backwards(f, inputs["dy"], nil)

    {dlog_y, dlast} = {inputs["dlog_y"] || zeros(gamma), inputs["dlast_state"]}
    later = gamma.type |> then(&Nx.as_type(sums_back(dlog_y, dlast), &1))
    inside = Nx.logical_and(Nx.greater_equal(gamma, floor), Nx.less_equal(gamma, 1))
    # Values out of bounds must not divide by 0.
    divisor = Nx.select(inside, gamma, Numbers.constant(1, gamma))

    slope =
      Nx.add(product(Recurrence.before(inputs["y"], first), total), Nx.divide(later, divisor))

    dinitial = Nx.add(product(first, product(at(f, 0), at(total, 0))), at(later, 0))
    {Nx.select(inside, slope, Numbers.constant(0, gamma)), dinitial}
  end

  defp slopes(:cumprod_scan_backward, _op, %{"gamma" => gamma} = inputs, start) do
    total = Recurrence.backwards(gamma, inputs["dy"], inputs["dlast_state"])
    before = Recurrence.before(inputs["y"], start || like_state(gamma, 1))
    {product(before, total), product(at(gamma, 0), at(total, 0))}
  end

  defp slopes(:logcumsumexp_backward, _op, %{"x" => x} = inputs, start) do
    {x, start} = {wider(x), wider(start || none(x))}
    y = log_sums(x, start)
    fades = Nx.exp(below(Recurrence.before(y, start), y))
    dlast = inputs["dlast_state"]
    total = Recurrence.backwards(fades, wider(inputs["dy"]), dlast && wider(dlast))
    absent = Nx.equal(x, Nx.Constants.neg_infinity(:f64))
    slope = product(Nx.exp(below(x, y)), total)

    {Nx.select(absent, Numbers.constant(0, x), slope), product(at(fades, 0), at(total, 0))}
  end

  defp slopes(_sum, _op, inputs, _start) do
    total = sums_back(inputs["dy"], inputs["dlast_state"])
    {total, at(total, 0)}
  end

  defp sums_back(dy, dlast) do
    ones = Nx.broadcast(Nx.tensor(1, type: :f64), dy)
    Recurrence.backwards(ones, wider(dy), dlast && wider(dlast))
  end

  defp product(a, b), do: Nx.multiply(a, b)

  ## Time first, as it runs: [L, B, H, W] in the type of the arithmetic

  defp in_time(t, op, name) do
    t = t |> Numbers.wide() |> Nx.transpose(axes: [2, 0, 1, 3])
    if back?(op, name), do: Nx.reverse(t, axes: [0]), else: t
  end

  defp in_place(t, op, name, type) do
    t = if back?(op, name), do: Nx.reverse(t, axes: [0]), else: t
    t |> Nx.transpose(axes: [1, 2, 0, 3]) |> Nx.as_type(type)
  end

  defp back?(_op, name) when name in [:cumsum, :cumsum_backward], do: false
  defp back?(_op, name) when name in [:reverse_cumsum, :reverse_cumsum_backward], do: true
  defp back?(op, _name), do: op.reverse

  defp wider(t), do: Nx.as_type(t, :f64)

  defp first(nil), do: nil
  defp first(t), do: Nx.new_axis(t, 0)

  defp like_state(t, value),
    do: Nx.broadcast(Numbers.constant(value, t), put_elem(t.shape, 0, 1))

  defp none(x), do: Nx.broadcast(Nx.Constants.neg_infinity(:f64), put_elem(x.shape, 0, 1))

  defp zeros(t), do: Nx.broadcast(Numbers.constant(0, t), t)
end
