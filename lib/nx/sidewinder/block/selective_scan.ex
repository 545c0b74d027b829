defmodule Sidewinder.Block.SelectiveScan do
  @moduledoc """
  `Sidewinder.selective_scan/6` in the graph of a compiler, as the struct of an `Nx.block/4`.

  Its fields are the options, the names of the `inputs` in the order of the block's arguments, and
  the `target` that the caller chose. A compiler may lower it to a call of its own; the block's
  default is `Sidewinder.Reference`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SelectiveScan,
    gradient: Sidewinder.Block.SelectiveScanBackward

  defstruct dt_softplus: false,
            dt_clamp: nil,
            clamp_grad: :mask,
            return_state: false,
            return_states: false,
            inputs: [],
            target: [],
            algorithm: :sequential

  @impl true
  def table do
    varying = [[:b, :l, :n], [:b, :l, {:divides, :d}, :n], [:d, :n]]

    %{
      name: :selective_scan,
      inputs: %{
        "x" => {:storage, [[:b, :l, :d]]},
        "dt" => {:storage, [[:b, :l, :d]]},
        "A" => {:wide, [[:d, :n]]},
        "B" => {:storage, varying},
        "C" => {:storage, varying},
        "D" => {:wide, [[:d]]},
        "z" => {:storage, [[:b, :l, :d]]},
        "dt_bias" => {:wide, [[:d]]},
        "initial_state" => {:wide, [[:b, :d, :n]]}
      },
      optional: [{:d, "D"}, :z, :dt_bias, :initial_state],
      options: [
        dt_softplus: :flag,
        dt_clamp: :pair,
        clamp_grad: {:gradient, [:mask, :straight_through]},
        return_state: :flag,
        return_states: :flag
      ],
      outputs: [
        {:y, :storage, [:b, :l, :d], :always},
        {:last_state, :wide, [:b, :d, :n], :return_state},
        {:states, :wide, [:b, :l, :d, :n], :return_states}
      ]
    }
  end

  @doc false
  # All outputs by name where there are three, as the kernels have it.
  def call(op, [x, dt, a, b, c], opts) do
    case Sidewinder.Op.call(
           op,
           [{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}],
           complete(opts)
         ) do
      [y: y] -> y
      [y: y, last_state: last_state] -> {y, last_state}
      [_, _, _] = outputs -> Map.new(outputs)
    end
  end

  defp complete(opts) do
    if is_list(opts) and {:return_states, true} in opts,
      do: Keyword.put(opts, :return_state, true),
      else: opts
  end
end

defmodule Sidewinder.Block.SelectiveScanBackward do
  @moduledoc "The gradient of `Sidewinder.Block.SelectiveScan`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SelectiveScan,
    gradient_of: Sidewinder.Block.SelectiveScan
end
