# Without Axon there is nothing to test, which test_helper.exs says.
if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.Axon.TernaryTest do
    use ExUnit.Case, async: true

    alias Sidewinder.Kernel.Ternary
    alias Sidewinder.Tensor

    @width 6

    defp model(options) do
      Axon.input("x", shape: {nil, @width})
      |> Sidewinder.Axon.ternary_dense(3, [name: "layer"] ++ options)
    end

    defp start(model, seed \\ 1) do
      {init, _} = Axon.build(model, seed: seed)
      init.(Nx.template({1, @width}, :f32), Axon.ModelState.empty())
    end

    test "has the parameters of a dense layer" do
      for {options, names} <- [{[], ["bias", "kernel"]}, {[use_bias: false], ["kernel"]}] do
        %{data: %{"layer" => params}} = start(model(options))
        assert Map.keys(params) == names
        assert params["kernel"].shape == {3, @width}
      end
    end

    test "gives what the kernels give on planes" do
      {x, _} = Nx.Random.normal(Nx.Random.key(2), 0.0, 1.0, shape: {4, @width})

      for options <- [[], [rule: :twn, per_row: true], [rule: :threshold, threshold: 0.1]] do
        model = model([use_bias: false] ++ options)
        state = start(model)
        w = Tensor.new(Nx.to_binary(state.data["layer"]["kernel"]), :f32, {3, @width})
        {planes, scale} = Ternary.quantize(w, options)

        y =
          Ternary.matmul_f32(Tensor.new(Nx.to_binary(x), :f32, {4, @width}), planes,
            w_scale: scale
          )

        expected = Nx.reshape(Nx.tensor(Tensor.to_list(y)), {4, 3})

        # Products of random weights may cancel to nearly 0.
        close = Nx.all_close(Axon.predict(model, state, x), expected, rtol: 1.0e-4, atol: 1.0e-5)
        assert Nx.to_number(close) == 1
      end
    end

    test "learns" do
      {x, key} = Nx.Random.normal(Nx.Random.key(2), 0.0, 1.0, shape: {32, @width})
      {w, _} = Nx.Random.randint(key, -1, 2, shape: {@width, 3})
      y = Nx.dot(x, w)

      loop =
        Axon.Loop.trainer(
          model([]),
          :mean_squared_error,
          Polaris.Optimizers.adam(learning_rate: 0.03),
          log: 0
        )

      loss = &Nx.to_number(Nx.mean(Nx.pow(Nx.subtract(Axon.predict(model([]), &1, x), y), 2)))
      data = Stream.repeatedly(fn -> {x, y} end)
      state = Axon.Loop.run(loop, data, Axon.ModelState.empty(), epochs: 1, iterations: 150)
      assert loss.(state) < 0.1 * loss.(start(model([])))
    end

    test "wrong options say what is wrong" do
      for {options, name} <- [
            {[rule: :round], "rule"},
            {[per_row: 1], "per_row"},
            {[units: 2], "units"}
          ] do
        error = assert_raise Sidewinder.Error, fn -> model(options) end
        assert error.argument == name
      end
    end
  end
end
