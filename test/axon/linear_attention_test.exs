if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonLinearAttentionTest do
    use ExUnit.Case, async: true

    import Sidewinder.NxTest.Scans, only: [assert_close: 3, random: 5]
    import Sidewinder.NxTest.Layers
    alias Axon.{MixedPrecision, ModelState}
    alias Sidewinder.Axon, as: Layer

    # 4 heads of 2 values, in 2 groups with keys of 3 numbers.
    @sizes [heads: 4, groups: 2, head_size: 3, value_size: 2]

    # The layer step by step, in f64.
    defp plain(p, x, opts) do
      {batch, length, _width} = x.shape
      gate? = Keyword.get(opts, :gate, true)
      decays = %{none: 0, retention: 0, head: 4, key: 12}[opts[:decay] || :none]
      sizes = Enum.reject([6, 6, 8, if(gate?, do: 8, else: 0), decays], &(&1 == 0))
      [q, k, v | rest] = x |> Nx.dot([2], p["in_proj"], [1]) |> add(p["in_proj_b"]) |> cut(sizes)

      # Heads 0 and 1 are of the first group.
      [q, k] =
        for t <- [q, k] do
          t = t |> feature(opts[:feature_map] || :elu) |> Nx.reshape({batch, length, 2, 3})
          Nx.take(t, Nx.tensor([0, 0, 1, 1]), axis: 2)
        end

      v = Nx.reshape(v, {batch, length, 4, 2})
      decay = decay(opts[:decay] || :none, List.last(rest), p["decay_b"], {batch, length})
      zeros = &Nx.broadcast(number(0), &1)

      {rows, _states} =
        Enum.map_reduce(0..(length - 1), {zeros.({batch, 4, 3, 2}), zeros.({batch, 4, 3})}, fn t,
                                                                                               {s,
                                                                                                z} ->
          at = & &1[[.., t]]
          key = at.(k)
          z = Nx.add(Nx.multiply(z, at.(decay)), key)
          s = Nx.multiply(s, Nx.new_axis(at.(decay), 3))
          s = Nx.add(s, Nx.multiply(Nx.new_axis(key, 3), Nx.new_axis(at.(v), 2)))
          q = Nx.multiply(at.(q), number(1 / :math.sqrt(3)))
          y = Nx.sum(Nx.multiply(s, Nx.new_axis(q, 3)), axes: [2])
          divisor = Nx.sum(Nx.multiply(z, q), axes: [2], keep_axes: true)
          {if(opts[:normalize], do: Nx.divide(y, divisor), else: y), {s, z}}
        end)

      y = Nx.stack(rows, axis: 1)
      mean = Nx.mean(Nx.multiply(y, y), axes: [3], keep_axes: true)
      y = y |> Nx.divide(Nx.sqrt(Nx.add(mean, number(1.0e-5)))) |> Nx.multiply(p["norm"])
      y = if gate?, do: Nx.multiply(y, silu(Nx.reshape(hd(rest), y.shape))), else: y

      y
      |> Nx.reshape({batch, length, 8})
      |> Nx.dot([2], p["out_proj"], [1])
      |> add(p["out_proj_b"])
    end

    # [B, L, H, K or 1]
    defp decay(:none, _, _, {batch, length}), do: Nx.broadcast(number(1), {batch, length, 4, 1})

    defp decay(:retention, _, _, {batch, length}) do
      kept = Nx.tensor([31 / 32, 63 / 64, 127 / 128, 255 / 256], type: :f64)
      Nx.broadcast(Nx.reshape(kept, {1, 1, 4, 1}), {batch, length, 4, 1})
    end

    defp decay(_, a, b, {batch, length}) do
      kept = Nx.pow(Nx.sigmoid(Nx.add(a, b)), number(1 / 16))
      Nx.reshape(kept, {batch, length, 4, :auto})
    end

    defp feature(x, :elu),
      do: Nx.select(Nx.greater(x, 0), Nx.add(x, 1), Nx.exp(Nx.min(x, number(0))))

    defp feature(x, :relu), do: Nx.max(x, number(0))
    defp feature(x, :silu), do: silu(x)
    defp feature(x, :identity), do: x

    # A plain number would be rounded to f32.
    defp number(number), do: Nx.tensor(number, type: :f64)

    defp add(t, nil), do: t
    defp add(t, bias), do: Nx.add(t, bias)

    defp cut(t, sizes) do
      {parts, _} = Enum.map_reduce(sizes, 0, &{Nx.slice_along_axis(t, &2, &1, axis: 2), &1 + &2})
      parts
    end

    defp silu(x), do: Nx.multiply(x, Nx.sigmoid(x))

    for {options, seed} <-
          Enum.with_index([
            [],
            [normalize: true],
            [decay: :retention, feature_map: :identity],
            [decay: :head, feature_map: :silu, use_bias: true],
            [decay: :key, feature_map: :identity],
            [decay: :key, normalize: true, gate: false],
            [gate: false, feature_map: :relu, use_bias: true]
          ]) do
      test "is the formula, in every type, with its gradient: #{inspect(options)}" do
        options = unquote(options)
        layer = Layer.linear_attention(Axon.input("x"), [name: "layer"] ++ @sizes ++ options)

        for {type, rtol} <- [f64: 1.0e-8, f32: 2.0e-4, bf16: 0.1],
            seed <- [unquote(seed), unquote(seed) + 20] do
          type = Nx.Type.normalize!(type)
          policy = MixedPrecision.create_policy(params: type, compute: type, output: type)
          {init, predict} = Axon.build(MixedPrecision.apply_policy(layer, policy), seed: seed)
          x = random(seed, {2, 5, 4}, -2.0, 2.0, type)
          state = init.(x, ModelState.empty())
          wide = Map.new(state.data["layer"], fn {name, t} -> {name, Nx.as_type(t, :f64)} end)
          x64 = Nx.as_type(x, :f64)
          assert_close(predict.(state, x), plain(wide, x64, options), rtol: rtol)

          if type != {:bf, 16} do
            got = Nx.Defn.grad(state, &Nx.sum(Nx.sin(predict.(&1, x)))).data["layer"]
            expected = Nx.Defn.grad(wide, &Nx.sum(Nx.sin(plain(&1, x64, options))))
            for {name, t} <- expected, do: assert_close(got[name], t, rtol: 10 * rtol)
          end
        end
      end
    end

    test "parameters have the shapes that heads, groups, gate and decay give" do
      shapes = fn options ->
        {init, _} = Axon.build(Layer.linear_attention(Axon.input("x"), [name: "l"] ++ options))
        %{"l" => params} = init.(Nx.template({1, 2, 64}, :f32), ModelState.empty()).data
        Map.new(params, fn {name, t} -> {name, t.shape} end)
      end

      # 2 heads of 32 numbers, which the width has room for.
      assert shapes.(head_size: 32) == %{
               "in_proj" => {4 * 64, 64},
               "norm" => {32},
               "out_proj" => {64, 64}
             }

      sizes = [head_size: 8, value_size: 32, heads: 4, groups: 1]

      assert shapes.(sizes ++ [gate: false, decay: :key]) == %{
               "in_proj" => {2 * 8 + 128 + 32, 64},
               "decay_b" => {32},
               "norm" => {32},
               "out_proj" => {64, 128}
             }

      assert %{"in_proj" => {276, 64}, "decay_b" => {4}} = shapes.(sizes ++ [decay: :head])
    end

    test "a layer learns" do
      Axon.input("x")
      |> Layer.linear_attention(head_size: 4, decay: :key, normalize: true, name: "layer")
      |> Axon.nx(& &1[[.., -1]])
      |> Axon.dense(1)
      |> learns()
    end

    test "options that are not allowed raise" do
      refuses(:linear_attention, [
        {[head_size: 0], "head_size: expected a positive integer, got 0"},
        {[decay: :fast], "decay: expected :none or :retention or :head or :key, got :fast"},
        {[keys: 3], "keys: expected an option out of name, meta, heads"}
      ])

      Layer.linear_attention(Axon.input("x"), heads: 4, groups: 3)
      |> refuses_to_start("groups: expected a divisor of 4, the heads, got 3")
    end
  end
end
