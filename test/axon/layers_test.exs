# Without Axon there is nothing to test, which test_helper.exs says.
if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonLayersTest do
    use ExUnit.Case, async: true

    import Sidewinder.NxTest.Scans, only: [assert_close: 2, assert_close: 3, random: 2, random: 5]

    alias Sidewinder.Axon, as: Layer

    defp input(width), do: Axon.input("x", shape: {nil, nil, width})

    defp start(model, template) do
      {init, _} = Axon.build(model, seed: 1)
      init.(template, Axon.ModelState.empty())
    end

    defp within?(t, bound),
      do:
        Nx.to_number(Nx.reduce_max(Nx.abs(t))) <= bound and
          Nx.to_number(Nx.standard_deviation(t)) > bound / 3

    defp policy(type) do
      type = Nx.Type.normalize!(type)
      Axon.MixedPrecision.create_policy(params: type, compute: type, output: type)
    end

    describe "rms_norm" do
      test "and its gradient are those of Axon's, in every type" do
        for {type, rtol} <- [f64: 1.0e-12, f32: 1.0e-5, bf16: 0.03, f16: 5.0e-3],
            shape <- [{2, 3, 5}, {4, 7}] do
          x = random(7, shape, -1.0, 1.0, type)
          gamma = random(8, {elem(shape, tuple_size(shape) - 1)}, 0.5, 1.5, type)
          model = Layer.rms_norm(Axon.input("x"), name: "norm", epsilon: 0.01)
          {_, predict} = Axon.build(Axon.MixedPrecision.apply_policy(model, policy(type)))

          ours = fn {x, gamma} ->
            predict.(Axon.ModelState.new(%{"norm" => %{"gamma" => gamma}}), x)
          end

          axon = fn {x, gamma} -> Axon.Layers.rms_norm(x, gamma, epsilon: 0.01) end
          loss = fn norm -> &Nx.sum(Nx.sin(norm.(&1))) end
          wide = {Nx.as_type(x, :f64), Nx.as_type(gamma, :f64)}
          expected = if type == :f64, do: {x, gamma}, else: wide

          assert ours.({x, gamma}).type == x.type
          reference = fn {x, gamma} -> normalize(x, gamma) end
          assert_close(ours.({x, gamma}), reference.(expected), rtol: rtol)

          assert_close(
            Nx.Defn.grad({x, gamma}, loss.(ours)),
            Nx.Defn.grad(expected, loss.(reference)),
            rtol: 4 * rtol
          )

          if type == :f32, do: assert_close(ours.({x, gamma}), axon.({x, gamma}))
        end
      end

      defp normalize(x, gamma) do
        mean = Nx.mean(Nx.multiply(x, x), axes: [-1], keep_axes: true)
        Nx.multiply(gamma, Nx.divide(x, Nx.sqrt(Nx.add(mean, Nx.tensor(0.01, type: x.type)))))
      end
    end

    # Name, layer, shapes of its parameters for a width of 4, and what it computes.
    defp dense_layers do
      block = [heads: 2, causal: true, rope_theta: 100.0, pairing: :interleaved]

      mha = %{"wqkv" => {12, 4}, "wo" => {4, 4}, "bo" => {4}}
      mlp = %{"wg" => {6, 4}, "wu" => {6, 4}, "wd" => {4, 6}}
      norms = for name <- ~w(ln1_w ln1_b ln2_w ln2_b), into: %{}, do: {name, {4}}
      norm = %{"gamma" => {4}, "beta" => {4}}

      [
        {"rms_norm", &Layer.rms_norm(&1, [epsilon: 0.1] ++ &2), %{"gamma" => {4}},
         &Sidewinder.rms_norm(&1, &2["gamma"], eps: 0.1)},
        {"layer_norm", &Layer.layer_norm(&1, [epsilon: 0.1] ++ &2), norm,
         &Sidewinder.layer_norm(&1, &2["gamma"], &2["beta"], eps: 0.1)},
        {"layer_norm, gelu", &Layer.layer_norm(&1, [activation: :gelu] ++ &2), norm,
         &Sidewinder.gelu(Sidewinder.layer_norm(&1, &2["gamma"], &2["beta"]))},
        {"layer_norm, gelu_erf", &Layer.layer_norm(&1, [activation: :gelu_erf] ++ &2), norm,
         &Sidewinder.gelu(Sidewinder.layer_norm(&1, &2["gamma"], &2["beta"]), form: :erf)},
        {"linear", &Layer.linear(&1, 3, [activation: :silu] ++ &2),
         %{"kernel" => {3, 4}, "bias" => {3}},
         &Sidewinder.silu(Nx.add(Nx.dot(&1, [-1], &2["kernel"], [-1]), &2["bias"]))},
        {"linear without bias", &Layer.linear(&1, 3, [use_bias: false] ++ &2),
         %{"kernel" => {3, 4}}, &Sidewinder.linear(&1, &2["kernel"])},
        {"mha", &Layer.mha(&1, [use_bias: true] ++ block ++ &2), mha,
         &Sidewinder.mha(&1, &2, block)},
        {"mha, plain", &Layer.mha(&1, &2), Map.delete(mha, "bo"), &Sidewinder.mha/2},
        {"swiglu_mlp", &Layer.swiglu_mlp(&1, [hidden: 6, activation: :relu] ++ &2), mlp,
         &Sidewinder.swiglu_mlp(&1, &2, activation: :relu)},
        {"transformer_block",
         &Layer.transformer_block(&1, [hidden: 6, use_bias: true, epsilon: 0.1] ++ block ++ &2),
         mha |> Map.merge(mlp) |> Map.merge(norms),
         &Sidewinder.transformer_block(&1, &2, [eps: 0.1] ++ block)}
      ]
    end

    test "layers are the functions of Sidewinder, in every type, with gradients to all parameters" do
      x = random(3, {2, 3, 4})

      for {name, layer, shapes, fun} <- dense_layers(), type <- [:f32, :f64, :bf16] do
        start = [kernel_initializer: :glorot_normal, bias_initializer: :normal]
        more = if name =~ ~r/norm/, do: [gamma_initializer: :uniform], else: start
        more = if name =~ "swiglu", do: Keyword.take(more, [:kernel_initializer]), else: more
        model = layer.(input(4), [name: "layer"] ++ more)
        model = Axon.MixedPrecision.apply_policy(model, policy(type))
        {init, predict} = Axon.build(model)
        %{data: %{"layer" => params}} = state = init.(x, Axon.ModelState.empty())
        assert Map.new(params, fn {name, t} -> {name, t.shape} end) == shapes, name

        expected = fun.(Nx.as_type(x, type), params)
        y = predict.(state, x)
        assert y.type == Nx.Type.normalize!(type)
        assert_close(y, expected, rtol: if(type == :bf16, do: 0.05, else: 1.0e-5), of: name)

        gradient = Nx.Defn.grad(state, &Nx.sum(Nx.sin(predict.(&1, x))))

        for {key, t} <- gradient.data["layer"] do
          assert t.type == params[key].type
          assert Nx.to_number(Nx.reduce_max(Nx.abs(t))) > 0, "#{name}, #{key}"
        end
      end
    end

    test "they start as their documentation says" do
      model = Layer.transformer_block(input(64), name: "layer", use_bias: true)
      %{data: %{"layer" => p}} = start(model, Nx.template({1, 3, 64}, :f32))
      assert p["wg"].shape == {256, 64}

      for {name, inputs} <- [wqkv: 64, wo: 64, wg: 64, wu: 64, wd: 256],
          do: assert(within?(p[to_string(name)], 1 / :math.sqrt(inputs)), to_string(name))

      for name <- ~w(ln1_w ln2_w), do: assert(p[name] == Nx.broadcast(1.0, {64}))
      for name <- ~w(ln1_b ln2_b bo), do: assert(p[name] == Nx.broadcast(0.0, {64}))
    end

    test "masks are layers, and attention has no parameters" do
      x = random(3, {2, 3, 4})
      mask = Nx.tensor([[[[1, 0, 0]]], [[[1, 1, 0]]]], type: :u8)
      inputs = %{"x" => x, "mask" => mask}
      hide = Axon.input("mask")

      for {layer, fun} <- [
            {&Layer.mha/2, &Sidewinder.mha/3},
            {&Layer.transformer_block/2, &Sidewinder.transformer_block/3}
          ],
          type <- [:f32, :bf16] do
        model = layer.(input(4), name: "layer", heads: 2, mask: hide)
        model = Axon.MixedPrecision.apply_policy(model, policy(type))
        %{data: %{"layer" => p}} = state = start(model, inputs)
        expected = fun.(Nx.as_type(x, type), p, heads: 2, mask: mask)
        assert_close(Axon.predict(model, state, inputs), expected)
        refute expected == fun.(Nx.as_type(x, type), p, heads: 2)
      end

      [q, k] = [random(4, {2, 3, 4, 2}), random(5, {2, 3, 2, 2})]
      [to_q, to_k] = for name <- ~w(q k), do: Axon.input(name)
      opts = [scale: 0.3, causal: true, q_offset: 1, layout: :heads_last]
      model = Layer.attention(to_q, to_k, to_k, [mask: hide] ++ opts)
      inputs = %{"q" => q, "k" => k, "mask" => mask}
      assert start(model, inputs).data == %{}

      assert Axon.predict(model, Axon.ModelState.empty(), inputs) ==
               Sidewinder.attention(q, k, k, [mask: mask] ++ opts)
    end

    test "wrong options raise" do
      x = input(4)

      for {fun, opts, argument, message} <- [
            {&Layer.mamba/2, [layer: 2], "layer", "an option out of name, layers,"},
            {&Layer.mamba/2, [layers: 0], "layers", "expected a positive integer, got 0"},
            {&Layer.mamba/2, [output: :first], "output",
             "expected :sequence or :last, got :first"},
            {&Layer.mamba/2, [name: :m], "name", "expected a string, got :m"},
            {&Layer.mamba/2, [meta: 1], "meta", "an option out of"},
            {&Layer.mamba_block/2, [dt_rank: 1.5], "dt_rank",
             "expected a positive integer, got 1.5"},
            {&Layer.mamba_block/2, [dt_min: 0.5], "dt_max",
             "expected a number not below dt_min, 0.5, got 0.1"},
            {&Layer.mamba_block/2, [dt_init_floor: 0], "dt_init_floor",
             "expected a positive number, got 0"},
            {&Layer.mamba_block/2, [use_bias: 1], "use_bias", "expected true or false, got 1"},
            {&Layer.mamba_block/2, [kernel_initializer: :zero], "kernel_initializer",
             "Axon.Initializers"},
            {&Layer.mamba_block/2, :opts, "options", "expected a keyword list, got :opts"},
            {&Layer.causal_conv1d/2, [activation: :relu], "activation",
             "expected :silu, got :relu"},
            {&Layer.causal_conv1d/2, [kernel_size: -1], "kernel_size",
             "expected a positive integer"},
            {&Layer.selective_scan(&1, &1, &1, &1, &2), [gate: 1], "gate",
             "expected a layer of Axon, got 1"},
            {&Layer.residual(&1, fn x -> x end, &2), [eps: 1], "eps",
             "an option out of name, epsilon"},
            {&Layer.rms_norm/2, [epsilon: 0], "epsilon", "expected a positive number, got 0"},
            {&Layer.layer_norm/2, [activation: :silu], "activation", "expected :gelu or"},
            {&Layer.linear(&1, 0, &2), [], "units", "expected a positive integer, got 0"},
            {&Layer.linear(&1, 3, &2), [activation: :tanh], "activation", "got :tanh"},
            {&Layer.mha/2, [mask: 1], "mask", "expected a layer of Axon, got 1"},
            {&Layer.mha/2, [hidden: 1], "hidden", "an option out of"},
            {&Layer.attention(&1, &1, &1, &2), [scale: :auto], "scale", "expected a number"},
            {&Layer.attention(&1, &1, &1, &2), [q_offset: 0.5], "q_offset",
             "an integer, got 0.5"},
            {&Layer.swiglu_mlp/2, [hidden: 0], "hidden", "expected a positive integer, got 0"},
            {&Layer.transformer_block/2, [pairing: :both], "pairing", ":half or :interleaved"}
          ] do
        error = assert_raise Sidewinder.Error, fn -> fun.(x, opts) end
        assert %{kind: :option, argument: ^argument} = error
        assert Exception.message(error) =~ message
      end
    end
  end
end
