# What the events of `Sidewinder.Telemetry` cost a call that no handler listens to, and one with a handler:
#
#     mix run bench/telemetry.exs
#
# Nanoseconds, the least of many short rounds, of a call without work, and for comparison of the smallest
# call of an op.

defmodule TelemetryBench do
  alias Sidewinder.{Kernel, Telemetry, Tensor}

  @calls 2_000
  @rounds 300
  @event [:sidewinder, :call, :stop]

  def run do
    tensor = Tensor.from_list([1, 2], :f32, {1, 2})
    weight = Tensor.from_list([1, 2], :f32, {2})
    inputs = for i <- 1..5, do: {"x#{i}", Tensor.to_native(tensor)}
    answer = {%{device: nil, level: nil, threads: 1}, {:ok, %{}}}
    work = fn -> answer end
    call = fn -> Telemetry.call(:op, inputs, work) end
    op = fn -> Kernel.run(:rms_norm, [x: tensor, w: weight], %{}) end

    bare = least(work)
    report("nobody listens", least(call) - bare)
    report("the smallest call of an op", least(op))

    if running?() do
      apply(:telemetry, :attach, ["bench", @event, &__MODULE__.nothing/4, nil])
      report("with a handler", least(call) - bare)
    end
  end

  def nothing(_event, _measurements, _metadata, _config), do: :ok

  defp running?, do: List.keymember?(Application.started_applications(), :telemetry, 0)

  defp least(work), do: Enum.min(for _ <- 1..@rounds, do: sample(work))

  # In a process of its own, whose heap is small.
  defp sample(work) do
    Task.await(Task.async(fn -> timed(work) end), :infinity)
  end

  defp timed(work) do
    start = :os.perf_counter(:nanosecond)
    repeat(work, @calls)
    (:os.perf_counter(:nanosecond) - start) / @calls
  end

  defp repeat(_work, 0), do: :ok

  defp repeat(work, left) do
    work.()
    repeat(work, left - 1)
  end

  defp report(what, ns), do: IO.puts("#{String.pad_trailing(what, 28)} #{round(ns)} ns")
end

TelemetryBench.run()
