defmodule Sidewinder.Block.Decode do
  @moduledoc "`Sidewinder.decode/6` for `Nx.Defn.Evaluator`; other compilers get what it is composed of."
  use Sidewinder.Op, reference: Sidewinder.Reference.Decode

  alias Sidewinder.Op.Heads

  # A mask has the keys of the cache first.
  declare(:decode,
    composed: true,
    axes: [k: {:divides, :h, :k}, m: {:sum, [:l, :cached], 0}],
    outputs: [
      {:y, :storage, Heads.axes(:h, :l, :v), :always},
      {:keys, :storage, [:b, :k, :c, :w], :always},
      {:values, :storage, [:b, :k, :c, :v], :always}
    ],
    hint: Heads.hint()
  )
end
