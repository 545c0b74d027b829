defmodule Sidewinder.Block.Linear do
  @moduledoc """
  `Sidewinder.linear/3` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Linear,
    gradient: Sidewinder.Block.LinearBackward

  declare(:linear)
end

defmodule Sidewinder.Block.LinearBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Linear`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Linear,
    gradient_of: Sidewinder.Block.Linear
end
