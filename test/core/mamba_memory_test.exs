defmodule Sidewinder.MambaMemoryTest do
  # Others would take and give back memory meanwhile.
  use ExUnit.Case, async: false

  alias Sidewinder.Mamba
  alias Sidewinder.Mamba.Session

  test "states take no more memory the longer a session runs" do
    session = Session.new(Mamba.random(layers: 1, width: 16, vocabulary: 5, backend: :cpu))
    step = fn count -> for _ <- 1..count, do: Session.step(session, 1) end
    step.(2_000)
    before = resident()
    step.(20_000)
    assert resident() - before < 8_000_000
  end

  defp resident do
    {pages, _} =
      "/proc/self/statm" |> File.read!() |> String.split() |> Enum.at(1) |> Integer.parse()

    pages * 4096
  end
end
