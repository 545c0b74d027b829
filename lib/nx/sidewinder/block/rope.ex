defmodule Sidewinder.Block.Rope do
  @moduledoc """
  `Sidewinder.rope/2` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Rope,
    gradient: Sidewinder.Block.RopeBackward

  alias Sidewinder.Op.Declared

  defstruct Declared.fields(:rope)

  import Sidewinder.Op.Heads

  @x axes(:h, :l, {:multiple, 2, :w})

  @table Declared.table(:rope,
           chosen_by: :layout,
           inputs: %{"x" => {:storage, [@x]}},
           outputs: [{:y, :storage, @x, :always}],
           hint: hint()
         )

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.RopeBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Rope`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Rope,
    gradient_of: Sidewinder.Block.Rope
end
