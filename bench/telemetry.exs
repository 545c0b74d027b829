# What the events of `Sidewinder.Telemetry` cost a call, and for comparison the smallest call of an op:
#
#     mix run bench/telemetry.exs [RESULT.json]
#
# Nanoseconds, the least of many short rounds, which other processes disturb least. A call without work, less that work.

Code.require_file("machine.exs", __DIR__)

defmodule TelemetryBench do
  alias Sidewinder.{Kernel, Telemetry, Tensor}

  @calls 200
  @rounds 1_000
  @event [:sidewinder, :call, :stop]

  def run(out) do
    rows = [nobody_listens: span(), smallest_call: least(&smallest/0)] ++ listened()
    for {what, ns} <- rows, do: IO.puts("#{String.pad_trailing("#{what}", 16)} #{round(ns)} ns")
    if out, do: File.write!(out, Machine.result(Enum.map(rows, &json/1)))
  end

  def nothing(_event, _measurements, _metadata, _config), do: :ok

  # By `apply`, because :telemetry may not be there.
  defp listened do
    if List.keymember?(Application.started_applications(), :telemetry, 0) do
      apply(:telemetry, :attach, ["bench", @event, &__MODULE__.nothing/4, nil])
      [with_a_handler: span()]
    else
      []
    end
  end

  # Of five inputs and no output.
  defp span do
    inputs = for i <- 1..5, do: {"x#{i}", Tensor.to_native(vector())}
    answer = {%{device: nil, level: nil, threads: 1}, {:ok, %{}}}
    work = fn -> answer end
    least(fn -> Telemetry.call(:op, inputs, work) end) - least(work)
  end

  defp smallest, do: Kernel.run(:rms_norm, [x: row(), w: vector()], %{})

  defp row, do: %Tensor{vector() | shape: {1, 2}}

  defp vector,
    do: %Tensor{type: :f32, shape: {2}, data: <<1.0::float-32-native, 2.0::float-32-native>>}

  defp least(work), do: Enum.min(for _ <- 1..@rounds, do: sample(work))

  # In a process of its own, whose heap is small.
  defp sample(work), do: Task.await(Task.async(fn -> timed(work) end), :infinity)

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

  defp json({what, ns}), do: ~s({"what": "#{what}", "ns": #{round(ns)}})
end

TelemetryBench.run(List.first(System.argv()))
