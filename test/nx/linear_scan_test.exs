defmodule Sidewinder.LinearScanTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans, only: [assert_close: 2, assert_close: 3, random: 2, ways: 0]
  import Sidewinder.NxTest.Ops, only: [problem: 3, run: 3]
  alias Sidewinder.{NxTest.Golden, Reference}

  @backends [:nx, :cpu]

  for backend <- @backends do
    test "agrees with the golden values in every way, on #{backend}" do
      for %{inputs: i} = golden <- Golden.cases("linear_scan"), {name, way} <- ways() do
        # Pure Nx takes seconds for the long ones under a compiler that writes slices.
        unless name == :inline and golden.name =~ ~r/1000|4096|513/ do
          opts = [return_state: true, backend: unquote(backend)]
          %{h: h, last_state: last} = outputs = way.(&run("linear_scan", &1, opts), [i])
          Golden.check(golden, outputs)
          assert_close(last, h[[.., -1]])
        end
      end
    end

    test "splitting a sequence anywhere and carrying the state changes nothing, on #{backend}" do
      {a, b} = {random(1, {2, 17, 3}), random(2, {2, 17, 3})}
      opts = [backend: unquote(backend), return_state: true]
      {h, last_state} = Sidewinder.linear_scan(a, b, opts)

      for at <- 1..16 do
        [first, second] = for range <- [0..(at - 1), at..16], do: {a[[.., range]], b[[.., range]]}
        {h1, state} = Sidewinder.linear_scan(elem(first, 0), elem(first, 1), opts)
        opts = [initial_state: state] ++ opts
        {h2, state} = Sidewinder.linear_scan(elem(second, 0), elem(second, 1), opts)
        assert_close(Nx.concatenate([h1, h2], axis: 1), h)
        assert_close(state, last_state)
      end
    end
  end

  test "the algorithms of the reference have its gradients" do
    {_, i, _, _} = problem("linear_scan", {2, 9, 3, 1}, :f64)

    loss = fn i, fun, opts ->
      Nx.sum(Nx.pow(fun.(i["a"], i["b"], [initial_state: i["initial_state"]] ++ opts), 2))
    end

    expected =
      Nx.Defn.grad(i, &loss.(&1, fn a, b, opts -> Sidewinder.linear_scan(a, b, opts) end, []))

    for algorithm <- [:sequential, :hillis_steele, :blelloch], {_, way} <- ways() do
      reference = fn a, b, opts -> Reference.linear_scan(a, b, opts) end
      gradient = fn i -> Nx.Defn.grad(i, &loss.(&1, reference, algorithm: algorithm)) end
      assert_close(way.(gradient, [i]), expected, rtol: 1.0e-11)
    end
  end

  test "raises for what does not fit" do
    {_, i, _, _} = problem("linear_scan", {2, 5, 3, 1}, :f32)
    wrong = %{i | "b" => Nx.broadcast(1.0, {2, 4, 3})}
    error = assert_raise Sidewinder.Error, fn -> run("linear_scan", wrong, []) end
    assert %{kind: :shape, op: "linear_scan", argument: "b", expected: "shape {2, 5, 3}"} = error
  end
end
