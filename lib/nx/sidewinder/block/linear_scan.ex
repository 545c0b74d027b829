defmodule Sidewinder.Block.LinearScan do
  @moduledoc """
  `Sidewinder.linear_scan/3` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.LinearScan,
    gradient: Sidewinder.Block.LinearScanBackward

  defstruct return_state: false, inputs: [], target: [], algorithm: :sequential

  @impl true
  def table do
    %{
      name: :linear_scan,
      inputs: %{
        "a" => {:storage, [[:b, :l, :k]]},
        "b" => {:storage, [[:b, :l, :k]]},
        "initial_state" => {:wide, [[:b, :k]]}
      },
      optional: [:initial_state],
      options: [return_state: :flag],
      outputs: [
        {:h, :storage, [:b, :l, :k], :always},
        {:last_state, :wide, [:b, :k], :return_state}
      ]
    }
  end

  @doc false
  def call(op, [a, b], opts) do
    case Sidewinder.Op.call(op, [{"a", a}, {"b", b}], opts) do
      [h: h] -> h
      [h: h, last_state: last_state] -> {h, last_state}
    end
  end
end

defmodule Sidewinder.Block.LinearScanBackward do
  @moduledoc "The gradient of `Sidewinder.Block.LinearScan`. It takes h in place of b."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.LinearScan,
    gradient_of: Sidewinder.Block.LinearScan

  {b, inputs} = Map.pop!(@table.inputs, "b")

  @table %{
    @table
    | inputs: Map.put(inputs, "h", b),
      outputs: [da: "a", db: "a", dinitial_state: "initial_state"]
  }

  @impl true
  def table, do: @table
end
