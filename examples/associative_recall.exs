# A Mamba-2 learns multi-query associative recall (Arora et al. 2023, "Zoology", arXiv:2312.04927): a sequence tells 32
# keys with a value each, all drawn anew, and then asks for all of them in another order. What it was told must
# be in the states, which are all that layers carry from token to token. A Mamba of equal width, layers and number of
# weights, with its usual 16 states for each channel where the Mamba-2 has 64, learns from the same sequences. From a clone:
#
#     mix run examples/associative_recall.exs [FOLDER] [--device cuda]
#
# `Sidewinder.Mamba.Trainer` trains both from random weights, on two cores of a CPU in some minutes. The number of pairs
# grows from 2 during the first part of the training. What was measured is written to FOLDER (`examples/results`):
# `associative_recall.json`, and `associative_recall.svg`, a plot of it. `STEPS=20` in the environment makes a short try.

Code.require_file("curves.exs", __DIR__)

defmodule Sidewinder.Examples.AssociativeRecall do
  alias Sidewinder.{Device, Mamba, Tensor}
  alias Sidewinder.Examples.Curves
  alias Sidewinder.Mamba.Trainer

  # Tokens: keys, then values.
  @keys 32
  @values 32
  @pairs 32
  @vocabulary @keys + @values

  @sizes [layers: 2, width: 64, vocabulary: @vocabulary]
  # The rank of dt makes up for the weights of Mamba-2's larger states.
  @models [
    mamba: [mixer: :mamba, state: 16, rank: 10],
    mamba2: [mixer: :mamba2, state: 64]
  ]
  @colours [mamba: "#d95f02", mamba2: "#1b6ca8"]

  @steps 1500
  @batch 16
  @rate 0.01
  @warmup 100
  # The part of the training in which the number of pairs grows.
  @growth 0.6
  # How often and on how many sequences a model is measured.
  @reports 30
  @measured 128

  def run(arguments) do
    {options, folders} = OptionParser.parse!(arguments, strict: [device: :string])
    device = Device.parse!(options[:device] || "cpu")
    steps = String.to_integer(System.get_env("STEPS", "#{@steps}"))
    results = for {name, sizes} <- @models, do: {name, learn(sizes, device, steps)}
    write(List.first(folders) || Path.join("examples", "results"), device, steps, results)
  end

  ## Sequences

  # All pairs of a key and a value, and again in another order: the values of the second half are asked for.
  defp sequence(pairs) do
    pairs =
      for key <- Enum.take_random(0..(@keys - 1), pairs),
          do: [key, @keys + :rand.uniform(@values) - 1]

    Enum.concat(pairs ++ Enum.shuffle(pairs))
  end

  defp sequences(count, pairs), do: for(_ <- 1..count, do: sequence(pairs))

  ## Training

  defp learn(sizes, device, steps) do
    :rand.seed(:exsss, {1, 2, 3})
    asked = sequences(@measured, @pairs)
    model = Mamba.random([backend: device] ++ sizes ++ @sizes)
    IO.puts("#{title(model.config)}, #{parameters(model)} weights")
    {time, curve} = :timer.tc(fn -> curve(Trainer.new(model), asked, steps) end)

    %{
      state: model.config.state,
      parameters: parameters(model),
      seconds: div(time, 1_000_000),
      right: List.last(curve)[:right],
      curve: curve
    }
  end

  defp curve(trainer, asked, steps) do
    for part <- Enum.chunk_every(1..steps, max(div(steps, @reports), 1)) do
      losses = for at <- part, do: step(trainer, at, steps)
      at = List.last(part)
      right = right(Trainer.model(trainer), asked)
      loss = Enum.sum(losses) / length(losses)
      row = [step: at, pairs: pairs(at, steps), loss: loss, right: right]

      IO.puts(
        "step #{at}, #{row[:pairs]} pairs: loss #{Float.round(loss, 3)}, #{percent(right)} right"
      )

      row
    end
  end

  defp step(trainer, at, steps) do
    batch = sequences(@batch, pairs(at, steps))
    Trainer.step(trainer, batch, learning_rate: rate(at, steps), weight_decay: 0.01).loss
  end

  defp pairs(at, steps), do: round(@pairs * at / (@growth * steps)) |> max(2) |> min(@pairs)

  # It grows at first, and goes down to a tenth along half a wave.
  defp rate(at, steps) do
    @rate * min(at / @warmup, 1) * (0.55 + 0.45 * :math.cos(:math.pi() * at / steps))
  end

  # The part of the values in the second halves that the model finds the most probable.
  defp right(model, sequences) do
    %{data: logits} = model |> Mamba.forward(sequences) |> Tensor.to_host()
    best = for <<row::binary-size(4 * @vocabulary) <- logits>>, do: best(row)
    rows = Enum.chunk_every(best, 4 * @pairs)
    hits = Enum.flat_map(Enum.zip(rows, sequences), &hits/1)
    Enum.count(hits, & &1) / length(hits)
  end

  defp hits({best, sequence}) do
    next = Enum.zip_with(best, tl(sequence), &(&1 == &2))
    next |> Enum.drop(2 * @pairs) |> Enum.take_every(2)
  end

  defp best(row) do
    logits = for <<logit::float-native-32 <- row>>, do: logit
    {_, token} = logits |> Enum.with_index() |> Enum.max()
    token
  end

  defp parameters(model) do
    Enum.sum(for {_, tensor} <- Mamba.tensors(model), do: Tensor.elements(tensor.shape))
  end

  ## Results

  defp write(folder, device, steps, results) do
    File.mkdir_p!(folder)
    about = for {name, result} <- results, do: {name, Map.delete(result, :curve)}

    fields =
      [device: Device.name(device), steps: steps, pairs: @pairs, chance: 1 / @values] ++ about

    rows = for {name, result} <- results, do: {"#{name}_by_step", result.curve}
    path = &Path.join(folder, "associative_recall.#{&1}")
    File.write!(path.("json"), Curves.json(fields, rows))
    File.write!(path.("svg"), plot(results))
    IO.puts("associative_recall.json and associative_recall.svg are in #{folder}")
  end

  defp plot(results) do
    curves =
      for {name, %{state: state, curve: curve}} <- results do
        points = for row <- curve, do: {row[:step], row[:right]}
        {title(%{mixer: name, state: state}), @colours[name], points}
      end

    [{_, %{curve: curve}} | _] = results
    Curves.svg("Values of #{@pairs} pairs that are right, by training step", curves, marks(curve))
  end

  # Where the number of pairs has reached a power of two.
  defp marks(curve) do
    for pairs <- [4, 8, 16, @pairs],
        row = Enum.find(curve, &(&1[:pairs] >= pairs)),
        do: {row[:step], "#{pairs} pairs"}
  end

  defp title(%{mixer: :mamba, state: state}), do: "Mamba, #{state} states"
  defp title(%{mixer: :mamba2, state: state}), do: "Mamba-2, #{state} states"

  defp percent(part), do: Curves.percent(part)
end

Sidewinder.Examples.AssociativeRecall.run(System.argv())
