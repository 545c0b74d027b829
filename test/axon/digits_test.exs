# Without Axon there is nothing to train, which test_helper.exs says.
if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.DigitsTest do
    # It sets the environment of the example.
    use ExUnit.Case, async: false

    import ExUnit.CaptureIO

    # In pure Nx it would take minutes.
    @tag skip: Sidewinder.NxTest.Scans.no_library()
    test "the example trains for some steps and tells their time" do
      System.put_env("STEPS", "3")
      on_exit(fn -> System.delete_env("STEPS") end)
      told = capture_io(fn -> Code.require_file("examples/digits.exs") end)
      assert told =~ "1438 digits to learn from, 359 held out"
      assert told =~ ~r/Epoch: 0, Batch: 0, accuracy: 0\.\d+ loss/
      assert told =~ ~r/A training step of 32 images, backend \w+: [\d.]+ ms\. All 440: \d+ s/
    end
  end
end
