defmodule Sidewinder.Block.CausalConv1d do
  @moduledoc """
  `Sidewinder.causal_conv1d/3` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.CausalConv1d,
    gradient: Sidewinder.Block.CausalConv1dBackward

  declare(:causal_conv1d)
end

defmodule Sidewinder.Block.CausalConv1dBackward do
  @moduledoc "The gradient of `Sidewinder.Block.CausalConv1d`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.CausalConv1d,
    gradient_of: Sidewinder.Block.CausalConv1d
end

defmodule Sidewinder.Block.CausalConv1dUpdate do
  @moduledoc """
  `Sidewinder.causal_conv1d_update/4` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op

  alias Sidewinder.Block.CausalConv1d
  alias Sidewinder.Op

  declare(:causal_conv1d_update)

  @impl true
  def body(op, inputs), do: Op.Step.body(op, CausalConv1d, inputs)

  @impl true
  def gradient(op, given), do: Op.Step.gradient(op, CausalConv1d, given)
end
