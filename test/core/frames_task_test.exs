defmodule Sidewinder.FramesTaskTest do
  # Others would take the time that frames need.
  use ExUnit.Case, async: false

  @small ~w(--backend cpu --threads 1 --agents 2 --window 3 --width 16 --state 4 --layers 1)

  setup do
    shell = Mix.shell()
    Mix.shell(Mix.Shell.Process)
    on_exit(fn -> Mix.shell(shell) end)
  end

  defp run(args), do: Mix.Tasks.Sidewinder.Frames.run(args)

  # The lines of a run: what it does, the columns, and a row for each form.
  defp lines(args) do
    run(@small ++ args)
    said()
  end

  defp said do
    receive do
      {:mix_shell, :info, [line]} -> [line | said()]
    after
      0 -> []
    end
  end

  defp row(line) do
    ["cpu", type, form, frames, missed | times] = String.split(line)
    assert type in ~w(f32 bf16)
    {form, String.to_integer(frames), String.to_integer(missed), for(t <- times, do: number(t))}
  end

  defp number(text) do
    {number, ""} = Float.parse(text)
    number
  end

  test "frames that have time are not missed, and each form has its row" do
    assert [about, columns, window, stream] = lines(~w(--rate 2 --seconds 1))
    assert about =~ "2 agents, window 3, width 16, state 4, 1 layers; 2.00 frames a second for"
    assert String.split(columns) == ~w(backend type form frames missed p50 p95 p99 longest)

    for {line, form} <- [{window, "window"}, {stream, "stream"}] do
      assert {^form, 2, 0, [p50, p95, p99, longest]} = row(line)
      assert 0 < p50 and p50 <= p95 and p95 <= p99 and p99 <= longest and longest < 500
    end
  end

  test "matrices may be quantized" do
    for format <- ~w(q8_0 q4_0 ternary) do
      assert [about, _, window, _] =
               lines(~w(--rate 2 --seconds 0.5 --width 32 --quantize) ++ [format])

      assert about =~ "1 layers in #{format};"
      assert {"window", 1, 0, _} = row(window)
    end
  end

  test "at a rate that nothing can keep all frames are missed, those never begun among them" do
    [_, _ | rows] = lines(~w(--rate 1000000 --seconds 0.002 --type bf16))

    for {row, form} <- Enum.zip(rows, ["window", "stream"]) do
      assert {^form, 2000, 2000, [p50 | _]} = row(row)
      assert p50 > 0.001
    end
  end

  test "says in a line what is wrong" do
    for {args, part} <- [
          {~w(--speed 3), "--speed"},
          {~w(--seconds soon), "--seconds"},
          {~w(--seconds 0), "--seconds: expected a positive number"},
          {~w(--seconds -1), "--seconds"},
          {~w(--rate 1e300), "--rate"},
          {~w(--agents 0), "--agents"},
          {~w(--width 100000000), "--width"},
          {~w(--width 9000000 --window 1 --agents 1), "width"},
          {~w(--agents 10000000 --window 10000000 --width 1), "shape"},
          {~w(--threads 0), "threads"},
          {~w(--type f31), "--type"},
          {~w(--backend nx), "--backend"},
          {~w(--quantize q5_0), "--quantize: expected q8_0, q4_0 or ternary, got q5_0"},
          {~w(--quantize q8_0 --type f64), "type"},
          {~w(--backend tpu), "backend"},
          {~w(now), "arguments"}
        ] do
      # What is said last counts.
      args = if "--backend" in args, do: args, else: ["--backend", "cpu" | args]
      assert catch_exit(run(args)) == {:shutdown, 1}
      assert_received {:mix_shell, :error, [message]}
      assert message =~ part and message =~ "expected" and message =~ "got"
      refute message =~ "\n"
    end
  end
end
