defmodule Sidewinder.Block.Rope do
  @moduledoc """
  `Sidewinder.rope/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Rope,
    gradient: Sidewinder.Block.RopeBackward

  declare(:rope,
    axes: [w: {:multiple, 2, :w}]
  )
end

defmodule Sidewinder.Block.RopeBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Rope`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Rope,
    gradient_of: Sidewinder.Block.Rope
end
