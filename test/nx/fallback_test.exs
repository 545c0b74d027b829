defmodule Sidewinder.FallbackTest do
  # It hides the native library from all.
  use ExUnit.Case, async: false

  import ExUnit.CaptureLog
  import Sidewinder.NxTest.Scans
  alias Sidewinder.NxTest.Ops

  @why {Sidewinder.Native, :why_not_loaded}
  @warned {Sidewinder.Op.Warning, :no_library}

  setup do
    {args, _} = problem({2, 4, 3, 2})
    expected = scan(args)
    why = :persistent_term.get(@why)
    config = Sidewinder.Device.config()
    :persistent_term.erase(@warned)

    on_exit(fn ->
      :persistent_term.put(@why, why)
      :persistent_term.erase(@warned)
      Sidewinder.Device.configure(Map.to_list(config))
    end)

    %{args: args, expected: expected}
  end

  defp scan(args, opts \\ []), do: apply(Sidewinder, :selective_scan, args ++ [opts])

  defp hide_library, do: :persistent_term.put(@why, "a test hides it")

  test "without the library all ways give the same, with one warning", %{
    args: args,
    expected: expected
  } do
    hide_library()

    log =
      capture_log(fn ->
        for {_, way} <- ways(),
            _ <- 1..2,
            do: assert_close(way.(&Sidewinder.selective_scan/5, args), expected)

        1..20
        |> Enum.map(fn _ -> Task.async(fn -> scan(args) end) end)
        |> Enum.each(&assert_close(Task.await(&1, :infinity), expected))
      end)

    assert [_, rest] = String.split(log, "native library is not there")
    assert rest =~ "a test hides it"
  end

  test "without the library every op has values and gradients" do
    for op <- Ops.ops() do
      call = Ops.problem(op, {2, 3, 3, 2})
      expected = Ops.value_and_grad(call)
      why = :persistent_term.get(@why)
      hide_library()

      capture_log(fn ->
        for {_, way} <- ways(), do: assert_close(Ops.value_and_grad(call, way), expected)
        assert Ops.kernel_calls(fn -> Ops.value_and_grad(call) end) == []
      end)

      :persistent_term.put(@why, why)
    end
  end

  test "many processes at once still warn once", %{args: args} do
    hide_library()

    log =
      capture_log(fn ->
        1..50
        |> Enum.map(fn _ -> Task.async(fn -> scan(args) end) end)
        |> Task.await_many(:infinity)
      end)

    assert length(String.split(log, "native library is not there")) == 2
  end

  test "who asks for pure Nx gets no warning", %{args: args, expected: expected} do
    hide_library()
    assert capture_log(fn -> assert_close(scan(args, backend: :nx), expected) end) == ""

    Sidewinder.Device.configure(backend: :nx)
    assert capture_log(fn -> assert_close(scan(args), expected) end) == ""
    refute kernel?(&scan(args, &1))
  end

  test "who asks for a GPU gets no slow answer instead", %{args: args} do
    hide_library()
    assert capture_log(fn -> refute kernel?(&scan(args, &1)) end) =~ "native library"

    unless Sidewinder.Device.cuda?() do
      assert_raise Sidewinder.Error, fn -> scan(args, backend: {:cuda, 0}) end
    end
  end

  test "pure Nx agrees with the kernel" do
    for_random(40, fn args, opts ->
      assert_close(scan(args, [backend: :nx] ++ opts), scan(args, opts))
    end)
  end
end
