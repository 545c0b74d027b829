defmodule Sidewinder.Block.SelectiveStateUpdate do
  @moduledoc """
  `Sidewinder.selective_state_update/7` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op

  alias Sidewinder.Block.SelectiveScan
  alias Sidewinder.Op

  # Groups divide the channels.
  declare(:selective_state_update,
    fields: [clamp_grad: :mask],
    axes: [g: {:divides, :d}],
    options: Keyword.take(SelectiveScan.table().options, [:clamp_grad])
  )

  @impl true
  def body(op, inputs), do: Op.Step.body(op, SelectiveScan, inputs)

  @impl true
  def gradient(op, given), do: Op.Step.gradient(op, SelectiveScan, given)
end
