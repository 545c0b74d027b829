defmodule Sidewinder.Block.LinearScan do
  @moduledoc """
  `Sidewinder.linear_scan/3` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.LinearScan,
    gradient: Sidewinder.Block.LinearScanBackward

  declare(:linear_scan, fields: [algorithm: :sequential])

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
end
