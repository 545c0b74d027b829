defmodule Sidewinder.Block.SelectiveScan do
  @moduledoc """
  `Sidewinder.selective_scan/6` in the graph of a compiler, as the struct of an `Nx.block/4`.

  Its fields are the options, the names of the `inputs` in the order of the block's arguments, and
  the `target` that the caller chose. A compiler may lower it to a call of its own; the block's
  default is `Sidewinder.Reference`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SelectiveScan,
    gradient: Sidewinder.Block.SelectiveScanBackward

  # Groups divide the channels.
  declare(:selective_scan,
    fields: [algorithm: :sequential],
    axes: [g: {:divides, :d}],
    options: [clamp_grad: {:gradient, [:mask, :straight_through]}]
  )

  @doc false
  # A map of outputs if there are three, as in `Sidewinder.Kernel.Scan`.
  def call(op, [x, dt, a, b, c], opts) do
    inputs = [{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}]

    case Sidewinder.Op.call(op, inputs, Sidewinder.Kernel.Scan.complete(opts)) do
      [y: y] -> y
      [y: y, last_state: last_state] -> {y, last_state}
      [_, _, _] = outputs -> Map.new(outputs)
    end
  end
end

defmodule Sidewinder.Block.SelectiveScanBackward do
  @moduledoc "The gradient of `Sidewinder.Block.SelectiveScan`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SelectiveScan,
    gradient_of: Sidewinder.Block.SelectiveScan
end
