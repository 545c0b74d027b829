# Whole calls from Elixir, binary to binary and buffer to buffer, without any package:
#
#     mix run bench/calls.exs [RESULT.json]
#
# Medians of many calls on the CPU and, where there is one, on CUDA device 0. The reference workload
# is 32 x 60 x 512 x 16, the layer that of mamba-130m, a step one token of it.

Code.require_file("machine.exs", __DIR__)

defmodule Calls do
  alias Sidewinder.{Device, Kernel.Scan, Tensor}

  @scans [reference: {32, 60, 512, 16}, "mamba-130m layer": {1, 2048, 1536, 16}]

  def run(out) do
    rows = Enum.flat_map(devices(), &rows/1)
    for row <- rows, do: IO.puts("#{pad(row.call)} #{pad(row.where)} #{round3(row.median_us)} us")
    if out, do: File.write!(out, Machine.result(Enum.map(rows, &json/1)))
  end

  defp devices, do: [:cpu | if(Device.cuda?(), do: [:cuda_from_host, :cuda_resident], else: [])]

  defp rows(where) do
    for({name, size} <- @scans, do: row(name, where, scan(size), &Scan.selective_scan/6)) ++
      [row(:"one token", where, step({1, 1536, 16}), &Scan.selective_state_update/7)]
  end

  defp row(name, where, tensors, fun) do
    args = Enum.map(tensors, &place(&1, where)) ++ [[backend: backend(where)]]
    %{call: "#{name}", where: "#{where}", median_us: median(fn -> apply(fun, args) end)}
  end

  defp place(tensor, :cuda_resident), do: Tensor.to_device(tensor, {:cuda, 0})
  defp place(tensor, _), do: tensor

  defp backend(:cpu), do: :cpu
  defp backend(_), do: {:cuda, 0}

  defp scan({b, l, d, n}) do
    [random({b, l, d}, -1, 1), random({b, l, d}, 0.001, 0.1), random({d, n}, -16, -1)] ++
      [random({b, l, n}, -1, 1), random({b, l, n}, -1, 1)]
  end

  defp step({b, d, n}) do
    [random({b, d, n}, -1, 1), random({b, d}, -1, 1), random({b, d}, 0.001, 0.1)] ++
      [random({d, n}, -16, -1), random({b, n}, -1, 1), random({b, n}, -1, 1)]
  end

  defp random(shape, low, high) do
    count = Tensor.elements(shape)

    values =
      for _ <- 1..count, into: <<>>, do: <<low + (high - low) * :rand.uniform()::float-native-32>>

    Tensor.new(values, :f32, shape)
  end

  # A second of calls after a tenth to warm up, in microseconds.
  defp median(call) do
    _ = times(call, 100_000)
    times = call |> times(1_000_000) |> Enum.sort()
    Enum.at(times, div(length(times), 2)) / 1000
  end

  defp times(call, microseconds) do
    until =
      System.monotonic_time() + System.convert_time_unit(microseconds, :microsecond, :native)

    Stream.repeatedly(fn -> time(call) end)
    |> Enum.take_while(fn _ -> System.monotonic_time() < until end)
  end

  defp time(call) do
    start = System.monotonic_time()
    call.()
    System.convert_time_unit(System.monotonic_time() - start, :native, :nanosecond)
  end

  defp json(%{call: call, where: where, median_us: us}),
    do: ~s({"call": "#{call}", "where": "#{where}", "median_us": #{round3(us)}})

  defp round3(number), do: :erlang.float_to_binary(number * 1.0, decimals: 3)
  defp pad(text), do: String.pad_trailing(text, 18)
end

:rand.seed(:exsss, {1, 2, 3})
Calls.run(List.first(System.argv()))
