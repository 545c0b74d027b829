defmodule Sidewinder.Reference.CausalConv1d do
  @moduledoc false
  # The depthwise causal convolution and its gradient, of checked inputs. A kernel is a few taps
  # wide, so the graph has a product for each tap.

  alias Sidewinder.Reference.{Activations, Recurrence}

  def body(op, %{"x" => x} = inputs) do
    padded = padded(inputs)
    y = inputs |> sums(padded) |> Activations.value(op.activation) |> Nx.as_type(x.type)
    [y: y, last_state: op.return_state && last_state(padded, inputs)]
  end

  @doc """
  With xp the state and then x, and u the sums: dxp_{t+j} = sum_j w_j du_t, dw_j = sum_t du_t xp_{t+j}
  """
  def backward(op, %{"x" => x, "w" => w, "dy" => dy} = inputs) do
    padded = padded(inputs)
    {length, width} = {Nx.axis_size(x, 1), Nx.axis_size(w, 1)}

    du =
      dy
      |> Nx.as_type(w.type)
      |> Nx.multiply(Activations.slope(sums(inputs, padded), op.activation))

    dw =
      for j <- 0..(width - 1), do: Nx.sum(Nx.multiply(du, rows(padded, j, length)), axes: [0, 1])

    taps = for j <- 0..(width - 1), do: spread(Nx.multiply(du, weight(w, j)), j, width - 1 - j)
    dpadded = Enum.reduce(taps ++ last_rows(inputs["dlast_state"], w, length), &Nx.add/2)

    [
      dx: Nx.as_type(rows(dpadded, width - 1, length), x.type),
      dw: Nx.stack(dw, axis: 1),
      dbias: Nx.sum(du, axes: [0, 1]),
      dinitial_state: inputs["initial_state"] && Nx.as_type(rows(dpadded, 0, width - 1), x.type)
    ]
  end

  # State and x, [B, W - 1 + L, D], in the type of the arithmetic.
  defp padded(%{"x" => x, "w" => w} = inputs) do
    {batch, _, channels} = x.shape

    state =
      case {Nx.axis_size(w, 1), inputs["initial_state"]} do
        {1, nil} -> []
        {width, nil} -> [Recurrence.zeros({batch, width - 1, channels}, w.type)]
        {_, state} -> [Nx.as_type(state, w.type)]
      end

    Nx.concatenate(state ++ [Nx.as_type(x, w.type)], axis: 1)
  end

  defp sums(%{"x" => x, "w" => w} = inputs, padded) do
    length = Nx.axis_size(x, 1)

    taps =
      for j <- 0..(Nx.axis_size(w, 1) - 1), do: Nx.multiply(rows(padded, j, length), weight(w, j))

    Enum.reduce(taps ++ List.wrap(inputs["bias"]), &Nx.add/2)
  end

  defp last_state(padded, %{"x" => x, "w" => w}) do
    padded |> rows(Nx.axis_size(x, 1), Nx.axis_size(w, 1) - 1) |> Nx.as_type(x.type)
  end

  defp rows(t, start, count), do: Nx.slice_along_axis(t, start, count, axis: 1)

  defp weight(w, j), do: w[[.., j]]

  defp spread(t, before, behind) do
    Nx.pad(t, Nx.tensor(0, type: t.type), [{0, 0, 0}, {before, behind, 0}, {0, 0, 0}])
  end

  defp last_rows(nil, _, _), do: []
  defp last_rows(dstate, w, length), do: [spread(Nx.as_type(dstate, w.type), length, 0)]
end
