# A Mamba learns to read handwritten digits, each a sequence of 64 pixels. From a clone, where Nx and
# Axon are there:
#
#     mix run examples/digits.exs
#
# It trains on the CPU with Nx.BinaryBackend and Nx.Defn.Evaluator, and with COMPILER=exla under EXLA, where that is
# there. What the kernels are worth, by the time of one step with four images instead of 32 (pure Nx without a compiler
# takes minutes for 32):
#
#     STEPS=5 BATCH=4 mix run examples/digits.exs
#     STEPS=1 BATCH=4 SIDEWINDER_BACKEND=nx mix run examples/digits.exs
#     STEPS=5 COMPILER=exla mix run examples/digits.exs
#     STEPS=5 COMPILER=exla SIDEWINDER_BACKEND=nx mix run examples/digits.exs

defmodule Digits do
  @data Path.join(__DIR__, "data/digits.csv.gz")

  @epochs 10
  @batch_size String.to_integer(System.get_env("BATCH", "32"))
  @width 8
  @learning_rate 0.015

  def run(steps) do
    if System.get_env("COMPILER") == "exla", do: compile_with_exla()
    # Nx.BinaryBackend makes many short-lived numbers: a large heap is swept less often.
    Process.flag(:min_heap_size, 4_000_000)
    {held_out, train} = split(images())
    IO.puts("#{length(train)} digits to learn from, #{length(held_out)} held out")

    per_epoch = div(length(train), @batch_size)
    limit = if steps, do: [epochs: 1, iterations: steps], else: [epochs: @epochs]
    model = model()

    state =
      model
      |> trainer(per_epoch)
      |> Axon.Loop.run(batches(train), Axon.ModelState.empty(), limit)

    unless steps,
      do: IO.puts("Of those held out, #{accuracy(model, state, held_out)}% read correctly")

    tell_times(@epochs * per_epoch)
  end

  defp compile_with_exla do
    {:ok, _} = Application.ensure_all_started(:exla)
    Nx.global_default_backend(EXLA.Backend)
    Nx.Defn.global_default_options(compiler: EXLA)
  end

  # Wide inside the blocks, which are kernels, and narrow between them.
  def model do
    Axon.input("pixels", shape: {nil, 64, 1})
    # The norm takes the length away, and a bias keeps how bright a pixel is in the direction.
    |> Axon.dense(@width, bias_initializer: Axon.Initializers.uniform(scale: 1.0), name: "embed")
    |> Sidewinder.Axon.mamba(
      layers: 2,
      expand: 8,
      state_size: 8,
      # A pixel sees those of two rows up to itself.
      kernel_size: 16,
      # Unit variance: matrices are {out, in}.
      kernel_initializer:
        Axon.Initializers.variance_scaling(mode: :fan_out, distribution: :uniform),
      output: :last,
      name: "mamba"
    )
    |> Axon.dense(10, activation: :softmax, name: "digit")
  end

  defp trainer(model, per_epoch) do
    rate = &rate(&1, 2 * per_epoch, @epochs * per_epoch)

    model
    |> Axon.Loop.trainer(:categorical_cross_entropy, Polaris.Optimizers.adam(learning_rate: rate),
      seed: 1,
      log: 5
    )
    |> Axon.Loop.metric(:accuracy)
    |> Axon.Loop.handle_event(:iteration_started, &start/1)
    |> Axon.Loop.handle_event(:iteration_completed, &stop/1)
  end

  # It grows for two epochs and then goes down to 0. (Polaris 0.1.0 has such a schedule, but one that
  # forgets the rate.)
  defp rate(step, warmup, steps) do
    part = Nx.min(Nx.divide(step, warmup), Nx.divide(Nx.subtract(steps, step), steps - warmup))
    Nx.multiply(@learning_rate, Nx.max(part, 0))
  end

  defp accuracy(model, state, images) do
    {pixels, labels} = tensors(images)
    part = Axon.Metrics.accuracy(labels, Axon.predict(model, state, pixels))
    Float.round(100 * Nx.to_number(part), 2)
  end

  ## Data

  defp images do
    for line <- @data |> File.read!() |> :zlib.gunzip() |> String.split("\n", trim: true) do
      line |> String.split(",") |> Enum.map(&String.to_integer/1) |> Enum.split(64)
    end
  end

  # Every fifth is held out.
  defp split(images) do
    {images |> Enum.drop(4) |> Enum.take_every(5),
     images |> Enum.chunk_every(5) |> Enum.flat_map(&Enum.take(&1, 4))}
  end

  # In another order each time, every image moved to a side by a pixel two times of three.
  defp batches(images) do
    :rand.seed(:exsss, 1)

    [images]
    |> Stream.flat_map(&Enum.shuffle/1)
    |> Stream.map(fn {pixels, label} -> {move(pixels, Enum.random(-1..1)), label} end)
    |> Stream.chunk_every(@batch_size, @batch_size, :discard)
    |> Stream.map(&tensors/1)
  end

  defp move(pixels, 0), do: pixels
  defp move(pixels, 1), do: rows(pixels, &[0 | Enum.drop(&1, -1)])
  defp move(pixels, -1), do: rows(pixels, &(tl(&1) ++ [0]))

  defp rows(pixels, fun), do: pixels |> Enum.chunk_every(8) |> Enum.flat_map(fun)

  defp tensors(images) do
    {pixels, labels} = Enum.unzip(images)
    pixels = pixels |> Nx.tensor(type: :f32) |> Nx.divide(16) |> Nx.new_axis(-1)
    {pixels, Nx.equal(Nx.tensor(labels), Nx.iota({1, 10}))}
  end

  ## Times

  defp start(loop) do
    Process.put(:started, System.monotonic_time(:microsecond))
    {:continue, loop}
  end

  defp stop(loop) do
    took = System.monotonic_time(:microsecond) - Process.get(:started)
    Process.put(:times, [took | Process.get(:times, [])])
    {:continue, loop}
  end

  # The first step builds the graph too.
  defp tell_times(all) do
    [first | rest] = Enum.reverse(Process.get(:times))
    times = Enum.sort(if rest == [], do: [first], else: rest)
    median = Enum.at(times, div(length(times), 2)) / 1000
    backend = Sidewinder.Device.config().backend

    IO.puts(
      "A training step of #{@batch_size} images, backend #{backend}: #{Float.round(median, 1)} ms. All #{all}: #{round(all * median / 1000)} s."
    )
  end
end

steps = System.get_env("STEPS")
Digits.run(steps && String.to_integer(steps))
