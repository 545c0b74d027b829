defmodule Sidewinder.MambaMemoryTest do
  # Others would take and give back memory meanwhile.
  use ExUnit.Case, async: false

  import Sidewinder.ResidentMemory
  alias Sidewinder.Mamba
  alias Sidewinder.Mamba.Session

  test "states take no more memory the longer a session runs" do
    session = Session.new(Mamba.random(layers: 1, width: 16, vocabulary: 5, backend: :cpu))

    # A hundred bytes lost at a step are found.
    assert_settles(session, 500_000, fn session ->
      for _ <- 1..5_000, do: Session.step(session, 1)
      session
    end)
  end
end
