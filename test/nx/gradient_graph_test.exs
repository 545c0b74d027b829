defmodule Sidewinder.GradientGraphTest do
  # Gradients of calls in all sorts of graphs.
  use ExUnit.Case, async: true

  import ExUnit.CaptureLog
  import Sidewinder.NxTest.Ops

  import Sidewinder.NxTest.Scans,
    only: [assert_close: 2, assert_close: 3, no_library: 0, random: 2, ways: 0]

  alias Sidewinder.NxTest.{Elsewhere, Flow}

  @backends [:nx, :cpu]
  @sizes {2, 4, 3, 2}

  defp call(op, backend, type \\ :f32),
    do: op |> problem(@sizes, type) |> with_options(backend: backend)

  for op <- ops(), backend <- @backends do
    test "every way gives the same for #{op}, on #{backend}" do
      call = call(unquote(op), unquote(backend))
      expected = value_and_grad(call)
      for {_, way} <- ways(), do: assert_close(value_and_grad(call, way), expected)
    end

    test "a second derivative of #{op} raises, on #{backend}" do
      {_, inputs, cotangents, _} = call = call(unquote(op), unquote(backend))
      weights = Map.new(inputs, fn {name, t} -> {name, random(5, t.shape)} end)

      for {_, way} <- ways() do
        twice = fn inputs ->
          Nx.Defn.grad(inputs, fn inputs ->
            gradients = gradients(put_elem(call, 1, inputs))
            for({name, t} <- gradients, do: Nx.sum(Nx.multiply(t, weights[name]))) |> add()
          end)
        end

        error = assert_raise Sidewinder.Error, fn -> way.(twice, [inputs]) end
        assert %{kind: :unavailable, argument: "gradient"} = error
        assert error.op =~ "_backward"
        assert Exception.message(error) =~ "second derivatives"
        assert Exception.message(error) =~ "stop_grad"
      end

      assert map_size(cotangents) > 0
    end
  end

  defp add(terms), do: Enum.reduce(terms, &Nx.add/2)

  describe "kernels called for value and gradients" do
    @describetag skip: no_library()

    test "of decoding: its gradient is composed" do
      calls = kernel_calls(fn -> value_and_grad(call("decode", :cpu), ways()[:evaluator]) end)
      assert strings(calls) == ~w(decode attention attention_backward)
    end

    for op <- ops(), op != "decode" do
      test "of #{op}: one forwards and one backwards" do
        call = call(unquote(op), :cpu)
        op = kernel(unquote(op))
        step? = op in ~w(selective_state_update causal_conv1d_update)
        whole = if step?, do: String.replace(op, ["_update", "_state_update"], ""), else: op
        backward = if op == "selective_state_update", do: "selective_scan", else: whole
        expected = [op, backward <> "_backward"]

        for {name, way} <- ways(), name in [:eager, :evaluator] do
          assert strings(kernel_calls(fn -> value_and_grad(call, way) end)) == expected
        end
      end
    end

    test "of a Mamba block under other compilers: those of its scan and convolution" do
      call = call("mamba_block", :cpu)
      expected = ~w(causal_conv1d causal_conv1d_backward selective_scan selective_scan_backward)
      calls = strings(kernel_calls(fn -> value_and_grad(call, ways()[:wrapper]) end))
      assert Enum.sort(calls) == expected
    end

    test "of one input, and where the value is not wanted" do
      {_, inputs, cotangents, opts} = call("selective_scan", :cpu)

      one = fn fun ->
        kernel_calls(fn ->
          fun.(inputs["x"], &loss({"selective_scan", %{inputs | "x" => &1}, cotangents, opts}))
        end)
      end

      assert one.(&Nx.Defn.value_and_grad/2) == [:selective_scan, :selective_scan_backward]
      assert one.(&Nx.Defn.grad/2) == [:selective_scan_backward]
    end

    test "of two scans in a row: two and two" do
      {_, inputs, _, _} = call("selective_scan", :cpu)
      calls = kernel_calls(fn -> Nx.Defn.value_and_grad(inputs, &twice(&1, :cpu)) end)

      assert Enum.frequencies(calls) == %{selective_scan: 2, selective_scan_backward: 2}
    end
  end

  defp strings(atoms), do: Enum.map(atoms, &Atom.to_string/1)

  defp twice(i, backend) do
    %{y: y, last_state: state} = run("selective_scan", i, return_state: true, backend: backend)
    again = run("selective_scan", %{i | "x" => y, "initial_state" => state}, backend: backend)
    Nx.sum(Nx.multiply(again.y, y))
  end

  for backend <- @backends do
    test "several calls in one graph, on #{backend}" do
      {_, inputs, _, _} = call("selective_scan", unquote(backend), :f64)
      [{_, eager} | graphs] = ways()
      gradient = fn inputs -> Nx.Defn.grad(inputs, &twice(&1, unquote(backend))) end
      expected = eager.(gradient, [inputs])
      for {_, way} <- graphs, do: assert_close(way.(gradient, [inputs]), expected)

      for {name, t} <- inputs do
        direction = random(3, t.shape)
        at = &twice(%{inputs | name => Nx.add(t, Nx.multiply(direction, &1))}, unquote(backend))
        difference = Nx.divide(Nx.subtract(at.(1.0e-5), at.(-1.0e-5)), 2.0e-5)
        got = Nx.sum(Nx.multiply(expected[name], direction))
        assert_close(got, difference, rtol: 1.0e-5, of: name)
      end
    end

    test "captured constants, on #{backend}" do
      {op, inputs, cotangents, opts} = call = call("selective_scan", unquote(backend))
      expected = gradients(call)

      for {name, t} <- inputs, {_, way} <- ways() do
        fun = fn t ->
          Nx.Defn.grad(t, &loss({op, Map.put(inputs, name, &1), cotangents, opts}))
        end

        assert_close(way.(fun, [t]), expected[name])
      end
    end

    test "in a `cond`, on #{backend}" do
      {_, i, _, _} = call("selective_scan", unquote(backend))
      args = for name <- ~w(x dt A B C), do: i[name]
      plain = fn args -> Nx.sum(apply(Sidewinder, :selective_scan, Tuple.to_list(args))) end
      sum = fn flag -> &Nx.sum(apply(Flow, :choose, [flag | Tuple.to_list(&1)])) end
      tuple = List.to_tuple(args)

      for {_, way} <- ways() do
        gradient = fn flag, args -> Nx.Defn.grad(args, sum.(flag)) end
        assert_close(way.(gradient, [1, tuple]), Nx.Defn.grad(tuple, plain))
        [dx | others] = Tuple.to_list(way.(gradient, [0, tuple]))
        assert dx == Nx.broadcast(1.0, i["x"])
        for t <- others, do: assert(Nx.to_number(Nx.sum(Nx.abs(t))) == 0)
      end
    end

    test "in a `cond`, of vectorized tensors, on #{backend}" do
      {_, i, _, _} = call("selective_scan", unquote(backend))
      [x, dt | rest] = for name <- ~w(x dt A B C), do: i[name]
      both = {Nx.vectorize(Nx.stack([x, Nx.negate(x)]), :run), dt}
      energy = fn {x, dt} -> Flow.energy(x, List.to_tuple([dt | rest])) end
      chosen = fn {x, dt} -> Nx.sum(Nx.pow(apply(Flow, :choose, [1, x, dt | rest]), 2)) end

      for {_, way} <- ways(),
          do: assert_close(way.(&Nx.Defn.grad(&1, chosen), [both]), Nx.Defn.grad(both, energy))
    end

    test "taken inside of a `while`, on #{backend}" do
      {_, i, _, _} = call("selective_scan", unquote(backend), :f64)
      [x | rest] = for name <- ~w(x dt A B C), do: i[name]
      step = fn x -> Nx.subtract(x, Nx.Defn.grad(x, &Flow.energy(&1, List.to_tuple(rest)))) end
      expected = x |> step.() |> step.() |> step.()

      log =
        capture_log(fn ->
          for {_, way} <- ways(),
              do: assert_close(way.(&Flow.descend/2, [x, List.to_tuple(rest)]), expected)
        end)

      refute log =~ "while"
    end
  end

  describe "a gradient through a `while`" do
    setup do
      :persistent_term.erase({Sidewinder.Op.Warning, :while})
      {_, i, _, _} = call("selective_scan", :cpu)
      %{args: for(name <- ~w(x dt A B C), do: i[name])}
    end

    test "is right for sums, and warns", %{args: [x, dt | rest]} do
      total = fn dt -> Flow.total(x, List.to_tuple([dt | rest])) end

      unrolled = fn dt ->
        for(i <- 0..2, do: Flow.energy(Nx.multiply(x, i), List.to_tuple([dt | rest]))) |> add()
      end

      log =
        capture_log(fn -> assert_close(Nx.Defn.grad(dt, total), Nx.Defn.grad(dt, unrolled)) end)

      assert log =~ "A gradient goes through a `while`"
      assert log =~ "unroll: true"
    end

    test "raises for types that Nx mixes up", %{args: args} do
      [x | rest] = Enum.map(args, &Nx.as_type(&1, :f64))
      repeat = &Nx.sum(apply(Flow, :repeat, [&1 | rest]))
      error = assert_raise Sidewinder.Error, fn -> Nx.Defn.grad(x, repeat) end
      assert %{kind: :unavailable, got: "f64"} = error
    end

    # If this fails, Nx has learnt it: take away the warning.
    test "is wrong in Nx itself for steps that depend on each other" do
      [x, w] = for values <- [[0.3, 0.9], [1.1, 1.7]], do: Nx.tensor(values)
      looped = Nx.Defn.grad(w, &Flow.sines(x, &1))
      unrolled = Nx.Defn.grad(w, &(x |> sine(&1) |> sine(&1) |> sine(&1) |> Nx.sum()))
      assert Nx.to_number(Nx.all_close(looped, unrolled)) == 0
    end

    test "is right where the loop is unrolled", %{args: [x | rest]} do
      unrolled = fn {x, rest} -> Nx.sum(Flow.unrolled(x, rest)) end

      by_hand = fn {x, rest} ->
        scan = fn x -> apply(Sidewinder, :selective_scan, [x | Tuple.to_list(rest)]) end
        x |> scan.() |> scan.() |> scan.() |> Nx.sum()
      end

      args = {x, List.to_tuple(rest)}

      log =
        capture_log(fn ->
          assert_close(Nx.Defn.grad(args, unrolled), Nx.Defn.grad(args, by_hand))
        end)

      refute log =~ "while"
    end
  end

  defp sine(x, w), do: Nx.sin(Nx.multiply(x, w))

  test "none flows through stop_grad, nor where nothing depends on the call" do
    {_, i, _, _} = call("selective_scan", :cpu)
    [x | rest] = args = for name <- ~w(x dt A B C), do: i[name]
    scan = fn x -> apply(Sidewinder, :selective_scan, [x | rest]) end
    fun = fn x -> Nx.sum(Nx.multiply(x, apply(Sidewinder, :selective_scan, args))) end
    assert_close(Nx.Defn.grad(x, fun), scan.(x))

    fun = fn x -> Nx.add(Nx.sum(x), Nx.Defn.Kernel.stop_grad(Nx.sum(scan.(x)))) end
    assert Nx.Defn.grad(x, fun) == Nx.broadcast(1.0, x)
    assert kernel_calls(fn -> Nx.Defn.grad(x, fun) end) == []

    stopped = fn x ->
      Nx.sum(Nx.multiply(x, Nx.Defn.Kernel.stop_grad(Nx.Defn.grad(x, &Nx.sum(scan.(&1))))))
    end

    assert_close(Nx.Defn.grad(x, stopped), Nx.Defn.grad(x, &Nx.sum(scan.(&1))))
  end

  test "of integers are floats, and of weights in the storage type have that type" do
    for backend <- @backends do
      ones = Nx.broadcast(1, {1, 2, 1})

      sum =
        &Nx.sum(
          Sidewinder.selective_scan(&1, ones, Nx.tensor([[0]]), ones, ones, backend: backend)
        )

      assert Nx.Defn.grad(ones, sum) == Nx.tensor([[[2.0], [1.0]]])

      {_, inputs, _, _} = call = call("selective_scan", backend, :bf16)
      narrow = Map.new(inputs, fn {name, t} -> {name, Nx.as_type(t, :bf16)} end)

      for {name, t} <- gradients(put_elem(call, 1, narrow)) do
        assert {name, t.type, t.shape} == {name, {:bf, 16}, inputs[name].shape}
      end
    end
  end

  test "one kernel gives the same again, bit by bit" do
    for op <- ops() do
      call = call(op, :cpu)
      first = value_and_grad(call)
      for _ <- 1..5, do: assert(value_and_grad(call) == first)
    end
  end

  test "names of axes stay with their inputs" do
    {op, inputs, cotangents, opts} = call("selective_scan", :cpu)
    x = Nx.rename(inputs["x"], [:batch, :time, :channel])
    gradients = gradients({op, %{inputs | "x" => x}, cotangents, opts})
    assert gradients["x"].names == [:batch, :time, :channel]
    assert gradients["A"].names == [nil, nil]
  end

  test "a graph can be printed and run again" do
    call = call("selective_scan", :cpu)
    {_, inputs, _, _} = call

    graph =
      Nx.Defn.debug_expr_apply(fn inputs -> gradients(put_elem(call, 1, inputs)) end, [inputs])

    assert inspect(graph["x"]) =~ "Nx.Defn.Expr"
    assert_close(gradients(call), gradients(call, ways()[:evaluator]), rtol: 0)
  end

  test "tensors stay on their backend" do
    # In pure Nx composed ops have gradients that Nx makes.
    for backend <- @backends, op <- ops(), backend != :nx or not composed?(op) do
      {_, inputs, cotangents, opts} = call = call(op, backend)
      move = &Map.new(&1, fn {name, t} -> {name, Nx.backend_copy(t, Elsewhere)} end)

      # Nx wants what a gradient captures to be an argument here.
      gradient = Nx.Defn.jit(&gradients({op, &1, &2, opts}))

      for {name, t} <- gradient.(move.(inputs), move.(cotangents)) do
        assert %Elsewhere{} = t.data
        assert_close(Nx.backend_copy(t, Nx.BinaryBackend), gradients(call)[name])
      end
    end
  end
end
