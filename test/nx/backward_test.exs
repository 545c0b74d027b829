defmodule Sidewinder.BackwardTest do
  # The gradient of the scan as a function.
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Ops, only: [gradients: 1, problem: 2, problem: 3, with_options: 2]
  import Sidewinder.NxTest.Scans, only: [assert_close: 2, assert_close: 3, ways: 0]
  alias Sidewinder.NxTest.Golden

  @backends [:nx, :cpu]

  defp optional(i, cotangents) do
    [d: i["D"], z: i["z"], dt_bias: i["dt_bias"], initial_state: i["initial_state"]] ++
      [dlast_state: cotangents["dlast_state"], dstates: cotangents["dstates"]]
  end

  defp backward(i, cotangents, opts) do
    args = [cotangents["dy"] | for(name <- ~w(x dt A B C), do: i[name])]
    apply(Sidewinder, :selective_scan_backward, args ++ [optional(i, cotangents) ++ opts])
  end

  for backend <- @backends do
    test "has what the gradient has, in every way, on #{backend}" do
      {_, i, cotangents, opts} =
        call = problem("selective_scan", {2, 5, 3, 2}) |> with_options(backend: unquote(backend))

      expected = Map.new(gradients(call), fn {name, t} -> {:"d#{name}", t} end)

      for {_, way} <- ways() do
        actual = way.(&backward(&1, &2, opts), [i, cotangents])
        assert Enum.sort(Map.keys(actual)) == Enum.sort(Map.keys(expected))
        assert_close(actual, expected, rtol: 1.0e-12)
      end
    end

    test "agrees with the golden values of the clamped scan, on #{backend}" do
      for %{name: "exphil" <> _} = golden <- Golden.cases("selective_scan") do
        args = for name <- ~w(dy x), do: golden.inputs[name]
        rest = for name <- ~w(dt A B C), do: golden.inputs[name]
        opts = [backend: unquote(backend)]

        {dx, d_dt, db, dc} = apply(Sidewinder, :backward, args ++ [nil | rest] ++ [opts])
        Golden.check(golden, %{dx: dx, ddt: d_dt, dB: db, dC: dc})
      end
    end

    test "lets the gradient through the clamp if asked to, on #{backend}" do
      x = Nx.tensor([[[1.0], [2.0]]])
      dt = Nx.tensor([[[0.5], [0.0005]]])

      [b, c] =
        for values <- [[1.0, 0.5], [1.0, 2.0]], do: Nx.reshape(Nx.tensor(values), {1, 2, 1})

      [a, dy] = [Nx.tensor([[-1.0]]), Nx.broadcast(1.0, {1, 2, 1})]

      for {more, expected} <- [
            {[], [0.0, 0.0]},
            {[clamp_grad: :mask], [0.0, 0.0]},
            {[clamp_grad: :straight_through], [2.998001, 1.8001999]},
            {[dt_clamp: nil], [2.99900025, 1.000499875]}
          ] do
        opts = [backend: unquote(backend)] ++ more
        {_, by_hand, _, _} = Sidewinder.backward(dy, x, nil, dt, a, b, c, opts)

        scans = [
          &Sidewinder.scan/6,
          &elem(Sidewinder.scan_with_states(&1, &2, &3, &4, &5, &6), 0)
        ]

        for scan <- scans do
          grad = Nx.Defn.grad(dt, &Nx.sum(scan.(x, &1, a, b, c, opts)))
          assert_close(by_hand, grad, rtol: 1.0e-6)
          assert_close(Nx.flatten(grad), Nx.tensor(expected), rtol: 1.0e-6, of: inspect(more))
        end

        step = fn dt ->
          [x, b, c] = for t <- [x, b, c], do: t[[.., 0]]
          state = Nx.broadcast(0.0, {1, 1, 1})
          opts = Keyword.merge([dt_clamp: {0.001, 0.1}], opts)
          {y, _} = Sidewinder.selective_state_update(state, x, dt[[.., 0]], a, b, c, opts)
          Nx.sum(y)
        end

        first = &Nx.sum(Sidewinder.scan(x, &1, a, b, c, opts)[[.., 0]])
        assert_close(Nx.Defn.grad(dt, step), Nx.Defn.grad(dt, first))
      end
    end

    test "has the bounds of the clamp inside, on #{backend}" do
      one = Nx.broadcast(1.0, {1, 3, 1})
      dt = Nx.tensor([[[0.001], [0.1], [0.10001]]])

      sum =
        &Nx.sum(Sidewinder.scan(one, &1, Nx.tensor([[0.0]]), one, one, backend: unquote(backend)))

      assert Nx.to_flat_list(Nx.Defn.grad(dt, sum)) == [3.0, 2.0, 0.0]
    end
  end

  test "takes all types and widens the weights" do
    for type <- [:f32, :bf16, :f16] do
      {_, i, cotangents, _} = problem("selective_scan", {2, 5, 3, 2}, type)
      i = Map.new(i, fn {name, t} -> {name, Nx.as_type(t, type)} end)

      gradients = backward(i, cotangents, [])
      for name <- [:dx, :ddt, :dB, :dC, :dz], do: assert(gradients[name].type == i["x"].type)
      for name <- [:dA, :dD, :dinitial_state], do: assert(gradients[name].type == {:f, 32})
    end
  end

  test "raises for what does not fit" do
    {_, i, cotangents, _} = problem("selective_scan", {2, 5, 3, 2}, :f32)

    for {key, name} <- [{"dy", "dy"}, {"dstates", "dstates"}, {"dlast_state", "dlast_state"}] do
      wrong = Map.put(cotangents, key, Nx.broadcast(1.0, {2, 4, 3}))
      error = assert_raise Sidewinder.Error, fn -> backward(i, wrong, []) end
      assert %{kind: :shape, op: "selective_scan_backward", argument: ^name} = error
    end

    for option <- [:clamp_grad, :return_state] do
      error = assert_raise Sidewinder.Error, fn -> backward(i, cotangents, [{option, true}]) end
      assert %{kind: :option, op: "selective_scan_backward"} = error
    end

    error =
      assert_raise Sidewinder.Error, fn ->
        Sidewinder.scan(i["x"], i["dt"], i["A"], i["B"], i["C"], clamp_grad: :none)
      end

    assert Exception.message(error) =~ "expected :mask or :straight_through, got :none"
  end
end
