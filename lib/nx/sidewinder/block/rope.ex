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

  alias Sidewinder.Block.Attention

  @impl true
  def table do
    x = Attention.axes(:h, :l, {:multiple, 2, :w})

    %{
      name: :rope,
      chosen_by: :layout,
      inputs: %{"x" => {:storage, [x]}},
      optional: [],
      options: [
        pairing: [:half, :interleaved],
        theta: :positive,
        first_position: :integer,
        layout: Map.keys(x),
        scaling_factor: :positive,
        low_freq_factor: :positive,
        high_freq_factor: :positive,
        original_length: :positive
      ],
      outputs: [{:y, :storage, x, :always}],
      hint: Attention.hint()
    }
  end
end

defmodule Sidewinder.Block.RopeBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Rope`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Rope,
    gradient_of: Sidewinder.Block.Rope
end
