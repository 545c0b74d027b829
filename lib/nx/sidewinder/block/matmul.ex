defmodule Sidewinder.Block.Matmul do
  @moduledoc """
  `Sidewinder.matmul/3` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Matmul,
    gradient: Sidewinder.Block.MatmulBackward

  alias Sidewinder.Op.Declared

  defstruct Declared.fields(:matmul)

  # The rows of a product are independent, as entries of a batch are.
  @table Declared.table(:matmul,
           inputs: %{"a" => {:storage, [[:b, :k]]}},
           outputs: [{:c, :storage, [:b, :n], :always}],
           hint: "Columns of a meet rows of b"
         )

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.MatmulBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Matmul`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Matmul,
    gradient_of: Sidewinder.Block.Matmul
end
