defmodule Sidewinder.Block.SwigluMlp do
  @moduledoc """
  `Sidewinder.swiglu_mlp/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SwigluMlp,
    gradient: Sidewinder.Block.SwigluMlpBackward

  declare(:swiglu_mlp,
    composed: true,
    fields: [activation: :silu]
  )
end

defmodule Sidewinder.Block.SwigluMlpBackward do
  @moduledoc "The gradient of `Sidewinder.Block.SwigluMlp`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.SwigluMlp
end
