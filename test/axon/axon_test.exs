# Without Axon there is nothing to test, which test_helper.exs says.
if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonTest do
    # It configures the backend for all.
    use ExUnit.Case, async: false

    import Sidewinder.NxTest.Ops, only: [kernel_calls: 1]

    import Sidewinder.NxTest.Scans,
      only: [assert_close: 2, assert_close: 3, no_library: 0, random: 2, random: 5]

    alias Sidewinder.Axon, as: Layer

    doctest Sidewinder.Axon

    defp input(width), do: Axon.input("x", shape: {nil, nil, width})

    defp start(model, template, seed \\ 1) do
      {init, _} = Axon.build(model, seed: seed)
      init.(template, Axon.ModelState.empty())
    end

    defp shapes(model, width) do
      %{data: %{"layer" => params}} = start(model, Nx.template({1, 3, width}, :f32))
      Map.new(params, fn {name, t} -> {name, t.shape} end)
    end

    defp within?(t, bound),
      do:
        Nx.to_number(Nx.reduce_max(Nx.abs(t))) <= bound and
          Nx.to_number(Nx.standard_deviation(t)) > bound / 3

    describe "mamba_block" do
      test "has the parameters of the paper" do
        assert shapes(Layer.mamba_block(input(20), name: "layer"), 20) == %{
                 "in_proj" => {80, 20},
                 "conv_w" => {40, 4},
                 "conv_b" => {40},
                 "x_proj" => {34, 40},
                 "dt_w" => {40, 2},
                 "dt_b" => {40},
                 "A_log" => {40, 16},
                 "D" => {40},
                 "out_proj" => {20, 40}
               }
      end

      test "has those that its options say" do
        opts = [
          state_size: 5,
          expand: 3,
          kernel_size: 2,
          dt_rank: 4,
          use_bias: true,
          conv_bias: false
        ]

        assert shapes(Layer.mamba_block(input(7), [name: "layer"] ++ opts), 7) == %{
                 "in_proj" => {42, 7},
                 "in_proj_b" => {42},
                 "conv_w" => {21, 2},
                 "x_proj" => {14, 21},
                 "dt_w" => {21, 4},
                 "dt_b" => {21},
                 "A_log" => {21, 5},
                 "D" => {21},
                 "out_proj" => {7, 21},
                 "out_proj_b" => {7}
               }
      end

      test "starts as in the paper" do
        model = Layer.mamba_block(input(32), name: "layer", use_bias: true, dt_rank: 4)
        %{data: %{"layer" => p}} = start(model, Nx.template({1, 3, 32}, :f32))

        for {name, inputs} <-
              [in_proj: 32, conv_w: 4, x_proj: 64, dt_w: 4, out_proj: 64] ++
                [in_proj_b: 32, conv_b: 4, out_proj_b: 64],
            do: assert(within?(p[to_string(name)], 1 / :math.sqrt(inputs)), to_string(name))

        dt = p["dt_b"] |> Nx.exp() |> Nx.log1p() |> Nx.to_flat_list()
        assert Enum.all?(dt, &(&1 >= 0.00099 and &1 <= 0.101))
        assert Enum.count(dt, &(&1 < 0.01)) in 16..48

        a = Nx.negate(Nx.exp(p["A_log"]))
        assert_close(a, Nx.broadcast(Nx.negate(Nx.add(Nx.iota({16}), 1)), {64, 16}))
        assert p["D"] == Nx.broadcast(1.0, {64})
      end

      test "its options say how it starts" do
        opts = [name: "layer", dt_min: 1.0e-5, dt_max: 1.0e-5, dt_init_floor: 0.5]

        opts =
          opts ++
            [
              kernel_initializer: :zeros,
              bias_initializer: fn shape, _ -> Nx.broadcast(2.0, shape) end
            ]

        %{data: %{"layer" => p}} =
          start(Layer.mamba_block(input(4), opts), Nx.template({1, 3, 4}, :f32))

        assert_close(Nx.log1p(Nx.exp(p["dt_b"])), Nx.broadcast(0.5, {8}))

        for name <- ~w(in_proj conv_w x_proj out_proj),
            do: assert(Nx.to_number(Nx.sum(p[name])) == 0)

        assert p["conv_b"] == Nx.broadcast(2.0, {8})
        assert within?(p["dt_w"], 1.0)
      end

      test "is Sidewinder.mamba_block, whatever parameters it has" do
        for use_bias <- [false, true], conv_bias <- [false, true], type <- [:f32, :f64] do
          model =
            Layer.mamba_block(input(3), name: "layer", use_bias: use_bias, conv_bias: conv_bias)

          {init, predict} = Axon.build(Axon.MixedPrecision.apply_policy(model, policy(type)))
          x = random(2, {2, 5, 3}, -1.0, 1.0, type)
          state = init.(x, Axon.ModelState.empty())
          y = predict.(state, x)
          assert y.type == Nx.Type.normalize!(type)
          assert_close(y, Sidewinder.mamba_block(x, state.data["layer"]))
        end
      end
    end

    defp policy(type) do
      type = Nx.Type.normalize!(type)
      Axon.MixedPrecision.create_policy(params: type, compute: type, output: type)
    end

    describe "mamba" do
      test "stacks blocks with residual connections, under stable names" do
        model =
          Layer.mamba(input(3),
            layers: 2,
            state_size: 4,
            name: "m",
            epsilon: 0.1,
            gamma_initializer: :uniform
          )

        x = random(3, {2, 4, 3})
        %{data: p} = state = start(model, x)
        assert Map.keys(p) == ~w(m_0 m_0_norm m_1 m_1_norm m_norm)

        norm = fn x, name -> Axon.Layers.rms_norm(x, p[name]["gamma"], epsilon: 0.1) end

        block = fn x, name ->
          Nx.add(x, Sidewinder.mamba_block(norm.(x, name <> "_norm"), p[name]))
        end

        expected = x |> block.("m_0") |> block.("m_1") |> norm.("m_norm")
        assert_close(Axon.predict(model, state, x), expected)

        last =
          Layer.mamba(input(3), layers: 2, state_size: 4, name: "m", epsilon: 0.1, output: :last)

        assert_close(Axon.predict(last, state, x), expected[[.., -1]])
      end

      test "without a name, two stacks share nothing" do
        model = input(3) |> Layer.mamba(layers: 1) |> Layer.mamba(layers: 1, state_size: 2)
        %{data: p} = start(model, Nx.template({1, 2, 3}, :f32))

        assert Map.keys(p) ==
                 ~w(mamba_block_0 mamba_block_1 rms_norm_0 rms_norm_1 rms_norm_2 rms_norm_3)

        refute p["mamba_block_0"]["in_proj"] == p["mamba_block_1"]["in_proj"]
        assert Axon.get_op_counts(model).mamba_block == 2
      end
    end

    # A model in f64 and a loss that all its outputs reach.
    defp tiny do
      Layer.mamba(input(3), layers: 2, state_size: 2, use_bias: true, name: "m")
      |> Axon.MixedPrecision.apply_policy(policy(:f64))
    end

    defp loss(model, x) do
      {_, predict} = Axon.build(model, mode: :train)
      &Nx.sum(Nx.sin(Nx.multiply(predict.(&1, x).prediction, 3)))
    end

    test "the gradient reaches every parameter and agrees with finite differences" do
      {model, x} = {tiny(), random(5, {2, 5, 3}, -1.0, 1.0, :f64)}
      {state, loss} = {start(model, x), loss(model, x)}
      gradient = Nx.Defn.grad(state, loss)

      for {layer, params} <- state.data, {name, t} <- params do
        direction = random(:erlang.phash2({layer, name}), t.shape, -1.0, 1.0, :f64)

        at = fn step ->
          moved = Nx.add(t, Nx.multiply(direction, step))
          Nx.to_number(loss.(put_in(state.data[layer][name], moved)))
        end

        got = Nx.to_number(Nx.sum(Nx.multiply(gradient.data[layer][name], direction)))
        expected = (at.(1.0e-5) - at.(-1.0e-5)) / 2.0e-5
        assert_in_delta got, expected, 1.0e-7 * (1 + abs(expected)), "#{layer}.#{name}"
        assert abs(got) > 1.0e-9, "#{layer}.#{name}"
      end

      pure = with_backend(:nx, fn -> Nx.Defn.grad(state, loss) end)

      for {layer, params} <- pure.data,
          do: assert_close(gradient.data[layer], params, rtol: 1.0e-9)
    end

    defp with_backend(backend, fun) do
      config = Sidewinder.Device.config()
      on_exit(fn -> Sidewinder.Device.configure(Map.to_list(config)) end)
      Sidewinder.Device.configure(backend: backend)
      fun.()
    end

    @tag skip: no_library()
    test "a block is one kernel forward and one backward" do
      {model, x} = {tiny(), random(5, {2, 5, 3}, -1.0, 1.0, :f64)}
      {state, loss} = {start(model, x), loss(model, x)}
      calls = kernel_calls(fn -> Nx.Defn.value_and_grad(state, loss) end)

      assert Enum.frequencies(calls) ==
               %{mamba_block: 2, mamba_block_backward: 2, rms_norm: 3, rms_norm_backward: 3}
    end

    test "mixed precision computes in its type and keeps the parameters'" do
      model = Layer.mamba(input(4), layers: 1, name: "m")

      mixed =
        Axon.MixedPrecision.create_policy(params: {:f, 32}, compute: {:bf, 16}, output: {:f, 32})

      x = random(6, {2, 5, 4})
      state = start(model, x)
      y = model |> Axon.MixedPrecision.apply_policy(mixed) |> Axon.predict(state, x)
      assert y.type == {:f, 32}
      assert_close(y, Axon.predict(model, state, x), rtol: 0.05)

      half = Axon.MixedPrecision.apply_policy(model, policy(:bf16))
      half_state = start(half, x)
      assert half_state.data["m_0"]["A_log"].type == {:bf, 16}
      y = Axon.predict(half, half_state, x)
      assert y.type == {:bf, 16}
      assert y |> Nx.is_nan() |> Nx.any() |> Nx.to_number() == 0
    end

    # Whether a number of the sequence so far was large.
    defp examples do
      for seed <- 1..8 do
        x = random(seed, {16, 6, 1}, 0.0, 1.0, :f32)
        {x, Nx.greater(Nx.reduce_max(x, axes: [1]), 0.9)}
      end
    end

    defp classifier do
      Axon.input("x", shape: {nil, nil, 1})
      |> Axon.dense(4, name: "embed")
      |> Layer.mamba(layers: 1, state_size: 4, output: :last, name: "m")
      |> Axon.dense(1, activation: :sigmoid)
    end

    defp train(model, state, epochs, rate \\ 0.03) do
      model
      |> Axon.Loop.trainer(:binary_cross_entropy, Polaris.Optimizers.adam(learning_rate: rate),
        log: 0,
        seed: 2
      )
      |> Axon.Loop.run(examples(), state, epochs: epochs)
    end

    defp mistake(state, model \\ classifier()) do
      losses =
        for {x, y} <- examples(),
            do:
              Axon.Losses.binary_cross_entropy(y, Axon.predict(model, state, x), reduction: :mean)

      Enum.sum(Enum.map(losses, &Nx.to_number/1)) / length(losses)
    end

    test "Axon.Loop trains it" do
      state = start(classifier(), Nx.template({16, 6, 1}, :f32), 2)
      assert mistake(train(classifier(), state, 6)) < 0.6 * mistake(state)
    end

    test "frozen parameters stay, the others do not" do
      state = start(classifier(), Nx.template({16, 6, 1}, :f32))
      # Deprecated, but what Axon.Loop heeds in Axon 0.8.
      model = apply(Axon, :freeze, [classifier(), &(&1.name in ["A_log", "in_proj"])])
      trained = train(model, state, 1)

      for {name, t} <- state.data["m_0"],
          do: assert(trained.data["m_0"][name] == t == name in ["A_log", "in_proj"], name)
    end

    test "a stack of transformer blocks learns" do
      # After a norm, a single number shows only beside a bias.
      model =
        Axon.input("x", shape: {nil, nil, 1})
        |> Layer.linear(8, bias_initializer: Axon.Initializers.normal(scale: 1.0), name: "embed")
        |> Layer.transformer_block(heads: 2, rope_theta: 100.0, name: "a")
        |> Layer.transformer_block(heads: 2, causal: true, name: "b")
        |> Axon.nx(& &1[[.., -1]])
        |> Axon.dense(1, activation: :sigmoid)

      state = start(model, Nx.template({16, 6, 1}, :f32), 2)
      assert mistake(train(model, state, 20, 0.01), model) < 0.4 * mistake(state, model)
    end

    test "a block can be built of its parts" do
      whole = Layer.mamba_block(input(4), name: "layer", state_size: 3, expand: 2)
      x = random(9, {2, 6, 4})
      %{data: %{"layer" => p}} = start(whole, x)

      dense = &Axon.dense(&1, &2, use_bias: false, name: &3)
      both = dense.(input(4), 16, "in_proj")
      [u, z] = for range <- [0..7, 8..15], do: Axon.nx(both, & &1[[.., .., range]])
      c = Layer.causal_conv1d(u, activation: :silu, name: "conv")
      projected = dense.(c, 7, "x_proj")

      [delta, b, c_out] =
        for range <- [0..0, 1..3, 4..6], do: Axon.nx(projected, & &1[[.., .., range]])

      parts =
        Layer.selective_scan(c, dense.(delta, 8, "dt"), b, c_out, gate: z, name: "scan")
        |> dense.(4, "out_proj")

      kernel = &%{"kernel" => Nx.transpose(p[&1])}

      params = %{
        "in_proj" => kernel.("in_proj"),
        "conv" => %{"kernel" => p["conv_w"], "bias" => p["conv_b"]},
        "x_proj" => kernel.("x_proj"),
        "dt" => kernel.("dt_w"),
        "scan" => Map.take(p, ~w(dt_b A_log D)),
        "out_proj" => kernel.("out_proj")
      }

      shapes =
        &Map.new(&1, fn {layer, params} ->
          {layer, Map.new(params, fn {k, t} -> {k, t.shape} end)}
        end)

      assert shapes.(start(parts, x).data) == shapes.(params)

      assert_close(
        Axon.predict(parts, Axon.ModelState.new(params), x),
        Sidewinder.mamba_block(x, p)
      )
    end
  end
end
