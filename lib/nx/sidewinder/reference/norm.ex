defmodule Sidewinder.Reference.Norm do
  @moduledoc false
  # Root mean square and layer normalisation of the rows of x, `{rows, D}`, and their gradients. With
  # the mean where there is a b, else 0:
  #
  #     x^ = (x - mean) r        z = w x^ + b        y = gelu(z) where it is set

  alias Sidewinder.Reference.Activations
  import Sidewinder.Reference.Numbers

  def body(op, %{"x" => x} = inputs) do
    %{z: z, r: r} = rows(op, inputs)

    [
      y: z |> Activations.value(function(op)) |> Nx.as_type(x.type),
      mean: Nx.mean(wide(x), axes: [-1]),
      rstd: Nx.squeeze(r, axes: [-1])
    ]
  end

  @doc "With u = w dz: dx = r (u - mean(u) - t (x - mean) mean(u x^)), mean(u) where there is a mean"
  def backward(op, %{"x" => x, "w" => w, "dy" => dy} = inputs) do
    %{centered: centered, unit: unit, r: r, t: t, z: z} = rows(op, inputs)
    dz = Nx.multiply(wide(dy), Activations.slope(z, function(op)))
    u = Nx.multiply(dz, w)
    along = centered |> Nx.multiply(t) |> Nx.multiply(mean(Nx.multiply(u, unit)))
    dx = u |> center(inputs["b"]) |> Nx.subtract(along) |> Nx.multiply(r)

    [
      dx: Nx.as_type(dx, x.type),
      dw: Nx.sum(Nx.multiply(dz, unit), axes: [0]),
      db: Nx.sum(dz, axes: [0])
    ]
  end

  @doc "dx plus the terms of the given cotangents of statistics: (dmean - drstd rstd^3 (x - mean)) / D"
  def through_statistics(dx, %{"x" => x} = given) do
    columns = Nx.axis_size(x, -1)
    shares = for name <- ~w(dmean drstd), t = given[name], do: {name, Nx.divide(t, columns)}
    shares |> Enum.reduce(wide(dx), &through(&1, &2, given)) |> Nx.as_type(dx.type)
  end

  defp through({"dmean", share}, dx, _given), do: Nx.add(dx, Nx.new_axis(share, -1))

  defp through({"drstd", share}, dx, %{"x" => x} = given) do
    [mean, r, share] = for t <- [given["mean"], given["rstd"], share], do: Nx.new_axis(t, -1)
    unit = x |> wide() |> Nx.subtract(mean) |> Nx.multiply(r)
    Nx.subtract(dx, Enum.reduce([r, r, share], unit, &Nx.multiply/2))
  end

  defp rows(op, %{"x" => x, "w" => w} = inputs) do
    centered = x |> wide() |> center(inputs["b"])
    {r, t} = scales(op, mean_square(centered))
    unit = Nx.multiply(centered, r)
    z = Enum.reduce(List.wrap(inputs["b"]), Nx.multiply(unit, w), &Nx.add/2)
    %{centered: centered, unit: unit, r: r, t: t, z: z}
  end

  defp center(x, nil), do: x
  defp center(x, _b), do: Nx.subtract(x, mean(x))

  defp mean(x), do: Nx.mean(x, axes: [-1], keep_axes: true)

  # A power of two near 1 / sqrt(D) keeps sums of squares of numbers up to 1e18 from overflowing.
  @doc "The mean of squares over the last axis, which is kept."
  def mean_square(x) do
    columns = Nx.axis_size(x, -1)
    scale = :math.pow(2, -round(:math.log2(columns) / 2))
    scaled = Nx.multiply(x, constant(scale, x))
    sum = Nx.sum(Nx.multiply(scaled, scaled), axes: [-1], keep_axes: true)
    Nx.multiply(sum, constant(1 / (columns * scale * scale), x))
  end

  # r and t
  defp scales(%{eps_mode: :outside, eps: eps}, square) do
    root = Nx.sqrt(square)
    none = Nx.equal(square, 0)
    one = constant(1, root)
    r = Nx.divide(one, Nx.add(root, constant(eps, root)))
    {r, Nx.select(none, constant(0, root), Nx.divide(one, Nx.select(none, one, root)))}
  end

  defp scales(%{eps: eps}, square) do
    r = Nx.rsqrt(Nx.add(square, constant(eps, square)))
    {r, r}
  end

  defp function(%{gelu: :tanh}), do: :gelu_tanh
  defp function(%{gelu: :erf}), do: :gelu_erf
  defp function(_), do: nil
end
