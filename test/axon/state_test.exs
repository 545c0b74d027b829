if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonStateTest do
    use ExUnit.Case, async: true

    alias Axon.ModelState
    alias Sidewinder.Axon, as: Layer
    import Sidewinder.NxTest.Scans, only: [random: 2]

    # Every layer with a state, its own or one of Axon's, before, between and after layers of ours.
    defp models do
      [x, k, v, h, mask] = for name <- ~w(x k v h mask), do: Axon.input(name)
      tokens = Axon.input("tokens")
      drop = &Axon.dropout(&1, rate: 0.5)
      block = &Layer.mm_rec_block(&1, [dropout: 0.5] ++ &2)
      heads = &Axon.nx(&1, fn t -> Nx.new_axis(t, 1) end)
      mm_rec = &Layer.mm_rec(tokens, [vocabulary: 7, width: 8, dropout: 0.5] ++ &1)
      {logits, state} = mm_rec.(memory: {k, v}, initial_state: h, return_state: true)
      {y, carried} = block.(x, return_state: true, name: "first")

      visible =
        Axon.nx(tokens, fn t -> t |> Nx.new_axis(1) |> Nx.new_axis(1) |> Nx.greater(0) end)

      %{
        "mm_rec" => mm_rec.([]),
        "mm_rec of three layers, the last tokens" => mm_rec.(layers: 3, last: 2),
        "mm_rec that carries its state" =>
          Axon.container({logits, state.last_state, state.summary}),
        "mm_rec behind its own output" => Axon.container({mm_rec.([]), drop.(x)}),
        "a block" => block.(x, []),
        "a block named by a function" => block.(x, name: fn _op, _counts -> "named" end),
        "blocks in residual connections" =>
          x |> Layer.residual(&block.(&1, [])) |> Layer.residual(&block.(&1, [])),
        "a block whose memory was seen before" => x |> drop.() |> block.(memory: {x, x}),
        "blocks that share a memory" =>
          x |> block.(memory: {x, x}) |> drop.() |> block.(memory: {x, x}),
        "blocks with no state of their own that share a memory" =>
          Enum.reduce(1..2, x, fn _, y -> drop.(Layer.mm_rec_block(y, memory: {x, x})) end),
        "a block that goes on" =>
          y |> drop.() |> block.(initial_state: carried.last_state, memory: {x, x}),
        "mamba" => x |> drop.() |> Layer.mamba(layers: 2) |> drop.() |> Axon.batch_norm(),
        "mamba, the last step" => x |> drop.() |> Layer.mamba(output: :last) |> drop.(),
        "mamba blocks with dropout" =>
          Enum.reduce(1..3, x, fn _, x -> Layer.residual(x, &drop.(Layer.mamba_block(&1))) end),
        "mamba over tokens" =>
          tokens |> Axon.embedding(7, 8) |> drop.() |> Layer.mamba() |> drop.() |> Layer.linear(7),
        "a transformer of one mask" =>
          Enum.reduce(1..3, drop.(x), &block_with_mask(&1, &2, mask, drop)),
        "a transformer whose mask is made of its tokens" =>
          Enum.reduce(1..3, tokens |> Axon.embedding(7, 8) |> drop.(), fn i, x ->
            block_with_mask(i, x, visible, drop)
          end),
        "mha of a mask that has a state" =>
          x |> Layer.mha(mask: mask) |> drop.() |> Layer.mha(mask: mask) |> drop.(),
        "attention" => Layer.attention(heads.(drop.(x)), heads.(drop.(x)), heads.(drop.(x))),
        "attention of what was seen" => shared(drop.(x), x, heads),
        "a scan" => scan(x, drop),
        "small layers" =>
          x
          |> drop.()
          |> Layer.causal_conv1d()
          |> drop.()
          |> Layer.rms_norm()
          |> drop.()
          |> Layer.layer_norm(activation: :gelu)
          |> drop.()
          |> Layer.swiglu_mlp()
          |> drop.()
          |> Layer.ternary_dense(8)
      }
    end

    defp block_with_mask(_i, x, mask, drop),
      do: x |> Layer.transformer_block(mask: mask) |> drop.()

    defp shared(dropped, x, heads) do
      [q, k] = for layer <- [dropped, x], do: heads.(layer)
      Layer.attention(Layer.attention(q, k, k), k, k)
    end

    defp scan(x, drop) do
      [dropped, dt, b, c, gate] = for layer <- [x, x, x, x, x], do: drop.(layer)
      x = Layer.selective_scan(dropped, dt, b, c, gate: gate)
      Layer.selective_scan(drop.(x), dt, b, c, gate: gate)
    end

    defp inputs(model) do
      all = %{
        "x" => random(1, {2, 4, 8}),
        "tokens" => Nx.tensor([[1, 2, 3, 4], [5, 6, 1, 1]]),
        "k" => random(2, {2, 2, 3, 8}),
        "v" => random(3, {2, 2, 3, 8}),
        "h" => random(4, {2, 2, 8}),
        "mask" => Nx.broadcast(1, {1, 4, 4})
      }

      Map.take(all, Map.keys(Axon.get_inputs(model)))
    end

    test "every state is another one at each step of training" do
      for {name, model} <- models(), compiler <- [Nx.Defn.Evaluator, Sidewinder.NxTest.Wrapper] do
        {init, train} = Axon.build(model, mode: :train, compiler: compiler)
        inputs = inputs(model)
        params = init.(inputs, ModelState.empty())
        assert map_size(params.state) > 0, name

        Enum.reduce(1..3, params, fn step, params ->
          %{state: state} = train.(params, inputs)

          for {layer, names} <- params.state, key <- names do
            assert %{^layer => %{^key => t}} = state, "#{name}: #{layer} at step #{step}"
            refute t == params.data[layer][key], "#{name}: #{layer} at step #{step}"
          end

          ModelState.update(params, %{}, state)
        end)
      end
    end

    test "what keeps states changes no numbers and no names" do
      for {name, model} <- models() do
        inputs = inputs(model)
        {init, predict} = Axon.build(model, seed: 1)
        {init_train, _} = Axon.build(model, seed: 1, mode: :train)
        [params, trained] = for init <- [init, init_train], do: init.(inputs, ModelState.empty())
        assert params.parameters == trained.parameters, name
        assert predict.(params, inputs) == predict.(trained, inputs), name
      end
    end

    test "keys start from the seed of the model, each from another number" do
      model =
        Enum.reduce(1..3, Axon.input("x"), fn _, x -> Layer.mm_rec_block(x, dropout: 0.5) end)

      for policy <- [[], [params: {:bf, 16}, compute: {:bf, 16}, output: {:bf, 16}]] do
        policy = Axon.MixedPrecision.create_policy(policy)
        model = Axon.MixedPrecision.apply_policy(model, policy)

        [first, again, other] =
          for seed <- [1, 1, 2] do
            {init, _} = Axon.build(model, seed: seed)
            %{data: data} = init.(Nx.template({1, 3, 8}, :f32), ModelState.empty())

            for {"dropout_key" <> _, %{"key" => key}} <- data,
                do: {key.type, Nx.to_flat_list(key)}
          end

        assert first == again and first != other
        assert length(Enum.uniq(first)) == 3
        assert Enum.all?(first, &match?({{:u, 32}, [_, _]}, &1))
      end
    end

    test "layers without a name start from other numbers, whatever their parameters and inputs" do
      x = Axon.input("x")
      mha = &Layer.mha(&1, heads: 2)
      mask = Axon.nx(x, fn _ -> Nx.broadcast(1, {1, 1, 1, 1}) end)

      for {layer, other, name} <- [
            {&Layer.linear(&1, 8), &Layer.linear(&1, 8, use_bias: false), "kernel"},
            {mha, &Layer.mha(&1, heads: 2, mask: mask), "wqkv"},
            {&Layer.mamba_block/1, &Layer.mamba_block(&1, use_bias: true), "in_proj"}
          ] do
        {init, _} = Axon.build(x |> layer.() |> layer.() |> other.() |> other.(), seed: 1)
        %{data: data} = init.(Nx.template({1, 3, 8}, :f32), ModelState.empty())
        started = for {_layer, params} <- data, do: params[name]
        assert length(Enum.uniq(started)) == 4
      end
    end

    test "a trained model has other keys than it started with, and other masks at each step" do
      model = Layer.mm_rec(Axon.input("tokens"), vocabulary: 7, width: 8, dropout: 0.5)
      tokens = Nx.tensor([[1, 2, 3, 4]])
      {init, train} = Axon.build(model, mode: :train)
      params = init.(tokens, ModelState.empty())
      keys = Map.keys(params.state)
      assert keys == ~w(mm_rec_0_key mm_rec_1_key)
      wanted = Nx.equal(Nx.new_axis(tokens, -1), Nx.iota({7}))

      trained =
        model
        |> Axon.Loop.trainer(:categorical_cross_entropy, :sgd, log: 0)
        |> Axon.Loop.run(Stream.repeatedly(fn -> {tokens, wanted} end), params,
          epochs: 1,
          iterations: 3
        )

      for key <- keys, do: refute(trained.data[key] == params.data[key], key)

      {predictions, _} =
        Enum.map_reduce(1..4, params, fn _, params ->
          %{prediction: prediction, state: state} = train.(params, tokens)
          {prediction, ModelState.update(params, %{}, state)}
        end)

      assert Enum.uniq(predictions) == predictions
    end
  end
end
