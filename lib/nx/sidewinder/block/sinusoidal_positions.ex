defmodule Sidewinder.Block.SinusoidalPositions do
  @moduledoc """
  `Sidewinder.sinusoidal_positions/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SinusoidalPositions,
    gradient: Sidewinder.Block.SinusoidalPositionsBackward

  defstruct theta: 10_000.0, first_position: 0, inputs: [], target: []

  @impl true
  def table do
    %{
      name: :sinusoidal_positions,
      inputs: %{"x" => {:storage, [[:b, :l, :d]]}},
      optional: [],
      options: [theta: :positive, first_position: :integer],
      outputs: [{:y, :storage, [:b, :l, :d], :always}]
    }
  end
end

defmodule Sidewinder.Block.SinusoidalPositionsBackward do
  @moduledoc "The gradient of `Sidewinder.Block.SinusoidalPositions`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SinusoidalPositions,
    gradient_of: Sidewinder.Block.SinusoidalPositions
end
