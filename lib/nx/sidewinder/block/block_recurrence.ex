defmodule Sidewinder.Block.BlockRecurrence do
  @moduledoc """
  `Sidewinder.block_recurrence/5` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.BlockRecurrence,
    gradient: Sidewinder.Block.BlockRecurrenceBackward

  alias Sidewinder.Error

  declare(:block_recurrence,
    fields: [mix: 0.1],
    rest: :return_state
  )

  @doc false
  def call([z, gamma, w_gate, b_gate], opts) do
    inputs = [{"z", z}, {"gamma", gamma}, {"w_gate", w_gate}, {"b_gate", b_gate}]

    case Sidewinder.Op.call(%__MODULE__{}, inputs, mix(opts, "block_recurrence")) do
      [h: h] -> h
      [h: h, last_state: last_state] -> {h, last_state}
    end
  end

  @doc false
  # Without a gate, wm and bm, nothing is mixed in.
  def mix(opts, op) do
    if Keyword.keyword?(opts) do
      gate = for key <- [:wm, :bm], opts[key] != nil, do: key
      mix!(gate, opts, op)
    else
      opts
    end
  end

  defp mix!([], opts, op) do
    case Keyword.get(opts, :mix) do
      nil -> Keyword.put(opts, :mix, 0)
      mix when mix == 0 -> opts
      mix -> raise wrong(:option, "mix", op, "0 where there are no wm and bm", mix)
    end
  end

  defp mix!([_, _], opts, _op), do: opts

  defp mix!([given], _opts, op) do
    [missing] = [:wm, :bm] -- [given]
    raise wrong(:argument, "#{missing}", op, "a tensor beside #{given}", nil)
  end

  defp wrong(kind, argument, op, expected, got) do
    Error.new(kind, argument, op: op, expected: expected, got: Error.show(got))
  end
end

defmodule Sidewinder.Block.BlockRecurrenceBackward do
  @moduledoc "The gradient of `Sidewinder.Block.BlockRecurrence`. It takes its h too."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.BlockRecurrence,
    gradient_of: Sidewinder.Block.BlockRecurrence
end
