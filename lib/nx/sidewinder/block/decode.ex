defmodule Sidewinder.Block.Decode do
  @moduledoc "`Sidewinder.decode/6` for `Nx.Defn.Evaluator`; other compilers get what it is composed of."
  use Sidewinder.Op, reference: Sidewinder.Reference.Decode

  import Sidewinder.Op.Heads
  alias Sidewinder.Op.Declared

  defstruct Declared.fields(:decode)

  @scores {:repeated, [:b, :h, :l, {:sum, [:l, :cached], 0}]}
  @key_heads {:divides, :h, :g}

  @table Declared.table(:decode,
           composed: true,
           chosen_by: :layout,
           inputs: %{
             "q" => {:storage, [axes(:h, :l, :w)]},
             "k" => {:storage, [axes(@key_heads, :l, :w)]},
             "v" => {:storage, [axes(@key_heads, :l, :v)]},
             "keys" => {:storage, [[:b, @key_heads, :c, :w]]},
             "values" => {:storage, [[:b, @key_heads, :c, :v]]},
             "mask" => {:mask, [@scores]},
             "bias" => {:wide, [@scores]}
           },
           options: [cached: :count],
           outputs: [
             {:y, :storage, axes(:h, :l, :v), :always},
             {:keys, :storage, [:b, :g, :c, :w], :always},
             {:values, :storage, [:b, :g, :c, :v], :always}
           ],
           hint: hint()
         )

  @impl true
  def table, do: @table
end
