defmodule Sidewinder.Block.GatedRmsNorm do
  @moduledoc """
  `Sidewinder.gated_rms_norm/4` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.GatedRmsNorm,
    gradient: Sidewinder.Block.GatedRmsNormBackward

  alias Sidewinder.Op.Declared

  defstruct Declared.fields(:gated_rms_norm)

  @table Declared.table(:gated_rms_norm,
           inputs: %{"x" => {:storage, [[:..., {:multiple, :groups, :d}]]}},
           hint: "Rows are normalised over the last axis of x"
         )

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.GatedRmsNormBackward do
  @moduledoc "The gradient of `Sidewinder.Block.GatedRmsNorm`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.GatedRmsNorm,
    gradient_of: Sidewinder.Block.GatedRmsNorm
end
