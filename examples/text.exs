# A Mamba of 3.6 million weights learns to continue a text, byte by byte: fourteen English novels of the 19th century
# (8.7 MB), in `examples/data/novels.txt.gz`. From a clone, best with a GPU (a minute on an H200):
#
#     mix run examples/text.exs [FOLDER]
#
# The model is written to FOLDER, where `Sidewinder.Mamba.load/2` and `mix sidewinder.generate` find it. The one in
# `examples/models/novels` was made so. At the end it is measured on a book that it has not read, beside PPM of order 5.
# Other sizes, for example for a try on a CPU:
#
#     STEPS=200 BATCH=4 CONTEXT=256 LAYERS=2 WIDTH=64 mix run examples/text.exs /tmp/model
#
# Which novels these are, and that they are in the public domain, is said in `examples/data/README.md`.

alias Sidewinder.Mamba
alias Sidewinder.Mamba.Trainer

defmodule Text do
  @novels Path.join(__DIR__, "data/novels.txt.gz")
  @unread Path.join(__DIR__, "../priv/samples/alice.txt")

  @sizes [steps: 1500, batch: 64, context: 512, layers: 8, width: 256, report: 100]
  @rate 2.0e-3
  @warmup 200
  # What the last novel ends with, by which to see whether the model only learns by heart.
  @kept 200_000

  def run(folder) do
    {read, kept} = novels()
    sizes = Map.new(@sizes, fn {name, default} -> {name, size(name, default)} end)
    :rand.seed(:exsss, {1, 2, 3})

    trainer =
      [layers: sizes.layers, width: sizes.width, vocabulary: 256, allow_tf32: true]
      |> Mamba.random()
      |> Trainer.new()

    {time, _} = :timer.tc(fn -> learn(trainer, read, kept, sizes) end)
    model = Trainer.model(trainer, type: :bf16)
    Mamba.save(model, folder)
    bytes = sizes.steps * sizes.batch * sizes.context

    IO.puts(
      "#{sizes.steps} steps, #{bytes} bytes read, in #{div(time, 1_000_000)} s; the model is in #{folder}"
    )

    measure(model, read)
  end

  defp novels do
    text = @novels |> File.read!() |> :zlib.gunzip()
    size = byte_size(text) - @kept
    {binary_part(text, 0, size), binary_part(text, size, @kept)}
  end

  defp size(name, default) do
    case System.get_env(name |> to_string() |> String.upcase()) do
      nil -> default
      text -> String.to_integer(text)
    end
  end

  defp learn(trainer, text, kept, %{steps: steps} = sizes) do
    for step <- 1..steps, reduce: 0.0 do
      sum ->
        batch = for _ <- 1..sizes.batch, do: piece(text, sizes.context + 1)
        %{loss: loss} = Trainer.step(trainer, batch, learning_rate: rate(step, steps))
        report(trainer, kept, step, sizes, sum + loss)
    end
  end

  defp piece(text, length) do
    text
    |> binary_part(:rand.uniform(byte_size(text) - length + 1) - 1, length)
    |> :binary.bin_to_list()
  end

  # It grows at first, and then goes down to a tenth along half a wave.
  defp rate(step, _steps) when step < @warmup, do: @rate * step / @warmup

  defp rate(step, steps) do
    part = (step - @warmup) / max(steps - @warmup, 1)
    @rate * (0.55 + 0.45 * :math.cos(:math.pi() * part))
  end

  defp report(trainer, kept, step, %{report: every} = sizes, sum) when rem(step, every) == 0 do
    rest =
      if rem(step, 10 * every) == 0 or step == sizes.steps, do: ahead(trainer, kept), else: ""

    IO.puts("step #{step}: #{bits(sum / every)} bits a byte#{rest}")
    0.0
  end

  defp report(_trainer, _kept, _step, _sizes, sum), do: sum

  defp ahead(trainer, kept),
    do: ", #{bits(Mamba.loss(Trainer.model(trainer), kept))} where it has not read"

  defp measure(model, read) do
    unread = File.read!(@unread)
    IO.puts("Alice's Adventures in Wonderland, in bits a byte:")
    IO.puts("  the model                        #{bits(Mamba.loss(model, unread))}")
    IO.puts("  PPM of order 5                   #{rounded(Sidewinder.PPM.bits_per_byte(unread))}")

    IO.puts(
      "  PPM that has read the same text  #{rounded(Sidewinder.PPM.bits_per_byte(unread, read))}"
    )
  end

  defp bits(nats), do: rounded(nats / :math.log(2))
  defp rounded(number), do: :erlang.float_to_binary(number, decimals: 3)
end

Text.run(List.first(System.argv()) || "examples/models/novels")
