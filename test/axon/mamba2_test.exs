if Code.ensure_loaded?(Sidewinder.Axon) do
  defmodule Sidewinder.AxonMamba2Test do
    use ExUnit.Case, async: true

    import Sidewinder.NxTest.Scans, only: [assert_close: 3, random: 5]
    import Sidewinder.NxTest.Layers
    alias Axon.{MixedPrecision, ModelState}
    alias Sidewinder.Axon, as: Layer

    @block [state_size: 3, head_size: 2, groups: 2, kernel_size: 3, use_bias: true]

    # The layer step by step: 8 inner channels are 4 heads of 2 rows, in 2 groups with 3 states.
    defp plain(p, x) do
      {_batch, length, _width} = x.shape
      all = x |> Nx.dot([2], p["in_proj"], [1]) |> Nx.add(p["in_proj_b"])
      [z, u, dt] = cut(all, [8, 20, 4])
      padded = Nx.pad(u, 0, [{0, 0, 0}, {2, 0, 0}, {0, 0, 0}])

      taps =
        for k <- 0..2,
            do: Nx.multiply(padded[[.., k..(k + length - 1)//1]], p["conv_w"][[.., k]])

      [x, b, c] =
        taps |> Enum.reduce(&Nx.add/2) |> Nx.add(p["conv_b"]) |> silu() |> cut([8, 6, 6])

      delta = dt |> Nx.add(p["dt_b"]) |> Nx.exp() |> Nx.log1p()
      decay = Nx.exp(Nx.multiply(delta, Nx.negate(Nx.exp(p["A_log"]))))
      x = Nx.reshape(x, {2, length, 4, 2})
      # Heads 0 and 1 are of the first group.
      [b, c] =
        for t <- [b, c],
            do: t |> Nx.reshape({2, length, 2, 3}) |> Nx.take(Nx.tensor([0, 0, 1, 1]), axis: 2)

      {rows, _state} =
        Enum.map_reduce(
          0..(length - 1),
          Nx.broadcast(Nx.tensor(0, type: x.type), {2, 4, 2, 3}),
          fn t, s ->
            at = & &1[[.., t]]

            input =
              Nx.multiply(
                Nx.new_axis(Nx.multiply(at.(x), Nx.new_axis(at.(delta), 2)), 3),
                Nx.new_axis(at.(b), 2)
              )

            s = Nx.add(Nx.multiply(s, at.(decay) |> Nx.new_axis(2) |> Nx.new_axis(3)), input)
            {Nx.sum(Nx.multiply(s, Nx.new_axis(at.(c), 2)), axes: [3]), s}
          end
        )

      y = rows |> Nx.stack(axis: 1) |> Nx.add(Nx.multiply(x, Nx.new_axis(p["D"], 1)))

      gated =
        y |> Nx.reshape({2, length, 8}) |> Nx.multiply(silu(z)) |> Nx.reshape({2, length, 2, 4})

      mean = Nx.mean(Nx.multiply(gated, gated), axes: [3], keep_axes: true)
      # A plain number would be rounded to f32 here.
      eps = Nx.tensor(1.0e-5, type: x.type)
      normed = Nx.divide(gated, Nx.sqrt(Nx.add(mean, eps)))

      normed
      |> Nx.reshape({2, length, 8})
      |> Nx.multiply(p["norm"])
      |> Nx.dot([2], p["out_proj"], [1])
      |> Nx.add(p["out_proj_b"])
    end

    defp cut(t, sizes) do
      {parts, _} = Enum.map_reduce(sizes, 0, &{Nx.slice_along_axis(t, &2, &1, axis: 2), &1 + &2})
      parts
    end

    defp silu(x), do: Nx.multiply(x, Nx.sigmoid(x))

    test "is the formula, in every type, with its gradient" do
      layer = Layer.mamba2_block(Axon.input("x"), [name: "block"] ++ @block)

      for {type, rtol} <- [f64: 1.0e-9, f32: 1.0e-4, bf16: 0.1] do
        type = Nx.Type.normalize!(type)
        policy = MixedPrecision.create_policy(params: type, compute: type, output: type)
        {init, predict} = Axon.build(MixedPrecision.apply_policy(layer, policy))
        x = random(1, {2, 5, 4}, -2.0, 2.0, type)
        state = init.(x, ModelState.empty())
        params = state.data["block"]
        wide = Map.new(params, fn {name, t} -> {name, Nx.as_type(t, :f64)} end)
        x64 = Nx.as_type(x, :f64)
        assert_close(predict.(state, x), plain(wide, x64), rtol: rtol)

        if type != {:bf, 16} do
          got = Nx.Defn.grad(state, &Nx.sum(Nx.sin(predict.(&1, x)))).data["block"]
          expected = Nx.Defn.grad(wide, &Nx.sum(Nx.sin(plain(&1, x64))))
          for {name, t} <- expected, do: assert_close(got[name], t, rtol: 10 * rtol)
        end
      end
    end

    test "parameters start as those of mamba_ssm" do
      {init, _} = Axon.build(Layer.mamba2_block(Axon.input("x"), name: "block"))
      %{"block" => params} = init.(Nx.template({1, 2, 64}, :f32), ModelState.empty()).data

      assert Map.new(params, fn {name, t} -> {name, t.shape} end) == %{
               "in_proj" => {2 * 128 + 2 * 128 + 2, 64},
               "conv_w" => {128 + 256, 4},
               "conv_b" => {128 + 256},
               "dt_b" => {2},
               "A_log" => {2},
               "D" => {2},
               "norm" => {128},
               "out_proj" => {64, 128}
             }

      for a <- Nx.to_flat_list(Nx.exp(params["A_log"])), do: assert(a >= 1 and a <= 16)

      for dt <- Nx.to_flat_list(Nx.log1p(Nx.exp(params["dt_b"]))),
          do: assert(dt >= 0.99e-3 and dt <= 0.101)
    end

    test "a stack learns" do
      sizes = [head_size: 4, state_size: 8, expand: 1]

      start =
        Axon.input("x")
        |> Layer.mamba2([layers: 2, output: :last, name: "m"] ++ sizes)
        |> Axon.dense(1)
        |> learns()

      assert Enum.sort(Map.keys(start.data)) == ~w(dense_0 m_0 m_0_norm m_1 m_1_norm m_norm)
    end

    test "options that are not allowed raise" do
      refuses(:mamba2_block, [
        {[head_size: 0], "head_size: expected a positive integer, got 0"},
        {[a_min: 3.0, a_max: 2.0], "a_max: expected a number not below a_min, 3.0, got 2.0"},
        {[dt_clamp: {0.2, 0.1}], "dt_clamp: expected {low, high}, two numbers in order"},
        {[states: 3], "states: expected an option out of name, meta, state_size"}
      ])

      for {options, message} <- [
            {[head_size: 3], "head_size: expected a divisor of 16, the inner width, got 3"},
            {[head_size: 4, groups: 3], "groups: expected a divisor of 4, the heads, got 3"}
          ],
          do: refuses_to_start(Layer.mamba2_block(Axon.input("x"), options), message)
    end
  end
end
