defmodule Sidewinder.Block.Matmul do
  @moduledoc """
  `Sidewinder.matmul/3` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Matmul,
    gradient: Sidewinder.Block.MatmulBackward

  # The rows of a product are independent, as entries of a batch are.
  declare(:matmul,
    axes: [m: :b]
  )
end

defmodule Sidewinder.Block.MatmulBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Matmul`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Matmul,
    gradient_of: Sidewinder.Block.Matmul
end
