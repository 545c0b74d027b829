defmodule Sidewinder.LinearAttentionTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Ops

  import Sidewinder.NxTest.Scans,
    only: [assert_close: 3, random: 5, types: 0, ways: 0]

  @op "linear_attention"

  # Batch, length, groups, heads, keys, values; the optional inputs; whether each key has a decay.
  @all ~w(g initial_state initial_z)
  @calls [
    {{1, 1, 1, 1, 2, 1}, @all, false},
    {{2, 5, 2, 4, 3, 2}, @all, true},
    {{2, 4, 1, 2, 3, 2}, ~w(g initial_state), false},
    {{1, 9, 1, 2, 2, 3}, [], false},
    {{2, 3, 2, 2, 3, 2}, ~w(g initial_z), true}
  ]

  defp call({sizes, there, by_key}, type, opts \\ []) do
    {batch, length, groups, heads, keys, values} = sizes
    wide = if type == :f64, do: :f64, else: :f32
    of_groups = {batch, length, groups, keys}
    of_decay = if by_key, do: {batch, length, heads, keys}, else: {batch, length, heads}

    inputs = %{
      "q" => random(1, of_groups, 0.1, 1.0, type),
      "k" => random(2, of_groups, 0.1, 1.0, type),
      "v" => random(3, {batch, length, heads, values}, -1.0, 1.0, type),
      "g" => random(4, of_decay, -0.5, 0.0, wide),
      "initial_state" => random(5, {batch, heads, keys, values}, -1.0, 1.0, wide),
      "initial_z" => random(6, {batch, heads, keys}, 0.1, 1.0, wide)
    }

    cotangents = %{"dy" => random(7, {batch, length, heads, values}, -1.0, 1.0, type)}
    {@op, Map.drop(inputs, @all -- there), cotangents, opts}
  end

  # Attention with a masked matrix instead of the softmax, and what remains of the initial states.
  defp formula(inputs, opts) do
    inputs = Map.new(inputs, fn {name, t} -> {name, Nx.as_type(t, :f64)} end)
    %{"q" => q, "k" => k, "v" => v} = inputs
    {batch, length, heads, values} = v.shape
    keys = Nx.axis_size(k, 3)
    [q, k] = for t <- [q, k], do: repeat(t, heads)
    scale = Nx.tensor(opts[:scale] || 1 / :math.sqrt(keys), type: :f64)
    q = Nx.multiply(q, scale)
    sums = Nx.cumulative_sum(decays(inputs["g"], {batch, length, heads, keys}), axis: 1)
    zeros = &Nx.broadcast(Nx.tensor(0.0, type: :f64), &1)
    state = inputs["initial_state"] || zeros.({batch, heads, keys, values})
    z = inputs["initial_z"] || zeros.({batch, heads, keys})

    # [B, T, S, H, K]
    between = Nx.exp(Nx.subtract(Nx.new_axis(sums, 2), Nx.new_axis(sums, 1)))

    scores =
      Nx.sum(Nx.multiply(Nx.multiply(Nx.new_axis(q, 2), Nx.new_axis(k, 1)), between), axes: [4])

    mask = Nx.greater_equal(Nx.iota({1, length, 1, 1}), Nx.iota({1, 1, length, 1}))
    scores = Nx.select(Nx.broadcast(mask, scores.shape), scores, Nx.tensor(0.0, type: :f64))
    left = Nx.multiply(q, Nx.exp(sums))
    heads_first = &Nx.transpose(&1, axes: [0, 2, 1, 3])
    of_state = Nx.dot(heads_first.(left), [3], [0, 1], state, [2], [0, 1])
    of_steps = Nx.transpose(scores, axes: [0, 3, 1, 2])

    n =
      heads_first.(Nx.add(Nx.dot(of_steps, [3], [0, 1], heads_first.(v), [2], [0, 1]), of_state))

    d = Nx.add(Nx.sum(scores, axes: [2]), Nx.sum(Nx.multiply(left, Nx.new_axis(z, 1)), axes: [3]))
    divisor = Nx.new_axis(Nx.add(d, Nx.tensor(1.0e-10, type: :f64)), 3)
    if opts[:normalize], do: Nx.divide(n, divisor), else: n
  end

  defp decays(nil, shape), do: Nx.broadcast(Nx.tensor(0.0, type: :f64), shape)

  defp decays(g, shape),
    do: if(g.shape == shape, do: g, else: Nx.broadcast(Nx.new_axis(g, 3), shape))

  defp repeat(t, heads) do
    {batch, length, groups, keys} = t.shape

    t
    |> Nx.new_axis(3)
    |> Nx.broadcast({batch, length, groups, div(heads, groups), keys})
    |> Nx.reshape({batch, length, heads, keys})
  end

  for backend <- [:nx, :cpu] do
    test "is its formula, in every way and type, on #{backend}" do
      for call <- @calls, {type, rtol} <- types(), opts <- [[], [normalize: true, scale: 0.5]] do
        {_, inputs, _, _} = call(call, type)
        expected = formula(inputs, opts)

        for {_, way} <- ways() do
          %{y: y} = way.(&run(@op, &1, [backend: unquote(backend)] ++ opts), [inputs])
          assert y.type == Nx.Type.normalize!(type)
          assert_close(y, expected, rtol: 4 * rtol, of: inspect({call, type, opts}))
        end
      end
    end

    test "has the gradient of its formula, in every way, on #{backend}" do
      for {_, there, _} = sizes <- @calls, opts <- [[], [normalize: true]] do
        {_, inputs, %{"dy" => dy}, _} = call = call(sizes, :f64, opts)
        expected = Nx.Defn.grad(inputs, &Nx.sum(Nx.multiply(formula(&1, opts), dy)))

        for {_, way} <- ways() do
          got = call |> with_options(backend: unquote(backend)) |> gradients(way)
          assert Enum.sort(Map.keys(got)) == Enum.sort(~w(q k v) ++ there)

          for {name, t} <- got,
              do: assert_close(t, expected[name], rtol: 1.0e-8, of: inspect({name, sizes, opts}))
        end
      end
    end

    test "a sequence may be cut anywhere, on #{backend}" do
      for by_key <- [false, true] do
        {_, inputs, _, _} = call({{2, 7, 1, 2, 3, 4}, @all, by_key}, :f32)
        opts = [backend: unquote(backend), normalize: true, return_state: true, return_z: true]
        whole = run(@op, inputs, opts)

        of_time = fn range ->
          Map.new(inputs, fn {name, t} ->
            {name, if(name in ~w(initial_state initial_z), do: t, else: t[[.., range]])}
          end)
        end

        first = run(@op, of_time.(0..5), opts)
        states = %{"initial_state" => first.last_state, "initial_z" => first.last_z}
        second = run(@op, Map.merge(of_time.(6..6), states), opts)
        assert_close(Nx.concatenate([first.y, second.y], axis: 1), whole.y, rtol: 1.0e-5)
        assert_close(second.last_state, whole.last_state, rtol: 1.0e-5)
        assert_close(second.last_z, whole.last_z, rtol: 1.0e-5)
      end
    end
  end

  test "is one kernel forward and one backward" do
    call = call({{2, 3, 1, 2, 2, 3}, @all, true}, :f32) |> with_options(backend: :cpu)

    assert kernel_calls(fn -> value_and_grad(call) end) ==
             [:linear_attention, :linear_attention_backward]
  end

  test "returns what it is asked for, in order" do
    {_, i, _, _} = call({{2, 3, 1, 2, 4, 5}, [], false}, :f32)
    shapes = &(&1 |> Tuple.to_list() |> Enum.map(fn t -> t.shape end))
    attend = &Sidewinder.linear_attention(i["q"], i["k"], i["v"], &1)
    assert attend.([]).shape == {2, 3, 2, 5}
    assert shapes.(attend.(return_state: true)) == [{2, 3, 2, 5}, {2, 2, 4, 5}]
    assert shapes.(attend.(return_z: true)) == [{2, 3, 2, 5}, {2, 2, 4}]
    both = attend.(return_z: true, return_state: true)
    assert shapes.(both) == [{2, 3, 2, 5}, {2, 2, 4, 5}, {2, 2, 4}]
  end

  test "axes have their names" do
    {_, inputs, _, _} = call({{1, 4, 1, 2, 3, 2}, [], false}, :f32)
    v = Nx.rename(inputs["v"], [:b, :l, :h, :v])
    y = Sidewinder.linear_attention(inputs["q"], inputs["k"], v)
    assert y.names == [:b, :l, :h, :v]
  end

  test "what does not fit raises, in every way" do
    {_, i, _, _} = call({{2, 3, 2, 4, 5, 6}, [], false}, :f32)
    attend = &Sidewinder.linear_attention(&1, &2, i["v"], &3)
    [q, k] = [i["q"], i["k"]]
    three = Nx.iota({2, 3, 3, 5}, type: :f32)

    for {kind, argument, message, fun} <- [
          {:shape, "q", "a divisor of 4", fn -> attend.(three, three, []) end},
          {:shape, "k", "{2, 3, 2, 5}", fn -> attend.(q, three, []) end},
          {:shape, "g", "{2, 3, 4}", fn -> attend.(q, k, g: Nx.iota({2, 4, 4})) end},
          {:shape, "g", "{2, 3, 4, 5}", fn -> attend.(q, k, g: Nx.iota({2, 3, 4, 6})) end},
          {:shape, "initial_z", "{2, 4, 5}",
           fn -> attend.(q, k, initial_z: Nx.iota({2, 4, 6})) end},
          {:option, "normalize", "true or false", fn -> attend.(q, k, normalize: 1) end}
        ],
        {_, way} <- ways() do
      error = assert_raise Sidewinder.Error, fn -> way.(fun, []) end
      assert %{kind: ^kind, argument: ^argument} = error, Exception.message(error)
      assert Exception.message(error) =~ message
    end
  end
end
