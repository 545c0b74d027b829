defmodule Sidewinder.Op.Cumulative do
  @moduledoc false
  # What the blocks of cumulative products, sums and log-sums have in common: the name of the kernel's sequence,
  # and the options that a scan has beside `return_state`.

  @sequence [:b, :h, :l, :w]
  @state [:b, :h, :w]

  @doc "The table of a scan."
  def table(name, x, options, more \\ []) do
    %{
      name: name,
      inputs: %{x => {:storage, [@sequence]}, "initial_state" => {:wide, [@state]}},
      optional: [:initial_state],
      options: options ++ [return_state: :flag],
      outputs:
        [{:y, :storage, @sequence, :always}] ++
          for(name <- more, do: {name, :wide, @sequence, :always}) ++
          [{:last_state, :wide, @state, :return_state}],
      hint: "Layout is batch, heads, length, channels of a head"
    }
  end

  @doc "The table of a gradient that takes the result of its scan as well."
  def with_result(table), do: put_in(table.inputs["y"], {:storage, [@sequence]})

  @doc "Calls a scan; returns its outputs, in a tuple if there are several."
  def call(%module{} = op, x, opts) do
    [name] = Map.keys(module.table().inputs) -- ["initial_state"]
    op |> Sidewinder.Op.call([{name, x}], opts) |> Keyword.values() |> outputs()
  end

  defp outputs([y]), do: y
  defp outputs(several), do: List.to_tuple(several)
end
