defmodule Sidewinder.Reference.Linear do
  @moduledoc false
  # The dense layer over the rows of x, `{rows, in}`, and its gradient.

  alias Sidewinder.Reference.Activations
  import Sidewinder.Reference.Numbers

  def body(op, %{"x" => x} = inputs) do
    [y: inputs |> sums() |> Activations.value(op.activation) |> Nx.as_type(x.type)]
  end

  def backward(op, %{"x" => x, "w" => w, "dy" => dy} = inputs) do
    dz = inputs |> sums() |> Activations.slope(op.activation) |> Nx.multiply(wide(dy))

    gradients = [
      dx: Nx.dot(dz, [1], wide(w), [0]),
      dw: Nx.dot(dz, [0], wide(x), [0]),
      db: Nx.sum(dz, axes: [0])
    ]

    for {name, t} <- gradients, do: {name, Nx.as_type(t, x.type)}
  end

  defp sums(%{"x" => x, "w" => w} = inputs) do
    products = Nx.dot(wide(x), [1], wide(w), [1])
    if b = inputs["b"], do: Nx.add(products, wide(b)), else: products
  end
end
