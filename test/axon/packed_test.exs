if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonPackedTest do
    use ExUnit.Case, async: true

    import Sidewinder.NxTest.Scans, only: [assert_close: 3, no_library: 0, random: 5, ways: 0]
    import Sidewinder.NxTest.Layers, only: [refuses: 2]
    alias Axon.{MixedPrecision, ModelState}
    alias Sidewinder.{Error, Mamba}
    alias Sidewinder.Axon, as: Layer

    @lengths [[0, 3, 1, 63, 0, 7], [5], [2, 0]]

    # Functions of Sidewinder.Axon, with sizes for a width of 4.
    @layers [
      mamba: [layers: 2, state_size: 3, kernel_size: 3, use_bias: true],
      mamba: [layers: 1, state_size: 3, conv_bias: false, output: :last],
      mamba2: [layers: 2, state_size: 3, head_size: 2, groups: 2, use_bias: true],
      gated_delta_net: [layers: 2, heads: 4, groups: 2, head_size: 3, conv_bias: true],
      gated_delta_net: [layers: 1, head_size: 2, output: :last],
      linear_attention: [head_size: 2, normalize: true],
      linear_attention: [head_size: 2, decay: :retention, gate: false],
      linear_attention: [heads: 4, groups: 2, head_size: 3, decay: :key, use_bias: true]
    ]

    # The layer, and the same layer of packed sequences.
    defp models(layer, options, type) do
      [x, ends] = for name <- ["x", "cu_seqlens"], do: Axon.input(name)
      policy = MixedPrecision.create_policy(params: type, compute: type, output: type)

      for more <- [[], [cu_seqlens: ends]] do
        apply(Layer, layer, [x, [name: "layer"] ++ options ++ more])
        |> MixedPrecision.apply_policy(policy)
      end
    end

    defp ends(lengths), do: Nx.tensor(Enum.scan([0 | lengths], &+/2))

    defp separately(predict, state, x, lengths, output) do
      {parts, _end} =
        Enum.map_reduce(lengths, 0, fn
          0, at when output == :last -> {Nx.broadcast(Nx.tensor(0, type: x.type), {1, 4}), at}
          0, at -> {nil, at}
          length, at -> {predict.(state, x[[.., at..(at + length - 1)]]), at + length}
        end)

      Nx.concatenate(Enum.filter(parts, & &1), axis: if(output == :last, do: 0, else: 1))
    end

    defp assert_gradient(got, expected, rtol, of) do
      scale = Nx.to_number(Nx.reduce_max(Nx.abs(expected)))
      assert_close(got, expected, rtol: 10 * rtol, atol: 2 * rtol * scale, of: of)
    end

    defp loss(y), do: y |> Nx.as_type(:f64) |> Nx.sin() |> Nx.sum()

    for {{layer, options}, seed} <- Enum.with_index(@layers),
        {type, rtol} <- [f32: 1.0e-4, bf16: 0.05] do
      test "#{layer} of packed sequences is that of each, with its gradient: #{type}, #{inspect(options)}" do
        {options, rtol} = {unquote(options), unquote(rtol)}
        [model, packed] = models(unquote(layer), options, Nx.Type.normalize!(unquote(type)))
        {init, predict} = Axon.build(model, seed: unquote(seed))
        {init_packed, predict_packed} = Axon.build(packed, seed: unquote(seed))

        for lengths <- @lengths do
          x = random(unquote(seed), {1, Enum.sum(lengths), 4}, -2.0, 2.0, unquote(type))
          inputs = %{"x" => x, "cu_seqlens" => ends(lengths)}
          state = init.(x, ModelState.empty())
          assert init_packed.(inputs, ModelState.empty()).data == state.data

          each = fn {state, x} -> separately(predict, state, x, lengths, options[:output]) end
          together = fn {state, x} -> predict_packed.(state, %{inputs | "x" => x}) end
          {got, expected} = {together.({state, x}), each.({state, x})}
          assert {got.shape, got.type} == {expected.shape, expected.type}
          assert_close(got, expected, rtol: rtol)

          gradients = &Nx.Defn.value_and_grad({state, x}, fn at -> loss(&1.(at)) end)
          {value, {of_state, of_x}} = gradients.(together)
          {expected_value, {expected_of_state, expected_of_x}} = gradients.(each)
          assert_close(value, expected_value, rtol: rtol, atol: 20 * rtol)
          assert_gradient(of_x, expected_of_x, rtol, "x")

          for {name, params} <- expected_of_state.data,
              {param, t} <- params,
              do: assert_gradient(of_state.data[name][param], t, rtol, "#{name}, #{param}")
        end
      end
    end

    @blocks [
      mamba_block: [],
      mamba2_block: [head_size: 2],
      gated_delta_net_block: [head_size: 2],
      linear_attention: [head_size: 2]
    ]

    defp started(layer, options, inputs) do
      [_model, packed] = models(layer, options, {:f, 32})
      {init, predict} = Axon.build(packed)
      {init.(inputs, ModelState.empty()), predict}
    end

    test "packed sequences may be jitted, by every compiler, with ends of every type" do
      x = random(1, {1, 9, 4}, -1.0, 1.0, :f32)

      for {layer, options} <- @blocks, type <- [:s32, :s64, :u8] do
        inputs = %{"x" => x, "cu_seqlens" => Nx.as_type(ends([4, 0, 5]), type)}
        {state, predict} = started(layer, options, inputs)
        expected = predict.(state, inputs)
        gradient = &Nx.Defn.grad(&1, fn state -> loss(predict.(state, &2)) end).data["layer"]
        expected_gradient = gradient.(state, inputs)

        for {name, way} <- ways() do
          about = [rtol: 1.0e-4, of: "#{layer}, #{name}"]
          assert_close(way.(predict, [state, inputs]), expected, about)
          got = way.(gradient, [state, inputs])
          for {param, t} <- expected_gradient, do: assert_close(got[param], t, about)
        end
      end
    end

    test "layers of single ops take packed sequences" do
      [x, ends] = for name <- ["x", "cu_seqlens"], do: Axon.input(name)
      heads = Axon.reshape(x, {:batch, 2, :auto, 2})
      packed = [cu_seqlens: ends]

      layers = %{
        conv: Layer.causal_conv1d(x, [name: "conv"] ++ packed),
        scan: Layer.selective_scan(x, x, x, x, [name: "scan", gate: x] ++ packed),
        attention: Layer.attention(heads, heads, heads, [causal: true] ++ packed)
      }

      {init, predict} = Axon.build(Axon.container(layers))
      x = random(1, {1, 6, 4}, -1.0, 1.0, :f32)
      inputs = %{"x" => x, "cu_seqlens" => ends([4, 0, 2])}
      state = init.(inputs, ModelState.empty())
      packed = [cu_seqlens: inputs["cu_seqlens"]]
      %{"conv" => conv, "scan" => scan} = state.data
      options = [d: scan["D"], z: x, dt_bias: scan["dt_b"], dt_softplus: true] ++ packed
      heads = Nx.reshape(x, {1, 2, 6, 2})

      expected = %{
        conv: Sidewinder.causal_conv1d(x, conv["kernel"], [bias: conv["bias"]] ++ packed),
        scan: Sidewinder.selective_scan(x, x, Nx.negate(Nx.exp(scan["A_log"])), x, x, options),
        attention: Sidewinder.attention(heads, heads, heads, [causal: true] ++ packed)
      }

      got = predict.(state, inputs)
      for {name, y} <- expected, do: assert_close(got[name], y, rtol: 0.0)
    end

    test "names of axes go along, but for steps that become sequences" do
      x = random(1, {1, 5, 4}, -1.0, 1.0, :f32) |> Nx.rename([:batch, :time, :width])
      inputs = %{"x" => x, "cu_seqlens" => Nx.rename(ends([2, 3]), [:sequences])}

      for {layer, options} <- [mamba: [], mamba2: [head_size: 2], gated_delta_net: [head_size: 2]],
          {output, names} <- [sequence: [:batch, :time, :width], last: [nil, :width]] do
        {state, predict} = started(layer, [output: output] ++ options, inputs)
        assert Nx.names(predict.(state, inputs)) == names
      end
    end

    # Axon raises an error of its own around that of a layer's shapes and types.
    defp refused(layer, options, inputs) do
      error =
        catch_error(
          with {state, predict} <- started(layer, options, inputs),
               do: predict.(state, inputs)
        )

      if is_struct(error, Axon.CompileError), do: error.exception, else: error
    end

    test "a batch, and ends of other shapes, types and values, are refused" do
      for {layer, options} <- @blocks,
          {shape, ends, kind, argument, expected} <- [
            {{2, 5, 4}, ends([5]), :shape, ~r/^[xv]$/, "shape {1, l, "},
            {{1, 5, 4}, Nx.tensor([[0, 5]]), :shape, ~r/^cu_seqlens$/, "shape {s + 1}"},
            {{1, 5, 4}, Nx.tensor([0.0, 5.0]), :dtype, ~r/^cu_seqlens$/, "integers"},
            {{1, 5, 4}, ends([4]), :argument, ~r/^cu_seqlens$/, "the length 5"}
          ] do
        inputs = %{"x" => random(1, shape, -1.0, 1.0, :f32), "cu_seqlens" => ends}

        assert %Error{kind: ^kind, got: <<_, _::binary>>} =
                 error = refused(layer, options, inputs)

        assert error.argument =~ argument
        assert error.expected =~ expected
      end

      for {layer, _options} <- @blocks,
          do: refuses(layer, [{[cu_seqlens: 5], "cu_seqlens: expected a layer of Axon, got 5"}])
    end

    @tag skip: no_library()
    test "a model that was trained on packed sequences is converted as any other" do
      for {layer, options} <- [mamba: [], mamba2: [head_size: 4]] do
        [model, packed] = models(layer, [layers: 1, output: :last] ++ options, {:f, 32})
        inputs = %{"x" => random(1, {1, 5, 4}, -1.0, 1.0, :f32), "cu_seqlens" => ends([2, 3])}
        {init, _predict} = Axon.build(packed)
        state = init.(inputs, ModelState.empty())
        [one, other] = for m <- [model, packed], do: Layer.to_mamba(m, state, backend: :cpu)
        assert Mamba.tensors(one) == Mamba.tensors(other)
        assert one.config == other.config
      end
    end
  end
end
