defmodule Sidewinder.DeviceTest do
  use ExUnit.Case, async: false

  alias Sidewinder.{Calls, Device, Error, Kernel, Tensor}

  setup do
    names = ~w(SIDEWINDER_BACKEND SIDEWINDER_THREADS SIDEWINDER_ALLOW_TF32)
    kept = for name <- names, do: {name, System.get_env(name)}

    on_exit(fn ->
      for {name, value} <- kept,
          do: if(value, do: System.put_env(name, value), else: System.delete_env(name))

      Application.put_env(:sidewinder, :backend, :auto)
      Application.delete_env(:sidewinder, :threads)
      Application.delete_env(:sidewinder, :allow_tf32)
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

  test "info tells in short what is here, and where each op would run" do
    info = Device.info()
    assert info.has_native and info.threads == info.cpu.threads
    assert info.simd_level in [:amx, :avx512, :avx2, :neon, :scalar]
    assert to_string(info.simd_level) == info.cpu.best
    assert info.has_simd == (info.simd_level != :scalar)
    assert info.cuda.available == Device.cuda?()
    assert info.cuda.available == (info.cuda.why_not == nil)
    assert length(info.cuda.devices) == length(info.gpus)

    ops = Sidewinder.Ops.all()
    forward = for %{backward_of: nil, name: name} <- ops, do: name
    assert forward -- Map.keys(info.ops) == []
    refute Enum.any?(Map.keys(info.ops), &String.ends_with?(&1, "_backward"))
  end

  @tag :no_cuda
  test "without a GPU every op runs on the CPU, and a forced one is told in words" do
    %{ops: ops, cuda: cuda} = Device.info()
    %{cpu: cpu} = Device.info()
    Device.configure(threads: 3)
    assert cuda.why_not =~ "CUDA" and not cuda.available and cuda.devices == []
    assert ops["linear"].why_not == cuda.why_not
    assert Device.info().ops["linear"].backend == "cpu #{cpu.best}, 3 threads"
    Device.configure(threads: 1)
    assert Device.info().ops["linear"].backend == "cpu #{cpu.best}, 1 thread"

    Device.configure(backend: "cuda:1")
    assert %{backend: "none: cuda:1 is forced" <> _, why_not: why} = Device.info().ops["linear"]
    assert why == cuda.why_not
    Device.configure(backend: :cpu)
    assert Device.info().ops["linear"].why_not == cuda.why_not
  end

  test "a forced pure Nx is told" do
    Device.configure(backend: :nx)
    %{ops: ops} = Device.info()

    pure =
      if Code.ensure_loaded?(Sidewinder.Reference),
        do: "pure Nx",
        else: "none: there is no pure Nx version"

    assert ops["selective_scan"].backend == pure
    assert ops["selective_scan"].why_not =~ "forces the backend nx"
  end

  @tag :cuda
  test "with a GPU every op runs there too, unless another backend is forced" do
    assert %{backend: backend, why_not: nil} = Device.info().ops["linear"]
    assert backend =~ "cpu" and backend =~ "cuda:0 for large or resident tensors"
    Device.configure(backend: {:cuda, 0})
    assert %{backend: "cuda:0", why_not: nil} = Device.info().ops["linear"]
    Device.configure(backend: {:cuda, 99})
    assert %{backend: "none: " <> _, why_not: "there are " <> _} = Device.info().ops["linear"]
    Device.configure(backend: :cpu)
    assert Device.info().ops["linear"].why_not =~ "forces the backend cpu"
  end

  test "the environment goes before the configuration, and a call before both" do
    System.delete_env("SIDEWINDER_BACKEND")
    Application.put_env(:sidewinder, :backend, "cuda:3")
    Application.put_env(:sidewinder, :threads, 3)
    Application.put_env(:sidewinder, :allow_tf32, true)
    assert Device.configure() == %{backend: {:cuda, 3}, threads: 3, allow_tf32: true}
    System.put_env("SIDEWINDER_BACKEND", "cpu")
    System.put_env("SIDEWINDER_THREADS", "2")
    System.put_env("SIDEWINDER_ALLOW_TF32", "false")
    assert Device.configure() == %{backend: :cpu, threads: 2, allow_tf32: false}
    assert %{allow_tf32: true} = Device.configure(allow_tf32: true)
    assert Device.info().cpu.threads == 2
    assert %{backend: :auto, threads: 2} = Device.configure(backend: :auto)

    inputs = Calls.inputs({4, 100, 64, 16})
    plan = &Kernel.plan(:selective_scan, inputs, %{}, &1)
    assert {:cpu, %{device: nil, threads: 2}} = plan.([])
    assert {:cpu, %{device: nil, threads: 1}} = plan.(threads: 1)
    assert {:io, %{device: 7, allow_tf32: false}} = plan.(backend: "cuda:7")
    assert {:io, %{allow_tf32: true}} = plan.(backend: "cuda:7", allow_tf32: true)
  end

  test "wrong values are refused" do
    for {name, value} <- [
          {"SIDEWINDER_BACKEND", "gpu"},
          {"SIDEWINDER_THREADS", "many"},
          {"SIDEWINDER_THREADS", "0"},
          {"SIDEWINDER_ALLOW_TF32", "maybe"}
        ] do
      System.put_env(name, value)
      assert_raise Error, fn -> Device.configure() end
      System.delete_env(name)
    end

    assert %Error{kind: :option, argument: "allow_tf32", expected: "true or false"} =
             catch_error(
               Kernel.plan(:selective_scan, Calls.inputs({1, 2, 3, 4}), %{}, allow_tf32: :maybe)
             )

    for text <- ["cuda:", "cuda:-1", "cuda:x", "", nil, 1, {:cuda, :a}] do
      assert_raise Error, fn -> Device.parse!(text) end
    end
  end

  test "small work stays on its scheduler, larger and forced work does not" do
    scan = fn inputs, where ->
      Kernel.plan(:selective_scan, inputs, %{}, [backend: :cpu] ++ where)
    end

    small = Calls.inputs({1, 2, 3, 4})
    assert {:quick, %{threads: 1}} = scan.(small, [])
    assert {:cpu, %{level: "scalar"}} = scan.(small, level: "scalar")
    assert {:cpu, _} = scan.(Calls.inputs({4, 100, 64, 16}), [])

    # An update in f64 is slower.
    middling = Calls.inputs({1, 100, 64, 16})
    assert {:quick, _} = scan.(middling, [])
    assert {:cpu, _} = scan.(for({name, t} <- middling, do: {name, Tensor.cast(t, :f64)}), [])
  end

  @tag :no_cuda
  test "large work runs on the CPU where there is no GPU" do
    assert {:cpu, %{device: nil}} = Kernel.plan(:selective_scan, Calls.inputs({8, 200, 200, 16}))
  end

  @tag :cuda
  test "large work from the host runs on the GPU" do
    assert {:io, %{device: 0}} = Kernel.plan(:selective_scan, Calls.inputs({8, 200, 200, 16}))
    inputs = Calls.inputs({8, 200, 200, 16})
    assert {:cpu, %{device: nil}} = Kernel.plan(:selective_scan, inputs, %{}, backend: :cpu)
  end
end
