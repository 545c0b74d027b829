defmodule Sidewinder.Block.HdsQueryTopk do
  @moduledoc """
  `Sidewinder.hds_query_topk/4` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan`.

  Its gradient is that of attention over the slots found, in pure Nx.
  """
  use Sidewinder.Op

  alias Sidewinder.Op.Gradient
  alias Sidewinder.Reference.HdsQueryTopk

  declare(:hds_query_topk,
    axes: [c: {:by, {HdsQueryTopk, :candidates, []}}],
    outputs: [context: "(B, L, D)", slots: {"(B, L, C)", "index"}]
  )

  @impl true
  defdelegate body(op, inputs), to: HdsQueryTopk

  @impl true
  def gradient(_op, given) do
    gradients = HdsQueryTopk.gradient(Map.new(given))
    tensors = for {name, t} <- given, name in ~w(q k v dcontext), do: {name, t}
    Map.new(gradients, fn {name, t} -> {name, Gradient.last(t, tensors, __MODULE__)} end)
  end
end
