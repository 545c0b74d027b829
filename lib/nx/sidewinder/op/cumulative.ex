defmodule Sidewinder.Op.Cumulative do
  @moduledoc false
  # The call of cumulative products, sums and log-sums.

  @doc "Calls a scan; returns its outputs, in a tuple if there are several."
  def call(%module{} = op, x, opts) do
    [name] = Map.keys(module.table().inputs) -- ["initial_state"]
    op |> Sidewinder.Op.call([{name, x}], opts) |> Keyword.values() |> outputs()
  end

  defp outputs([y]), do: y
  defp outputs(several), do: List.to_tuple(several)
end
