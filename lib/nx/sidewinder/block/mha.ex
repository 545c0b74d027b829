defmodule Sidewinder.Block.Mha do
  @moduledoc """
  `Sidewinder.mha/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Mha,
    gradient: Sidewinder.Block.MhaBackward

  declare(:mha,
    composed: true,
    without: ~w(keys values cached),
    axes: [d: {:multiple, :heads, :d}, h: :heads]
  )
end

defmodule Sidewinder.Block.MhaBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Mha`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.Mha
end
