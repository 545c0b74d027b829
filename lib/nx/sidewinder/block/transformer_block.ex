defmodule Sidewinder.Block.TransformerBlock do
  @moduledoc """
  `Sidewinder.transformer_block/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.TransformerBlock,
    gradient: Sidewinder.Block.TransformerBlockBackward

  declare(:transformer_block,
    composed: true,
    without: ~w(keys values cached),
    axes: [d: {:multiple, :heads, :d}, h: :heads]
  )
end

defmodule Sidewinder.Block.TransformerBlockBackward do
  @moduledoc "The gradient of `Sidewinder.Block.TransformerBlock`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.TransformerBlock
end
