defmodule Sidewinder.Block.Ssd do
  @moduledoc """
  `Sidewinder.ssd/6` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan` for what its fields are.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Ssd,
    gradient: Sidewinder.Block.SsdBackward

  # Groups divide the heads.
  declare(:ssd,
    axes: [g: {:divides, :h, :g}],
    options: [clamp_grad: {:gradient, [:mask, :straight_through]}]
  )
end

defmodule Sidewinder.Block.SsdBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Ssd`."
  use Sidewinder.Op, reference: Sidewinder.Reference.Ssd, gradient_of: Sidewinder.Block.Ssd
end
