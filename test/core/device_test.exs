defmodule Sidewinder.DeviceTest do
  use ExUnit.Case, async: false

  alias Sidewinder.{Calls, Device, Error, Kernel, Tensor}

  setup do
    kept =
      for name <- ["SIDEWINDER_BACKEND", "SIDEWINDER_THREADS"], do: {name, System.get_env(name)}

    on_exit(fn ->
      for {name, value} <- kept,
          do: if(value, do: System.put_env(name, value), else: System.delete_env(name))

      Application.put_env(:sidewinder, :backend, :auto)
      Application.delete_env(:sidewinder, :threads)
      Device.configure()
    end)
  end

  test "info tells what is here" do
    info = Device.info()
    assert info.native and info.why_no_native == nil

    assert "reference" in info.cpu.levels and "scalar" in info.cpu.levels and
             info.cpu.best in info.cpu.levels

    assert info.cpu.threads >= 1
    assert info.gpus != [] or is_binary(info.why_no_gpus)
  end

  test "the environment goes before the configuration, and a call before both" do
    System.delete_env("SIDEWINDER_BACKEND")
    Application.put_env(:sidewinder, :backend, "cuda:3")
    Application.put_env(:sidewinder, :threads, 3)
    assert Device.configure() == %{backend: {:cuda, 3}, threads: 3}
    System.put_env("SIDEWINDER_BACKEND", "cpu")
    System.put_env("SIDEWINDER_THREADS", "2")
    assert Device.configure() == %{backend: :cpu, threads: 2}
    assert Device.info().cpu.threads == 2
    assert Device.configure(backend: :auto) == %{backend: :auto, threads: 2}

    inputs = Calls.inputs({4, 100, 64, 16})
    assert {:cpu, %{device: nil, threads: 2}} = Kernel.plan(inputs)
    assert {:cpu, %{device: nil, threads: 1}} = Kernel.plan(inputs, threads: 1)
    assert {:io, %{device: 7}} = Kernel.plan(inputs, backend: "cuda:7")
  end

  test "wrong values are refused" do
    for {name, value} <- [
          {"SIDEWINDER_BACKEND", "gpu"},
          {"SIDEWINDER_THREADS", "many"},
          {"SIDEWINDER_THREADS", "0"}
        ] do
      System.put_env(name, value)
      assert_raise Error, fn -> Device.configure() end
      System.delete_env(name)
    end

    for text <- ["cuda:", "cuda:-1", "cuda:x", "", nil, 1, {:cuda, :a}] do
      assert_raise Error, fn -> Device.parse!(text) end
    end
  end

  test "small work stays on its scheduler, larger and forced work does not" do
    small = Calls.inputs({1, 2, 3, 4})
    assert {:quick, %{threads: 1}} = Kernel.plan(small, backend: :cpu)
    assert {:cpu, %{level: "scalar"}} = Kernel.plan(small, backend: :cpu, level: "scalar")
    assert {:cpu, _} = Kernel.plan(Calls.inputs({4, 100, 64, 16}), backend: :cpu)
    assert {:cpu, _} = Kernel.plan(for({name, t} <- small, do: {name, Tensor.cast(t, :f64)}))

    assert {:cpu, _} =
             Kernel.plan(x: Calls.uniform({100, 100}, 0, 1), A: Calls.uniform({1, 16}, 0, 1))

    rows = Calls.uniform({10, 100}, 0, 1)
    assert {:quick, _} = Kernel.plan(x: rows, w: Calls.uniform({100, 100}, 0, 1))
    assert {:cpu, _} = Kernel.plan(x: rows, in_proj: Calls.uniform({200, 100}, 0, 1))
  end

  @tag :no_cuda
  test "large work runs on the CPU where there is no GPU" do
    assert {:cpu, %{device: nil}} = Kernel.plan(Calls.inputs({8, 200, 200, 16}))
  end

  @tag :cuda
  test "large work from the host runs on the GPU" do
    assert {:io, %{device: 0}} = Kernel.plan(Calls.inputs({8, 200, 200, 16}))
    assert {:cpu, %{device: nil}} = Kernel.plan(Calls.inputs({8, 200, 200, 16}), backend: :cpu)
  end
end
