defmodule Sidewinder.Block.SinusoidalPositions do
  @moduledoc """
  `Sidewinder.sinusoidal_positions/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SinusoidalPositions,
    gradient: Sidewinder.Block.SinusoidalPositionsBackward

  alias Sidewinder.Op.Declared

  defstruct Declared.fields(:sinusoidal_positions)

  @table Declared.table(:sinusoidal_positions)

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.SinusoidalPositionsBackward do
  @moduledoc "The gradient of `Sidewinder.Block.SinusoidalPositions`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SinusoidalPositions,
    gradient_of: Sidewinder.Block.SinusoidalPositions
end
