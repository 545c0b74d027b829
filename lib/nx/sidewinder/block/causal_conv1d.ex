defmodule Sidewinder.Block.CausalConv1d do
  @moduledoc """
  `Sidewinder.causal_conv1d/3` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.CausalConv1d,
    gradient: Sidewinder.Block.CausalConv1dBackward

  defstruct activation: nil, return_state: false, inputs: [], target: []

  @impl true
  def table do
    state = [:b, {:sum, [:w], -1}, :d]

    %{
      name: :causal_conv1d,
      inputs: %{
        "x" => {:storage, [[:b, :l, :d]]},
        "w" => {:wide, [[:d, :w]]},
        "bias" => {:wide, [[:d]]},
        "initial_state" => {:storage, [state]}
      },
      optional: [:bias, :initial_state],
      options: [activation: [:silu], return_state: :flag],
      outputs: [
        {:y, :storage, [:b, :l, :d], :always},
        {:last_state, :storage, state, :return_state}
      ]
    }
  end
end

defmodule Sidewinder.Block.CausalConv1dBackward do
  @moduledoc "The gradient of `Sidewinder.Block.CausalConv1d`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.CausalConv1d,
    gradient_of: Sidewinder.Block.CausalConv1d
end

defmodule Sidewinder.Block.CausalConv1dUpdate do
  @moduledoc """
  `Sidewinder.causal_conv1d_update/4` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op

  alias Sidewinder.{Block, Op}

  @whole {Block.CausalConv1d, "state", :state}

  defstruct activation: nil, inputs: [], target: []

  @impl true
  def table do
    state = [:b, {:sum, [:w], -1}, :d]

    %{
      name: :causal_conv1d_update,
      inputs: %{
        "x" => {:storage, [[:b, :d]]},
        "w" => {:wide, [[:d, :w]]},
        "state" => {:storage, [state]},
        "bias" => {:wide, [[:d]]}
      },
      optional: [:bias],
      options: [activation: [:silu]],
      outputs: [{:y, :storage, [:b, :d], :always}, {:state, :storage, state, :always}]
    }
  end

  @impl true
  def body(op, inputs), do: Op.Step.body(op, @whole, inputs)

  @impl true
  def gradient(op, given), do: Op.Step.gradient(op, @whole, given)
end
