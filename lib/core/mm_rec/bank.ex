defmodule Sidewinder.MMRec.Bank do
  @moduledoc false
  # The tensors of a memory's banks, `{batch, slots, width}` on the memory's device.

  alias Sidewinder.{Held, Kernel, Tensor}

  @doc "A bank of zeros."
  def zeros(memory, slots) do
    # A failed allocation is an error in the native library; for a binary made here it would end the VM.
    %{tensors: [bank]} = held = Held.new(memory.type, [shape(memory, slots)], ordinal(memory))
    %{data: zero} = Tensor.from_list([0], memory.type, {1})
    row = :binary.copy(zero, memory.batch * memory.width)
    zero = here(Tensor.new(row, memory.type, {memory.batch, memory.width}), memory)
    run(:write_long, memory, [{"bank", bank}, {"summary", zero}], %{policy: "broadcast"})
    [zeros] = Held.rows(held, 0, slots)
    zeros
  end

  @doc "Memory for `slots` keys and values, of which none is claimed."
  def held(memory, slots) do
    shape = shape(memory, slots)
    Held.new(memory.type, [shape, shape], ordinal(memory))
  end

  @doc "Writes rows of keys and of values in place, into slots that were claimed."
  def write(memory, held, rows, options) do
    for {bank, rows} <- Enum.zip(held.tensors, rows),
        do: run(:write_short, memory, [{"bank", bank}, {"rows", rows}], options)
  end

  defp run(op, memory, inputs, options),
    do: Kernel.run(op, inputs, options, backend: memory.backend)

  defp shape(memory, slots), do: [memory.batch, slots, memory.width]

  @doc "The tensor on the memory's device."
  def here(tensor, memory), do: Tensor.to_device(tensor, device(memory))

  @doc "The ordinal of the memory's device, nil for the host."
  def ordinal(memory), do: Held.ordinal!(device(memory))

  defp device(%{backend: :cpu}), do: :host
  defp device(%{backend: backend}), do: backend
end
