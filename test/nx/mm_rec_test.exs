defmodule Sidewinder.MMRecNxTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans, only: [assert_close: 2, assert_close: 3, random: 2, ways: 0]

  import Sidewinder.NxTest.Ops,
    only: [gradients: 2, problem: 2, problem: 3, run: 3, with_options: 2]

  alias Sidewinder.NxTest.Golden

  @backends [:nx, :cpu]

  for backend <- @backends do
    test "all agree with the golden values in every way, on #{backend}" do
      asked = %{
        "mdi_update" => [],
        "mdi" => [return_parts: true],
        "block_recurrence" => [return_state: true],
        "mmrec_block" => [return_state: true]
      }

      for {op, more} <- asked,
          %{inputs: i} = golden <- Golden.cases(op),
          {name, way} <- ways(),
          not long?(golden.name, name, unquote(backend)) do
        opts = more ++ Golden.attributes(golden) ++ [backend: unquote(backend)]
        cotangents = for "d" <> _ = name <- Map.keys(i), do: name
        Golden.check(golden, way.(&run(op, &1, opts), [Map.drop(i, cotangents)]))
      end
    end

    test "a sequence may be cut anywhere, on #{backend}" do
      {_, i, _, opts} = problem("mmrec_block", {2, 7, 3, 2}, :f32)
      opts = [backend: unquote(backend), return_state: true] ++ opts
      whole = run("mmrec_block", i, opts)

      for at <- 1..6 do
        first = run("mmrec_block", %{i | "x" => i["x"][[.., 0..(at - 1)]]}, opts)
        rest = %{i | "x" => i["x"][[.., at..6]], "initial_state" => first.last_state}
        second = run("mmrec_block", rest, opts)
        assert_close(Nx.concatenate([first.y, second.y], axis: 1), whole.y)
        assert_close(second.last_state, whole.last_state)
      end
    end

    test "no memory is one of zeros, and one memory may serve all, on #{backend}" do
      {_, i, _, opts} = problem("mmrec_block", {3, 4, 3, 2}, :f32)
      opts = [backend: unquote(backend)] ++ opts
      zeros = Nx.broadcast(0.0, {3, 5, 4})
      none = run("mmrec_block", Map.drop(i, ~w(k_mem v_mem)), opts)
      assert_close(none, run("mmrec_block", %{i | "k_mem" => zeros, "v_mem" => zeros}, opts))

      one = for name <- ~w(k_mem v_mem), into: %{}, do: {name, i[name][0..0]}
      all = Map.new(one, fn {name, t} -> {name, Nx.tile(t, [3, 1, 1])} end)
      run = fn memory -> run("mmrec_block", Map.merge(i, memory), opts) end
      assert_close(run.(one), run.(all))

      gradient = fn memory ->
        Nx.Defn.grad(memory, &Nx.sum(run("mmrec_block", Map.merge(i, &1), opts).y))
      end

      expected =
        Map.new(gradient.(all), fn {k, t} -> {k, Nx.sum(t, axes: [0], keep_axes: true)} end)

      for {name, t} <- gradient.(one), do: assert_close(t, expected[name], atol: 1.0e-5)
    end

    test "the state is kept in bounds, on #{backend}" do
      {_, i, _, _} = problem("block_recurrence", {2, 60, 4, 2}, :f32)
      i = %{i | "gamma" => Nx.broadcast(0.99, {2, 60, 4})}
      opts = [backend: unquote(backend)]

      largest =
        &(run("block_recurrence", i, &1 ++ opts).h
          |> Nx.abs()
          |> Nx.reduce_max()
          |> Nx.to_number())

      assert largest.([]) > 2
      assert largest.(state_clip: 0.5) == 0.5
      assert largest.(state_norm: true) <= 2

      for more <- [[state_clip: 0.5], [state_norm: true], [state_norm: true, state_clip: 0.9]] do
        {op, _, _, _} = call = problem("block_recurrence", {2, 5, 3, 2})
        assert op == "block_recurrence"
        Sidewinder.NxTest.Ops.check_differences(with_options(call, more ++ opts))
      end
    end
  end

  # Pure Nx takes seconds for them.
  defp long?(_, _, :cpu), do: false
  defp long?(name, way, :nx), do: way != :eager and name =~ ~r/1000|4096|1024|257/

  test "what a gradient keeps changes no number" do
    call = with_options(problem("mmrec_block", {2, 6, 3, 3}, :f32), backend: :cpu)

    for {_, way} <- ways() do
      expected = gradients(call, way)
      kept = gradients(with_options(call, checkpoint: false), way)
      for {name, t} <- expected, do: assert(Nx.to_binary(t) == Nx.to_binary(kept[name]))
    end
  end

  test "a gate is there as a whole or not at all, and mixes only then" do
    {_, i, _, _} = problem("block_recurrence", {1, 3, 2, 2}, :f32)
    core = Map.drop(i, ~w(w_mix b_mix))
    assert_close(run("block_recurrence", core, []), run("block_recurrence", i, mix: 0))

    refuse = fn i, opts ->
      assert_raise Sidewinder.Error, fn -> run("block_recurrence", i, opts) end
    end

    assert %{argument: "bm", kind: :argument} = refuse.(Map.delete(i, "b_mix"), [])
    assert %{argument: "mix", kind: :option} = refuse.(core, mix: 0.1)
    assert %{argument: "mix", kind: :option} = refuse.(i, mix: :much)
    assert %{argument: "state_clip", kind: :option} = refuse.(i, state_clip: 0)
    wrong = %{i | "w_mix" => i["w_gate"]}
    assert %{argument: "w_mix", kind: :shape, expected: "shape {2, 4}"} = refuse.(wrong, [])
  end

  test "a context comes with its network" do
    {_, i, _, _} = problem("mdi_gamma", {1, 3, 2, 2}, :f32)

    for name <- ~w(context wc1 bc2) do
      error = assert_raise Sidewinder.Error, fn -> run("mdi_gamma", Map.delete(i, name), []) end
      assert %{argument: ^name, kind: :argument, op: "mdi_gamma"} = error
    end

    assert %{gamma: _} = run("mdi_gamma", Map.drop(i, ~w(context wc1 bc1 wc2 bc2)), [])
  end

  test "dropout leaves some, makes it larger, and has a gradient" do
    {_, i, _, opts} = problem("mmrec_block", {2, 5, 3, 2}, :f32)
    run = fn i, key -> run("mmrec_block", i, [dropout: 0.5, dropout_key: key] ++ opts).y end
    [one, two] = for seed <- [1, 2], do: Nx.Random.key(seed)
    y = run.(i, one)
    assert_close(y, run.(i, one))
    assert Nx.to_number(Nx.any(Nx.not_equal(y, run.(i, two)))) == 1

    mean =
      for(seed <- 1..50, do: run.(i, Nx.Random.key(seed))) |> Nx.stack() |> Nx.mean(axes: [0])

    # The norm before the last layer is not linear, so means are only near.
    assert_close(mean, run("mmrec_block", i, opts).y, atol: 0.6, rtol: 0.2)

    expected = Nx.Defn.grad(i["x"], &Nx.sum(run.(%{i | "x" => &1}, one)))

    for {_, way} <- ways() do
      got =
        way.(fn x, i -> Nx.Defn.grad(x, &Nx.sum(run.(Map.put(i, "x", &1), one))) end, [i["x"], i])

      assert_close(got, expected)
    end

    for bad <- [1, -0.1, :half] do
      error =
        assert_raise Sidewinder.Error, fn ->
          run("mmrec_block", i, dropout: bad, dropout_key: one)
        end

      assert %{argument: "dropout", kind: :option} = error
    end

    error = assert_raise Sidewinder.Error, fn -> run("mmrec_block", i, dropout: 0.1) end
    assert %{argument: "dropout_key"} = error
  end

  test "wrong calls of the block say what is wrong" do
    {_, i, _, _} = problem("mmrec_block", {2, 5, 3, 2}, :f32)

    refuse = fn i, opts ->
      assert_raise Sidewinder.Error, fn -> run("mmrec_block", i, opts) end
    end

    assert %{argument: "wf2", kind: :shape} = refuse.(%{i | "wf2" => i["wm"]}, [])

    assert %{argument: "k_mem", kind: :shape} =
             refuse.(%{i | "k_mem" => random(1, {4, 5, 4})}, [])

    assert %{argument: "wq", kind: :argument} = refuse.(Map.delete(i, "wq"), [])
    assert %{argument: "x", kind: :shape} = refuse.(i, heads: 3)
    assert %{argument: "norm", kind: :option} = refuse.(i, norm: :beside)
    assert %{argument: "wide", kind: :argument} = refuse.(Map.put(i, "wide", i["n1"]), [])
  end
end
