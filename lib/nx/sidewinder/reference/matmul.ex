defmodule Sidewinder.Reference.Matmul do
  @moduledoc false
  # The product of two matrices, and its gradient.

  import Sidewinder.Reference.Numbers

  def body(_op, %{"a" => a, "b" => b}), do: [c: product({a, 1}, {b, 0})]

  def backward(_op, %{"a" => a, "b" => b, "dc" => dc}) do
    [da: product({dc, 1}, {b, 1}), db: product({a, 0}, {dc, 0})]
  end

  # Summed over these axes.
  defp product({a, i}, {b, j}), do: Nx.as_type(Nx.dot(wide(a), [i], wide(b), [j]), a.type)
end
