defmodule Sidewinder.ExamplesTest do
  # It sets the environment of the examples.
  use ExUnit.Case, async: false

  import ExUnit.CaptureIO

  @tag :tmp_dir
  test "associative recall trains its models for some steps and writes what it measured",
       %{tmp_dir: folder} do
    {steps, arguments} = {System.get_env("STEPS"), System.argv()}
    System.put_env("STEPS", "2")
    System.argv([folder])

    on_exit(fn ->
      System.argv(arguments)
      if steps, do: System.put_env("STEPS", steps), else: System.delete_env("STEPS")
    end)

    told = capture_io(fn -> Code.require_file("examples/associative_recall.exs") end)
    assert told =~ ~r/Mamba, 16 states, 72640 weights\nstep 1, 27 pairs: loss 4\.1/
    assert told =~ ~r/Mamba-2, 64 states, 72908 weights\nstep 1, 27 pairs: loss 4\.1/
    json = File.read!(Path.join(folder, "associative_recall.json"))
    assert json =~ ~r/"mamba2": {"parameters": 72908, "right": 0\.0\d+/
    assert json =~ ~r/"mamba2_by_step": \[\n    {"step": 1, "pairs": 27, "loss": 4\.1/
    plot = File.read!(Path.join(folder, "associative_recall.svg"))
    assert length(String.split(plot, "<polyline")) == 3
  end
end
