defmodule Sidewinder.SelectiveStateUpdateTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans
  alias Sidewinder.NxTest.Golden

  defp update(args, opts \\ []), do: apply(Sidewinder, :selective_state_update, args ++ [opts])

  @tag skip: no_library()
  test "agrees with the golden values in every way" do
    for golden <- Golden.cases("selective_state_update"), {_, way} <- ways() do
      args = for name <- ["initial_state", "x", "dt", "A", "B", "C"], do: golden.inputs[name]
      opts = Keyword.drop(Golden.options(golden), [:initial_state, :return_state, :return_states])
      fun = fn state, x, dt, a, b, c -> update([state, x, dt, a, b, c], opts) end
      {y, state} = way.(fun, args)
      Golden.check(golden, %{y: y, last_state: state})
    end
  end

  test "33 tokens one by one are the scan" do
    {[x, dt, a, b, c], optional} = problem({2, 33, 4, 3}, forms: {{:groups, 2}, :shared})
    opts = [dt_softplus: true, dt_clamp: {0.01, 1.0}] ++ Keyword.take(optional, [:d, :dt_bias])

    scan_opts =
      [initial_state: optional[:initial_state], z: optional[:z], return_state: true] ++ opts

    {y, last_state} = Sidewinder.selective_scan(x, dt, a, b, c, scan_opts)

    {ys, state} =
      Enum.map_reduce(0..32, optional[:initial_state], fn t, state ->
        [x, dt, b, c, z] = for sequence <- [x, dt, b, c, optional[:z]], do: sequence[[.., t]]
        update([state, x, dt, a, b, c], [z: z] ++ opts)
      end)

    assert_close(Nx.stack(ys, axis: 1), y)
    assert_close(state, last_state)
  end

  test "takes all types, vectorized axes and names" do
    for {type, rtol} <- types() do
      {[x, dt, a, b, c], optional} = problem({3, 2, 4, 2}, type: type)
      state = optional[:initial_state]
      [x, dt, b, c] = for t <- [x, dt, b, c], do: t[[.., 0]]
      {y, new_state} = update([state, x, dt, a, b, c])
      {exact, _} = update(Enum.map([state, x, dt, a, b, c], &Nx.as_type(&1, :f64)))
      assert_close(y, exact, rtol: rtol)

      [state, x, dt, b, c] =
        for t <- [state, x, dt, b, c], do: Nx.vectorize(Nx.new_axis(t, 1), :user)

      {vectorized, new} = update([state, Nx.rename(x, [:batch, :channel]), dt, a, b, c])
      assert vectorized.names == [:batch, :channel]
      assert Nx.to_binary(vectorized) == Nx.to_binary(y)
      assert Nx.to_binary(new) == Nx.to_binary(new_state)
    end
  end

  test "raises for wrong shapes, in its own terms" do
    {[x, dt, a, b, c], optional} = problem({3, 1, 4, 2})
    [x, dt, b, c] = for t <- [x, dt, b, c], do: t[[.., 0]]

    for {args, name} <- [
          {[Nx.broadcast(1.0, {3, 4}), x, dt, a, b, c], "initial_state"},
          {[optional[:initial_state], x, dt, a, b, Nx.broadcast(1.0, {4, 2})], "C"}
        ] do
      error = assert_raise Sidewinder.Error, fn -> update(args) end
      assert %{kind: :shape, op: "selective_state_update", argument: ^name} = error
    end
  end
end
