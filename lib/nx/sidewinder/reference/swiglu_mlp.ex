defmodule Sidewinder.Reference.SwigluMlp do
  @moduledoc false
  # The gated feed-forward layer, composed of dense layers.

  alias Sidewinder.{Block.Linear, Op}

  def body(op, %{"x" => x, "wg" => wg, "wu" => wu, "wd" => wd}) do
    [y: gate] = Op.part(op, %Linear{activation: op.activation}, [{"x", x}, {"w", wg}])
    [y: up] = Op.part(op, %Linear{}, [{"x", x}, {"w", wu}])
    Op.part(op, %Linear{}, [{"x", Nx.multiply(gate, up)}, {"w", wd}])
  end
end
