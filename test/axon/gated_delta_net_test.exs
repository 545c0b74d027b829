if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonGatedDeltaNetTest do
    use ExUnit.Case, async: true

    import Sidewinder.NxTest.Scans, only: [assert_close: 3, random: 5]
    import Sidewinder.NxTest.Layers
    alias Axon.{MixedPrecision, ModelState}
    alias Sidewinder.Axon, as: Layer

    @block [heads: 4, groups: 2, head_size: 3, value_size: 2, kernel_size: 3]

    # The layer step by step: 4 heads of 2 values, in 2 groups with keys of 3 numbers.
    defp plain(p, x, factor) do
      {_batch, length, _width} = x.shape
      all = x |> Nx.dot([2], p["in_proj"], [1]) |> add(p["in_proj_b"])
      [u, z, b, a] = cut(all, [20, 8, 4, 4])
      padded = Nx.pad(u, 0, [{0, 0, 0}, {2, 0, 0}, {0, 0, 0}])

      taps =
        for k <- 0..2,
            do: Nx.multiply(padded[[.., k..(k + length - 1)//1]], p["conv_w"][[.., k]])

      [q, k, v] = taps |> Enum.reduce(&Nx.add/2) |> add(p["conv_b"]) |> silu() |> cut([6, 6, 8])

      # Heads 0 and 1 are of the first group.
      [q, k] =
        for t <- [q, k] do
          t = Nx.reshape(t, {2, length, 2, 3})
          square = Nx.sum(Nx.multiply(t, t), axes: [3], keep_axes: true)
          unit = Nx.divide(t, Nx.sqrt(Nx.add(square, number(1.0e-6, x))))
          Nx.take(unit, Nx.tensor([0, 0, 1, 1]), axis: 2)
        end

      v = Nx.reshape(v, {2, length, 4, 2})
      beta = Nx.multiply(Nx.sigmoid(b), factor)
      delta = a |> Nx.add(p["dt_b"]) |> Nx.exp() |> Nx.log1p()
      decay = Nx.exp(Nx.multiply(delta, Nx.negate(Nx.exp(p["A_log"]))))

      {rows, _state} =
        Enum.map_reduce(
          0..(length - 1),
          Nx.broadcast(number(0, x), {2, 4, 3, 2}),
          fn t, s ->
            at = & &1[[.., t]]
            s = Nx.multiply(s, at.(decay) |> Nx.new_axis(2) |> Nx.new_axis(3))
            key = Nx.new_axis(at.(k), 3)
            error = Nx.subtract(at.(v), Nx.sum(Nx.multiply(s, key), axes: [2]))
            step = Nx.multiply(error, Nx.new_axis(at.(beta), 2))
            s = Nx.add(s, Nx.multiply(key, Nx.new_axis(step, 2)))
            {Nx.sum(Nx.multiply(s, Nx.new_axis(at.(q), 3)), axes: [2]), s}
          end
        )

      y = rows |> Nx.stack(axis: 1) |> Nx.multiply(number(1 / :math.sqrt(3), x))
      mean = Nx.mean(Nx.multiply(y, y), axes: [3], keep_axes: true)

      y
      |> Nx.divide(Nx.sqrt(Nx.add(mean, number(1.0e-5, x))))
      |> Nx.multiply(p["norm"])
      |> Nx.multiply(silu(Nx.reshape(z, {2, length, 4, 2})))
      |> Nx.reshape({2, length, 8})
      |> Nx.dot([2], p["out_proj"], [1])
      |> add(p["out_proj_b"])
    end

    # A plain number would be rounded to f32.
    defp number(number, x), do: Nx.tensor(number, type: x.type)

    defp add(t, nil), do: t
    defp add(t, bias), do: Nx.add(t, bias)

    defp cut(t, sizes) do
      {parts, _} = Enum.map_reduce(sizes, 0, &{Nx.slice_along_axis(t, &2, &1, axis: 2), &1 + &2})
      parts
    end

    defp silu(x), do: Nx.multiply(x, Nx.sigmoid(x))

    for {about, options, factor} <- [
          {"by default", [], 1},
          {"with biases and negative eigenvalues",
           [use_bias: true, conv_bias: true, negative_eigenvalues: true], 2}
        ] do
      test "is the formula, in every type, with its gradient, #{about}" do
        options = [name: "block"] ++ @block ++ unquote(options)
        layer = Layer.gated_delta_net_block(Axon.input("x"), options)

        for {type, rtol} <- [f64: 1.0e-9, f32: 1.0e-4, bf16: 0.1] do
          type = Nx.Type.normalize!(type)
          policy = MixedPrecision.create_policy(params: type, compute: type, output: type)
          {init, predict} = Axon.build(MixedPrecision.apply_policy(layer, policy))
          x = random(1, {2, 5, 4}, -2.0, 2.0, type)
          state = init.(x, ModelState.empty())
          wide = Map.new(state.data["block"], fn {name, t} -> {name, Nx.as_type(t, :f64)} end)
          x64 = Nx.as_type(x, :f64)
          assert_close(predict.(state, x), plain(wide, x64, unquote(factor)), rtol: rtol)

          if type != {:bf, 16} do
            got = Nx.Defn.grad(state, &Nx.sum(Nx.sin(predict.(&1, x)))).data["block"]
            expected = Nx.Defn.grad(wide, &Nx.sum(Nx.sin(plain(&1, x64, unquote(factor)))))
            for {name, t} <- expected, do: assert_close(got[name], t, rtol: 10 * rtol)
          end
        end
      end
    end

    test "parameters have the shapes that heads and groups give" do
      shapes = fn options ->
        {init, _} =
          Axon.build(Layer.gated_delta_net_block(Axon.input("x"), [name: "b"] ++ options))

        %{"b" => params} = init.(Nx.template({1, 2, 64}, :f32), ModelState.empty()).data
        for a <- Nx.to_flat_list(Nx.exp(params["A_log"])), do: assert(a >= 1 and a <= 16)
        Map.new(params, fn {name, t} -> {name, t.shape} end)
      end

      # 2 heads of 32 numbers, which the width has room for.
      assert shapes.(head_size: 32) == %{
               "in_proj" => {4 * 64 + 2 * 2, 64},
               "conv_w" => {3 * 64, 4},
               "dt_b" => {2},
               "A_log" => {2},
               "norm" => {32},
               "out_proj" => {64, 64}
             }

      assert %{
               "in_proj" => {280, 64},
               "conv_w" => {144, 4},
               "norm" => {32},
               "out_proj" => {64, 128}
             } =
               shapes.(head_size: 8, value_size: 32, heads: 4, groups: 1)
    end

    test "a stack learns" do
      Axon.input("x")
      |> Layer.gated_delta_net(layers: 2, output: :last, head_size: 4, name: "net")
      |> Axon.dense(1)
      |> learns()
    end

    test "options that are not allowed raise" do
      refuses(:gated_delta_net_block, [
        {[head_size: 0], "head_size: expected a positive integer, got 0"},
        {[value_size: 1.5], "value_size: expected a positive integer, got 1.5"},
        {[keys: 3], "keys: expected an option out of name, meta, heads"}
      ])

      Layer.gated_delta_net_block(Axon.input("x"), heads: 4, groups: 3)
      |> refuses_to_start("groups: expected a divisor of 4, the heads, got 3")
    end
  end
end
