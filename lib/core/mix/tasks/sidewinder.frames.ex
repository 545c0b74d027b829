defmodule Mix.Tasks.Sidewinder.Frames do
  @shortdoc "Drives a Mamba backbone at 60 frames a second, as a game agent would"

  @moduledoc """
  Feeds a Mamba backbone of random weights with frames of features, 60 a second, and prints how long they took and
  how many were missed: a frame is missed if it is not done when the next one is due.

      mix sidewinder.frames [OPTIONS]

  There are two forms of it: `window` runs the last frames of each agent anew each time, `stream` keeps a session for
  each agent and takes in the new frame alone.

    * `--seconds N` - how long each form runs, 60 by default
    * `--rate N` - frames a second, 60 by default
    * `--backend cpu|cuda|cuda:N` - only there; by default on the CPU, and on a GPU if there is one
    * `--agents N` (32), `--window N` (60), `--width N` (512), `--state N` (16), `--layers N` (2) - the sizes
    * `--type f32|bf16|f16|f64` - the type, by default f32 on a CPU and bf16 on a GPU
    * `--quantize q8_0|q4_0|ternary` - how large matrices are held: see `Sidewinder.Mamba.load/2`
    * `--threads N` - CPU threads

  Times are in milliseconds from when a frame was due. The exit code is 1 only if something is wrong.
  """

  use Mix.Task

  import Sidewinder.CommandLine, only: [short: 1]
  alias Sidewinder.{CommandLine, Device, Mamba, OpArguments, RandomInputs, Tensor, Timing}
  alias Sidewinder.Mamba.Session

  @task "sidewinder.frames"
  @most 10_000_000
  @sizes [agents: 32, window: 60, width: 512, state: 16, layers: 2]
  @switches [seconds: :float, rate: :float, backend: :string, type: :string] ++
              [quantize: :string, threads: :integer] ++
              for({name, _} <- @sizes, do: {name, :integer})

  @impl true
  def run(args) do
    Mix.Task.run("app.config")
    CommandLine.run(args, &main(CommandLine.options!(&1, @switches, @task)))
  end

  defp main(options) do
    sizes = Map.new(@sizes, fn {name, default} -> {name, number!(options, name, default)} end)
    rate = number!(options, :rate, 60.0)
    seconds = number!(options, :seconds, 60.0)
    backends = backends(options[:backend])
    quantize = CommandLine.format!(options[:quantize], "--quantize", @task)
    options = Keyword.put(options, :quantize, quantize)
    matrices = if quantize, do: " in #{quantize}"

    Mix.shell().info(
      "#{sizes.agents} agents, window #{sizes.window}, width #{sizes.width}, state #{sizes.state}, " <>
        "#{sizes.layers} layers#{matrices}; #{short(rate)} frames a second for #{short(seconds)} s"
    )

    line(["backend", "type", "form", "frames", "missed", "p50", "p95", "p99", "longest"])

    for backend <- backends do
      model = model(sizes, backend, options)

      for {form, frame} <- [window: window(model, sizes), stream: stream(model, sizes)] do
        # The first frames load kernels and touch memory.
        for i <- 0..2, do: frame.(i)
        report([Device.name(backend), model.type, form], rate, drive(frame, rate, seconds))
      end
    end
  end

  defp number!(options, name, default) do
    value = Keyword.get(options, name, default)
    expected = "a positive number, at most #{@most}"

    if value > 0 and value <= @most,
      do: value,
      else: CommandLine.wrong!("--#{name}", expected, to_string(value), @task)
  end

  defp backends(nil), do: if(Device.cuda?(), do: [:cpu, {:cuda, 0}], else: [:cpu])

  defp backends(name) do
    backend = Device.parse!(name)

    if backend in [:auto, :nx],
      do: CommandLine.wrong!("--backend", "cpu, cuda or cuda:N", name, @task),
      else: [backend]
  end

  defp model(sizes, backend, options) do
    threads = if backend == :cpu, do: Keyword.take(options, [:threads]), else: []
    type = OpArguments.type!(options[:type] || default_type(backend))
    own = [layers: sizes.layers, width: sizes.width, state: sizes.state]
    how = [type: type, quantize: options[:quantize], backend: backend]
    Mamba.random(own ++ how ++ threads)
  end

  defp default_type(:cpu), do: "f32"
  defp default_type(_cuda), do: "bf16"

  # The work for frame `i`: functions, over features that were made before.
  defp window(model, %{agents: agents, window: window, width: width}) do
    features = RandomInputs.normal({agents, window, width}, model.type, 1, :window)
    fn _i -> model |> Mamba.forward(features) |> Tensor.to_host() end
  end

  defp stream(model, %{agents: agents, width: width}) do
    sessions = for _ <- 1..agents, do: Session.new(model)
    frames = for i <- 0..7, do: RandomInputs.normal({agents, width}, model.type, 1, i)
    frames = List.to_tuple(frames)
    fn i -> Session.step(sessions, elem(frames, rem(i, 8))) end
  end

  ## The clock

  # The number of frames, and milliseconds from when a frame was due to when it was done, for those that were begun. The
  # others had expired before the previous frame was done.
  defp drive(frame, rate, seconds) do
    every = 1_000_000 / rate
    start = System.monotonic_time(:microsecond) + 1000
    frames = max(round(seconds * rate), 1)
    times(frame, {start, every, frames}, 0, [])
  end

  defp times(_frame, {_start, _every, frames}, i, done) when i >= frames,
    do: {frames, done}

  defp times(frame, {start, every, frames} = plan, i, done) do
    due = start + i * every
    wait(due)
    frame.(i)
    now = System.monotonic_time(:microsecond)
    # The next frame that has not expired.
    next = max(i + 1, floor((now - start) / every))
    times(frame, plan, min(next, max(frames, i + 1)), [(now - due) / 1000 | done])
  end

  # Timers are too coarse for the last two milliseconds.
  defp wait(due) do
    left = due - System.monotonic_time(:microsecond)

    cond do
      left > 3000 ->
        Process.sleep(trunc(left / 1000) - 2)
        wait(due)

      left > 0 ->
        wait(due)

      true ->
        :ok
    end
  end

  defp report(what, rate, {frames, done}) do
    sorted = Enum.sort(done)
    late = Enum.count(done, &(&1 > 1000 / rate))
    missed = late + frames - length(done)

    times = for share <- [0.5, 0.95, 0.99, 1.0], do: short(Timing.at(sorted, share))
    line(what ++ [frames, missed] ++ times)
  end

  defp line([backend | cells]) do
    cells = for cell <- cells, do: cell |> to_string() |> String.pad_leading(9)
    Mix.shell().info(String.pad_trailing(backend, 12) <> Enum.join(cells))
  end
end
