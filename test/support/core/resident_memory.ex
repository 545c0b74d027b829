defmodule Sidewinder.ResidentMemory do
  @moduledoc false
  # What is lost at every turn makes each round of turns grow, and the last one too. Heaps that find
  # their size and memory that was freed elsewhere move a round or two and then stand still: one
  # bound over all rounds would tell the two apart only on a machine that does nothing else.
  import ExUnit.Assertions

  @rounds 8

  @doc "Fails if `round`, called eight times on what it returned, takes `bytes` more each time to the end."
  def assert_settles(state, bytes, round) do
    {growth, _} =
      Enum.map_reduce(1..@rounds, state, fn _, state ->
        before = resident()
        state = round.(state)
        {resident() - before, state}
      end)

    # The first half may still fill what others have freed.
    least = growth |> Enum.drop(div(@rounds, 2)) |> Enum.min()
    assert least < bytes, "bytes more after each round: #{inspect(growth)}"
  end

  # Linux alone tells; elsewhere nothing seems to grow.
  defp resident do
    :erlang.garbage_collect()

    with {:ok, text} <- File.read("/proc/self/status"),
         [_, kib] <- Regex.run(~r/VmRSS:\s+(\d+)/, text),
         do: 1024 * String.to_integer(kib),
         else: (_ -> 0)
  end
end
