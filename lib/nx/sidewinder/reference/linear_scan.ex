defmodule Sidewinder.Reference.LinearScan do
  @moduledoc false
  # The linear recurrence and its gradient, of checked inputs.

  alias Sidewinder.Reference.{Numbers, Recurrence}
  import Recurrence, only: [at: 2, swap: 1]

  def body(op, %{"a" => a, "b" => b} = inputs) do
    h = Recurrence.forwards(op.algorithm, {wide(a), wide(b)}, first(inputs["initial_state"]))
    last_state = Nx.squeeze(at(h, Nx.axis_size(h, 0) - 1), axes: [0])
    [h: narrow(h, a), last_state: last_state]
  end

  @doc "g_t = dh_t + a_{t+1} g_{t+1}, db_t = g_t, da_t = g_t h_{t-1}, dinitial_state = a_1 g_1"
  def backward(_op, %{"a" => a, "h" => h, "dh" => dh} = inputs) do
    {wide_a, h} = {wide(a), wide(h)}
    g = Recurrence.backwards(wide_a, wide(dh), first(inputs["dlast_state"]))
    before = Recurrence.before(h, first(inputs["initial_state"]))

    [
      da: narrow(Nx.multiply(g, before), a),
      db: narrow(g, a),
      dinitial_state: Nx.squeeze(Nx.multiply(at(wide_a, 0), at(g, 0)), axes: [0])
    ]
  end

  # [L, B, K] in the type of the arithmetic, and back.
  defp wide(t), do: t |> Numbers.wide() |> swap()

  defp narrow(t, like), do: t |> swap() |> Nx.as_type(like.type)

  defp first(nil), do: nil
  defp first(t), do: Nx.new_axis(t, 0)
end
