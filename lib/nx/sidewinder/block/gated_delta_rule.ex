defmodule Sidewinder.Block.GatedDeltaRule do
  @moduledoc """
  `Sidewinder.gated_delta_rule/5` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan` for what its fields
  are.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.GatedDeltaRule,
    gradient: Sidewinder.Block.GatedDeltaRuleBackward

  # Groups divide the heads.
  declare(:gated_delta_rule, axes: [g: {:divides, :h, :g}])
end

defmodule Sidewinder.Block.GatedDeltaRuleBackward do
  @moduledoc "The gradient of `Sidewinder.Block.GatedDeltaRule`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.GatedDeltaRule,
    gradient_of: Sidewinder.Block.GatedDeltaRule
end
