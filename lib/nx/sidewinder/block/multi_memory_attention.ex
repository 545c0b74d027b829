defmodule Sidewinder.Block.MultiMemoryAttention do
  @moduledoc """
  `Sidewinder.multi_memory_attention/5`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.MultiMemoryAttention,
    gradient: Sidewinder.Block.MultiMemoryAttentionBackward

  declare(:multi_memory_attention,
    composed: true,
    axes: [d: {:multiple, :heads, :d}, h: :heads],
    rest: :return_lse
  )
end

defmodule Sidewinder.Block.MultiMemoryAttentionBackward do
  @moduledoc "The gradient of `Sidewinder.Block.MultiMemoryAttention`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.MultiMemoryAttention
end
