defmodule Sidewinder.TelemetryTest do
  # Handlers see the calls of all processes.
  use ExUnit.Case, async: false

  alias Sidewinder.{Error, Mamba, Telemetry, Tensor}
  alias Sidewinder.Kernel.Scan
  alias Sidewinder.Mamba.{Session, Trainer}

  @running List.keymember?(Application.started_applications(), :telemetry, 0)
  @events for name <- [:call, :load, :forward, :loss, :prefill, :step, :train],
              do: [:sidewinder, name, :stop]
  @fault [:sidewinder, :device, :fault]

  def forward(event, measurements, metadata, test),
    do: if(self() == test, do: send(test, {event, measurements, metadata}))

  defp listen(_context) do
    # By `apply`, because :telemetry may not be there.
    apply(:telemetry, :attach_many, [
      __MODULE__,
      [@fault | @events],
      &__MODULE__.forward/4,
      self()
    ])

    on_exit(fn -> apply(:telemetry, :detach, [__MODULE__]) end)
  end

  defp scan(length, options) do
    tensor = fn shape ->
      Tensor.from_list(List.duplicate(0.5, Tensor.elements(shape)), :f32, shape)
    end

    [x, dt] = for _ <- 1..2, do: tensor.({1, length, 2})
    [b, c] = for _ <- 1..2, do: tensor.({1, length, 3})
    Scan.selective_scan(x, dt, tensor.({2, 3}), b, c, options)
  end

  defp model(options \\ []),
    do: Mamba.random([layers: 1, width: 16, vocabulary: 11, backend: :cpu] ++ options)

  describe "with a handler" do
    @describetag skip: not @running
    setup :listen

    test "a call has its op, place, bytes and time" do
      before = System.monotonic_time()
      scan(4, threads: 2)
      assert_received {[:sidewinder, :call, :stop], measurements, metadata}

      # x, dt and y have 4 x 2 numbers, B and C 4 x 3, A 2 x 3.
      assert %{bytes: 216, duration: duration, monotonic_time: stop} = measurements
      assert duration > 0 and stop - duration >= before and stop <= System.monotonic_time()
      best = Sidewinder.Device.info().cpu.best

      assert metadata ==
               %{op: :selective_scan, backend: :cpu, level: best, threads: 2, error: nil}
    end

    test "the level is that of the call, and a short call has one thread" do
      scan(4, level: "scalar")
      assert_received {_, _, %{level: "scalar"}}
      scan(4, backend: :cpu)
      assert_received {_, _, %{threads: 1, backend: :cpu}}
      refute_received _
    end

    test "a call that fails has its error and no bytes" do
      error = assert_raise Error, fn -> scan(4, dt_clamp: {2, 1}) end
      assert_received {[:sidewinder, :call, :stop], %{bytes: 0}, %{error: ^error}}
      refute_received _
    end

    test "loading, prompts, steps, training and whole sequences" do
      folder = Path.join(System.tmp_dir!(), "sidewinder-telemetry-#{System.pid()}")
      on_exit(fn -> File.rm_rf!(folder) end)
      Mamba.save(model(), folder)
      model = Mamba.load(folder, backend: :cpu)
      assert_received {[:sidewinder, :load, :stop], %{duration: _}, loaded}
      assert loaded == %{path: folder, config: model.config, type: :f32, error: nil}

      sessions = for _ <- 1..3, do: Session.new(model)
      for session <- sessions, do: Session.prefill(session, [1, 2])
      for _ <- 1..3, do: assert_received({[_, :prefill, _], %{tokens: 2}, %{model: ^model}})
      Session.step(sessions, [1, 2, 3])
      assert_received {[_, :step, _], %{tokens: 3}, %{model: ^model, error: nil}}
      Session.next(hd(sessions), 4)
      assert_received {[_, :step, _], %{tokens: 1}, %{model: ^model}}
      Trainer.step(Trainer.new(model), [[1, 2, 3], [4, 5, 6]])
      assert_received {[_, :train, _], %{tokens: 6}, %{model: ^model}}
      Mamba.forward(model, [[1, 2, 3], [4, 5, 6]])
      assert_received {[_, :forward, _], %{tokens: 6}, %{model: ^model, error: nil}}
      Mamba.loss(model, [1, 2, 3, 4])
      assert_received {[_, :loss, _], %{tokens: 4}, %{model: ^model, error: nil}}
      error = assert_raise Error, fn -> Mamba.loss(model, [1, 11]) end
      assert_received {[_, :loss, _], %{tokens: 2}, %{error: ^error}}
      refute_received _
    end

    test "frames count as tokens, and what failed has its error" do
      session = Session.new(Mamba.random(layers: 1, width: 16, backend: :cpu))
      Session.prefill(session, Tensor.from_list(List.duplicate(1, 80), :f32, {5, 16}))
      assert_received {[_, :prefill, _], %{tokens: 5}, %{error: nil}}
      Session.step(session, Tensor.from_list(List.duplicate(1, 16), :f32, {16}))
      assert_received {[_, :step, _], %{tokens: 1}, %{error: nil}}

      error = assert_raise Error, fn -> Session.step(Session.new(model()), 11) end
      assert_received {[_, :step, _], %{tokens: 1}, %{error: ^error}}
      error = assert_raise Error, fn -> Mamba.load("none", backend: :cpu) end
      assert_received {[_, :load, _], _, %{path: "none", config: nil, error: ^error}}
      refute_received _
    end

    test "a fault of a device has an event of its own, whatever listens to the call" do
      answer =
        {:error, %{kind: :device_lost, op: "", argument: "", expected: "", got: "", hint: ""}}

      assert {%{device: 0}, ^answer} = Telemetry.call(:op, [], fn -> {%{device: 0}, answer} end)
      assert_received {[_, :call, _], %{bytes: 0}, %{backend: {:cuda, 0}, level: nil}}
      assert_received {@fault, %{system_time: _}, %{error: error, event: [_, :call, _]}}
      assert %Error{kind: :device_lost} = error

      assert Telemetry.span(:unheard, fn -> answer end, fn _ -> flunk("nobody listens") end) ==
               answer

      assert_received {@fault, _, %{event: [_, :unheard, _], error: ^error}}
      refute_received _
    end
  end

  # In another VM, whose device can be lost.
  @tag :cuda
  @tag skip: not @running
  test "a device that is lost is a fault" do
    code = """
    defmodule Heard do
      def fault(_event, _measurements, %{error: error, event: event}, _config),
        do: IO.puts("\#{error.kind} \#{inspect(event)}")
    end

    alias Sidewinder.{Kernel, Native, Telemetry, Tensor}
    {:ok, _} = Application.ensure_all_started(:telemetry)
    Telemetry.start()
    :telemetry.attach("heard", [:sidewinder, :device, :fault], &Heard.fault/4, nil)
    [x, w] = for shape <- [{1, 2}, {2}], do: Tensor.from_list([1, 2], :f32, shape)
    Kernel.run(:rms_norm, [x: x, w: w], %{}, backend: {:cuda, 0})
    {:ok, _} = Native.debug_lose_device(0)

    try do
      Kernel.run(:rms_norm, [x: x, w: w], %{}, backend: {:cuda, 0})
    rescue
      Sidewinder.Error -> Kernel.run(:rms_norm, [x: x, w: w], %{})
    end
    """

    paths = for module <- [Telemetry, :telemetry], do: ["-pa", Path.dirname(:code.which(module))]

    {output, 0} =
      System.cmd(System.find_executable("elixir"), Enum.concat(paths) ++ ["-e", code],
        stderr_to_stdout: true
      )

    assert output == "device_lost [:sidewinder, :call, :stop]\n"
  end

  test "without a handler nothing but the work is done" do
    assert Telemetry.span(:unheard, fn -> {:ok, 1} end, fn _ -> flunk("asked") end) == {:ok, 1}
    assert %Tensor{shape: {1, 4, 2}} = scan(4, [])
  end

  test "without :telemetry, or before the application starts, nothing is sent" do
    code = """
    :nonexistent = Process.whereis(:telemetry_handler_table) || :nonexistent
    {:ok, 1} = Sidewinder.Telemetry.span(:call, fn -> {:ok, 1} end, fn _ -> raise "asked" end)
    {:ok, _} = Application.ensure_all_started(:logger)
    Sidewinder.Telemetry.start()
    {:ok, 1} = Sidewinder.Telemetry.span(:call, fn -> {:ok, 1} end, fn _ -> raise "asked" end)
    lost = {:error, %{kind: :device_lost}}
    ^lost = Sidewinder.Telemetry.span(:call, fn -> lost end, fn _ -> raise "asked" end)
    """

    ebin = Path.dirname(:code.which(Telemetry))
    elixir = System.find_executable("elixir")
    assert {"", 0} = System.cmd(elixir, ["-pa", ebin, "-e", code], stderr_to_stdout: true)
  end
end
