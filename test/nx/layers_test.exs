defmodule Sidewinder.LayersTest do
  # What sequence models have around their scans: activations, norms, products, attention.
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Ops

  import Sidewinder.NxTest.Scans,
    only: [assert_close: 2, assert_close: 3, random: 2, random: 5, types: 0, ways: 0]

  alias Sidewinder.NxTest.Golden

  @backends [:nx, :cpu]
  @norms ~w(rms_norm layer_norm layer_norm_gelu)
  @rows activations() ++ @norms ++ ~w(linear swiglu_mlp)
  @layers @rows ++ ~w(matmul rope sinusoidal_positions attention mha transformer_block)
  @golden @norms ++ ~w(linear matmul rope attention swiglu_mlp transformer_block)
  @asking [attention: [return_lse: true], layer_norm: [return_statistics: true]]
  @sizes {2, 5, 4, 3}

  # An activation's golden case has the function among its attributes.
  defp function(%{fn: "gelu_" <> form}), do: {&Sidewinder.gelu/2, [form: String.to_atom(form)]}
  defp function(%{fn: name}), do: {Function.capture(Sidewinder, String.to_atom(name), 2), []}

  for backend <- @backends do
    for op <- @golden do
      test "#{op} agrees with the golden values in every way, on #{backend}" do
        for golden <- Golden.cases(unquote(op)), {name, way} <- ways() do
          # Pure Nx takes seconds for a million scores.
          unless golden.name == "l1024" and (unquote(backend) == :nx or name != :eager) do
            opts = [backend: unquote(backend)] ++ Golden.attributes(golden)
            opts = Keyword.get(@asking, String.to_atom(unquote(op)), []) ++ opts
            inputs = Map.drop(golden.inputs, ["dy"])
            outputs = way.(&run(unquote(op), &1, opts), [inputs])
            assert map_size(outputs) > 0
            Golden.check(golden, outputs)
          end
        end
      end
    end

    test "activations and their slopes agree with the golden values, on #{backend}" do
      for %{attrs: attrs, inputs: %{"x" => x}} = golden <- Golden.cases("activations") do
        {fun, opts} = function(attrs)
        opts = [backend: unquote(backend)] ++ opts
        dydx = Nx.Defn.grad(x, &Nx.sum(fun.(&1, opts)))
        Golden.check(golden, %{y: fun.(x, opts), dydx: dydx})
      end
    end

    test "finite numbers have finite activations and slopes, on #{backend}" do
      x = Nx.tensor([-3.0e38, -1.0e30, -1000.0, -89.0, -1.0e-30, 0.0, 89.0, 1000.0, 1.0e30])

      for name <- activations(), form <- [:tanh, :erf], name == "gelu" or form == :tanh do
        opts = if name == "gelu", do: [form: form], else: []
        y = run(name, %{"x" => x}, [backend: unquote(backend)] ++ opts).y
        loss = &Nx.sum(run(name, %{"x" => &1}, [backend: unquote(backend)] ++ opts).y)

        for t <- [y, Nx.Defn.grad(x, loss)],
            do: assert(Enum.all?(Nx.to_flat_list(t), &is_float/1), "#{name}: #{inspect(t)}")

        last = if name == "sigmoid", do: 1.0, else: Nx.to_number(x[-1])
        assert Nx.to_number(y[-1]) == last
      end
    end

    test "takes all types and rounds once, on #{backend}" do
      for op <- @layers, {type, rtol} <- types() do
        {_, inputs, _, opts} = call = problem(op, @sizes, type)
        opts = [backend: unquote(backend)] ++ opts
        {_, wide, _, _} = as_type(call, :f64)
        outputs = run(op, inputs, opts)
        assert Map.keys(outputs) in [[:y], [:c]]

        for {name, t} <- outputs do
          assert t.type == Nx.Type.normalize!(type)
          assert_close(t, run(op, wide, opts)[name], rtol: 4 * rtol, of: "#{op} in #{type}")
        end
      end
    end

    test "of a query that sees nothing: zeros, and no gradient, on #{backend}" do
      {_, inputs, cotangents, _} = problem("attention", {1, 3, 2, 2}, :f32)
      hidden = Nx.broadcast(Nx.tensor(0, type: :u8), {3, 4})

      for {mask, opts, empty} <- [
            {hidden, [], 0..2},
            {Nx.put_slice(hidden, [1, 2], Nx.tensor([[1]], type: :u8)), [], [0, 2]},
            {nil, [causal: true, q_offset: -2], [0, 1]},
            {nil, [causal: true, q_offset: -(2 ** 61)], 0..2},
            {Nx.tensor([0, 0, 1, 1], type: :u8), [causal: true, q_offset: 0], [0, 1]}
          ],
          {_, way} <- ways() do
        inputs = if mask, do: %{inputs | "mask" => mask}, else: Map.delete(inputs, "mask")
        opts = [backend: unquote(backend)] ++ opts
        returned = way.(&run("attention", &1, [return_lse: true] ++ opts), [inputs])
        gradients = gradients({"attention", inputs, Map.take(cotangents, ["dy"]), opts}, way)

        for {_, t} <- gradients, do: assert(Nx.to_number(Nx.any(Nx.is_nan(t))) == 0)

        for i <- 0..2 do
          [y, lse, dq] = for t <- [returned.y, returned.lse, gradients["q"]], do: t[[.., .., i]]
          empty? = i in empty
          assert empty? == (size(y) == 0)
          assert empty? == (Nx.to_number(Nx.reduce_max(lse)) == :neg_infinity)
          # With one key in sight there is no gradient either.
          if empty?, do: assert(size(dq) == 0)
        end
      end
    end
  end

  defp size(t), do: t |> Nx.abs() |> Nx.reduce_max() |> Nx.to_number()

  describe "attention, kernel and pure Nx:" do
    for {name, opts} <- [
          {"plain", [causal: false]},
          {"causal", [causal: true]},
          {"no later offset", [causal: true, q_offset: 0]},
          {"scaled", [scale: 0]},
          {"a negative scale", [scale: -0.3]}
        ],
        layout <- [:heads_first, :heads_last] do
      test "#{name}, #{layout}, repeated masks and biases" do
        {_, inputs, cotangents, _} = problem("attention", {2, 3, 5, 2})

        turn =
          &if(unquote(layout) == :heads_last, do: Nx.transpose(&1, axes: [0, 2, 1, 3]), else: &1)

        opts = unquote(opts)

        for mask <- [nil, {4}, {3, 4}, {1, 1, 4}, {4, 1, 1}, {2, 1, 3, 1}, {2, 4, 3, 4}],
            bias <- [nil, {1}, {3, 1}, {2, 4, 1, 4}] do
          mask = mask && Nx.greater(random(7, mask), -0.5)
          bias = bias && random(8, bias, -1.0, 1.0, :f64)
          given = for {name, t} <- [{"mask", mask}, {"bias", bias}], t, into: %{}, do: {name, t}
          inputs = inputs |> Map.drop(~w(mask bias)) |> Map.merge(given)

          call = &{"attention", &1, &2, [backend: &3] ++ &4}
          # Rows that see nothing have no logarithm to add to a loss.
          cotangents = if mask, do: Map.take(cotangents, ["dy"]), else: cotangents
          {value, gradients} = value_and_grad(call.(inputs, cotangents, :nx, opts))

          turned =
            Map.new(inputs, fn {k, t} -> {k, if(k in ~w(q k v), do: turn.(t), else: t)} end)

          turned_dy = Map.replace_lazy(cotangents, "dy", turn)
          opts = opts ++ [layout: unquote(layout)]

          for backend <- @backends do
            {actual, actual_gradients} = value_and_grad(call.(turned, turned_dy, backend, opts))
            assert_close(actual, value, rtol: 1.0e-11)

            for {name, t} <- actual_gradients do
              t = if name in ~w(q k v), do: turn.(t), else: t
              assert_close(t, gradients[name], rtol: 1.0e-10, of: "#{backend} d#{name}")
            end
          end
        end
      end
    end
  end

  test "statistics of layers are those of rows, of any rank and type, with y as it is without" do
    for {type, rtol} <- types(), shape <- [{7}, {3, 5}, {2, 3, 1, 6}], backend <- @backends do
      x = random(1, shape, 2.0, 5.0, type)
      opts = [eps: 1.0e-3, backend: backend]
      wide = if type == :f64, do: {:f, 64}, else: {:f, 32}
      [w, b] = for seed <- 2..3, do: random(seed, {Nx.axis_size(x, -1)}, -1.0, 1.0, wide)
      exact = Nx.as_type(x, :f64)

      rstd =
        exact |> Nx.variance(axes: [-1]) |> Nx.add(Nx.tensor(1.0e-3, type: :f64)) |> Nx.rsqrt()

      for {_, way} <- ways() do
        norm = fn more -> way.(&Sidewinder.layer_norm(&1, &2, &3, more ++ opts), [x, w, b]) end
        got = norm.(return_statistics: true)
        assert got.y == norm.([])
        assert {got.mean.type, got.rstd.type} == {wide, wide}
        assert_close(got.mean, Nx.mean(exact, axes: [-1]), rtol: min(rtol, 1.0e-5))
        assert_close(got.rstd, rstd, rtol: min(rtol, 1.0e-5))
      end
    end
  end

  test "a bias of -infinity hides as a mask does" do
    {_, inputs, cotangents, _} = problem("attention", {1, 3, 2, 2})
    {inputs, cotangents} = {Map.drop(inputs, ~w(mask bias)), Map.take(cotangents, ["dy"])}
    some = Nx.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 1]], type: :u8)
    none = Nx.put_slice(some, [2, 0], Nx.tensor([[0, 0, 0, 0]], type: :u8))

    for mask <- [some, none], backend <- @backends do
      bias = Nx.select(mask, Nx.tensor(0, type: :f64), Nx.Constants.neg_infinity(:f64))
      opts = [backend: backend]
      given = Map.put(inputs, "mask", mask)
      expected = value_and_grad({"attention", given, cotangents, opts})
      given = Map.put(inputs, "bias", bias)
      {value, gradients} = value_and_grad({"attention", given, cotangents, opts})
      assert_close({value, Map.delete(gradients, "bias")}, expected, rtol: 1.0e-12)
      assert size(Nx.select(mask, Nx.tensor(0, type: :f64), gradients["bias"])) == 0
    end
  end

  test "masks are of any integers, and have no gradient" do
    {_, inputs, cotangents, opts} = problem("attention", {2, 3, 2, 2}, :f32)
    expected = run("attention", inputs, opts)

    for change <- [
          &Nx.as_type(&1, :s64),
          &Nx.multiply(Nx.as_type(&1, :s16), 256),
          &Nx.multiply(&1, 2)
        ],
        backend <- @backends do
      changed = Map.update!(inputs, "mask", change)
      assert_close(run("attention", changed, [backend: backend] ++ opts).y, expected.y)
    end

    for {_, way} <- ways() do
      gradient =
        way.(
          fn mask, inputs ->
            Nx.Defn.grad(mask, &loss({"attention", %{inputs | "mask" => &1}, cotangents, opts}))
          end,
          [inputs["mask"], inputs]
        )

      assert gradient.shape == inputs["mask"].shape
      assert size(gradient) == 0
    end
  end

  test "the mask of self-attention hides, in the kernel and in pure Nx" do
    for op <- ~w(mha transformer_block), mask <- [nil, {4}, {1, 4}, {2, 4, 1}, {2, 1, 4, 4}] do
      {_, inputs, _, opts} = problem(op, {2, 4, 2, 2})
      mask = mask && Nx.remainder(Nx.iota(mask), 2)
      inputs = if mask, do: %{inputs | "mask" => mask}, else: Map.delete(inputs, "mask")
      [a, b] = for backend <- @backends, do: run(op, inputs, [backend: backend] ++ opts).y
      assert_close(a, b, rtol: 1.0e-11)
      shown = run(op, Map.delete(inputs, "mask"), opts).y
      assert size(Nx.subtract(a, shown)) > 1.0e-3 == (mask != nil)
    end
  end

  test "rope turns back, in any layout and with any scaling of angles" do
    x = random(1, {2, 3, 5, 8}, -1.0, 1.0, :f64)
    last = Nx.transpose(x, axes: [0, 2, 1, 3])

    for pairing <- [:half, :interleaved],
        more <- [
          [],
          [theta: 10, first_position: 100_000],
          [first_position: -3],
          [scaling_factor: 8, original_length: 32],
          [scaling_factor: 8.0, original_length: 16, low_freq_factor: 0.5, high_freq_factor: 2]
        ] do
      opts = [pairing: pairing] ++ more
      y = Sidewinder.rope(x, [backend: :nx] ++ opts)
      assert_close(Sidewinder.rope(x, [backend: :cpu] ++ opts), y, rtol: 1.0e-12)

      for backend <- @backends do
        turned = Sidewinder.rope(last, [backend: backend, layout: :heads_last] ++ opts)
        assert_close(Nx.transpose(turned, axes: [0, 2, 1, 3]), y, rtol: 1.0e-12)
        # A rotation keeps lengths.
        square =
          &Nx.sum(Nx.multiply(Nx.pow(Sidewinder.rope(&1, [backend: backend] ++ opts), 2), 0.5))

        assert_close(Nx.Defn.grad(x, square), x, rtol: 1.0e-12)
      end
    end
  end

  test "sinusoidal positions are sines and cosines, of any width and from any position on" do
    for width <- [1, 2, 3, 7, 33], first <- [0, -3, 100_000], theta <- [10_000, 10.0] do
      x = random(1, {2, 5, width}, -1.0, 1.0, :f64)
      opts = [first_position: first, theta: theta]

      waves =
        for p <- 0..4 do
          for k <- 0..(width - 1) do
            angle = (first + p) * :math.pow(theta, -2 * div(k, 2) / width)
            if rem(k, 2) == 0, do: :math.sin(angle), else: :math.cos(angle)
          end
        end

      for backend <- @backends, {_, way} <- ways() do
        y = way.(&Sidewinder.sinusoidal_positions(&1, [backend: backend] ++ opts), [x])
        assert_close(y, Nx.add(x, Nx.tensor(waves, type: :f64)), rtol: 1.0e-10)
      end
    end
  end

  test "rows are rows, whatever the axes before them, and keep their names" do
    for op <- @rows, backend <- @backends do
      {_, inputs, _, opts} = problem(op, {2, 6, 4, 3})
      opts = [backend: backend] ++ opts
      {x, rest} = Map.pop!(inputs, "x")
      expected = run(op, inputs, opts).y
      width = Nx.axis_size(expected, -1)

      for {shape, names} <- [
            {{12, 4}, [:row, :column]},
            {{3, 2, 2, 4}, [:a, nil, :c, :d]},
            {{1, 1, 12, 1, 4}, [nil, nil, nil, nil, :d]}
          ] do
        of = &run(op, Map.put(rest, "x", &1), opts).y
        given = x |> Nx.reshape(shape) |> Nx.rename(names)
        y = of.(given)
        kept = if op == "linear", do: List.replace_at(names, -1, nil), else: names
        assert y.names == kept
        assert_close(Nx.reshape(y, {2, 6, width}), expected, rtol: 0)

        gradient = Nx.Defn.grad(given, &Nx.sum(Nx.sin(of.(&1))))
        assert {gradient.shape, gradient.names} == {shape, names}
        flat = Nx.Defn.grad(x, &Nx.sum(Nx.sin(of.(&1))))
        assert_close(Nx.reshape(gradient, x.shape), flat, rtol: 1.0e-12)
      end

      assert_close(run(op, Map.put(rest, "x", x[1][2]), opts).y, expected[1][2], rtol: 1.0e-12)
    end

    assert Sidewinder.silu(2).shape == {}
    assert Nx.Defn.grad(2.0, &Sidewinder.relu/1) == Nx.tensor(1.0)
  end

  test "names go where their axes go" do
    {_, %{"a" => a, "b" => b}, _, _} = problem("matmul", @sizes)
    c = Sidewinder.matmul(Nx.rename(a, [:rows, :inner]), Nx.rename(b, [:inner, :columns]))
    assert c.names == [:rows, nil]

    {_, %{"q" => q, "k" => k, "v" => v}, _, _} = problem("attention", @sizes)
    {y, lse} = Sidewinder.attention(Nx.rename(q, [:b, :h, :l, :w]), k, v, return_lse: true)
    assert {y.names, lse.names} == {[:b, :h, :l, nil], [:b, :h, :l]}

    {_, %{"x" => x, "w" => w, "b" => b}, _, _} = problem("layer_norm", @sizes)
    got = Sidewinder.layer_norm(Nx.rename(x, [:b, :l, :d]), w, b, return_statistics: true)
    assert {got.y.names, got.mean.names, got.rstd.names} == {[:b, :l, :d], [:b, :l], [:b, :l]}

    x = Nx.rename(Nx.iota({1, 2, 3, 4}), [:b, :l, :h, :w])
    assert Sidewinder.rope(x, layout: :heads_last).names == [:b, :l, :h, :w]
    assert Sidewinder.sinusoidal_positions(x[0]).names == [:l, :h, :w]
  end

  test "integers become floats" do
    x = Nx.iota({2, 4})
    float = Nx.as_type(x, :f32)
    w = Nx.tensor([1, 2, 3, 4])

    for {fun, given} <- [
          {&Sidewinder.silu/1, [x]},
          {&Sidewinder.layer_norm/3, [x, w, w]},
          {&Sidewinder.linear/2, [x, x]},
          {&Sidewinder.matmul(&1, Nx.transpose(&2)), [x, x]},
          {&Sidewinder.rope(Nx.reshape(&1, {1, 1, 2, 4})), [x]},
          {&Sidewinder.sinusoidal_positions(Nx.reshape(&1, {1, 2, 4})), [x]}
        ] do
      floats = Enum.map(given, &Nx.as_type(&1, :f32))
      assert apply(fun, given) == apply(fun, floats)
      assert apply(fun, given).type == {:f, 32}
    end

    assert Sidewinder.rms_norm(Nx.as_type(x, :f16), w) ==
             Sidewinder.rms_norm(Nx.as_type(x, :f16), Nx.as_type(w, :f32))

    assert Sidewinder.linear(float, x, bias: w[0..1]).type == {:f, 32}
  end

  test "what does not fit raises, in every way" do
    x = random(1, {2, 3, 4})
    [w, v] = [random(2, {4}), random(3, {3})]
    q = random(4, {1, 4, 3, 6})
    params = %{wqkv: random(5, {12, 4}), wo: random(6, {4, 4})}

    for {kind, argument, message, fun} <- [
          {:shape, "x", "{..., d}, got {}", fn -> Sidewinder.rms_norm(1.0, w) end},
          {:shape, "w", "shape {4}, got {3}", fn -> Sidewinder.rms_norm(x, v) end},
          {:shape, "b", "shape {4}, got {3}", fn -> Sidewinder.layer_norm(x, w, v) end},
          {:option, "eps", "a number, not negative, got -1",
           fn -> Sidewinder.layer_norm(x, w, w, eps: -1) end},
          {:option, "return_statistics", "true or false",
           fn -> Sidewinder.layer_norm(x, w, w, return_statistics: 1) end},
          {:option, "eps_mode", ":inside or :outside",
           fn -> Sidewinder.rms_norm(x, w, eps_mode: 1) end},
          {:option, "gelu", ":tanh or :erf",
           fn -> Sidewinder.layer_norm_gelu(x, w, w, gelu: :none) end},
          {:option, "form", ":tanh or :erf", fn -> Sidewinder.gelu(x, form: :none) end},
          {:option, "fn", "an option out of", fn -> Sidewinder.silu(x, fn: :relu) end},
          {:argument, "x", "an Nx tensor", fn -> Sidewinder.silu(:x) end},
          {:shape, "w", "shape {o, 4}, got {4, 3}",
           fn -> Sidewinder.linear(x, random(1, {4, 3})) end},
          {:shape, "b", "shape {5}, got {4}",
           fn -> Sidewinder.linear(x, random(1, {5, 4}), bias: w) end},
          {:dtype, "w", "expected bf16, got f32",
           fn -> Sidewinder.linear(Nx.as_type(x, :bf16), random(1, {5, 4})) end},
          {:option, "activation", ":silu",
           fn -> Sidewinder.linear(x, random(1, {5, 4}), activation: :tanh) end},
          {:shape, "b", "shape {4, n}, got {3, 4}", fn -> Sidewinder.matmul(x[0], x[1]) end},
          {:shape, "x", "a multiple of 2", fn -> Sidewinder.rope(random(1, {1, 1, 2, 3})) end},
          {:option, "theta", "a positive number, got 0", fn -> Sidewinder.rope(q, theta: 0) end},
          {:option, "first_position", "an integer",
           fn -> Sidewinder.rope(q, first_position: 1.5) end},
          {:option, "layout", ":heads_first or :heads_last",
           fn -> Sidewinder.rope(q, layout: :blhd) end},
          {:option, "high_freq_factor", "more than low_freq_factor",
           fn -> Sidewinder.rope(q, scaling_factor: 2, high_freq_factor: 1) end},
          {:shape, "x", "{b, l, d}, got {4}", fn -> Sidewinder.sinusoidal_positions(w) end},
          {:option, "theta", "a positive number, got -1",
           fn -> Sidewinder.sinusoidal_positions(x, theta: -1) end},
          {:shape, "k", "{1, a divisor of 4, m, 6}, got {1, 3, 3, 6}",
           fn -> Sidewinder.attention(q, q[[.., 0..2]], q) end},
          {:shape, "v", "{1, 4, 3, v}, got {1, 2, 3, 6}",
           fn -> Sidewinder.attention(q, q, q[[.., 0..1]]) end},
          {:shape, "k", "layout", fn -> Sidewinder.attention(q, q[[.., .., .., 0..2]], q) end},
          {:shape, "mask", "{1, 4, 3, 3} or what repeats to it, got {2, 3}",
           fn -> Sidewinder.attention(q, q, q, mask: Nx.iota({2, 3})) end},
          {:shape, "bias", "repeats",
           fn -> Sidewinder.attention(q, q, q, bias: random(1, {1, 1, 4, 3, 3})) end},
          {:dtype, "mask", "u8", fn -> Sidewinder.attention(q, q, q, mask: v) end},
          {:option, "q_offset", "an integer",
           fn -> Sidewinder.attention(q, q, q, q_offset: 2 ** 80) end},
          {:option, "scale", "a number", fn -> Sidewinder.attention(q, q, q, scale: :auto) end},
          {:argument, "wg", "a tensor", fn -> Sidewinder.swiglu_mlp(x, %{}) end},
          {:shape, "wd", "{4, 5}",
           fn ->
             Sidewinder.swiglu_mlp(x, %{wg: random(1, {5, 4}), wu: random(1, {5, 4}), wd: x[0]})
           end},
          {:shape, "x", "a multiple of 3", fn -> Sidewinder.mha(x, params, heads: 3) end},
          {:option, "heads", "a positive integer, got 0",
           fn -> Sidewinder.mha(x, params, heads: 0) end},
          {:argument, "wq", "one of wqkv, wo, bo",
           fn -> Sidewinder.mha(x, Map.put(params, :wq, w)) end},
          {:shape, "wqkv", "{12, 4}", fn -> Sidewinder.mha(x, %{params | wqkv: x[0]}) end},
          {:shape, "mask", "{2, 2, 3, 3}",
           fn -> Sidewinder.mha(x, params, heads: 2, mask: Nx.iota({2, 4, 1, 1})) end},
          {:argument, "ln1_w", "a tensor", fn -> Sidewinder.transformer_block(x, params) end}
        ],
        {_, way} <- ways() do
      error = assert_raise Sidewinder.Error, fn -> way.(fun, []) end
      assert %{kind: ^kind, argument: ^argument} = error, Exception.message(error)
      assert Exception.message(error) =~ message
    end
  end
end
