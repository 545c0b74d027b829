defmodule Sidewinder.MMRec.MemoryGrowthTest do
  # What the whole VM has can only be told while nothing else runs.
  use ExUnit.Case, async: false

  alias Sidewinder.{MMRec.Memory, RandomInputs}

  @width 64

  defp random(shape, seed), do: RandomInputs.tensor(shape, :f32, {-1, 1}, seed)

  defp resident do
    :erlang.garbage_collect()

    with {:ok, text} <- File.read("/proc/self/status"),
         [_, kib] <- Regex.run(~r/VmRSS:\s+(\d+)/, text),
         do: 1024 * String.to_integer(kib),
         else: (_ -> nil)
  end

  test "20,000 writes leave nothing behind" do
    memory = Memory.new(width: @width, short_slots: 32, long_slots: 4)
    [row, summary] = [random({1, 1, @width}, 1), random({1, @width}, 2)]

    write = fn memory, count ->
      Enum.reduce(1..count, memory, fn _, memory ->
        memory |> Memory.write_short(row, row) |> Memory.write_long(summary, summary)
      end)
    end

    memory = write.(memory, 2_000)
    before = resident()
    written = write.(memory, 20_000)
    assert Memory.cursor(written, :short) == 22_000
    # Each row and summary takes a KiB.
    if before, do: assert(resident() - before < 8_000_000)
  end
end
