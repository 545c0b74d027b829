defmodule Sidewinder.Reference.MultiMemoryAttention do
  @moduledoc false
  # Attention over a memory, composed of dense layers and attention. Sequences that share a memory are one long
  # sequence to attention: no row hides a slot from another.

  alias Sidewinder.Op
  alias Sidewinder.Block.{Attention, Linear}
  alias Sidewinder.Reference.Numbers

  def body(op, %{"h" => h, "k_mem" => k, "v_mem" => v} = inputs) do
    [batch, length, width] = Tuple.to_list(h.shape)
    [of_memory, slots, _] = Tuple.to_list(k.shape)
    heads = op.heads
    rows = div(batch * length, of_memory)

    in_heads = fn t, shape ->
      Nx.reshape(t, List.to_tuple(shape ++ [heads, div(width, heads)]))
    end

    attention = %Attention{layout: :heads_last, return_lse: true}

    given = [
      {"q", in_heads.(queries(op, inputs), [of_memory, rows])},
      {"k", in_heads.(k, [of_memory, slots])},
      {"v", in_heads.(v, [Nx.axis_size(v, 0), slots])}
    ]

    [y: a, lse: lse] = Op.part(op, attention, given)

    # The weight of a single slot is 1 for every score, so its score has no gradient: a computed one is rounding.
    a = if slots == 1, do: Nx.broadcast(in_heads.(v, [of_memory, 1]), a.shape), else: a

    [y: y] =
      Op.part(op, %Linear{}, [
        {"x", Nx.reshape(a, h.shape)},
        {"w", inputs["wao"]},
        {"b", inputs["bao"]}
      ])

    [y: y, lse: by_batch(lse, {batch, heads, length})]
  end

  defp queries(op, %{"h" => h, "waq" => w} = inputs) do
    [y: q] = Op.part(op, %Linear{}, [{"x", h}, {"w", w}, {"b", inputs["baq"]}])
    q_in = inputs["q_in"]
    if q_in, do: Nx.add(q, Nx.multiply(q_in, Numbers.constant(0.5, q_in))), else: q
  end

  defp by_batch(%{shape: shape} = lse, shape), do: lse

  defp by_batch(lse, {batch, heads, length}),
    do: lse |> Nx.reshape({heads, batch, length}) |> Nx.transpose(axes: [1, 0, 2])
end
