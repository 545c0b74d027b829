defmodule Sidewinder.CumulativeTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans, only: [assert_close: 2, assert_close: 3, random: 5, ways: 0]
  import Sidewinder.NxTest.Ops, only: [problem: 3, run: 3]
  alias Sidewinder.{Error, NxTest.Golden}

  @backends [:nx, :cpu]
  @golden ~w(exp_product_scan cumprod_scan logcumsumexp reverse_cumsum)
  @scans @golden ++ ["cumsum"]

  defp sequence(op), do: if(op in ~w(exp_product_scan cumprod_scan), do: "gamma", else: "x")

  for backend <- @backends, op <- @golden do
    test "#{op} agrees with the golden values in every way, on #{backend}" do
      for golden <- Golden.cases(unquote(op)), {name, way} <- ways() do
        # Pure Nx takes seconds for the long ones under a compiler that writes slices.
        unless name == :inline and golden.name =~ ~r/1000|4096|1025|c4/ do
          opts = [return_state: true, backend: unquote(backend)] ++ Golden.attributes(golden)
          inputs = Map.drop(golden.inputs, ~w(dy dlog_y))
          %{y: y, last_state: last} = outputs = way.(&run(unquote(op), &1, opts), [inputs])
          Golden.check(golden, outputs)
          at = if unquote(op) == "reverse_cumsum", do: 0, else: -1
          assert_close(last, (outputs[:log_y] || y)[[.., .., at]])
        end
      end
    end
  end

  for backend <- @backends, op <- @scans do
    test "splitting #{op} anywhere and carrying the state changes nothing, on #{backend}" do
      {_, i, _, _} = problem(unquote(op), {2, 9, 3, 2}, :f64)
      opts = [backend: unquote(backend), return_state: true]
      x = i[sequence(unquote(op))]
      whole = run(unquote(op), i, opts)

      for at <- 1..8 do
        parts = [0..(at - 1), at..8]
        parts = if unquote(op) == "reverse_cumsum", do: Enum.reverse(parts), else: parts

        {ys, state} =
          Enum.map_reduce(parts, i["initial_state"], fn range, state ->
            piece = %{sequence(unquote(op)) => x[[.., .., range]], "initial_state" => state}

            %{y: y, last_state: state} = run(unquote(op), piece, opts)
            assert_close(y, whole.y[[.., .., range]], rtol: 1.0e-12)
            {y, state}
          end)

        assert length(ys) == 2
        assert_close(state, whole.last_state, rtol: 1.0e-12)
      end
    end
  end

  for op <- ~w(exp_product_scan cumprod_scan logcumsumexp) do
    test "#{op} in reverse is the scan of what is reversed, with its gradients" do
      {_, i, _, _} = problem(unquote(op), {2, 7, 3, 2}, :f64)
      name = sequence(unquote(op))
      flip = &Nx.reverse(&1, axes: [2])

      loss = fn x, opts, out ->
        run(unquote(op), %{i | name => x}, opts).y |> out.() |> Nx.sin() |> Nx.sum()
      end

      for backend <- @backends, {_, way} <- ways() do
        opts = [backend: backend]
        there = fn x -> Nx.Defn.value_and_grad(x, &loss.(flip.(&1), opts, flip)) end

        back = fn x ->
          Nx.Defn.value_and_grad(x, &loss.(&1, [reverse: true] ++ opts, fn y -> y end))
        end

        assert_close(way.(back, [i[name]]), way.(there, [i[name]]), rtol: 1.0e-11)
      end
    end
  end

  for backend <- @backends do
    test "decays out of their bounds have no gradient, on #{backend}" do
      gamma = Nx.tensor([[[[0.5], [1.5], [0.01], [0.9]]]])
      opts = [eps: 0.1, backend: unquote(backend)]
      loss = fn gamma -> Nx.sum(elem(Sidewinder.exp_product_scan(gamma, opts), 0)) end
      {value, gradient} = Nx.Defn.value_and_grad(gamma, loss)
      assert_close(value, Nx.tensor(0.5 + 0.5 + 0.05 + 0.045))
      assert_close(Nx.flatten(gradient), Nx.tensor([2.19, 0.0, 0.0, 0.05]))
    end

    test "where nothing was added a log-sum is minus infinity, and has no gradient, on #{backend}" do
      x = Nx.tensor([[[[:neg_infinity], [:neg_infinity], [1.0], [:neg_infinity]]]])
      opts = [backend: unquote(backend)]
      y = Sidewinder.logcumsumexp(x, opts)
      assert Nx.to_flat_list(y) == [:neg_infinity, :neg_infinity, 1.0, 1.0]
      gradient = Nx.Defn.grad(x, &Nx.sum(Sidewinder.logcumsumexp(&1, opts)[[.., .., 2..3]]))
      assert Nx.to_flat_list(gradient) == [0.0, 0.0, 2.0, 0.0]
    end

    test "a long sum keeps its digits, on #{backend}" do
      x = random(1, {1, 1, 3000, 2}, 0.0, 1.0, :f32)
      y = Sidewinder.cumsum(x, backend: unquote(backend))
      exact = x |> Nx.as_type(:f64) |> Nx.cumulative_sum(axis: 2)
      assert_close(y, exact, rtol: 1.0e-7)
    end
  end

  test "raises for what does not fit" do
    x = Nx.broadcast(0.5, {2, 2, 5, 3})

    for {fun, argument, kind} <- [
          {&Sidewinder.cumprod_scan(Nx.squeeze(x[[0]]), &1), "gamma", :shape},
          {&Sidewinder.cumprod_scan(x, [initial_state: Nx.broadcast(1.0, {2, 3})] ++ &1),
           "initial_state", :shape},
          {&Sidewinder.exp_product_scan(x, [eps: 2] ++ &1), "eps", :option},
          {&Sidewinder.exp_product_scan(x, [log_min: 2] ++ &1), "log_min", :option},
          {&Sidewinder.cumsum(x, [reverse: true] ++ &1), "reverse", :option}
        ],
        backend <- @backends do
      error = assert_raise Error, fn -> fun.(backend: backend) end
      assert {error.kind, error.argument} == {kind, argument}
    end
  end
end
