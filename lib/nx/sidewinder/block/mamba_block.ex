defmodule Sidewinder.Block.MambaBlock do
  @moduledoc """
  `Sidewinder.mamba_block/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as products of matrices and the blocks of its convolution and scan, so this
  struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.MambaBlock,
    gradient: Sidewinder.Block.MambaBlockBackward

  alias Sidewinder.Op.Declared

  defstruct return_state: false, inputs: [], target: []

  @table Declared.table(:mamba_block,
           composed: true,
           params: %{
             required: ~w(conv_w A_log dt_w in_proj x_proj dt_b D out_proj),
             optional: ~w(conv_b in_proj_b out_proj_b),
             aliases: %{"a_log" => "A_log"}
           },
           without: ~w(expand d_state dt_rank d_conv)
         )

  @impl true
  def table, do: @table

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
