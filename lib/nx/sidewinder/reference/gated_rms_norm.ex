defmodule Sidewinder.Reference.GatedRmsNorm do
  @moduledoc false
  # The norm of Mamba-2 of the rows of x, `{rows, D}`, with the gate z, and its gradient. Rows are cut into their
  # groups, `{rows, groups, D / groups}`:
  #
  #     u = x silu(z)    y = w u^              or, with norm_before_gate,    u = x    y = w u^ silu(z)
  #     u^ = u r         r = 1 / sqrt(mean(u^2) + eps)

  alias Sidewinder.Reference.{Activations, Norm}
  import Sidewinder.Reference.Numbers

  def body(op, %{"x" => x} = inputs) do
    %{unit: unit, w: w, gate: gate} = parts(op, inputs)
    y = Nx.multiply(unit, w)
    y = if op.norm_before_gate, do: Nx.multiply(y, gate), else: y
    [y: like(y, x)]
  end

  @doc "With the cotangent e of w u^: du = r (w e - u^ mean(w e u^)) and dw = sum e u^"
  def backward(op, %{"x" => x, "w" => w, "dy" => dy} = inputs) do
    parts = %{unit: unit} = parts(op, inputs)
    dy = grouped(dy, op)
    e = if op.norm_before_gate, do: Nx.multiply(dy, parts.gate), else: dy
    we = Nx.multiply(e, parts.w)
    along = we |> Nx.multiply(unit) |> Nx.mean(axes: [-1], keep_axes: true)
    du = we |> Nx.subtract(Nx.multiply(unit, along)) |> Nx.multiply(parts.r)
    {dx, dz} = through_gate(op, du, Map.merge(parts, %{x: grouped(x, op), dy: dy}))
    dw = Nx.sum(Nx.multiply(e, unit), axes: [0])
    [dx: like(dx, x), dz: like(dz, x), dw: Nx.reshape(dw, w.shape)]
  end

  defp through_gate(%{norm_before_gate: true}, du, %{dy: dy, w: w, unit: unit, slope: slope}),
    do: {du, Enum.reduce([w, unit, slope], dy, &Nx.multiply/2)}

  defp through_gate(_op, du, %{x: x, gate: gate, slope: slope}),
    do: {Nx.multiply(du, gate), du |> Nx.multiply(x) |> Nx.multiply(slope)}

  defp parts(op, %{"x" => x, "z" => z, "w" => w}) do
    [x, z] = for t <- [x, z], do: grouped(t, op)
    gate = Activations.value(z, :silu)
    u = if op.norm_before_gate, do: x, else: Nx.multiply(x, gate)
    square = Norm.mean_square(u)
    r = Nx.rsqrt(Nx.add(square, constant(op.eps, square)))
    slope = Activations.slope(z, :silu)
    %{unit: Nx.multiply(u, r), r: r, w: grouped(w, op), gate: gate, slope: slope}
  end

  # The last axis split into groups, in the type of the arithmetic.
  defp grouped(t, %{groups: groups}) do
    {others, [width]} = t.shape |> Tuple.to_list() |> Enum.split(-1)
    t |> wide() |> Nx.reshape(List.to_tuple(others ++ [groups, div(width, groups)]))
  end

  defp like(t, x), do: t |> Nx.reshape(x.shape) |> Nx.as_type(x.type)
end
