defmodule Sidewinder.Block.MambaBlock do
  @moduledoc """
  `Sidewinder.mamba_block/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as products of matrices and the blocks of its convolution and scan, so this
  struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.MambaBlock,
    gradient: Sidewinder.Block.MambaBlockBackward

  defstruct return_state: false, inputs: [], target: []

  @impl true
  def table do
    state = [:b, {:sum, [:w], -1}, :i]

    %{
      name: :mamba_block,
      composed: true,
      params: %{
        required: ~w(conv_w A_log dt_w in_proj x_proj dt_b D out_proj),
        optional: ~w(conv_b in_proj_b out_proj_b),
        aliases: %{"a_log" => "A_log"}
      },
      inputs: %{
        "x" => {:storage, [[:b, :l, :m]]},
        "conv_w" => {:wide, [[:i, :w]]},
        "A_log" => {:wide, [[:i, :n]]},
        "dt_w" => {:storage, [[:i, :r]]},
        "in_proj" => {:storage, [[{:sum, [:i, :i], 0}, :m]]},
        "x_proj" => {:storage, [[{:sum, [:r, :n, :n], 0}, :i]]},
        "dt_b" => {:wide, [[:i]]},
        "D" => {:wide, [[:i]]},
        "out_proj" => {:storage, [[:m, :i]]},
        "conv_b" => {:wide, [[:i]]},
        "in_proj_b" => {:storage, [[{:sum, [:i, :i], 0}]]},
        "out_proj_b" => {:storage, [[:m]]},
        "conv_state" => {:storage, [state]},
        "ssm_state" => {:wide, [[:b, :i, :n]]}
      },
      optional: [:conv_state, :ssm_state],
      options: [return_state: :flag],
      outputs: [
        {:y, :storage, [:b, :l, :m], :always},
        {:conv_state, :storage, state, :return_state},
        {:ssm_state, :wide, [:b, :i, :n], :return_state}
      ]
    }
  end

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
