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

  # A model and what it says, so that a lost resource shows.
  @model """
  alias Sidewinder.{Mamba, Native, Tensor}
  model = Mamba.random(layers: 1, width: 8, vocabulary: 11, seed: 1)
  says = fn model -> Mamba.forward(model, [[1, 2, 3]]) |> Tensor.to_host() end
  said = says.(model)
  works? = fn -> Native.loaded?() and says.(model) == said end
  """

  @tag skip: not Sidewinder.Native.loaded?()
  test "the module is loaded again, as upgrades and recompiling do, and models go on" do
    {output, status} =
      elixir(@ebin, """
      #{@model}
      beam = File.read!(:code.which(Native))
      load = fn -> :code.load_binary(Native, ~c"native.beam", beam) end
      owner = spawn(fn -> Process.sleep(:infinity) end)
      before = Sidewinder.Cancellation.new(owner)
      busy = Task.async(fn -> for _ <- 1..2000, do: ^said = says.(model) end)

      for again <- 1..3 do
        :code.purge(Native)
        {:module, Native} = :code.load_file(Native)
        true = works?.()
        # Held by a version that has gone, and freed by this one.
        for _ <- 1..20, do: Mamba.random(layers: 1, width: 8, vocabulary: 11, seed: again)
        :erlang.garbage_collect()
      end

      2000 = busy |> Task.await(:infinity) |> length()

      # Monitors of versions that have gone are those of this one.
      both = [before, Sidewinder.Cancellation.new(owner)]
      [false, false] = Enum.map(both, &Sidewinder.Cancellation.cancelled?/1)
      Process.exit(owner, :kill)
      Process.sleep(100)
      [true, true] = Enum.map(both, &Sidewinder.Cancellation.cancelled?/1)

      # As `recompile` does it.
      :code.purge(Native)
      :code.delete(Native)
      {:module, Native} = load.()
      true = works?.()

      # Nothing refers to the library for a while, but its threads are there.
      for _ <- 1..2 do
        :code.purge(Native)
        :code.delete(Native)
        :code.purge(Native)
        {:module, Native} = load.()
        ^said = says.(Mamba.random(layers: 1, width: 8, vocabulary: 11, seed: 1))
      end

      IO.puts("all is well")
      """)

    assert {String.trim(output), status} == {"all is well", 0}
  end

  @tag skip: not Sidewinder.Native.loaded?()
  test "where the library cannot be loaded again, or is another, the old module goes on" do
    root = Path.join(System.tmp_dir!(), "sidewinder-again-#{System.pid()}")
    other = Path.join([root, "sidewinder"])
    File.mkdir_p!(other)
    for dir <- ~w(ebin priv), do: File.cp_r!(Path.join(@ebin, "../#{dir}"), Path.join(other, dir))
    on_exit(fn -> File.rm_rf!(root) end)

    {output, status} =
      elixir(@ebin, """
      #{@model}
      beam = File.read!(:code.which(Native))
      load = fn -> :code.load_binary(Native, ~c"native.beam", beam) end
      Logger.configure(level: :none)
      ebin = #{inspect(@ebin)}

      # No application, so no library.
      Code.delete_path(ebin)
      {:error, :on_load_failure} = load.()
      true = works?.()

      # Another file is another library, which must not touch what the first one has made.
      Code.prepend_path(#{inspect(Path.join(other, "ebin"))})
      {:error, :on_load_failure} = load.()
      true = works?.()

      # It can take over the module, not the resources.
      for forget <- [&:code.purge/1, &:code.delete/1, &:code.purge/1], do: forget.(Native)
      {:module, Native} = load.()
      ^said = says.(Mamba.random(layers: 1, width: 8, vocabulary: 11, seed: 1))
      try do
        says.(model)
        raise "it has used a foreign model"
      rescue
        ArgumentError -> :ok
      end
      IO.puts("all is well")
      """)

    assert {output |> String.split("\n", trim: true) |> List.last(), status} ==
             {"all is well", 0},
           output
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
