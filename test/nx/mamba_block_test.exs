defmodule Sidewinder.MambaBlockTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans, only: [assert_close: 2, assert_close: 3, types: 0, ways: 0]
  import Sidewinder.NxTest.Ops, only: [problem: 2, problem: 3, run: 3]
  alias Sidewinder.{NxTest.Golden, Op}

  @backends [:nx, :cpu]
  @states ~w(conv_state ssm_state)

  for backend <- @backends do
    test "agrees with the golden values in every way, on #{backend}" do
      for golden <- Golden.cases("mamba_block"), {_, way} <- ways() do
        opts = [return_state: true, backend: unquote(backend)]
        inputs = Map.delete(golden.inputs, "dy")
        Golden.check(golden, way.(&run("mamba_block", &1, opts), [inputs]))
      end
    end

    test "some tokens, then one by one, are the whole, on #{backend}" do
      {_, i, _, _} = problem("mamba_block", {2, 7, 3, 2})
      opts = [return_state: true, backend: unquote(backend)]
      expected = run("mamba_block", i, opts)
      part = fn i, range -> %{i | "x" => i["x"][[.., range]]} end

      {ys, i} =
        Enum.map_reduce([0..3, 4..4, 5..5, 6..6], i, fn range, at ->
          result = run("mamba_block", part.(Map.put(at, "x", i["x"]), range), opts)
          {result.y, Map.merge(at, Map.new(@states, &{&1, result[String.to_atom(&1)]}))}
        end)

      assert_close(Nx.concatenate(ys, axis: 1), expected.y, rtol: 1.0e-10)
      for state <- @states, do: assert_close(i[state], expected[String.to_atom(state)])
    end

    test "takes all types and vectorized axes, on #{backend}" do
      for {type, rtol} <- types() do
        {_, i, _, _} = problem("mamba_block", {2, 5, 4, 3}, type)
        opts = [return_state: true, backend: unquote(backend)]
        result = run("mamba_block", i, opts)
        wide = Map.new(i, fn {name, t} -> {name, Nx.as_type(t, :f64)} end)
        assert result.y.type == i["x"].type
        assert result.ssm_state.type == if(type == :f64, do: {:f, 64}, else: {:f, 32})
        assert_close(result, run("mamba_block", wide, opts), rtol: 3 * rtol)

        vectorized =
          Map.new(i, fn {name, t} -> {name, Nx.vectorize(Nx.stack([t, t]), :model)} end)

        %{y: y} = run("mamba_block", vectorized, opts)
        assert y.vectorized_axes == [model: 2]
        assert Nx.devectorize(y, keep_names: false)[1] == result.y
      end
    end

    test "the gradient is an op of its own too, on #{backend}" do
      {_, i, cotangents, opts} =
        call = problem("mamba_block", {2, 5, 3, 2}) |> put_elem(3, backend: unquote(backend))

      first = ~w(x conv_w A_log dt_w)
      names = first ++ (Map.keys(i) -- first)
      tensors = for name <- names, do: {name, i[name]}
      backward = %Sidewinder.Block.MambaBlockBackward{target: opts}
      actual = Map.new(Op.call(backward, tensors ++ Map.to_list(cotangents), []))
      expected = Sidewinder.NxTest.Ops.gradients(call)
      assert_close(actual, Map.new(expected, fn {name, t} -> {:"d#{name}", t} end), rtol: 1.0e-9)
    end
  end

  test "params go by atoms, and by the names of selective_scan/6" do
    {_, i, _, _} = problem("mamba_block", {1, 3, 2, 2})
    {x, params} = Map.pop!(Map.drop(i, @states), "x")
    expected = Sidewinder.mamba_block(x, params)
    atoms = Map.new(params, fn {name, t} -> {String.to_atom(name), t} end)
    assert Sidewinder.mamba_block(x, atoms) == expected

    {a_log, atoms} = Map.pop!(atoms, :A_log)
    assert Sidewinder.mamba_block(x, Map.put(atoms, :a_log, a_log)) == expected
  end

  test "raises for params and shapes that do not fit" do
    {_, i, _, _} = problem("mamba_block", {1, 3, 2, 2})
    {x, params} = Map.pop!(Map.drop(i, @states), "x")
    wrong = &assert_raise(Sidewinder.Error, fn -> Sidewinder.mamba_block(x, &1) end)

    assert %{kind: :argument, argument: "dt_w", got: "none"} = wrong.(Map.delete(params, "dt_w"))
    assert %{kind: :argument, argument: "dt_v"} = error = wrong.(Map.put(params, "dt_v", x))
    assert error.expected =~ "one of A_log, in_proj, conv_w"
    assert %{kind: :argument, argument: "params"} = wrong.([])

    half = Map.update!(params, "in_proj", & &1[0..3])
    assert %{kind: :shape, argument: "in_proj", expected: "shape {8, 2}"} = wrong.(half)
    more = Map.update!(params, "x_proj", &Nx.concatenate([&1, &1]))
    assert %{kind: :shape, argument: "x_proj", expected: "shape {6, 4}"} = wrong.(more)
  end
end
