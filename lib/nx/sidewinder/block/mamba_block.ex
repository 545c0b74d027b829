defmodule Sidewinder.Block.MambaBlock do
  @moduledoc """
  `Sidewinder.mamba_block/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as products of matrices and the blocks of its convolution and scan, so this
  struct is in none of their graphs.
  """
  @behaviour Sidewinder.Op

  alias Sidewinder.{Error, Op, Reference}

  defstruct return_state: false, inputs: [], target: []

  @required ~w(conv_w A_log dt_w in_proj x_proj dt_b D out_proj)
  @optional ~w(conv_b in_proj_b out_proj_b)

  @impl true
  def table do
    state = [:b, {:sum, [:w], -1}, :i]

    %{
      name: :mamba_block,
      composed: true,
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
      optional: [conv_state: "conv_state", ssm_state: "ssm_state"],
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
    case Op.call(op, [{"x", x} | params!(params)], opts) do
      [y: y] -> y
      [{:y, y} | states] -> {y, Map.new(states)}
    end
  end

  # In the order in which they tell the sizes.
  defp params!(params) when is_map(params) and not is_struct(params) do
    given = Map.new(params, fn {key, t} -> {name(key), t} end)
    known = @required ++ @optional
    unknown = Map.keys(given) -- known

    if unknown != [], do: raise(wrong(hd(unknown), "one of #{Enum.join(known, ", ")}"))
    for name <- known, t = param!(given, name), do: {name, t}
  end

  defp params!(other), do: raise(wrong("params", "a map of tensors", Error.show(other)))

  defp param!(given, name) do
    given[name] || (name in @required && raise(wrong(name, "a tensor", "none")))
  end

  defp name(key) when key in [:a_log, "a_log"], do: "A_log"
  defp name(key), do: to_string(key)

  defp wrong(name, expected, got \\ nil) do
    Error.new(:argument, name, op: "mamba_block", expected: expected, got: got || name)
  end

  @impl true
  defdelegate body(op, inputs), to: Reference.MambaBlock

  @impl true
  def gradient(op, given), do: Op.Gradient.by(Sidewinder.Block.MambaBlockBackward, op, given)
end

defmodule Sidewinder.Block.MambaBlockBackward do
  @moduledoc "The gradient of `Sidewinder.Block.MambaBlock`, as one kernel."
  @behaviour Sidewinder.Op

  alias Sidewinder.{Block, Op, Reference}

  defstruct inputs: [], target: []

  @impl true
  def table, do: Op.Gradient.table(Block.MambaBlock.table())

  @impl true
  defdelegate body(op, inputs), to: Reference.MambaBlock, as: :backward
end
