# An MM-Rec learns to remember: a sequence of tokens begins with pairs of a key and a value among noise, then comes
# noise for 512 steps, and then keys, for each of which the model shall tell its value. What a token stands for is drawn
# anew for each sequence, so there is nothing to be known but what was seen. From a clone, where Nx and Axon are there:
#
#     mix run examples/recall.exs [FOLDER]
#
# It trains on the CPU with Nx.BinaryBackend and Nx.Defn.Evaluator, in some minutes: first on short sequences, then on
# longer and longer ones. A model of the same size without a memory, for which every token is a sequence of its own, is
# trained on the same tokens; it can only guess. What was measured is written to FOLDER (`examples/results`):
# `recall.json`, and `recall.svg`, a plot of it.

Code.require_file("curves.exs", __DIR__)

defmodule Recall do
  alias Sidewinder.Examples.Curves

  # Tokens: keys, then values, then noise.
  @keys 4
  @values 4
  @noise 8
  @pairs 2

  @steps 512
  # Lengths of the noise, which grow whenever nine of ten answers are right.
  @lengths [4, 8, 16, 32, 64, 128, 256, @steps]
  @batch 32
  @most 4000
  @rate 0.01
  # How many sequences a model is measured on.
  @measured 256

  def run(folder) do
    # Nx.BinaryBackend makes many short-lived numbers: a large heap is swept less often.
    Process.flag(:min_heap_size, 4_000_000)
    :rand.seed(:exsss, {1, 2, 3})
    {time, {state, curve}} = :timer.tc(fn -> learn(model(), &inputs/2) end)
    right = measure(model(), state, &inputs/2)

    IO.puts(
      "With its state: #{percent(right)} right over #{@steps} steps, after #{seconds(time)}"
    )

    :rand.seed(:exsss, {1, 2, 3})
    count = length(curve)
    {without, without_curve} = learn(model(), &alone/2, fn step, _ -> step >= count end)
    guessed = measure(model(), without, &alone/2)
    IO.puts("Without: #{percent(guessed)}, where #{percent(1 / @values)} is chance")

    tell(folder, %{
      steps: @steps,
      chance: 1 / @values,
      with_state: right,
      without_state: guessed,
      parameters: parameters(state),
      seconds: div(time, 1_000_000),
      curve: curve,
      without_curve: without_curve
    })
  end

  # The recurrence is the only way from one token to another: the memory is empty.
  def model do
    Sidewinder.Axon.mm_rec(Axon.input("tokens", shape: {nil, nil}),
      vocabulary: @keys + @values + @noise,
      width: 16,
      layers: 2,
      hidden: 32,
      last: @pairs,
      # Much is kept from the start, and the state cannot grow.
      decay_bias: 3.0,
      state_norm: true
    )
  end

  ## Sequences

  # Tokens {batch, length + pairs} and the values {batch, pairs} that are asked for.
  def inputs(length, batch) do
    {tokens, answers} = Enum.unzip(for _ <- 1..batch, do: sequence(length))
    {Nx.tensor(tokens), Nx.tensor(answers)}
  end

  # Every token by itself is what the question alone is.
  defp alone(length, batch) do
    {tokens, answers} = inputs(length, batch)
    asked = Nx.slice_along_axis(tokens, length, @pairs, axis: 1)
    {Nx.reshape(asked, {batch * @pairs, 1}), Nx.reshape(answers, {batch * @pairs, 1})}
  end

  # The pairs are among the first 32 tokens.
  defp sequence(length) do
    keys = Enum.take_random(0..(@keys - 1), @pairs)
    pairs = for key <- keys, do: {key, @keys + :rand.uniform(@values) - 1}
    slots = Enum.take_random(0..(div(min(length, 32), 2) - 1), @pairs)
    placed = Map.new(Enum.zip(slots, pairs))
    asked = Enum.shuffle(pairs)
    noise = for slot <- 0..(div(length, 2) - 1), token <- tokens(placed[slot]), do: token
    {noise ++ Enum.map(asked, &elem(&1, 0)), Enum.map(asked, &elem(&1, 1))}
  end

  defp tokens({key, value}), do: [key, value]
  defp tokens(nil), do: for(_ <- 1..2, do: @keys + @values + :rand.uniform(@noise) - 1)

  ## Training

  defp learn(model, inputs, stop \\ fn _step, _lengths -> false end) do
    {init, predict} = Axon.build(model, mode: :train)
    {tokens, _} = inputs.(hd(@lengths), 2)
    state = init.(tokens, Axon.ModelState.empty())
    {start, update} = Polaris.Optimizers.adam(learning_rate: @rate)
    update = {Polaris.Updates.clip_by_global_norm() |> elem(1), update}
    step = Nx.Defn.jit(&step(predict, update, &1, &2, &3, &4))
    optimizer = start.(state.data)
    walk(step, inputs, stop, {state, optimizer}, @lengths, {0, 0.0, []})
  end

  defp walk(
         step,
         inputs,
         stop,
         {state, optimizer},
         [length | longer] = lengths,
         {at, smooth, curve}
       ) do
    {tokens, answers} = inputs.(length, @batch)
    {state, optimizer, loss, right} = step.(state, optimizer, tokens, answers)
    right = Nx.to_number(right)
    smooth = 0.95 * smooth + 0.05 * right
    curve = [%{step: at, length: length, loss: Nx.to_number(loss), right: right} | curve]
    if rem(at, 50) == 0, do: report(hd(curve), smooth)

    cond do
      stop.(at + 1, lengths) or at + 1 == @most ->
        {state, Enum.reverse(curve)}

      smooth > 0.9 and longer != [] ->
        walk(step, inputs, stop, {state, optimizer}, longer, {at + 1, 0.0, curve})

      smooth > 0.97 ->
        {state, Enum.reverse(curve)}

      true ->
        walk(step, inputs, stop, {state, optimizer}, lengths, {at + 1, smooth, curve})
    end
  end

  defp step(predict, {clip, update}, state, optimizer, tokens, answers) do
    {{loss, right}, gradients} =
      Nx.Defn.value_and_grad(
        state.data,
        &loss(predict, %{state | data: &1}, tokens, answers),
        &elem(&1, 0)
      )

    {gradients, _} = clip.(gradients, %{}, state.data)
    {updates, optimizer} = update.(gradients, optimizer, state.data)
    {%{state | data: Polaris.Updates.apply_updates(state.data, updates)}, optimizer, loss, right}
  end

  defp loss(predict, state, tokens, answers) do
    %{prediction: logits} = predict.(state, tokens)
    wanted = Nx.equal(Nx.new_axis(answers, -1), Nx.iota({Nx.axis_size(logits, -1)}))
    scores = Axon.Activations.log_softmax(logits, axis: -1)
    loss = Nx.negate(Nx.divide(Nx.sum(Nx.multiply(wanted, scores)), Nx.size(answers)))
    {loss, Nx.mean(Nx.equal(Nx.argmax(logits, axis: -1), answers))}
  end

  defp measure(model, state, inputs) do
    {tokens, answers} = inputs.(@steps, @measured)
    logits = Axon.predict(model, state, tokens)
    logits |> Nx.argmax(axis: -1) |> Nx.equal(answers) |> Nx.mean() |> Nx.to_number()
  end

  ## Results

  defp report(%{step: step, length: length, loss: loss}, smooth) do
    IO.puts(
      "step #{step}, #{length} tokens of noise: loss #{Float.round(loss, 3)}, #{percent(smooth)} right"
    )
  end

  defp parameters(state) do
    Enum.sum(for {_, params} <- state.data, {_, %Nx.Tensor{} = t} <- params, do: Nx.size(t))
  end

  defp tell(folder, results) do
    File.mkdir_p!(folder)
    File.write!(Path.join(folder, "recall.json"), json(results))
    File.write!(Path.join(folder, "recall.svg"), plot(results))
    IO.puts("#{results.parameters} parameters; recall.json and recall.svg are in #{folder}")
  end

  defp json(%{curve: curve, without_curve: without} = results) do
    rows = [with_state_by_step: thinned(curve), without_state_by_step: thinned(without)]

    rows =
      for {name, curve} <- rows,
          do:
            {name,
             Enum.map(curve, &for(key <- [:step, :length, :loss, :right], do: {key, &1[key]}))}

    results |> Map.drop([:curve, :without_curve]) |> Curves.json(rows)
  end

  # Ten steps of one length as one, the last of them.
  defp thinned(curve) do
    for same <- Enum.chunk_by(curve, & &1.length), ten <- Enum.chunk_every(same, 10) do
      mean = fn key -> Enum.sum(Enum.map(ten, &Map.fetch!(&1, key))) / length(ten) end
      %{List.last(ten) | loss: mean.(:loss), right: mean.(:right)}
    end
  end

  # The part of right answers, and how long sequences were.
  defp plot(%{curve: curve, without_curve: without}) do
    marks = for {a, b} <- Enum.zip(curve, tl(curve)), a.length != b.length, do: {b.step, b.length}

    Curves.svg(
      "Answers that are right, by training step; sequences grow to #{@steps} steps",
      [{"without its state", "#d95f02", points(without)}, {"MM-Rec", "#1b6ca8", points(curve)}],
      marks
    )
  end

  defp points(curve), do: for(%{step: step, right: right} <- thinned(curve), do: {step, right})

  defp percent(part), do: Curves.percent(part)
  defp seconds(microseconds), do: "#{div(microseconds, 1_000_000)} s"
end

Recall.run(List.first(System.argv()) || Path.join("examples", "results"))
