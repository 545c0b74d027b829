defmodule Sidewinder.GradientTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans
  alias Sidewinder.NxTest.{Flow, Inline, Wrapper}

  @message ~r/the gradient of selective_scan is not there yet/

  setup do
    {args, optional} = problem({2, 4, 3, 2})
    %{args: args, optional: optional}
  end

  defp loss(args, opts), do: Nx.sum(output(apply(Sidewinder, :selective_scan, args ++ [opts])))

  test "raises for every input, whatever is returned", %{args: args, optional: optional} do
    for at <- 0..4, more <- [[], [return_state: true], [return_states: true]] do
      fun = &loss(List.replace_at(args, at, &1), optional ++ more)
      assert_raise Sidewinder.Error, @message, fn -> Nx.Defn.grad(Enum.at(args, at), fun) end
    end

    for {key, t} <- optional do
      fun = &loss(args, Keyword.replace!(optional, key, &1))
      assert_raise Sidewinder.Error, @message, fn -> Nx.Defn.grad(t, fun) end
    end
  end

  test "raises for value_and_grad and under every compiler", %{args: [x | rest]} do
    for compiler <- [Nx.Defn.Evaluator, Wrapper, Inline], opts <- [[], [backend: :nx]] do
      fun = fn x -> Nx.Defn.value_and_grad(x, &loss([&1 | rest], opts)) end

      assert_raise Sidewinder.Error, @message, fn ->
        Nx.Defn.jit_apply(fun, [x], compiler: compiler)
      end
    end
  end

  test "raises through the last state", %{args: [x | rest]} do
    fun = fn x ->
      Nx.sum(elem(apply(Sidewinder, :selective_scan, [x | rest] ++ [[return_state: true]]), 1))
    end

    assert_raise Sidewinder.Error, @message, fn -> Nx.Defn.grad(x, fun) end
  end

  test "raises in `while` and `cond`, and for vectorized tensors", %{args: [x, dt, a, b, c]} do
    for fun <- [&Flow.repeat(&1, dt, a, b, c), &Flow.choose(1, &1, dt, a, b, c)] do
      assert_raise Sidewinder.Error, @message, fn -> Nx.Defn.grad(x, &Nx.sum(fun.(&1))) end
    end

    vectorized = Nx.vectorize(Nx.stack([x, x]), :run)

    assert_raise Sidewinder.Error, @message, fn ->
      Nx.Defn.grad(vectorized, &loss([&1, dt, a, b, c], []))
    end
  end

  test "raises for the other functions too", %{args: [x, dt, a, b, c], optional: optional} do
    assert_raise Sidewinder.Error, @message, fn ->
      Nx.Defn.grad(x, &Nx.sum(Sidewinder.scan(&1, dt, a, b, c)))
    end

    [x1, dt, b, c] = for t <- [x, dt, b, c], do: t[[.., 0]]

    step = fn x ->
      Nx.sum(elem(Sidewinder.selective_state_update(optional[:initial_state], x, dt, a, b, c), 0))
    end

    assert_raise Sidewinder.Error, ~r/gradient of selective_state_update/, fn ->
      Nx.Defn.grad(x1, step)
    end

    linear = &Nx.sum(Sidewinder.Reference.linear_scan(&1, x))
    assert_raise Sidewinder.Error, ~r/gradient of linear_scan/, fn -> Nx.Defn.grad(x, linear) end
  end

  test "does not raise where no gradient flows through", %{args: [x | rest] = args} do
    fun = fn x -> Nx.sum(Nx.multiply(x, apply(Sidewinder, :selective_scan, args))) end
    assert_close(Nx.Defn.grad(x, fun), apply(Sidewinder, :selective_scan, args))

    fun = fn x -> Nx.add(Nx.sum(x), Nx.Defn.Kernel.stop_grad(loss([x | rest], []))) end
    assert Nx.Defn.grad(x, fun) == Nx.broadcast(1.0, x)
  end
end
