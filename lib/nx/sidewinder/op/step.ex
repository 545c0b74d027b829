defmodule Sidewinder.Op.Step do
  @moduledoc false
  # An op that advances sequences by one token is the op `whole` over sequences of length 1, without
  # the axis of time.

  @doc "The body of a step."
  def body(op, whole, inputs) do
    outputs = whole.body(whole(whole, op), Map.new(inputs, &longer(&1, whole)))
    [y: Nx.squeeze(outputs[:y], axes: [1]), last_state: outputs[:last_state]]
  end

  @doc "The gradient of a step."
  def gradient(op, whole, given) do
    given = for {name, _} = tensor <- given, name != "y", do: longer(tensor, whole)

    for {"d" <> name, t} <- whole.gradient(whole(whole, op), given), into: %{} do
      {"d" <> name, if(sequence?(whole, name), do: Nx.squeeze(t, axes: [1]), else: t)}
    end
  end

  defp whole(whole, op) do
    struct(
      whole,
      [return_state: true] ++ Keyword.delete(Map.to_list(Map.from_struct(op)), :inputs)
    )
  end

  defp longer({name, t}, whole),
    do: {name, if(sequence?(whole, name), do: Nx.new_axis(t, 1), else: t)}

  defp sequence?(_whole, "dy"), do: true
  defp sequence?(whole, name), do: match?({_, [[:b, :l | _] | _]}, whole.table().inputs[name])
end
