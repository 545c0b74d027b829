defmodule Sidewinder.Reference.Decode do
  @moduledoc false
  # Attention over a cache and new tokens, composed of a write into the cache, and attention.

  alias Sidewinder.{Error, Op}
  alias Sidewinder.Block.Attention

  def body(%{cached: cached} = op, inputs) do
    all = cached + new(op, inputs["q"])
    room!(cached, all, Nx.axis_size(inputs["keys"], 2))
    keys = written(op, inputs["keys"], inputs["k"])
    values = written(op, inputs["values"], inputs["v"])
    seen = fn held -> held |> Nx.slice_along_axis(0, all, axis: 2) |> turned(op) end
    attention = %Attention{scale: op.scale, causal: op.causal, layout: op.layout}

    given =
      [{"q", inputs["q"]}, {"k", seen.(keys)}, {"v", seen.(values)}] ++
        for name <- ["mask", "bias"], do: {name, inputs[name]}

    [y: y] = Op.part(op, attention, given)
    [y: y, keys: keys, values: values]
  end

  defp new(%{layout: :heads_first}, q), do: Nx.axis_size(q, 2)
  defp new(%{layout: :heads_last}, q), do: Nx.axis_size(q, 1)

  defp written(op, held, new), do: Nx.put_slice(held, [0, 0, op.cached, 0], turned(new, op))

  # The cache is heads-first in every layout.
  defp turned(t, %{layout: :heads_first}), do: t
  defp turned(t, %{layout: :heads_last}), do: Nx.transpose(t, axes: [0, 2, 1, 3])

  defp room!(cached, all, room) when cached >= 0 and all <= room, do: :ok

  defp room!(cached, all, room) do
    raise Error.new(:option, "cached",
            op: "decode",
            expected: "room for #{all - cached} rows after it, of #{room} in the cache",
            got: Integer.to_string(cached),
            hint: "Give it a larger cache"
          )
  end
end
