defmodule Sidewinder.LoadTest do
  use ExUnit.Case, async: false

  import Sidewinder.Calls, only: [inputs: 2]
  alias Sidewinder.{Kernel, Tensor}

  # Small calls on a normal scheduler, larger ones on dirty ones.
  @sizes [{1, 1, 1, 1}, {1, 7, 33, 16}, {2, 63, 20, 5}, {3, 100, 64, 16}]

  # Long enough to be seen, with arithmetic that cannot be hurried.
  defp long_inputs, do: inputs({1, 12_000, 128, 16}, 1)

  defp long_call(inputs),
    do: Kernel.run(:selective_scan, inputs, %{}, backend: :cpu, level: "reference")

  defp binary_memory do
    for process <- Process.list(), do: :erlang.garbage_collect(process)
    :erlang.memory(:binary)
  end

  # Memory is freed by other threads, a little later.
  defp assert_memory_back(before, tries \\ 50) do
    memory = binary_memory()

    cond do
      memory <= before + 1_000_000 -> :ok
      tries == 0 -> flunk("#{memory} bytes of binaries are alive, there were #{before} before")
      true -> Process.sleep(20) && assert_memory_back(before, tries - 1)
    end
  end

  test "1,000 processes at once get right answers, and memory is as before" do
    calls = for {sizes, seed} <- Enum.with_index(@sizes), do: inputs(sizes, seed)
    scan = &Kernel.run(:selective_scan, &1, %{return_state: true}, backend: :cpu)
    calls = for inputs <- calls, do: {inputs, scan.(inputs)}
    before = binary_memory()

    work = fn i ->
      for round <- 0..4 do
        {inputs, expected} = Enum.at(calls, rem(i + round, length(calls)))
        assert scan.(inputs) == expected
      end
    end

    1..1_000 |> Enum.map(&Task.async(fn -> work.(&1) end)) |> Task.await_many(120_000)
    assert_memory_back(before)
  end

  test "a caller that is killed in the middle of a call harms nobody" do
    inputs = long_inputs()
    before = binary_memory()

    for _ <- 1..3 do
      {caller, monitor} = spawn_monitor(fn -> long_call(inputs) end)
      Process.sleep(30)
      Process.exit(caller, :kill)
      assert_receive {:DOWN, ^monitor, :process, ^caller, :killed}, 30_000
    end

    small = inputs({1, 7, 33, 16}, 1)
    assert Kernel.run(:selective_scan, small, %{}) == Kernel.run(:selective_scan, small, %{})
    assert_memory_back(before, 500)
  end

  test "schedulers stay responsive while as many long calls run as there are schedulers" do
    inputs = long_inputs()
    started = System.monotonic_time(:microsecond)
    calls = for _ <- 1..System.schedulers_online(), do: Task.async(fn -> long_call(inputs) end)
    late = Enum.sort(ticks(calls, []))
    took = System.monotonic_time(:microsecond) - started

    # Calls on the schedulers themselves would keep others waiting until they are done. Not a fixed
    # time, for some kernels let busy threads go on for 140 ms before an idle scheduler gets its turn.
    assert Enum.at(late, div(length(late), 2)) < took / 4
  end

  # By how many microseconds sleeps of a millisecond are exceeded while the tasks are at work.
  defp ticks(tasks, late) do
    {time, _} = :timer.tc(fn -> Process.sleep(1) end)
    late = [time - 1_000 | late]
    if Enum.any?(tasks, &Process.alive?(&1.pid)), do: ticks(tasks, late), else: late
  end

  @tag :cuda
  test "1,000 processes at once on CUDA, host and resident, and device memory is as before" do
    calls = for {sizes, seed} <- Enum.with_index(@sizes), do: inputs(sizes, seed)
    scan = &Kernel.run(:selective_scan, &1, %{return_state: true}, &2)

    on_device = fn inputs ->
      for {name, t} <- inputs, do: {name, Tensor.to_device(t, {:cuda, 0})}
    end

    on_host = fn outputs -> Map.new(outputs, fn {name, t} -> {name, Tensor.to_host(t)} end) end
    calls = for inputs <- calls, do: {inputs, scan.(inputs, backend: {:cuda, 0})}
    {:ok, before} = Sidewinder.Native.debug_device_bytes(0)

    work = fn i ->
      {inputs, expected} = Enum.at(calls, rem(i, length(calls)))
      assert scan.(inputs, backend: {:cuda, 0}) == expected
      assert inputs |> on_device.() |> scan.([]) |> on_host.() == expected
    end

    1..1_000 |> Enum.map(&Task.async(fn -> work.(&1) end)) |> Task.await_many(300_000)
    for process <- Process.list(), do: :erlang.garbage_collect(process)
    Process.sleep(200)
    assert {:ok, ^before} = Sidewinder.Native.debug_device_bytes(0)
  end
end
