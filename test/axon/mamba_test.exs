# Without Axon there is nothing to test, which test_helper.exs says.
if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonMambaTest do
    use ExUnit.Case, async: true

    import Sidewinder.NxTest.Scans,
      only: [assert_close: 2, assert_close: 3, no_library: 0, random: 2]

    alias Sidewinder.{Error, Mamba, Op, Safetensors}
    alias Sidewinder.Axon, as: Layer

    @golden Path.expand("../golden", __DIR__)
    @block [state_size: 4, expand: 3, kernel_size: 3, dt_rank: 2]

    # There is no Sidewinder.Mamba in pure Nx.
    @moduletag skip: no_library()

    defp tokens(model, options \\ []) do
      Axon.input("tokens", shape: {nil, nil})
      |> Axon.embedding(13, 6, name: "words")
      |> Layer.mamba([layers: 2] ++ @block ++ options)
      |> model.()
    end

    defp features(options) do
      Layer.mamba(Axon.input("x", shape: {nil, nil, 6}), [name: "m"] ++ @block ++ options)
    end

    # Every parameter has numbers of its own, so that none can stand for another.
    defp start(model, template) do
      {init, _} = Axon.build(model, seed: 1)
      %{data: data} = state = init.(template, Axon.ModelState.empty())

      data =
        for {layer, params} <- data, into: %{} do
          {layer,
           for(
             {name, t} <- params,
             into: %{},
             do: {name, moved(t, :erlang.phash2({layer, name}))}
           )}
        end

      %{state | data: data}
    end

    defp moved(t, seed), do: Nx.add(t, Nx.multiply(0.1, random(seed, t.shape)))

    @some_tokens [[1, 2, 3, 12], [0, 5, 5, 7]]

    defp same(model, state, mamba, input \\ @some_tokens) do
      {fed, input} =
        if is_list(input), do: {input, Nx.tensor(input)}, else: {Op.to_kernel(input), input}

      got = Op.from_kernel(Mamba.forward(mamba, fed))
      assert_close(got, Axon.predict(model, state, input))
    end

    defp refused(model, state, part) do
      error = catch_error(Layer.to_mamba(model, state, backend: :cpu))
      assert %Error{kind: :argument, expected: <<_, _::binary>>, hint: <<_, _::binary>>} = error
      assert Exception.message(error) =~ part
    end

    defp there_and_back(model, x, sizes) do
      state = start(model, x)
      mamba = Layer.to_mamba(model, state, backend: :cpu)
      assert Map.take(mamba.config, Map.keys(sizes)) == sizes
      same(model, state, mamba, x)
      {back, state_back} = Layer.from_mamba(mamba, name: "m")
      assert state_back.data == state.data
      same(back, state_back, mamba, x)
      assert Mamba.tensors(Layer.to_mamba(back, state_back)) == Mamba.tensors(mamba)
    end

    test "a backbone gives the same numbers there and back" do
      sizes = %{mixer: :mamba, width: 6, inner: 18, state: 4, rank: 2, conv: 3, vocabulary: 0}

      for options <- [[], [use_bias: true, conv_bias: false, epsilon: 0.1], [layers: 1]],
          do: there_and_back(features(options), random(1, {2, 5, 6}), sizes)
    end

    test "a backbone of Mamba-2 gives the same numbers there and back" do
      input = Axon.input("x", shape: {nil, nil, 6})
      of_all = %{mixer: :mamba2, width: 6, inner: 12, state: 4, conv: 3, vocabulary: 0}

      for {options, sizes} <- [
            {[head_size: 3], %{heads: 4, groups: 1, dt_limit: {0.0, :infinity}}},
            {[head_size: 2, groups: 3, use_bias: true, dt_clamp: {0.01, 0.5}],
             %{heads: 6, groups: 3, dt_limit: {0.01, 0.5}}},
            {[head_size: 12, conv_bias: false, epsilon: 0.1, layers: 1], %{heads: 1, eps: 0.1}}
          ] do
        model = Layer.mamba2(input, [name: "m", state_size: 4, kernel_size: 3] ++ options)
        there_and_back(model, random(1, {2, 5, 6}), Map.merge(of_all, sizes))
      end
    end

    @tag :tmp_dir
    test "a model that goes through Axon is saved as the one that it came from", %{tmp_dir: to} do
      from = Path.expand("../golden/scripted/chat_eos", __DIR__)
      mamba = Mamba.load(from, backend: :cpu)
      {model, state} = Layer.from_mamba(mamba)
      back = Layer.to_mamba(model, state, like: mamba, backend: :cpu)
      assert {back.ends, back.tokenizer} == {mamba.ends, mamba.tokenizer}
      Mamba.save(back, to)
      assert Enum.sort(File.ls!(to)) == Enum.sort(File.ls!(from))
      assert File.read!(Path.join(to, "config.json")) =~ ~s("eos_token_id": 393)
      assert Mamba.tensors(Mamba.load(to, backend: :cpu)) == Mamba.tensors(mamba)
    end

    test "a language model has its head behind it, Axon's or ours" do
      for head <- [&Axon.dense/3, &Layer.linear/3] do
        model = tokens(&head.(&1, 13, use_bias: false))
        state = start(model, Nx.tensor(@some_tokens))
        mamba = Layer.to_mamba(model, state, backend: :cpu)
        assert is_map_key(Mamba.tensors(mamba), "lm_head.weight")
        same(model, state, mamba)
        {back, state_back} = Layer.from_mamba(mamba)
        same(back, state_back, mamba)
      end
    end

    test "a head with the numbers of the embedding is it" do
      model = tokens(&Axon.dense(&1, 13, use_bias: false, name: "head"))
      state = start(model, Nx.tensor(@some_tokens))
      kernel = Nx.transpose(state.data["words"]["kernel"])
      state = put_in(state.data["head"]["kernel"], kernel)
      mamba = Layer.to_mamba(model, state, backend: :cpu, type: :f64)
      assert mamba.type == :f64
      refute is_map_key(Mamba.tensors(mamba), "lm_head.weight")
      same(model, state, mamba)
      {back, state_back} = Layer.from_mamba(mamba)
      same(back, state_back, mamba)
      assert %{"mamba_head" => same, "mamba_embedding" => same} = state_back.data
    end

    test "published checkpoints become layers and are themselves again" do
      for kind <- ~w(mamba mamba2 mamba2_groups) do
        mamba = Mamba.load("#{@golden}/#{kind}", backend: :cpu)
        {model, state} = Layer.from_mamba(mamba)
        same(model, state, mamba, [[1, 2, 3], [4, 5, 36]])
        again = Layer.to_mamba(model, state, backend: :cpu)
        assert again.config == mamba.config
        assert Mamba.tensors(again) == Mamba.tensors(mamba)
      end

      first = Safetensors.read("#{@golden}/mamba/model.safetensors")
      assert Mamba.tensors(Mamba.load("#{@golden}/mamba", backend: :cpu)) == first
    end

    test "its state can be trained on" do
      mamba = Mamba.random(layers: 1, width: 4, vocabulary: 5, state: 2, backend: :cpu)
      {model, state} = Layer.from_mamba(mamba)
      assert Axon.ModelState.trainable_parameters(state) == state.data
      batch = {Nx.tensor([[1, 2, 3]]), Nx.tensor([[2, 3, 4]])}

      loss = &Axon.Losses.categorical_cross_entropy(&1, &2, sparse: true, from_logits: true)
      loss = &Nx.mean(loss.(Nx.new_axis(&1, -1), &2))

      trained =
        model
        |> Axon.Loop.trainer(loss, Polaris.Optimizers.sgd(learning_rate: 0.5), log: 0)
        |> Axon.Loop.run([batch], state, epochs: 5)

      better = Layer.to_mamba(model, trained, backend: :cpu)
      row = &Enum.slice(Sidewinder.Tensor.to_list(Mamba.forward(&1, [[1, 2, 3]])), 10, 5)
      assert Enum.at(row.(better), 4) > Enum.at(row.(mamba), 4)
      same(model, trained, better, [[1, 2, 3]])
    end

    test "types of parameters go along" do
      x = random(1, {2, 5, 6})
      model = features([])
      state = start(model, x)
      half = &Nx.as_type(&1, :bf16)

      data =
        Map.new(state.data, fn {layer, params} -> {layer, Map.new(params, &half(&1, half))} end)

      mamba = Layer.to_mamba(model, %{state | data: data}, backend: :cpu)
      assert mamba.type == :bf16
      {back, state_back} = Layer.from_mamba(mamba)
      assert %{"mamba_0" => %{"in_proj" => %{type: {:bf, 16}}}} = state_back.data
      # What a default policy computes in f32 is near to what is computed in between bf16 layers.
      got = Op.from_kernel(Mamba.forward(mamba, Op.to_kernel(half.(x))))
      assert_close(got, Axon.predict(back, state_back, half.(x)), rtol: 3.0e-2)
    end

    defp half({name, t}, half), do: {name, half.(t)}

    test "the last step alone is the last of them" do
      model = tokens(&Axon.dense(&1, 13, use_bias: false), output: :last, name: "m")
      state = start(model, Nx.tensor(@some_tokens))
      mamba = Layer.to_mamba(model, state, backend: :cpu)
      logits = Op.from_kernel(Mamba.forward(mamba, @some_tokens))
      assert_close(logits[[.., -1]], Axon.predict(model, state, Nx.tensor(@some_tokens)))
    end

    test "a stack of a larger model takes its part of the state" do
      stack = &Layer.mamba(&1, [name: "m"] ++ @block)

      model =
        Axon.input("y", shape: {nil, nil, 2})
        |> Axon.dense(6, name: "front")
        |> stack.()
        |> Axon.dense(3, activation: :softmax)

      state = start(model, Nx.template({1, 2, 2}, :f32))
      refused(model, state, "softmax")
      part = stack.(Axon.input("x", shape: {nil, nil, 6}))
      x = random(1, {2, 5, 6})
      same(part, state, Layer.to_mamba(part, state, backend: :cpu), x)
      refused(Layer.mamba(Axon.dense(Axon.input("y"), 6)), state, "dense_0")
    end

    test "what a Sidewinder.Mamba has no place for is refused" do
      dense = &Axon.dense(&1, 13, [use_bias: false] ++ &2)
      template = Nx.tensor(@some_tokens)

      for {model, part} <- [
            {tokens(&Axon.dense(&1, 13)), "use_bias: false"},
            {tokens(&dense.(&1, activation: :relu)), "relu_0"},
            {tokens(&Layer.linear(&1, 13, use_bias: false, activation: :silu)), "activation"},
            {tokens(& &1), "words"},
            {tokens(&Axon.dropout(dense.(&1, []))), "dropout_0"}
          ],
          do: refused(model, start(model, template), part)

      x = Axon.input("x", shape: {nil, nil, 6})
      block = &Layer.residual(&1, fn x -> Layer.mamba_block(x) end, epsilon: &2)
      ok = Layer.rms_norm(block.(x, 1.0e-5))
      state = start(ok, Nx.template({1, 2, 6}, :f32))
      assert %Mamba{} = Layer.to_mamba(ok, state)
      refused(Layer.rms_norm(block.(x, 0.5)), state, "epsilon")
      refused(Layer.rms_norm(x), state, "Mamba block")
      refused(Axon.dense(ok, 13, use_bias: false), state, "embedding")
      refused(ok, Axon.ModelState.empty(), "\"gamma\"")
      whole = put_in(state.data["mamba_block_0"]["D"], Nx.tensor([1]))
      refused(ok, whole, "\"D\"")

      second = &Layer.residual(&1, fn x -> Layer.mamba2_block(x, [head_size: 3] ++ &2) end)
      refused(Layer.rms_norm(second.(block.(x, 1.0e-5), [])), state, "mamba2_block_0")
      refused(Layer.rms_norm(second.(second.(x, []), groups: 2)), state, "mamba2_block_1")
      refused(Layer.rms_norm(second.(x, groups: 2, norm_groups: 1)), state, "norm_groups")
      refused(Layer.rms_norm(second.(x, epsilon: 0.5)), state, "epsilon")
    end

    test "what layers have no place for is refused" do
      tensors = Mamba.tensors(Mamba.random(layers: 2, width: 4, expand: 2, backend: :cpu))
      odd = Map.delete(tensors, "backbone.layers.1.mixer.conv1d.bias")
      error = catch_error(Layer.from_mamba(Mamba.new(nil, odd, backend: :cpu)))
      assert %Error{kind: :argument} = error
      assert Exception.message(error) =~ "mamba_1"

      assert %Error{kind: :option} =
               catch_error(Layer.from_mamba(Mamba.new(nil, tensors), nam: 1))

      error = catch_error(Layer.from_mamba(Mamba.load("#{@golden}/falcon_mamba", backend: :cpu)))
      assert %Error{kind: :argument, argument: "model"} = error
      assert Exception.message(error) =~ "those of falcon_mamba"
    end
  end
end
