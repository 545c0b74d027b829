defmodule Sidewinder.AxonMMRecTest do
  use ExUnit.Case, async: true

  alias Axon.ModelState
  alias Sidewinder.NxTest.{Inline, Wrapper}
  import Sidewinder.NxTest.Scans, only: [assert_close: 2, assert_close: 3, random: 2]

  defp built(model, inputs, opts \\ []) do
    {init, predict} = Axon.build(model, opts)
    {init.(inputs, ModelState.empty()), predict}
  end

  test "a block starts as its documentation says" do
    model = Sidewinder.Axon.mm_rec_block(Axon.input("x"), name: "block", decay_bias: -2.0)
    {%{data: %{"block" => params}}, _} = built(model, Nx.template({2, 3, 16}, :f32), seed: 1)
    assert map_size(params) == 30
    assert Nx.to_flat_list(params["wg2"]) |> Enum.all?(&(&1 == 0.0))
    assert Nx.to_flat_list(params["bg2"]) |> Enum.uniq() == [-2.0]
    assert Nx.to_flat_list(params["n1"]) |> Enum.uniq() == [1.0]

    for {name, inputs} <- [
          {"wq", 16},
          {"bq", 16},
          {"wm", 32},
          {"bm", 32},
          {"wc1", 16},
          {"bc1", 16},
          {"wc2", 4},
          {"bc2", 4},
          {"wf1", 16},
          {"bf1", 16},
          {"wf2", 64},
          {"bf2", 64}
        ] do
      largest = params[name] |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()
      assert largest <= 1 / :math.sqrt(inputs) and largest > 0.3 / :math.sqrt(inputs), name
    end
  end

  test "a block is the function, with what is carried" do
    [x, k, v, h] = for name <- ~w(x k v h), do: Axon.input(name)
    options = [heads: 2, mix: 0.2, levels: 2, state_norm: true]

    {y, state} =
      Sidewinder.Axon.mm_rec_block(
        x,
        [name: "block", memory: {k, v}, initial_state: h, return_state: true] ++ options
      )

    inputs = %{
      "x" => random(1, {2, 5, 8}),
      "k" => random(2, {2, 6, 8}),
      "v" => random(3, {2, 6, 8}),
      "h" => random(4, {2, 8})
    }

    model = Axon.container(Map.put(state, :y, y))
    {params, predict} = built(model, inputs)
    got = predict.(params, inputs)
    carried = [k_mem: inputs["k"], v_mem: inputs["v"], initial_state: inputs["h"]]

    {y, state} =
      Sidewinder.mmrec_block(
        inputs["x"],
        params.data["block"],
        [return_state: true] ++ carried ++ options
      )

    assert_close(got.y, y)
    assert_close(got.last_state, state.last_state)
    assert_close(got.summary, state.summary)
  end

  test "without a mix there is no second gate" do
    model = Sidewinder.Axon.mm_rec_block(Axon.input("x"), name: "block", mix: 0)
    {%{data: %{"block" => params}}, _} = built(model, Nx.template({1, 3, 4}, :f32))
    refute Map.has_key?(params, "wm") or Map.has_key?(params, "bm")
  end

  test "dropout is for training, with another key each time" do
    model = Sidewinder.Axon.mm_rec_block(Axon.input("x"), name: "block", dropout: 0.5)
    x = random(1, {1, 4, 8})
    {params, predict} = built(model, x)
    assert_close(predict.(params, x), predict.(params, x))
    {_, train} = Axon.build(model, mode: :train)
    %{prediction: one, state: state} = train.(params, x)
    %{prediction: two} = train.(%{params | data: Map.merge(params.data, state)}, x)
    assert Nx.to_number(Nx.any(Nx.not_equal(one, two))) == 1
  end

  defp model(opts \\ []) do
    Sidewinder.Axon.mm_rec(
      Axon.input("tokens", shape: {nil, nil}),
      [vocabulary: 7, width: 8] ++ opts
    )
  end

  test "a model ties its logits to the embedding, and gives those of the last tokens" do
    tokens = Nx.tensor([[1, 2, 3, 4], [5, 6, 0, 1]])
    {params, predict} = built(model(), tokens)
    assert Map.keys(params.data) == ~w(mm_rec_0 mm_rec_1 mm_rec_embedding mm_rec_norm)
    all = predict.(params, tokens)
    assert all.shape == {2, 4, 7}
    {_, predict} = Axon.build(model(last: 3))
    assert_close(predict.(params, tokens), all[[.., 1..3]])

    by_hand = Nx.take(params.data["mm_rec_embedding"]["kernel"], tokens)

    by_hand =
      for i <- 0..1, reduce: by_hand do
        x -> Sidewinder.mmrec_block(x, params.data["mm_rec_#{i}"])
      end

    gamma = params.data["mm_rec_norm"]["gamma"]
    normed = Sidewinder.rms_norm(by_hand, gamma, eps: 1.0e-6, eps_mode: :outside)
    assert_close(all, Sidewinder.linear(normed, params.data["mm_rec_embedding"]["kernel"]))
  end

  test "a model goes on where it was, and what it carries has a part for each block" do
    [tokens, h] = for name <- ~w(tokens h), do: Axon.input(name)
    opts = [vocabulary: 7, width: 8, return_state: true]
    {logits, state} = Sidewinder.Axon.mm_rec(tokens, [initial_state: h] ++ opts)
    model = Axon.container(%{logits: logits, h: state.last_state, summary: state.summary})
    inputs = fn tokens, h -> %{"tokens" => tokens, "h" => h} end
    start = Nx.broadcast(0.0, {2, 1, 8})
    tokens = Nx.tensor([[1, 2, 3, 4, 5]])
    {params, predict} = built(model, inputs.(tokens, start))
    whole = predict.(params, inputs.(tokens, start))
    assert whole.h.shape == {2, 1, 8} and whole.summary.shape == {2, 1, 8}
    first = predict.(params, inputs.(tokens[[.., 0..1]], start))
    second = predict.(params, inputs.(tokens[[.., 2..4]], first.h))
    assert_close(second.logits, whole.logits[[.., 2..4]])
    assert_close(second.h, whole.h)
  end

  test "a token that is none raises, and gradients of the embedding are those of Nx" do
    tokens = Nx.tensor([[1, 2, 2, 6]])
    {params, _} = built(model(), tokens)
    {_, train} = Axon.build(model(), mode: :train)

    loss = fn data -> Nx.sum(Nx.sin(train.(%{params | data: data}, tokens).prediction)) end
    expected = Nx.Defn.jit_apply(&Nx.Defn.grad(&1, loss), [params.data], compiler: Inline)
    ours = Nx.Defn.jit_apply(&Nx.Defn.grad(&1, loss), [params.data])

    for {layer, tensors} <- expected, {name, t} <- tensors do
      assert_close(ours[layer][name], t, rtol: 2.0e-4, atol: 1.0e-4, of: "#{layer} #{name}")
    end

    {_, predict} = Axon.build(model())
    error = assert_raise Sidewinder.Error, fn -> predict.(params, Nx.tensor([[7]])) end
    assert %{argument: "tokens", expected: "numbers from 0 to 6"} = error
  end

  for {name, compiler} <- [evaluator: Nx.Defn.Evaluator, wrapper: Wrapper] do
    test "training lowers the loss, compiled by the #{name}" do
      :rand.seed(:exsss, 1)
      tokens = Nx.tensor(for _ <- 1..4, do: for(i <- 0..5, do: rem(i * 2 + 1, 7)))
      data = Stream.repeatedly(fn -> {tokens[[.., 0..4]], tokens[[.., 1..5]]} end)
      model = model(dropout: 0.1)

      loss = fn wanted, logits ->
        Axon.Losses.categorical_cross_entropy(wanted, logits,
          from_logits: true,
          sparse: false,
          reduction: :mean
        )
      end

      one_hot = fn {x, y} -> {x, Nx.equal(Nx.new_axis(y, -1), Nx.iota({7}))} end
      data = Stream.map(data, one_hot)
      {x, y} = data |> Enum.take(1) |> hd()
      {params, predict} = built(model, x)
      before = loss.(y, predict.(params, x)) |> Nx.to_number()

      state =
        model
        |> Axon.Loop.trainer(loss, Polaris.Optimizers.adam(learning_rate: 0.02), log: 0, seed: 1)
        |> Axon.Loop.run(data, params, epochs: 1, iterations: 15, compiler: unquote(compiler))

      assert loss.(y, predict.(state, x)) |> Nx.to_number() < 0.6 * before
    end
  end

  test "wrong options are refused" do
    x = Axon.input("x")

    for {opts, argument} <- [
          {[heads: 0], "heads"},
          {[dropout: 1], "dropout"},
          {[memory: x], "memory"},
          {[state_clip: -1], "state_clip"},
          {[colour: :red], "colour"}
        ] do
      error = assert_raise Sidewinder.Error, fn -> Sidewinder.Axon.mm_rec_block(x, opts) end
      assert %{kind: :option, argument: ^argument} = error
    end

    assert %{argument: "vocabulary"} =
             assert_raise(Sidewinder.Error, fn -> Sidewinder.Axon.mm_rec(x) end)
  end
end
