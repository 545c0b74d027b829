defmodule Sidewinder.Reference.Mha do
  @moduledoc false
  # Multi-head self-attention with its projections, composed of dense layers, rotations and attention.

  alias Sidewinder.Op
  alias Sidewinder.Block.{Attention, Linear, Rope}

  def body(op, %{"x" => x} = inputs) do
    [q, k, v] = projections(op, inputs)
    attention = %Attention{causal: op.causal, layout: :heads_last}
    given = [{"q", rotate(op, q)}, {"k", rotate(op, k)}, {"v", v}, {"mask", inputs["mask"]}]
    [y: y] = Op.part(op, attention, given)

    Op.part(op, %Linear{}, [
      {"x", Nx.reshape(y, x.shape)},
      {"w", inputs["wo"]},
      {"b", inputs["bo"]}
    ])
  end

  # Each {B, L, H, W}
  defp projections(op, %{"x" => x, "wqkv" => w}) do
    {batch, length, width} = x.shape
    [y: qkv] = Op.part(op, %Linear{}, [{"x", x}, {"w", w}])
    qkv = Nx.reshape(qkv, {batch, length, 3, op.heads, div(width, op.heads)})
    for i <- 0..2, do: Nx.squeeze(Nx.slice_along_axis(qkv, i, 1, axis: 2), axes: [2])
  end

  defp rotate(%{rope_theta: nil}, x), do: x

  defp rotate(%{rope_theta: theta, pairing: pairing} = op, x) do
    rope = %Rope{theta: theta, pairing: pairing, layout: :heads_last}
    [y: y] = Op.part(op, rope, [{"x", x}])
    y
  end
end
