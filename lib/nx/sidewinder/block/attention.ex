defmodule Sidewinder.Block.Attention do
  @moduledoc """
  `Sidewinder.attention/4` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Attention,
    gradient: Sidewinder.Block.AttentionBackward

  import Sidewinder.Op.Heads
  alias Sidewinder.Op.Declared

  defstruct Declared.fields(:attention, return_lse: false)

  @keys {:divides, :h, :g}

  @table Declared.table(:attention,
           chosen_by: :layout,
           inputs: %{
             "q" => {:storage, [axes(:h, :l, :w)]},
             "k" => {:storage, [axes(@keys, :m, :w)]},
             "v" => {:storage, [axes(@keys, :m, :v)]}
           },
           options: [return_lse: {:here, :flag}],
           outputs: [
             {:y, :storage, axes(:h, :l, :v), :always},
             {:lse, :wide, [:b, :h, :l], {:saved, :return_lse}}
           ],
           hint: hint()
         )

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.AttentionBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Attention`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Attention,
    gradient_of: Sidewinder.Block.Attention

  # It takes both outputs too.
  %{"dy" => y, "dlse" => lse} = @table.inputs
  @table %{@table | inputs: Map.merge(@table.inputs, %{"y" => y, "lse" => lse})}

  @impl true
  def table, do: @table
end
