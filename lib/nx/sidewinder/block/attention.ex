defmodule Sidewinder.Block.Attention do
  @moduledoc """
  `Sidewinder.attention/4` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Attention,
    gradient: Sidewinder.Block.AttentionBackward

  # The gradient takes both results.
  declare(:attention,
    axes: [k: {:divides, :h, :k}],
    rest: {:saved, :return_lse}
  )
end

defmodule Sidewinder.Block.AttentionBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Attention`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Attention,
    gradient_of: Sidewinder.Block.Attention
end
