defmodule Sidewinder.Block.GatedRmsNorm do
  @moduledoc """
  `Sidewinder.gated_rms_norm/4` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.GatedRmsNorm,
    gradient: Sidewinder.Block.GatedRmsNormBackward

  declare(:gated_rms_norm,
    axes: [d: {:multiple, :groups, :d}]
  )
end

defmodule Sidewinder.Block.GatedRmsNormBackward do
  @moduledoc "The gradient of `Sidewinder.Block.GatedRmsNorm`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.GatedRmsNorm,
    gradient_of: Sidewinder.Block.GatedRmsNorm
end
