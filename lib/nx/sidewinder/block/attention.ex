defmodule Sidewinder.Block.Attention do
  @moduledoc """
  `Sidewinder.attention/4` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Attention,
    gradient: Sidewinder.Block.AttentionBackward

  defstruct scale: nil,
            causal: false,
            q_offset: nil,
            layout: :heads_first,
            return_lse: false,
            inputs: [],
            target: []

  import Sidewinder.Op.Heads

  @scores {:repeated, [:b, :h, :l, :m]}
  @keys {:divides, :h, :g}

  @table %{
    name: :attention,
    chosen_by: :layout,
    inputs: %{
      "q" => {:storage, [axes(:h, :l, :w)]},
      "k" => {:storage, [axes(@keys, :m, :w)]},
      "v" => {:storage, [axes(@keys, :m, :v)]},
      "mask" => {:mask, [@scores]},
      "bias" => {:wide, [@scores]}
    },
    optional: [:mask, :bias],
    options: [
      scale: :number,
      causal: :flag,
      q_offset: :integer,
      layout: layouts(),
      return_lse: {:here, :flag}
    ],
    outputs: [
      {:y, :storage, axes(:h, :l, :v), :always},
      {:lse, :wide, [:b, :h, :l], {:saved, :return_lse}}
    ],
    hint: hint()
  }

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
