defmodule Sidewinder.Block.SelectiveStateUpdate do
  @moduledoc """
  `Sidewinder.selective_state_update/7` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  @behaviour Sidewinder.Op

  defstruct dt_softplus: false, dt_clamp: nil, inputs: [], target: [], algorithm: :sequential

  @impl true
  def table do
    varying = [[:b, :n], [:b, {:divides, :d}, :n]]

    %{
      name: :selective_state_update,
      inputs: %{
        "x" => {:storage, [[:b, :d]]},
        "state" => {:wide, [[:b, :d, :n]]},
        "dt" => {:storage, [[:b, :d]]},
        "A" => {:wide, [[:d, :n]]},
        "B" => {:storage, varying},
        "C" => {:storage, varying},
        "D" => {:wide, [[:d]]},
        "z" => {:storage, [[:b, :d]]},
        "dt_bias" => {:wide, [[:d]]}
      },
      optional: [d: "D", z: "z", dt_bias: "dt_bias"],
      options: [dt_softplus: :flag, dt_clamp: :pair],
      outputs: [{:y, :storage, [:b, :d], :always}, {:state, :wide, [:b, :d, :n], :always}]
    }
  end

  @impl true
  defdelegate body(op, inputs), to: Sidewinder.Reference, as: :selective_state_update_body
end
