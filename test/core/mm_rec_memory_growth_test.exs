defmodule Sidewinder.MMRec.MemoryGrowthTest do
  # What the whole VM has can only be told while nothing else runs.
  use ExUnit.Case, async: false

  import Sidewinder.ResidentMemory
  alias Sidewinder.{MMRec.Memory, RandomInputs}

  @width 64

  defp random(shape, seed), do: RandomInputs.tensor(shape, :f32, {-1, 1}, seed)

  test "writes leave nothing behind" do
    memory = Memory.new(width: @width, short_slots: 32, long_slots: 4)
    [row, summary] = [random({1, 1, @width}, 1), random({1, @width}, 2)]

    # Each row and summary takes a KiB: 5 MB a round.
    assert_settles(memory, 1_000_000, fn memory ->
      written =
        Enum.reduce(1..5_000, memory, fn _, memory ->
          memory |> Memory.write_short(row, row) |> Memory.write_long(summary, summary)
        end)

      assert Memory.cursor(written, :short) == Memory.cursor(memory, :short) + 5_000
      written
    end)
  end
end
