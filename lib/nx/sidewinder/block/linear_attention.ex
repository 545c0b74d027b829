defmodule Sidewinder.Block.LinearAttention do
  @moduledoc """
  `Sidewinder.linear_attention/4` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan` for what its fields
  are.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.LinearAttention,
    gradient: Sidewinder.Block.LinearAttentionBackward

  # Groups divide the heads.
  declare(:linear_attention, axes: [g: {:divides, :h, :g}])
end

defmodule Sidewinder.Block.LinearAttentionBackward do
  @moduledoc "The gradient of `Sidewinder.Block.LinearAttention`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.LinearAttention,
    gradient_of: Sidewinder.Block.LinearAttention
end
