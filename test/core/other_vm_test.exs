defmodule Sidewinder.OtherVmTest do
  # What would spoil this VM for other tests is done in another one.
  use ExUnit.Case, async: true

  @ebin Path.dirname(:code.which(Sidewinder.Native))

  defp elixir(ebin, code, env \\ []) do
    System.cmd(System.find_executable("elixir"), ["-pa", ebin, "-e", code],
      env: env,
      stderr_to_stdout: true
    )
  end

  test "without the native library everything loads, and calls raise what tells the remedy" do
    root = Path.join(System.tmp_dir!(), "sidewinder-#{System.pid()}")
    ebin = Path.join([root, "sidewinder", "ebin"])
    File.mkdir_p!(ebin)
    File.cp_r!(@ebin, ebin)

    {output, 0} =
      elixir(ebin, """
      {:ok, _} = Application.ensure_all_started(:sidewinder)
      false = Sidewinder.Native.loaded?()
      info = Sidewinder.Device.info()
      %{native: false, cpu: nil, gpus: []} = info
      true = info.why_no_native =~ "sidewinder_nif" and info.why_no_gpus =~ "mix compile"
      %{has_native: false, has_simd: false, simd_level: nil, threads: nil, cuda: cuda} = info
      %{available: false, devices: [], why_not: why} = cuda
      true = why == info.why_no_gpus
      backends = Enum.uniq(for {_, choice} <- info.ops, do: choice)
      [] = backends -- [%{backend: "pure Nx", why_not: info.why_no_native}]
      {:ok, _} = Application.ensure_all_started(:mix)
      Enum.each(Mix.Tasks.Sidewinder.Info.lines(info), &IO.puts/1)
      x = Sidewinder.Tensor.new(<<0::32>>, :f32, {1, 1, 1})
      a = Sidewinder.Tensor.new(<<0::32>>, :f32, {1, 1})
      try do
        Sidewinder.Kernel.Scan.selective_scan(x, x, a, x, x)
      rescue
        error in Sidewinder.Error -> IO.puts("\#{error.kind} \#{Exception.message(error)}")
      end
      """)

    File.rm_rf!(root)

    assert output =~
             "unavailable native library: expected Sidewinder's compiled library, got none"

    assert output =~ "mix compile --force"
    assert output =~ ~r/^native library +none: .*sidewinder_nif/m

    if Code.ensure_loaded?(Sidewinder.Reference),
      do: assert(output =~ ~r/^selective_scan +pure Nx$/m),
      else: assert(output =~ "No op can run")
  end

  test "a wrong setting in the environment is named at the first call" do
    code = "Sidewinder.Device.config()"
    {output, status} = elixir(@ebin, code, [{"SIDEWINDER_BACKEND", "abacus"}])

    assert status != 0 and
             output =~ ~s(backend: expected auto, cpu, cuda, cuda:N or nx, got "abacus")
  end

  @tag :cuda
  test "a lost device answers with its error at once, and the CPU works on" do
    {output, 0} =
      elixir(@ebin, """
      alias Sidewinder.{Device, Kernel, Native, Tensor}
      one = &Tensor.from_list(List.duplicate(1, Tensor.elements(&1)), :f32, &1)
      inputs = for {n, s} <- [x: {1, 2, 3}, dt: {1, 2, 3}, A: {3, 4}, B: {1, 2, 4}, C: {1, 2, 4}], do: {n, one.(s)}
      expected = Kernel.run(:selective_scan, inputs, %{}, backend: :cpu)
      Kernel.run(:selective_scan, inputs, %{}, backend: {:cuda, 0})
      true = Device.cuda?()
      buffer = Tensor.to_device(one.({3}), {:cuda, 0})
      {:ok, _} = Native.debug_lose_device(0)
      for work <- [
            fn -> Kernel.run(:selective_scan, inputs, %{}, backend: {:cuda, 0}) end,
            fn -> Tensor.to_device(one.({1}), {:cuda, 0}) end,
            fn -> Tensor.to_host(buffer) end
          ] do
        try do
          work.()
        rescue
          error in Sidewinder.Error -> IO.puts("kind \#{error.kind}")
        end
      end
      false = Device.cuda?()
      ^expected = Kernel.run(:selective_scan, inputs, %{}, backend: :cpu)
      ^expected = Kernel.run(:selective_scan, inputs, %{})
      """)

    assert String.split(output, "\n", trim: true) == List.duplicate("kind device_lost", 3)
  end
end
