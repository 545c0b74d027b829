defmodule Sidewinder.GatedDeltaRuleTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Ops

  import Sidewinder.NxTest.Scans,
    only: [assert_close: 3, random: 5, types: 0, ways: 0]

  @op "gated_delta_rule"

  # Batch, length, groups, heads, keys, values; and which of the optional inputs are there.
  @all ~w(g initial_state)
  @sizes [
    {{1, 1, 1, 1, 2, 1}, @all},
    {{2, 5, 2, 4, 3, 2}, @all},
    {{1, 9, 1, 2, 2, 3}, []},
    {{2, 3, 2, 2, 3, 2}, ~w(g)}
  ]

  defp call({sizes, there}, type, opts \\ []) do
    {batch, length, groups, heads, keys, values} = sizes
    wide = if type == :f64, do: :f64, else: :f32
    of_groups = {batch, length, groups, keys}

    inputs = %{
      "q" => random(1, of_groups, -1.0, 1.0, type),
      "k" => random(2, of_groups, -0.7, 0.7, type),
      "v" => random(3, {batch, length, heads, values}, -1.0, 1.0, type),
      "beta" => random(4, {batch, length, heads}, 0.1, 1.0, type),
      "g" => random(5, {batch, length, heads}, -0.5, 0.0, wide),
      "initial_state" => random(6, {batch, heads, keys, values}, -1.0, 1.0, wide)
    }

    cotangents = %{"dy" => random(7, {batch, length, heads, values}, -1.0, 1.0, type)}
    {@op, Map.drop(inputs, @all -- there), cotangents, opts}
  end

  # One step after the other: S = a (I - beta k k') S + beta k v', as a product of matrices.
  defp formula(inputs, opts) do
    inputs = Map.new(inputs, fn {name, t} -> {name, Nx.as_type(t, :f64)} end)
    %{"q" => q, "k" => k, "v" => v, "beta" => beta} = inputs
    {batch, length, heads, values} = v.shape
    keys = Nx.axis_size(k, 3)
    [q, k] = for t <- [q, k], do: t |> unit(opts[:qk_l2norm]) |> repeat(heads)
    scale = Nx.tensor(opts[:scale] || 1 / :math.sqrt(keys), type: :f64)

    initial =
      inputs["initial_state"] ||
        Nx.broadcast(Nx.tensor(0.0, type: :f64), {batch, heads, keys, values})

    {ys, _} =
      Enum.map_reduce(0..(length - 1), initial, fn t, state ->
        [q, k, v, beta] = for x <- [q, k, v, beta], do: Nx.squeeze(x[[.., t..t]], axes: [1])
        beta = Nx.reshape(beta, {batch, heads, 1, 1})

        decay =
          if g = inputs["g"],
            do: g[[.., t]] |> Nx.exp() |> Nx.reshape({batch, heads, 1, 1}),
            else: 1

        forget = Nx.subtract(Nx.eye(keys, type: :f64), Nx.multiply(beta, outer(k, k)))
        kept = Nx.dot(forget, [3], [0, 1], state, [2], [0, 1])
        state = Nx.add(Nx.multiply(decay, kept), Nx.multiply(beta, outer(k, v)))
        {Nx.multiply(scale, Nx.dot(state, [2], [0, 1], q, [2], [0, 1])), state}
      end)

    Nx.stack(ys, axis: 1)
  end

  defp outer(a, b), do: Nx.multiply(Nx.new_axis(a, 3), Nx.new_axis(b, 2))

  defp unit(x, true) do
    square = Nx.sum(Nx.multiply(x, x), axes: [-1], keep_axes: true)
    Nx.divide(x, Nx.sqrt(Nx.add(square, Nx.tensor(1.0e-6, type: :f64))))
  end

  defp unit(x, _), do: x

  defp repeat(t, heads) do
    {batch, length, groups, keys} = t.shape

    t
    |> Nx.new_axis(3)
    |> Nx.broadcast({batch, length, groups, div(heads, groups), keys})
    |> Nx.reshape({batch, length, heads, keys})
  end

  for backend <- [:nx, :cpu] do
    test "is its formula, in every way and type, on #{backend}" do
      for sizes <- @sizes, {type, rtol} <- types(), opts <- [[], [qk_l2norm: true, scale: 0.5]] do
        {_, inputs, _, _} = call(sizes, type)
        expected = formula(inputs, opts)

        for {_, way} <- ways() do
          %{y: y} = way.(&run(@op, &1, [backend: unquote(backend)] ++ opts), [inputs])
          assert y.type == Nx.Type.normalize!(type)
          assert_close(y, expected, rtol: 4 * rtol, of: inspect({sizes, type}))
        end
      end
    end

    test "has the gradient of its formula, in every way, on #{backend}" do
      for {_, there} = sizes <- @sizes, opts <- [[], [qk_l2norm: true]] do
        {_, inputs, %{"dy" => dy}, _} = call = call(sizes, :f64, opts)
        expected = Nx.Defn.grad(inputs, &Nx.sum(Nx.multiply(formula(&1, opts), dy)))

        for {_, way} <- ways() do
          got = call |> with_options(backend: unquote(backend)) |> gradients(way)
          assert Enum.sort(Map.keys(got)) == Enum.sort(~w(q k v beta) ++ there)

          for {name, t} <- got,
              do: assert_close(t, expected[name], rtol: 1.0e-8, of: inspect({name, sizes}))
        end
      end
    end

    test "a sequence may be cut anywhere, on #{backend}" do
      {_, inputs, _, _} = call({{2, 7, 1, 2, 3, 4}, @all}, :f32)
      opts = [backend: unquote(backend), return_state: true]
      whole = run(@op, inputs, opts)

      of_time = fn range ->
        Map.new(inputs, fn {name, t} ->
          {name, if(name == "initial_state", do: t, else: t[[.., range]])}
        end)
      end

      first = run(@op, of_time.(0..5), opts)
      second = run(@op, %{of_time.(6..6) | "initial_state" => first.last_state}, opts)
      assert_close(Nx.concatenate([first.y, second.y], axis: 1), whole.y, rtol: 1.0e-5)
      assert_close(second.last_state, whole.last_state, rtol: 1.0e-5)
    end
  end

  test "is one kernel forward and one backward" do
    call = call({{2, 3, 1, 2, 2, 3}, @all}, :f32) |> with_options(backend: :cpu)

    assert kernel_calls(fn -> value_and_grad(call) end) ==
             [:gated_delta_rule, :gated_delta_rule_backward]
  end

  test "axes have their names" do
    {_, inputs, _, _} = call({{1, 4, 1, 2, 3, 2}, []}, :f32)
    v = Nx.rename(inputs["v"], [:b, :l, :h, :v])
    y = Sidewinder.gated_delta_rule(inputs["q"], inputs["k"], v, inputs["beta"])
    assert y.names == [:b, :l, :h, :v]
  end

  test "what does not fit raises, in every way" do
    {_, i, _, _} = call({{2, 3, 2, 4, 5, 6}, []}, :f32)
    rule = &Sidewinder.gated_delta_rule(&1, &2, i["v"], i["beta"], &3)
    [q, k] = [i["q"], i["k"]]
    three = Nx.iota({2, 3, 3, 5}, type: :f32)

    for {kind, argument, message, fun} <- [
          {:shape, "q", "a divisor of 4", fn -> rule.(three, three, []) end},
          {:shape, "k", "{2, 3, 2, 5}", fn -> rule.(q, three, []) end},
          {:shape, "g", "{2, 3, 4}", fn -> rule.(q, k, g: Nx.iota({2, 4, 4})) end},
          {:shape, "initial_state", "{2, 4, 5, 6}",
           fn -> rule.(q, k, initial_state: Nx.iota({2, 4, 6, 5})) end},
          {:option, "qk_l2norm", "true or false", fn -> rule.(q, k, qk_l2norm: 1) end}
        ],
        {_, way} <- ways() do
      error = assert_raise Sidewinder.Error, fn -> way.(fun, []) end
      assert %{kind: ^kind, argument: ^argument} = error, Exception.message(error)
      assert Exception.message(error) =~ message
    end
  end
end
