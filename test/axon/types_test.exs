if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonTypesTest do
    use ExUnit.Case, async: true

    alias Axon.{MixedPrecision, ModelState}
    alias Sidewinder.Axon, as: Layer
    import Sidewinder.NxTest.Scans, only: [assert_close: 3]

    @types [{:f, 32}, {:bf, 16}, {:f, 16}, {:f, 64}, {:s, 64}, {:u, 8}]
    @policies [
      [],
      [params: {:bf, 16}],
      [params: {:f, 16}],
      [params: {:f, 64}],
      [compute: {:bf, 16}],
      [compute: {:f, 64}],
      [output: {:bf, 16}],
      [params: {:bf, 16}, output: {:f, 32}],
      [params: {:f, 32}, compute: {:f, 16}, output: {:f, 32}]
    ]

    # Each takes and gives features of width 8.
    defp layers do
      %{
        "linear" => &Layer.linear(&1, 8, activation: :silu),
        "ternary_dense" => &Layer.ternary_dense(&1, 8),
        "rms_norm" => &Layer.rms_norm/1,
        "layer_norm" => &Layer.layer_norm/1,
        "layer_norm with an activation" => &Layer.layer_norm(&1, activation: :gelu),
        "causal_conv1d" => &Layer.causal_conv1d/1,
        "selective_scan" => &Layer.selective_scan(&1, &1, &1, &1),
        "selective_scan with a gate" => &Layer.selective_scan(&1, &1, &1, &1, gate: &1),
        "mamba_block" => &Layer.mamba_block(&1, use_bias: true),
        "mamba" => &Layer.mamba(&1, layers: 1),
        "residual" => &Layer.residual(&1, fn x -> Layer.linear(x, 8) end),
        "mha" => &Layer.mha(&1, heads: 2, use_bias: true),
        "mha with a mask" => &Layer.mha(&1, heads: 2, mask: mask(&1)),
        "swiglu_mlp" => &Layer.swiglu_mlp/1,
        "transformer_block" => &Layer.transformer_block(&1, heads: 2),
        "transformer_block with a mask" => &Layer.transformer_block(&1, mask: mask(&1)),
        "mm_rec_block" => &Layer.mm_rec_block/1,
        "mm_rec_block with a memory" => &Layer.mm_rec_block(&1, memory: {&1, &1})
      }
    end

    # Integers, of the numbers that are odd.
    defp mask(x) do
      Axon.nx(x, fn x ->
        odd = x |> Nx.as_type(:s32) |> Nx.remainder(2) |> Nx.reduce_max(axes: [0, 2])
        Nx.max(Nx.reshape(odd, {1, 1, 1, :auto}), Nx.equal(Nx.iota({1, 1, 1, 4}), 0))
      end)
    end

    # Whole numbers, which all types have.
    defp features(type), do: Nx.as_type(Nx.remainder(Nx.iota({2, 4, 8}), 5), type)

    defp with_policy(layer, policy) do
      layer.(Axon.input("x"))
      |> MixedPrecision.apply_policy(MixedPrecision.create_policy(policy))
    end

    defp started(model, x) do
      {init, predict} = Axon.build(model, seed: 1)
      state = init.(x, ModelState.empty())
      {state, predict.(state, x)}
    end

    defp gradient(model, state, x) do
      {_, train} = Axon.build(model, mode: :train)

      # Linear, so that the rounding of y says nothing of the gradient.
      loss = fn data ->
        y = Nx.as_type(train.(%{state | data: data}, x).prediction, :f64)
        Nx.sum(Nx.multiply(y, Nx.cos(Nx.iota(y.shape, type: :f64))))
      end

      Nx.Defn.grad(state.data, loss)
    end

    defp narrow?({_, bits}), do: bits < 32

    # What Axon.dense gives.
    defp type_of_dense(type, policy) do
      {_, y} = started(with_policy(&Axon.dense(&1, 8), policy), features(type))
      y.type
    end

    # What the layer computes with, as f64.
    defp exact(tensors, compute) do
      Nx.Defn.Composite.traverse(tensors, fn t ->
        t = if compute && Nx.Type.float?(t.type), do: Nx.as_type(t, compute), else: t
        Nx.as_type(t, :f64)
      end)
    end

    defp bound(types) do
      types
      |> Enum.map(
        &%{{:f, 64} => 1.0e-10, {:f, 32} => 2.0e-4, {:f, 16} => 0.02, {:bf, 16} => 0.12}[&1]
      )
      |> Enum.max()
    end

    test "types are those of Axon.dense; numbers and gradients those of f64, as far as types go" do
      for type <- @types,
          policy <- @policies,
          expected_type = type_of_dense(type, policy),
          {name, layer} <- layers() do
        {compute, at} = {policy[:compute], "#{name} of #{inspect(type)} under #{inspect(policy)}"}
        model = with_policy(layer, policy)
        x = features(type)
        {state, y} = started(model, x)
        assert y.type == expected_type, at
        # A policy of 16 bits rounds between the layers of a model too.
        params = for {_, params} <- state.data, {_, t} <- params, do: compute || t.type
        common = Enum.reduce(params, compute || type, &Nx.Type.merge(&2, &1))

        wide = layer.(Axon.input("x"))
        wide_state = %{state | data: exact(state.data, compute)}
        wide_x = exact(x, compute)
        bound = bound([common, policy[:output] || common])
        assert_close(y, Axon.predict(wide, wide_state, wide_x), rtol: bound, of: at)

        # Gradients in 16 bits are sums of rounded numbers.
        if not narrow?(common) do
          got = gradient(model, state, x)
          expected = gradient(wide, wide_state, wide_x)

          for {layer, params} <- expected, {name, t} <- params do
            of_type = state.data[layer][name].type

            scale = Nx.to_number(Nx.reduce_max(Nx.abs(t))) + 1
            bound = bound([common, of_type, policy[:output] || common])

            assert_close(got[layer][name], t,
              rtol: bound,
              atol: bound * scale,
              of: "#{at}: #{name}"
            )
          end
        end
      end
    end

    test "attention has the common type of its inputs, and a mask stays a mask" do
      [q, k, v, mask] = for name <- ~w(q k v mask), do: Axon.input(name)
      heads = Nx.new_axis(features(:f32), 1)
      mask_of = fn type -> Nx.as_type(Nx.tri(4, 4), type) end

      for {types, expected} <- [
            {[:bf16, :f32, :f32], {:f, 32}},
            {[:f32, :bf16, :f64], {:f, 64}},
            {[:bf16, :f16, :bf16], {:f, 16}},
            {[:s32, :bf16, :u8], {:bf, 16}},
            {[:s32, :s32, :u8], {:f, 32}}
          ],
          mask_type <- [nil, :u8, :s64] do
        model = Layer.attention(q, k, v, mask: mask_type && mask)

        inputs =
          for {name, type} <- Enum.zip(~w(q k v), types),
              into: %{},
              do: {name, Nx.as_type(heads, type)}

        masked = if mask_type, do: Map.put(inputs, "mask", mask_of.(mask_type)), else: inputs
        options = if mask_type, do: [mask: mask_of.(:u8)], else: []
        y = Axon.predict(model, ModelState.empty(), masked)
        assert y.type == expected
        [q64, k64, v64] = for name <- ~w(q k v), do: Nx.as_type(inputs[name], :f64)
        assert_close(y, Sidewinder.attention(q64, k64, v64, options), rtol: bound([expected]))
      end

      wrong = %{"q" => heads, "k" => heads, "v" => heads, "mask" => mask_of.(:f32)}
      model = Layer.attention(q, k, v, mask: mask)

      error =
        assert_raise Axon.CompileError, fn -> Axon.predict(model, ModelState.empty(), wrong) end

      assert %{kind: :dtype, argument: "mask"} = error.exception
    end

    test "what a block carries has the type of its arithmetic, and goes on in the type of its features" do
      [x, h] = for name <- ~w(x h), do: Axon.input(name)
      {y, state} = Layer.mm_rec_block(x, initial_state: h, return_state: true)

      for {type, carried} <- [bf16: :f32, f16: :f32, f32: :f32, f64: :f64],
          given <- [:bf16, :f32, :f64] do
        policy = MixedPrecision.create_policy(params: Nx.Type.normalize!(type))
        model = MixedPrecision.apply_policy(Axon.container({y, state.last_state}), policy)
        start = Nx.broadcast(Nx.tensor(0, type: given), {2, 8})
        {_, {y, last_state}} = started(model, %{"x" => features(type), "h" => start})

        assert {y.type, last_state.type} ==
                 {Nx.Type.normalize!(type), Nx.Type.normalize!(carried)}
      end
    end

    test "models over tokens have the type of their parameters" do
      tokens = Nx.tensor([[1, 2, 3]])

      embedding =
        &(Axon.input("tokens") |> Axon.embedding(7, 8) |> Layer.mamba(&1) |> Layer.linear(7))

      for model <- [
            Layer.mm_rec(Axon.input("tokens"), vocabulary: 7, width: 8, dropout: 0.5),
            Layer.mm_rec(Axon.input("tokens"), vocabulary: 5000, width: 8, last: 1),
            embedding.(layers: 2),
            embedding.(output: :last)
          ],
          {policy, expected} <- [
            {[params: {:bf, 16}], {:bf, 16}},
            {[params: {:f, 64}], {:f, 64}},
            {[params: {:bf, 16}, compute: {:f, 32}], {:f, 32}},
            {[compute: {:f, 16}, output: {:f, 32}], {:f, 32}}
          ] do
        model = MixedPrecision.apply_policy(model, MixedPrecision.create_policy(policy))
        {state, y} = started(model, tokens)
        assert y.type == expected
        {_, train} = Axon.build(model, mode: :train)
        loss = &Nx.sum(Nx.as_type(train.(&1, &2).prediction, :f32))
        of = fn state, tokens -> Nx.Defn.grad(state, &loss.(&1, tokens)) end
        gradient = Nx.Defn.jit_apply(of, [state, tokens])

        for {layer, params} <- state.data, {name, t} <- params, name != "key" do
          assert gradient.data[layer][name].shape == t.shape
          assert gradient.data[layer][name] |> Nx.is_nan() |> Nx.any() |> Nx.to_number() == 0
        end
      end
    end

    test "a model whose parameters alone have 16 bits is trained by every compiler" do
      for compiler <- [Nx.Defn.Evaluator, Sidewinder.NxTest.Wrapper, Sidewinder.NxTest.Inline] do
        model = with_policy(&Layer.mamba(&1, layers: 1, name: "m"), params: {:bf, 16})
        x = features(:f32)
        {state, _} = started(model, x)

        trained =
          model
          |> Axon.Loop.trainer(:mean_squared_error, Polaris.Optimizers.adam(learning_rate: 0.05),
            log: 0
          )
          |> Axon.Loop.run(Stream.repeatedly(fn -> {x, Nx.divide(x, 2)} end), state,
            epochs: 1,
            iterations: 3,
            compiler: compiler
          )

        for {layer, params} <- state.data, {name, t} <- params do
          assert trained.data[layer][name].shape == t.shape
          refute trained.data[layer][name] == t
        end
      end
    end

    test "a Mamba of any type takes features and tokens of every type" do
      for type <- [:f32, :bf16, :f16, :f64], vocabulary <- [0, 11] do
        opts = [layers: 1, width: 8, vocabulary: vocabulary, backend: :cpu]
        {model, state} = Layer.from_mamba(Sidewinder.Mamba.random(opts))
        data = Nx.Defn.Composite.traverse(state.data, &Nx.as_type(&1, type))
        inputs = if vocabulary == 0, do: @types, else: [{:s, 64}, {:u, 8}]

        for input <- inputs do
          x = if vocabulary == 0, do: features(input), else: Nx.tensor([[1, 2, 3]], type: input)

          common =
            if Nx.Type.integer?(input),
              do: Nx.Type.normalize!(type),
              else: Nx.Type.merge(input, Nx.Type.normalize!(type))

          assert Axon.predict(model, %{state | data: data}, x).type == common
        end
      end
    end

    test "floats of 8 bits are computed in f32, complex numbers are refused" do
      for {name, layer} <- layers() do
        {_, y} = started(with_policy(layer, params: {:f, 8}), features({:f, 8}))
        assert y.type == {:f, 8}
        {_, y} = started(with_policy(layer, params: {:f, 8}), features(:f32))
        assert y.type == {:f, 32}
        assert y |> Nx.is_nan() |> Nx.any() |> Nx.to_number() == 0, name
        assert_raise Axon.CompileError, fn -> started(with_policy(layer, []), features(:c64)) end
      end
    end
  end
end
