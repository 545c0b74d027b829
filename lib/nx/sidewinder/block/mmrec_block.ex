defmodule Sidewinder.Block.MmrecBlock do
  @moduledoc """
  `Sidewinder.mmrec_block/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.MmrecBlock,
    gradient: Sidewinder.Block.MmrecBlockBackward

  alias Sidewinder.Block.BlockRecurrence
  alias Sidewinder.{Op, Ops, Reference}

  declare(:mmrec_block,
    composed: true,
    fields: [mix: 0.1],
    axes: [d: {:multiple, :heads, :d}],
    optional: [:k_mem, :v_mem, :initial_state],
    options: [norm: [:outside, :inside]],
    rest: :return_state
  )

  # Outputs that the gradient takes if they were kept, and those that are kept for the gradient alone.
  taken = for slot <- Ops.find!(Ops.all(), :mmrec_block_backward).inputs, do: slot.name
  @kept for {name, _, _, _} <- @table.outputs, "#{name}" in taken, do: "#{name}"
  @own for {name, _, _, {:unless, :checkpoint}} <- @table.outputs, do: name

  # With `checkpoint` the gradient must not keep intermediate tensors alive.
  @impl true
  def gradient(%{checkpoint: checkpoint} = op, given) do
    given = if checkpoint, do: Enum.reject(given, &(elem(&1, 0) in @kept)), else: given
    Sidewinder.Op.Gradient.by(Sidewinder.Block.MmrecBlockBackward, op, given)
  end

  @doc false
  def call(x, params, opts) do
    {dropout, opts} = Reference.MmrecBlock.dropout!(opts)
    opts = ready(x, params, opts)
    {wanted, opts} = all_if_kept(opts)
    inputs = Op.Params.inputs!(%__MODULE__{}, x, params)

    outputs =
      if dropout,
        do: Reference.MmrecBlock.with_dropout(%__MODULE__{}, inputs, opts, dropout),
        else: Op.call(%__MODULE__{}, inputs, opts)

    case Keyword.drop(outputs, @own) do
      [{:y, y} | state] when wanted -> {y, Map.new(state)}
      [{:y, y} | _] -> y
    end
  end

  # Without a memory, one slot of zeros: the result does not depend on the number of zero slots.
  defp ready(x, params, opts) do
    if Keyword.keyword?(opts) and is_map(params) do
      given = for {name, t} <- params, to_string(name) in ["wm", "bm"], do: {:"#{name}", t}
      mix = (given ++ opts) |> BlockRecurrence.mix("mmrec_block") |> Keyword.take([:mix])
      opts |> Keyword.merge(mix) |> memory(x)
    else
      opts
    end
  end

  defp memory(opts, %Nx.Tensor{shape: {_, _, width}, type: type}) do
    if opts[:k_mem] || opts[:v_mem] do
      opts
    else
      zeros = Nx.broadcast(Nx.tensor(0, type: Nx.Type.to_floating(type)), {1, 1, width})
      Keyword.merge(opts, k_mem: zeros, v_mem: zeros)
    end
  end

  defp memory(opts, _wrong), do: opts

  defp all_if_kept(opts) do
    if Keyword.keyword?(opts) do
      wanted = opts[:return_state] == true

      {wanted,
       if(opts[:checkpoint] == false, do: Keyword.put(opts, :return_state, true), else: opts)}
    else
      {false, opts}
    end
  end
end

defmodule Sidewinder.Block.MmrecBlockBackward do
  @moduledoc "The gradient of `Sidewinder.Block.MmrecBlock`, as one kernel. It takes intermediate tensors if they were kept."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.MmrecBlock
end
