defmodule Sidewinder.Op.Step do
  @moduledoc false
  # An op that advances sequences by one token is the op `whole` over sequences of length 1: its
  # sequences have an axis of time less, and its states, which go in as `before` and come out as
  # `later`, are the initial and the last state there.

  @doc "The body of a step."
  def body(op, {whole, before, later}, inputs) do
    inputs = Map.new(inputs, &longer(&1, whole, %{before => "initial_state"}))
    outputs = whole.body(whole(whole, op), inputs)
    [{:y, Nx.squeeze(outputs[:y], axes: [1])}, {later, outputs[:last_state]}]
  end

  @doc "The gradient of a step."
  def gradient(op, {whole, before, later}, given) do
    names = %{before => "initial_state", "d#{later}" => "dlast_state"}
    given = for {name, _} = tensor <- given, name != "y", do: longer(tensor, whole, names)

    for {"d" <> name, t} <- whole.gradient(whole(whole, op), given), into: %{} do
      t = if sequence?(whole, name), do: Nx.squeeze(t, axes: [1]), else: t
      {"d" <> if(name == "initial_state", do: before, else: name), t}
    end
  end

  defp whole(whole, op) do
    struct(
      whole,
      [return_state: true] ++ Keyword.delete(Map.to_list(Map.from_struct(op)), :inputs)
    )
  end

  defp longer({name, t}, whole, names) do
    name = Map.get(names, name, name)
    {name, if(sequence?(whole, name), do: Nx.new_axis(t, 1), else: t)}
  end

  defp sequence?(_whole, "dy"), do: true
  defp sequence?(whole, name), do: match?({_, [[:b, :l | _] | _]}, whole.table().inputs[name])
end
