defmodule Sidewinder.SelectiveScanTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans
  alias Sidewinder.NxTest.{Golden, Inline}

  doctest Sidewinder

  defp scan(args, opts \\ []), do: apply(Sidewinder, :selective_scan, args ++ [opts])

  # The optional tensors as arguments, for they are part of the graph too.
  defp call(way, args, opts) do
    {tensors, opts} = Enum.split_with(opts, &is_struct(elem(&1, 1), Nx.Tensor))
    {names, values} = Enum.unzip(tensors)

    fun = fn required, optional ->
      scan(Tuple.to_list(required), Enum.zip(names, Tuple.to_list(optional)) ++ opts)
    end

    way.(fun, [List.to_tuple(args), List.to_tuple(values)])
  end

  describe "every way in" do
    @tag skip: no_library()
    test "agrees with the golden values" do
      for golden <- Golden.cases("selective_scan"), {name, way} <- ways() do
        # Pure Nx takes seconds for the long ones, and has its own test.
        unless name == :inline and golden.name =~ "long" do
          args = for input <- ["x", "dt", "A", "B", "C"], do: golden.inputs[input]
          Golden.check(golden, Golden.named(call(way, args, Golden.options(golden))))
        end
      end
    end

    test "gives the same for random sizes, forms and options" do
      [{:eager, eager} | graphs] = ways()

      for_random(25, fn args, opts ->
        expected = call(eager, args, opts)

        for {name, way} <- graphs do
          compare = if name == :inline, do: &assert_close/2, else: &assert(&1 == &2)
          assert_same(call(way, args, opts), expected, compare)
          assert_close(call(way, args, [backend: :nx] ++ opts), expected)
        end
      end)
    end

    test "takes all types" do
      for {type, rtol} <- types(), {_, way} <- ways() do
        {args, optional} = problem({2, 5, 6, 4}, type: type, forms: {{:groups, 2}, :constant})
        opts = [return_states: true] ++ optional
        result = call(way, args, opts)
        assert result.y.type == Nx.Type.normalize!(type)
        assert result.states.type == if(type == :f64, do: {:f, 64}, else: {:f, 32})

        exact = call(&apply/2, Enum.map(args, &Nx.as_type(&1, :f64)), wide(opts))
        assert_close(result, exact, rtol: rtol)
      end
    end

    @tag skip: no_library()
    test "goes to the kernel, unless its body is compiled" do
      {args, _} = problem({1, 2, 3, 4})

      for {name, way} <- ways() do
        assert kernel?(fn opts -> call(way, args, opts) end) == (name != :inline)
      end
    end
  end

  defp wide(opts) do
    for {key, value} <- opts,
        do: {key, if(is_struct(value, Nx.Tensor), do: Nx.as_type(value, :f64), else: value)}
  end

  describe "inside a graph" do
    setup do
      {args, optional} = problem({2, 4, 3, 2})
      %{args: args, optional: optional, expected: scan(args, optional)}
    end

    test "captured constants are as good as arguments", %{args: [x | rest] = args} = context do
      for {_, way} <- ways() do
        fun = fn x -> scan([x | rest], context.optional) end
        assert_close(way.(fun, [x]), context.expected)

        fun = fn x -> Nx.add(x, scan(args, context.optional)) end
        assert_close(way.(fun, [x]), Nx.add(x, context.expected))
      end
    end

    test "it can be there several times", %{args: [x | rest]} do
      twice = fn x ->
        {y, state} = scan([x | rest], return_state: true)
        Nx.add(scan([y | rest], initial_state: state), y)
      end

      for {_, way} <- ways(), do: assert_close(way.(twice, [x]), twice.(x))
    end

    test "it can be in a `while`", %{args: [x, dt, a, b, c]} do
      expected = Enum.reduce(1..3, x, fn _, x -> scan([x, dt, a, b, c]) end)

      for {_, way} <- ways() do
        assert_close(way.(&Sidewinder.NxTest.Flow.repeat/5, [x, dt, a, b, c]), expected)
      end
    end

    test "it can be in a `cond`", %{args: [x, dt, a, b, c] = args} do
      for {_, way} <- ways(), flag <- [0, 1] do
        expected = if flag == 1, do: scan(args), else: x
        assert_close(way.(&Sidewinder.NxTest.Flow.choose/6, [flag, x, dt, a, b, c]), expected)
      end
    end

    test "it can be compiled ahead", %{args: args, expected: expected, optional: optional} do
      for compiler <- [Nx.Defn.Evaluator, Sidewinder.NxTest.Wrapper, Inline] do
        fun = fn x, dt, a, b, c -> scan([x, dt, a, b, c], optional) end
        compiled = Nx.Defn.compile(fun, args, compiler: compiler)
        assert_close(apply(compiled, args), expected)
      end
    end

    test "a graph that was split or printed still runs", %{args: args, expected: expected} do
      expr =
        Nx.Defn.debug_expr_apply(
          fn x, dt, a, b, c -> Nx.multiply(scan([x, dt, a, b, c]), 2) end,
          args
        )

      chain = Nx.Defn.Graph.split(expr, fn _ -> :none end)
      assert Nx.Defn.Graph.run(chain, args) == Nx.multiply(scan(args), 2)
      assert %Nx.Tensor{} = expected
    end
  end

  describe "what goes in" do
    test "B and C of equal content give the same in all forms" do
      {[x, dt, a, b, c], _} = problem({2, 5, 6, 3})
      groups = &Nx.broadcast(Nx.new_axis(&1, 2), {2, 5, 6, 3})
      expected = scan([x, dt, a, b, c])

      for b <- [b, Nx.new_axis(b, 2), groups.(b)], c <- [c, Nx.new_axis(c, 2), groups.(c)] do
        assert_close(scan([x, dt, a, b, c]), expected)
      end

      constant = random(9, {6, 3})
      each = Nx.broadcast(constant, {2, 5, 6, 3})
      assert_close(scan([x, dt, a, constant, constant]), scan([x, dt, a, each, each]))
    end

    test "a gate with silu(z) = 1 changes nothing" do
      {args, _} = problem({2, 5, 3, 2})
      z = Nx.broadcast(1.27846454, {2, 5, 3})
      assert_close(scan(args, z: z), scan(args))
    end

    test "a NaN stays in its channel and batch" do
      {[x | rest], _} = problem({2, 4, 3, 2})
      x = Nx.indexed_put(x, Nx.tensor([0, 1, 2]), Nx.Constants.nan())

      for backend <- [:cpu, :nx] do
        nan? = Nx.is_nan(scan([x | rest], backend: backend))

        expected =
          for i <- 0..1,
              t <- 0..3,
              k <- 0..2,
              do: if(i == 0 and t >= 1 and k == 2, do: 1, else: 0)

        assert Nx.to_flat_list(nan?) == expected
      end
    end

    test "the names of x's axes stay" do
      {[x | rest], _} = problem({2, 4, 3, 2})
      x = Nx.rename(x, [:batch, :time, :channel])

      for {_, way} <- ways() do
        result = call(way, [x | rest], return_states: true)
        assert result.y.names == [:batch, :time, :channel]
        assert result.last_state.names == [:batch, :channel, nil]
        assert result.states.names == [:batch, :time, :channel, nil]
      end
    end

    test "integers become floats" do
      ones = Nx.broadcast(1, {1, 2, 1})
      y = Sidewinder.selective_scan(ones, ones, Nx.tensor([[0]]), ones, ones)
      assert y == Nx.tensor([[[1.0], [2.0]]])

      half = Nx.as_type(ones, :bf16)
      assert Sidewinder.selective_scan(half, ones, Nx.tensor([[0]]), ones, ones).type == {:bf, 16}
    end

    test "weights in the storage type are widened" do
      {[x, dt, a, b, c], optional} = problem({1, 3, 2, 2}, type: :bf16)
      opts = for {key, t} <- optional, do: {key, Nx.as_type(t, :bf16)}
      a = Nx.as_type(a, :bf16)

      expected =
        scan([x, dt, Nx.as_type(a, :f32), b, c], for({k, t} <- opts, do: {k, widened(k, t)}))

      assert scan([x, dt, a, b, c], opts) == expected
    end
  end

  defp widened(:z, t), do: t
  defp widened(_, t), do: Nx.as_type(t, :f32)

  describe "splitting" do
    test "a sequence anywhere and carrying the state changes nothing" do
      {args, optional} = problem({1, 17, 2, 3})
      opts = [return_state: true] ++ Keyword.take(optional, [:d, :initial_state])
      {y, last_state} = scan(args, opts)

      for at <- 1..16 do
        {y1, state} = scan(part(args, 0, at), opts)

        {y2, state} =
          scan(part(args, at, 17 - at), d: opts[:d], return_state: true, initial_state: state)

        assert_close(Nx.concatenate([y1, y2], axis: 1), y)
        assert_close(state, last_state)
      end
    end

    defp part([x, dt, a, b, c], start, length) do
      [x, dt, b, c] = for t <- [x, dt, b, c], do: Nx.slice_along_axis(t, start, length, axis: 1)
      [x, dt, a, b, c]
    end
  end

  describe "wrong input" do
    setup do
      {args, _} = problem({2, 4, 6, 3})
      %{args: args}
    end

    @shapes [
      {0, {4, 6}, "x", "{b, l, d}"},
      {1, {1, 4, 6}, "dt", "{2, 4, 6}"},
      {2, {3, 6}, "A", "{6, n}"},
      {3, {2, 4, 4}, "B", "{2, 4, 3} or {2, 4, a divisor of 6, 3} or {6, 3}"},
      {4, {2, 4, 4, 3}, "C", "a divisor of 6"}
    ]

    test "raises for each wrong shape, in every way", %{args: args} do
      for {_, way} <- ways(), {at, shape, name, expected} <- @shapes do
        wrong = List.replace_at(args, at, Nx.broadcast(1.0, shape))
        error = assert_raise Sidewinder.Error, fn -> call(way, wrong, []) end
        assert %{kind: :shape, op: "selective_scan", argument: ^name} = error
        assert error.expected =~ expected
      end
    end

    test "raises for wrong optional inputs", %{args: args} do
      for {key, name} <- [d: "D", z: "z", dt_bias: "dt_bias", initial_state: "initial_state"] do
        error =
          assert_raise Sidewinder.Error, fn -> scan(args, [{key, Nx.broadcast(1.0, {5, 5})}]) end

        assert %{kind: :shape, argument: ^name} = error
      end
    end

    test "raises where types are mixed or unknown", %{args: [x, dt, a, b, c]} do
      for {_, way} <- ways() do
        error =
          assert_raise Sidewinder.Error, fn ->
            call(way, [x, Nx.as_type(dt, :bf16), a, b, c], [])
          end

        assert %{kind: :dtype, argument: "dt", expected: "f32", got: "bf16"} = error

        error =
          assert_raise Sidewinder.Error, fn ->
            call(way, [x, dt, Nx.as_type(a, :f64), b, c], [])
          end

        assert %{kind: :dtype, argument: "A"} = error
      end

      assert_raise Sidewinder.Error, ~r/x: expected f32, bf16, f16 or f64, got c64/, fn ->
        scan([Nx.as_type(x, :c64), dt, a, b, c])
      end
    end

    test "raises for what is no tensor", %{args: [_ | rest]} do
      assert_raise Sidewinder.Error, ~r/x: expected an Nx tensor, got "x"/, fn ->
        scan(["x" | rest])
      end

      assert %{kind: :shape} = assert_raise(Sidewinder.Error, fn -> scan([1.0 | rest]) end)
    end

    @tag skip: no_library()
    test "raises for wrong options", %{args: args} do
      for {opts, name} <- [
            {[dt_clamp: {1, 0}], "dt_clamp"},
            {[dt_clamp: 3], "dt_clamp"},
            {[dt_softplus: 1], "dt_softplus"},
            {[softplus: true], "softplus"},
            {[backend: :tpu], "backend"},
            {[level: "of no CPU"], "level"}
          ] do
        error = assert_raise Sidewinder.Error, fn -> scan(args, opts) end
        assert {error.argument, error.kind} == {name, :option} or name == "level"
      end
    end

    test "raises where options are no keyword list", %{args: [x, dt, a, b, c]} do
      for fun <- [:selective_scan, :scan], module <- [Sidewinder, Sidewinder.Reference] do
        if function_exported?(module, fun, 6) do
          error =
            assert_raise Sidewinder.Error, fn -> apply(module, fun, [x, dt, a, b, c, %{d: 1}]) end

          assert %{kind: :option, expected: "a keyword list"} = error
        end
      end
    end

    test "raises in one line", %{args: [x, dt, a, b, _]} do
      assert_raise Sidewinder.Error,
                   "selective_scan: C: expected shape {2, 4, 3} or {2, 4, a divisor of 6, 3} or {6, 3}, " <>
                     "got {2, 3, 4}. Layout is channel-last: batch, length, channels",
                   fn -> scan([x, dt, a, b, Nx.broadcast(1.0, {2, 3, 4})]) end
    end
  end

  describe "scan/6" do
    test "is selective_scan/6 with the clamp, unless told otherwise" do
      {[x, dt, a, b, c] = args, _} = problem({2, 4, 3, 2})
      dt = Nx.multiply(dt, 0.5)

      assert Sidewinder.scan(x, dt, a, b, c) == scan([x, dt, a, b, c], dt_clamp: {0.001, 0.1})
      assert Sidewinder.scan(x, dt, a, b, c, dt_clamp: nil) == scan([x, dt, a, b, c])
      assert apply(Sidewinder, :scan, args) != scan(args)
    end

    test "works inside defn" do
      {args, _} = problem({2, 4, 3, 2})
      expected = apply(Sidewinder, :scan, args)
      for {_, way} <- ways(), do: assert_close(way.(&Sidewinder.scan/5, args), expected)
    end

    test "scan_with_states/6 returns all states" do
      {args, _} = problem({2, 4, 3, 2})
      %{y: y, states: states} = scan(args, dt_clamp: {0.001, 0.1}, return_states: true)

      for {_, way} <- ways(),
          do: assert_close(way.(&Sidewinder.scan_with_states/5, args), {y, states})
    end
  end
end
