defmodule Sidewinder.CausalConv1dTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans, only: [assert_close: 2, assert_close: 3, random: 2, ways: 0]
  import Sidewinder.NxTest.Ops, only: [problem: 2, problem: 3, run: 3]
  alias Sidewinder.NxTest.Golden

  @backends [:nx, :cpu]

  for backend <- @backends do
    test "agrees with the golden values in every way, on #{backend}" do
      for %{inputs: i, attrs: attrs} = golden <- Golden.cases("causal_conv1d"),
          {_, way} <- ways() do
        activation = attrs[:activation] && String.to_atom(attrs[:activation])
        opts = [activation: activation, return_state: true, backend: unquote(backend)]
        Golden.check(golden, way.(&run("causal_conv1d", &1, opts), [i]))
      end
    end

    test "splitting a sequence anywhere and carrying the state changes nothing, on #{backend}" do
      opts = [
        bias: random(3, {2}),
        activation: :silu,
        return_state: true,
        backend: unquote(backend)
      ]

      {x, w} = {random(1, {2, 9, 2}), random(2, {2, 4})}
      {y, final} = Sidewinder.causal_conv1d(x, w, opts)

      for at <- 1..8 do
        {y1, state} = Sidewinder.causal_conv1d(x[[.., 0..(at - 1)]], w, opts)
        {y2, state} = Sidewinder.causal_conv1d(x[[.., at..8]], w, [initial_state: state] ++ opts)
        assert_close(Nx.concatenate([y1, y2], axis: 1), y)
        assert state == final
      end
    end

    test "steps are the whole, under every compiler, on #{backend}" do
      opts = [bias: random(3, {3}), activation: :silu, backend: unquote(backend)]
      {x, w} = {random(1, {2, 7, 3}), random(2, {3, 4})}
      {y, final} = Sidewinder.causal_conv1d(x, w, [return_state: true] ++ opts)

      for {_, way} <- ways() do
        step = &Sidewinder.causal_conv1d_update(&1, &2, w, opts)

        {ys, state} =
          Enum.map_reduce(0..6, Nx.broadcast(0.0, {2, 3, 3}), fn t, state ->
            {y, state} = way.(step, [state, x[[.., t]]])
            {y, state}
          end)

        assert_close(Nx.stack(ys, axis: 1), y)
        assert_close(state, final)
      end
    end

    test "takes kernels of all widths, on #{backend}" do
      for width <- 1..6 do
        {x, w} = {random(1, {2, 5, 3}), random(2, {3, width})}
        y = Sidewinder.causal_conv1d(x, w, backend: unquote(backend))

        expected =
          for t <- 0..4 do
            for j <- 0..(width - 1), s = t + j - width + 1, s >= 0 do
              Nx.multiply(x[[.., s]], w[[.., j]])
            end
            |> Enum.reduce(&Nx.add/2)
          end

        assert_close(y, Nx.stack(expected, axis: 1))
        sum = &Nx.sum(Sidewinder.causal_conv1d(&1, w, backend: unquote(backend)))
        assert_close(Nx.Defn.grad(x, sum)[[.., 4]], Nx.broadcast(w[[.., width - 1]], {2, 3}))
      end
    end

    test "takes all types and vectorized axes, on #{backend}" do
      for {type, rtol} <- Sidewinder.NxTest.Scans.types() do
        {_, i, _, _} = problem("causal_conv1d", {2, 5, 3, 2}, type)
        opts = [return_state: true, activation: :silu, backend: unquote(backend)]
        result = run("causal_conv1d", i, opts)
        wide = Map.new(i, fn {name, t} -> {name, Nx.as_type(t, :f64)} end)
        assert result.y.type == i["x"].type
        assert result.last_state.type == i["x"].type
        assert_close(result, run("causal_conv1d", wide, opts), rtol: rtol)

        vectorized =
          Map.new(i, fn {name, t} -> {name, Nx.vectorize(Nx.stack([t, t]), :model)} end)

        %{y: y} = run("causal_conv1d", vectorized, opts)
        assert y.vectorized_axes == [model: 2]
        assert Nx.devectorize(y, keep_names: false)[1] == result.y
      end
    end
  end

  test "raises for what does not fit" do
    {_, i, _, _} = problem("causal_conv1d", {2, 5, 3, 2})

    for {name, shape, expected} <- [
          {"w", {4, 3}, "shape {3, w}"},
          {"bias", {4}, "shape {3}"},
          {"initial_state", {2, 3, 3}, "shape {2, 2, 3}"}
        ] do
      wrong = Map.put(i, name, Nx.broadcast(Nx.tensor(1, type: :f64), shape))
      error = assert_raise Sidewinder.Error, fn -> run("causal_conv1d", wrong, []) end
      assert %{kind: :shape, argument: ^name, expected: ^expected} = error
    end

    error = assert_raise Sidewinder.Error, fn -> run("causal_conv1d", i, activation: :tanh) end
    assert Exception.message(error) =~ "activation: expected :silu, got :tanh"
  end

  test "raises for a state that would be empty" do
    x = Nx.broadcast(1.0, {1, 2, 1})

    error =
      assert_raise Sidewinder.Error, fn ->
        Sidewinder.causal_conv1d(x, Nx.tensor([[2.0]]), return_state: true)
      end

    assert %{kind: :shape} = error
    assert Exception.message(error) =~ "Nx has no empty tensors"
  end
end
