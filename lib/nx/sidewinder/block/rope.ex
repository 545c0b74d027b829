defmodule Sidewinder.Block.Rope do
  @moduledoc """
  `Sidewinder.rope/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Rope,
    gradient: Sidewinder.Block.RopeBackward

  defstruct pairing: :half,
            theta: 10_000.0,
            first_position: 0,
            layout: :heads_first,
            scaling_factor: nil,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_length: 8192.0,
            inputs: [],
            target: []

  import Sidewinder.Op.Heads

  @x axes(:h, :l, {:multiple, 2, :w})

  @table %{
    name: :rope,
    chosen_by: :layout,
    inputs: %{"x" => {:storage, [@x]}},
    optional: [],
    options: [
      pairing: [:half, :interleaved],
      theta: :positive,
      first_position: :integer,
      layout: layouts(),
      scaling_factor: :positive,
      low_freq_factor: :positive,
      high_freq_factor: :positive,
      original_length: :positive
    ],
    outputs: [{:y, :storage, @x, :always}],
    hint: hint()
  }

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.RopeBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Rope`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Rope,
    gradient_of: Sidewinder.Block.Rope
end
