if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonErrorsTest do
    use ExUnit.Case, async: true

    alias Axon.ModelState
    alias Sidewinder.Axon, as: Layer
    alias Sidewinder.Axon.Layers

    # What an input of complex numbers makes raise, by the layer that raises.
    defp layers do
      [x, k, h] = for name <- ~w(x k h), do: Axon.input(name)

      %{
        linear: Layer.linear(x, 8),
        ternary_dense: Layer.ternary_dense(x, 8),
        rms_norm: Layer.rms_norm(x),
        layer_norm: Layer.layer_norm(x),
        causal_conv1d: Layer.causal_conv1d(x),
        selective_scan: Layer.selective_scan(x, x, x, x, gate: x),
        mamba_block: Layer.mamba_block(x, use_bias: true),
        attention: Layer.attention(x, x, x),
        mha: Layer.mha(x, mask: k),
        swiglu_mlp: Layer.swiglu_mlp(x),
        transformer_block: Layer.transformer_block(x, mask: k),
        mm_rec_block: Layer.mm_rec_block(x, memory: {k, k}, initial_state: h, dropout: 0.5)
      }
    end

    defp error(model, inputs) do
      assert_raise Axon.CompileError, fn ->
        {init, _} = Axon.build(model)
        init.(inputs, ModelState.empty())
      end
    end

    defp named!(error, op) do
      assert {Layers, ^op, arity} = error.mfa
      message = Exception.message(error)

      assert message =~
               "when compiling layer Sidewinder.Axon.Layers.#{op}/#{arity} named #{op}_0:"

      [first | _] = String.split(message, "\n")
      refute first =~ "anonymous fn"
      error
    end

    test "errors of Axon name the layer" do
      inputs = %{
        "x" => Nx.template({1, 4, 8}, :c64),
        "k" => Nx.template({1, 1, 4, 4}, :u8),
        "h" => Nx.template({1, 8}, :f32)
      }

      for {op, model} <- layers(),
          do: model |> error(Map.take(inputs, Map.keys(Axon.get_inputs(model)))) |> named!(op)
    end

    test "the error itself is the one of the function" do
      {x, y} = {Axon.input("x"), Axon.input("y")}
      model = Layer.attention(x, x, y)
      inputs = %{"x" => Nx.template({1, 1, 4, 8}, :f32), "y" => Nx.template({1, 1, 5, 8}, :f32)}
      error = named!(error(model, inputs), :attention)
      assert %Sidewinder.Error{kind: :shape, op: "attention", argument: "v"} = error.exception
    end

    test "the parts of whole models are named too" do
      tokens = Axon.input("tokens")
      opts = [vocabulary: 7, width: 8, name: "model"]

      for {model, inputs, op} <- [
            {Layer.mm_rec(tokens, [vocabulary: 5000] ++ tl(opts)),
             %{"tokens" => Nx.template({1, 2}, :f32)}, :tied_embedding},
            {Layer.mm_rec(tokens, opts), %{"tokens" => Nx.template({2}, :s64)}, :mm_rec_block},
            {Layer.mamba(tokens), %{"tokens" => Nx.template({8}, :f32)}, :mamba_block},
            {Layer.residual(tokens, &Layer.mamba_block/1),
             %{"tokens" => Nx.template({1, 1}, :c64)}, :rms_norm},
            {elem(
               Layer.mm_rec(tokens, [return_state: true, initial_state: Axon.input("h")] ++ opts),
               0
             ), %{"tokens" => Nx.template({1, 2}, :s64), "h" => Nx.template({1, 1, 8}, :f32)},
             :of_block}
          ] do
        error = error(model, inputs)
        assert {Layers, ^op, _} = error.mfa
      end
    end

    test "axes that features and a mask call differently raise" do
      [x, mask] = for name <- ~w(x mask), do: Axon.input(name)
      x_named = Nx.template({2, 4, 8}, :f32, names: [:batch, :time, :width])
      mask_named = Nx.template({2, 1, 4, 4}, :u8, names: [:other, nil, nil, nil])
      error = error(Layer.mha(x, mask: mask), %{"x" => x_named, "mask" => mask_named})
      assert %Sidewinder.Error{argument: "mask", got: ":other"} = error.exception
    end

    test "a layer tells its inputs, parameters and options" do
      model = Layer.linear(Axon.input("x"), 3, activation: :relu)
      assert %{opts: opts} = model.nodes[model.output]
      assert opts == [inputs: [:x], parameters: ["kernel", "bias"], activation: :relu]
    end
  end
end
