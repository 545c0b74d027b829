defmodule Sidewinder.Reference.Ssd do
  @moduledoc false
  # The scan of Mamba-2 and its gradient: a selective scan of H P channels, to which each head's step size and decay are
  # spread. Inputs are checked, without names and vectorized axes, each of its op's type.

  alias Sidewinder.Block
  alias Sidewinder.Reference.SelectiveScan

  @doc "y and the last state."
  def body(op, %{"x" => x, "B" => b} = inputs) do
    {_, _, heads, width} = x.shape
    outputs = SelectiveScan.body(scan(op), spread(inputs))
    state = {Nx.axis_size(x, 0), heads, width, Nx.axis_size(b, 3)}
    [y: Nx.reshape(outputs[:y], x.shape), last_state: Nx.reshape(outputs[:last_state], state)]
  end

  @doc "The gradients. What is summed over a head is summed in the type of the arithmetic."
  def backward(op, %{"A" => a} = inputs) do
    wide = Map.new(inputs, fn {name, t} -> {name, t && Nx.as_type(t, a.type)} end)

    for {name, gradient} <- SelectiveScan.backward(scan(op), spread(wide)),
        do: {name, fold(gradient, inputs[String.replace_prefix("#{name}", "d", "")])}
  end

  defp scan(op) do
    options = Map.take(op, [:dt_softplus, :dt_clamp, :clamp_grad])
    struct!(Block.SelectiveScan, Map.put(options, :return_states, false))
  end

  # The inputs of the scan: the numbers of each tensor in order, each as often as the scan has it.
  defp spread(%{"x" => x, "B" => b} = inputs) do
    for {name, t} <- inputs, into: %{}, do: {name, t && spread(t, shape(name, x.shape, b.shape))}
  end

  defp spread(t, shape) do
    size = Nx.size(t)

    t
    |> Nx.reshape({size, 1})
    |> Nx.broadcast({size, div(Tuple.product(shape), size)})
    |> Nx.reshape(shape)
  end

  defp shape(name, {batch, length, heads, width}, {_, _, groups, state}) do
    case name do
      "A" -> {heads * width, state}
      _ when name in ["D", "dt_bias"] -> {heads * width}
      _ when name in ["B", "C"] -> {batch, length, groups, state}
      _ when name in ["initial_state", "dlast_state"] -> {batch, heads * width, state}
      _ -> {batch, length, heads * width}
    end
  end

  # The other way round.
  defp fold(gradient, input) do
    size = Nx.size(input)

    gradient
    |> Nx.reshape({size, div(Nx.size(gradient), size)})
    |> Nx.sum(axes: [1])
    |> Nx.reshape(input.shape)
    |> Nx.as_type(input.type)
  end
end
