defmodule Sidewinder.Block.Decode do
  @moduledoc "`Sidewinder.decode/6` for `Nx.Defn.Evaluator`; other compilers get what it is composed of."
  use Sidewinder.Op, reference: Sidewinder.Reference.Decode

  # The keys of masks and biases are those of the cache, then the new ones.
  declare(:decode,
    composed: true,
    axes: [k: {:divides, :h, :k}, m: {:sum, [:l, :cached], 0}],
    outputs: [y: "(B, H, L, V)", keys: "(B, K, C, W)", values: "(B, K, C, V)"]
  )
end
