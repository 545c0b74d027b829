defmodule Sidewinder.Reference.SinusoidalPositions do
  @moduledoc false
  # Sines and cosines of positions, added to embeddings.

  alias Sidewinder.Reference.Rope
  import Sidewinder.Reference.Numbers

  def body(op, %{"x" => x}), do: [y: x |> wide() |> add(op) |> Nx.as_type(x.type)]
  def backward(_op, %{"dy" => dy}), do: [dx: dy]

  defp add(x, op) do
    {_, length, width} = x.shape
    pairs = div(width + 1, 2)
    rates = for i <- 0..(pairs - 1), do: Rope.rate(op.theta, i, width)
    angles = Rope.angles(op.first_position, length, rates)

    # An odd width drops the last cosine.
    [Nx.sin(angles), Nx.cos(angles)]
    |> Nx.stack(axis: -1)
    |> Nx.reshape({length, 2 * pairs})
    |> Nx.slice_along_axis(0, width, axis: 1)
    |> Nx.as_type(x.type)
    |> Nx.add(x)
  end
end
