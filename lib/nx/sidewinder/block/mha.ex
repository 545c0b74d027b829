defmodule Sidewinder.Block.Mha do
  @moduledoc """
  `Sidewinder.mha/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Mha,
    gradient: Sidewinder.Block.MhaBackward

  alias Sidewinder.Op.Declared

  defstruct Keyword.delete(Declared.fields(:mha), :cached)

  @table Declared.table(:mha,
           composed: true,
           params: %{required: ~w(wqkv wo), optional: ~w(bo)},
           without: ~w(keys values cached),
           inputs: %{
             "x" => {:storage, [[:b, :l, {:multiple, :heads, :d}]]},
             "mask" => {:mask, [{:repeated, [:b, :heads, :l, :l]}]}
           },
           options: [heads: :size],
           outputs: [{:y, :storage, [:b, :l, :d], :always}],
           hint: "x is {batch, length, width}, and weights are stored {out, in}"
         )

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.MhaBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Mha`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.Mha
end
