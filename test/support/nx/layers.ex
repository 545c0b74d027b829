if Code.ensure_loaded?(Axon) do
  defmodule Sidewinder.NxTest.Layers do
    @moduledoc false
    # What tests of layers of Axon share.

    import ExUnit.Assertions
    alias Axon.ModelState
    alias Sidewinder.NxTest.Scans

    @doc """
    Trains a model, from `{B, L, 8}` to a number, on means of the third step, until its loss is a fourth. Returns the
    state before.
    """
    def learns(model) do
      {init, predict} = Axon.build(model)
      x = Scans.random(3, {8, 6, 8}, -1.0, 1.0, {:f, 32})
      target = Nx.mean(x[[.., 2]], axes: [1], keep_axes: true)
      loss = &Nx.to_number(Nx.mean(Nx.pow(Nx.subtract(predict.(&1, x), target), 2)))
      start = init.(x, ModelState.empty())
      optimizer = Polaris.Optimizers.adam(learning_rate: 0.01)

      trained =
        model
        |> Axon.Loop.trainer(:mean_squared_error, optimizer, log: 0)
        |> Axon.Loop.run([{x, target}], start, epochs: 40, compiler: Nx.Defn.Evaluator)

      assert loss.(trained) < loss.(start) / 4
      start
    end

    @doc "Asserts that a function of `Sidewinder.Axon` refuses each of these options, with the start of its message."
    def refuses(layer, options_and_messages) do
      for {options, message} <- options_and_messages do
        error =
          assert_raise Sidewinder.Error, fn ->
            apply(Sidewinder.Axon, layer, [Axon.input("x"), options])
          end

        assert Exception.message(error) =~ "Sidewinder.Axon.#{layer}: " <> message
      end
    end

    @doc "Asserts that a layer over 8 channels refuses to make its parameters."
    def refuses_to_start(layer, message) do
      {init, _predict} = Axon.build(layer)
      make = fn -> init.(Nx.template({1, 2, 8}, :f32), ModelState.empty()) end
      assert Exception.message(assert_raise(Sidewinder.Error, make)) =~ message
    end
  end
end
