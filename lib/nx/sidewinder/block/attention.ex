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

  @impl true
  def table do
    keys = {:divides, :h, :g}
    scores = {:repeated, [:b, :h, :l, :m]}

    %{
      name: :attention,
      chosen_by: :layout,
      inputs: %{
        "q" => {:storage, [axes(:h, :l, :w)]},
        "k" => {:storage, [axes(keys, :m, :w)]},
        "v" => {:storage, [axes(keys, :m, :v)]},
        "mask" => {:mask, [scores]},
        "bias" => {:wide, [scores]}
      },
      optional: [mask: "mask", bias: "bias"],
      options: [
        scale: :number,
        causal: :flag,
        q_offset: :integer,
        layout: Map.keys(axes(:h, :l, :w)),
        return_lse: {:here, :flag}
      ],
      outputs: [
        {:y, :storage, axes(:h, :l, :v), :always},
        {:lse, :wide, [:b, :h, :l], {:saved, :return_lse}}
      ],
      hint: hint()
    }
  end

  @doc false
  def axes(heads, length, width) do
    %{heads_first: [:b, heads, length, width], heads_last: [:b, length, heads, width]}
  end

  @doc false
  def hint do
    "Axes are batch, heads, length, width, or with layout: :heads_last batch, length, heads, width; " <>
      "a mask and a bias have batch, heads, queries, keys"
  end
end

defmodule Sidewinder.Block.AttentionBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Attention`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Attention,
    gradient_of: Sidewinder.Block.Attention

  # It takes both outputs too.
  @impl true
  def table do
    table = Sidewinder.Op.Gradient.table(Sidewinder.Block.Attention.table())
    %{inputs: %{"dy" => y, "dlse" => lse}} = table
    %{table | inputs: Map.merge(table.inputs, %{"y" => y, "lse" => lse})}
  end
end
