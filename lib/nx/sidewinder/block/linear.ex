defmodule Sidewinder.Block.Linear do
  @moduledoc """
  `Sidewinder.linear/3` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Linear,
    gradient: Sidewinder.Block.LinearBackward

  alias Sidewinder.Reference.Activations

  defstruct activation: nil, inputs: [], target: []

  @impl true
  def table do
    %{
      name: :linear,
      inputs: %{
        "x" => {:storage, [[:..., :i]]},
        "w" => {:storage, [[:o, :i]]},
        "b" => {:storage, [[:o]]}
      },
      optional: [bias: "b"],
      options: [activation: Activations.names()],
      outputs: [{:y, :storage, [:..., :o], :always}],
      hint: "Weights are stored {out, in}, and the last axis of x meets `in`"
    }
  end
end

defmodule Sidewinder.Block.LinearBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Linear`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Linear,
    gradient_of: Sidewinder.Block.Linear
end
