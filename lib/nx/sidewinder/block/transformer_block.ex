defmodule Sidewinder.Block.TransformerBlock do
  @moduledoc """
  `Sidewinder.transformer_block/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.TransformerBlock,
    gradient: Sidewinder.Block.TransformerBlockBackward

  alias Sidewinder.Block.Mha
  alias Sidewinder.Op.Declared

  defstruct Keyword.delete(Declared.fields(:transformer_block), :cached)

  @mha Mha.table()

  @table Declared.table(:transformer_block,
           composed: true,
           params: %{
             required: ~w(wqkv wo wg wu wd ln1_w ln1_b ln2_w ln2_b),
             optional: @mha.params.optional
           },
           without: ~w(keys values cached),
           inputs: Map.take(@mha.inputs, ~w(x mask)),
           options: [heads: :size],
           outputs: @mha.outputs,
           hint: @mha.hint
         )

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.TransformerBlockBackward do
  @moduledoc "The gradient of `Sidewinder.Block.TransformerBlock`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.TransformerBlock
end
