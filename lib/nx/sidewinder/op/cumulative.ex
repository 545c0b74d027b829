defmodule Sidewinder.Op.Cumulative do
  @moduledoc false
  # What the blocks of cumulative products, sums and log-sums have in common.

  alias Sidewinder.Op.Declared

  @doc "The table of a scan, with sorts of options that are narrower than the kernel's."
  def table(name, options \\ []) do
    Declared.table(name,
      options: options,
      hint: "Layout is batch, heads, length, channels of a head"
    )
  end

  @doc "The table of a gradient that takes the result of its scan as well."
  def with_result(table), do: put_in(table.inputs["y"], {:storage, [[:b, :h, :l, :w]]})

  @doc "Calls a scan; returns its outputs, in a tuple if there are several."
  def call(%module{} = op, x, opts) do
    [name] = Map.keys(module.table().inputs) -- ["initial_state"]
    op |> Sidewinder.Op.call([{name, x}], opts) |> Keyword.values() |> outputs()
  end

  defp outputs([y]), do: y
  defp outputs(several), do: List.to_tuple(several)
end
