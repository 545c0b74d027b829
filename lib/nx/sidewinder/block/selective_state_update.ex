defmodule Sidewinder.Block.SelectiveStateUpdate do
  @moduledoc """
  `Sidewinder.selective_state_update/7` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op

  alias Sidewinder.Op.Declared
  alias Sidewinder.Block.SelectiveScan
  alias Sidewinder.Op

  defstruct Declared.fields(:selective_state_update, clamp_grad: :mask)

  # Groups divide the channels.
  @varying [[:b, :n], [:b, {:divides, :d}, :n]]
  @table Declared.table(:selective_state_update,
           inputs: %{"B" => {:storage, @varying}, "C" => {:storage, @varying}},
           options: [clamp_grad: {:gradient, [:mask, :straight_through]}]
         )

  @impl true
  def table, do: @table

  @impl true
  def body(op, inputs), do: Op.Step.body(op, SelectiveScan, inputs)

  @impl true
  def gradient(op, given), do: Op.Step.gradient(op, SelectiveScan, given)
end
