defmodule Sidewinder.Block.MambaBlock do
  @moduledoc """
  `Sidewinder.mamba_block/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as products of matrices and the blocks of its convolution and scan, so this
  struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.MambaBlock,
    gradient: Sidewinder.Block.MambaBlockBackward

  declare(:mamba_block,
    composed: true,
    aliases: %{"a_log" => "A_log"},
    without: ~w(expand d_state dt_rank d_conv)
  )

  @doc false
  def call(op, x, params, opts) do
    case Sidewinder.Op.Params.call(op, x, params, opts) do
      [y: y] -> y
      [{:y, y} | states] -> {y, Map.new(states)}
    end
  end
end

defmodule Sidewinder.Block.MambaBlockBackward do
  @moduledoc "The gradient of `Sidewinder.Block.MambaBlock`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.MambaBlock
end
