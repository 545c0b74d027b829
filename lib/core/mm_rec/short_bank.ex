defmodule Sidewinder.MMRec.ShortBank do
  @moduledoc false
  # The short bank of a layer: `short` holds the written rows that are still there, in order of time, nil before the
  # first; the last of them is in the slot before `short_cursor`. A row's slot is its number modulo the number of slots.

  alias Sidewinder.{Held, Kernel, Tensor}
  alias Sidewinder.MMRec.Bank

  # Rows that memory is taken for at first.
  @room 64

  @doc "The layer with `rows`, keys and values of `count` rows, from the slot `start` on."
  def write(_memory, layer, _rows, _start, 0), do: layer

  # None of the present rows stays.
  def write(%{short_slots: slots} = memory, layer, rows, start, count) when count >= slots,
    do: fill(memory, layer, rows, Integer.mod(-count, slots), start + count)

  def write(%{short_slots: slots} = memory, %{short: nil} = layer, rows, start, count),
    do:
      append(memory, layer, Bank.held(memory, max(count, min(@room, slots))), rows, start, count)

  def write(%{short_slots: slots} = memory, layer, rows, start, count) do
    if rem(start, slots) == rem(layer.short_cursor, slots),
      do: append(memory, layer, layer.short, rows, start, count),
      else: overwrite(memory, layer, rows, start, count)
  end

  defp append(memory, layer, held, rows, start, count) do
    held = Held.claim(held, count, memory.short_slots)
    Bank.write(memory, held, rows, %{start: held.length, mode: "strict"})
    held = Held.extended(held, count, memory.short_slots)
    %{layer | short: held, short_cursor: start + count}
  end

  # Away from the cursor, slots and time are no longer in the same order.
  defp overwrite(%{short_slots: slots} = memory, layer, rows, start, count) do
    {k, v} = read(memory, layer)

    banks =
      for {bank, rows} <- Enum.zip([k, v], rows),
          do: Kernel.MMRec.write_short(bank, rows, start: start, backend: memory.backend)

    fill(memory, layer, banks, Integer.mod(-(start + count), slots), start + count)
  end

  @doc "The layer with `rows` of all slots, which are moved so that the one at the cursor comes first."
  def fill(%{short_slots: slots} = memory, layer, rows, start, cursor) do
    held = memory |> Bank.held(slots) |> Held.claim(slots)
    Bank.write(memory, held, rows, %{start: start, mode: "ring"})
    %{layer | short: Held.extended(held, slots, slots), short_cursor: cursor}
  end

  @doc "Keys and values of all slots, in order of slots."
  def read(memory, %{short: nil}) do
    zeros = Bank.zeros(memory, memory.short_slots)
    {zeros, zeros}
  end

  def read(%{short_slots: slots} = memory, %{short: held, short_cursor: cursor}) do
    count = count(held)
    zeros = if count < slots, do: Bank.zeros(memory, slots)

    banks =
      for rows <- Held.rows(held, held.first, count) do
        start = Integer.mod(cursor - count, slots)
        bank = zeros || rows
        Kernel.MMRec.write_short(bank, rows, start: start, backend: memory.backend)
      end

    List.to_tuple(banks)
  end

  @doc "Key and value of a slot, `{batch, width}`."
  def read_slot(%{short_slots: slots} = memory, %{short: held, short_cursor: cursor}, slot) do
    # How many rows before the cursor it is.
    back = slots - Integer.mod(slot - cursor, slots)

    tensors =
      if back <= count(held),
        do: Held.rows(held, held.length - back, 1),
        else: List.duplicate(Bank.zeros(memory, 1), 2)

    [k, v] = for t <- tensors, do: Tensor.reshape(t, {memory.batch, memory.width})
    {k, v}
  end

  @doc "How many rows there are."
  def count(nil), do: 0
  def count(held), do: held.length - held.first
end
