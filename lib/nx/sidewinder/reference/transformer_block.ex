defmodule Sidewinder.Reference.TransformerBlock do
  @moduledoc false
  # The block of a transformer, composed of its norms, self-attention and feed-forward layer.

  alias Sidewinder.Op
  alias Sidewinder.Block.{LayerNorm, Mha, SwigluMlp}

  def body(op, %{"x" => x} = inputs) do
    mha = struct(Mha, Map.take(op, [:heads, :causal, :rope_theta, :pairing]))
    h = Nx.add(x, part(op, mha, norm(op, x, inputs, "ln1"), inputs, ~w(wqkv wo bo mask)))
    [y: Nx.add(h, part(op, %SwigluMlp{}, norm(op, h, inputs, "ln2"), inputs, ~w(wg wu wd)))]
  end

  defp norm(op, x, inputs, name) do
    given = [{"x", x}, {"w", inputs[name <> "_w"]}, {"b", inputs[name <> "_b"]}]
    [y: y] = Op.part(op, %LayerNorm{eps: op.eps}, given)
    y
  end

  defp part(op, part, x, inputs, names) do
    [y: y] = Op.part(op, part, [{"x", x} | for(name <- names, do: {name, inputs[name]})])
    y
  end
end
