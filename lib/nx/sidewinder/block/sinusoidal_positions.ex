defmodule Sidewinder.Block.SinusoidalPositions do
  @moduledoc """
  `Sidewinder.sinusoidal_positions/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SinusoidalPositions,
    gradient: Sidewinder.Block.SinusoidalPositionsBackward

  declare(:sinusoidal_positions)
end

defmodule Sidewinder.Block.SinusoidalPositionsBackward do
  @moduledoc "The gradient of `Sidewinder.Block.SinusoidalPositions`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SinusoidalPositions,
    gradient_of: Sidewinder.Block.SinusoidalPositions
end
