defmodule Sidewinder.Block.SelectiveStateUpdate do
  @moduledoc """
  `Sidewinder.selective_state_update/7` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op

  alias Sidewinder.{Block, Op}

  @whole {Block.SelectiveScan, "initial_state", :last_state}

  defstruct dt_softplus: false, dt_clamp: nil, clamp_grad: :mask, inputs: [], target: []

  @impl true
  def table do
    varying = [[:b, :n], [:b, {:divides, :d}, :n]]

    %{
      name: :selective_state_update,
      inputs: %{
        "x" => {:storage, [[:b, :d]]},
        "initial_state" => {:wide, [[:b, :d, :n]]},
        "dt" => {:storage, [[:b, :d]]},
        "A" => {:wide, [[:d, :n]]},
        "B" => {:storage, varying},
        "C" => {:storage, varying},
        "D" => {:wide, [[:d]]},
        "z" => {:storage, [[:b, :d]]},
        "dt_bias" => {:wide, [[:d]]}
      },
      optional: [{:d, "D"}, :z, :dt_bias],
      options: [
        dt_softplus: :flag,
        dt_clamp: :pair,
        clamp_grad: {:gradient, [:mask, :straight_through]}
      ],
      outputs: [{:y, :storage, [:b, :d], :always}, {:last_state, :wide, [:b, :d, :n], :always}]
    }
  end

  @impl true
  def body(op, inputs), do: Op.Step.body(op, @whole, inputs)

  @impl true
  def gradient(op, given), do: Op.Step.gradient(op, @whole, given)
end
