if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonGatedRmsNormTest do
    use ExUnit.Case, async: true

    import Sidewinder.NxTest.Scans, only: [assert_close: 3, random: 5]
    alias Axon.{MixedPrecision, ModelState}
    alias Sidewinder.Axon, as: Layer

    @options [groups: 2, norm_before_gate: true]

    test "is the function of Sidewinder, in every type, with its gradient" do
      layer = Layer.gated_rms_norm(Axon.input("x"), Axon.input("z"), [name: "norm"] ++ @options)
      fun = &Sidewinder.gated_rms_norm(&1["x"], &1["z"], &2, [eps: 1.0e-5] ++ @options)

      for {type, rtol} <- [f32: 1.0e-5, f64: 1.0e-10, bf16: 0.05] do
        type = Nx.Type.normalize!(type)
        policy = MixedPrecision.create_policy(params: type, compute: type, output: type)
        {init, predict} = Axon.build(MixedPrecision.apply_policy(layer, policy))

        inputs =
          for {name, seed} <- [{"x", 1}, {"z", 2}],
              into: %{},
              do: {name, random(seed, {2, 3, 6}, -2.0, 2.0, type)}

        state = init.(inputs, ModelState.empty())
        %{data: %{"norm" => %{"gamma" => gamma}}} = state
        assert {gamma.shape, gamma.type} == {{6}, type}
        assert gamma == Nx.broadcast(Nx.tensor(1, type: type), {6})
        assert_close(predict.(state, inputs), fun.(inputs, gamma), rtol: rtol)

        got = Nx.Defn.grad(state, &Nx.sum(Nx.sin(predict.(&1, inputs))))
        expected = Nx.Defn.grad(gamma, &Nx.sum(Nx.sin(fun.(inputs, &1))))
        assert_close(got.data["norm"]["gamma"], expected, rtol: 4 * rtol)
      end
    end

    test "options that are not allowed raise" do
      [x, z] = for name <- ~w(x z), do: Axon.input(name)

      for {option, message} <- [
            {{:groups, 0}, "groups: expected a positive integer, got 0"},
            {{:norm_before_gate, 1}, "norm_before_gate: expected true or false, got 1"},
            {{:epsilon, 0}, "epsilon: expected a positive number, got 0"}
          ] do
        error = assert_raise Sidewinder.Error, fn -> Layer.gated_rms_norm(x, z, [option]) end
        assert %{kind: :option} = error
        assert Exception.message(error) =~ message
      end
    end
  end
end
