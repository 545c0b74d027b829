defmodule Sidewinder.VectorizedTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans

  defp scan([x, dt, a, b, c | optional]) do
    opts = Enum.zip([:d, :z, :dt_bias, :initial_state], optional)
    {y, state} = Sidewinder.selective_scan(x, dt, a, b, c, [return_state: true] ++ opts)
    Nx.concatenate([Nx.flatten(y), Nx.flatten(state)])
  end

  # A tensor with these axes, then those of the shape.
  defp input(seed, axes, shape) do
    t = random(seed, List.to_tuple(Keyword.values(axes) ++ Tuple.to_list(shape)), -1.0, 0.0)
    if axes == [], do: t, else: Nx.vectorize(t, Keyword.keys(axes))
  end

  @shapes [{2, 3, 4}, {2, 3, 4}, {4, 5}, {2, 3, 2, 5}, {4, 5}, {4}, {2, 3, 4}, {4}, {2, 4, 5}]

  # Which of the inputs x dt a b c d z dt_bias h0 has which axes.
  @cases [
    [u: [0, 1, 3, 6, 8]],
    [u: [0]],
    [u: [8]],
    [u: [0, 1], v: [3]],
    [u: [2]],
    [u: [0, 2]],
    [u: [0, 2, 5], v: [0, 1]],
    [u: [0, 1], v: [0, 2]],
    [v: [2], u: [4]],
    [u: [2, 4, 5, 7]],
    [u: [0, 4, 7], v: [2, 8], w: [1, 6]]
  ]
  @sizes [u: 2, v: 3, w: 2]

  defp inputs(axes) do
    for {shape, at} <- Enum.with_index(@shapes) do
      input(at, for({name, inputs} <- axes, at in inputs, do: {name, @sizes[name]}), shape)
    end
  end

  # The same by hand: one call for each entry of the axes.
  defp by_hand(inputs, []), do: scan(inputs)

  defp by_hand(inputs, [{name, _} | rest]) do
    entries =
      for i <- 0..(@sizes[name] - 1), do: by_hand(Enum.map(inputs, &entry(&1, name, i)), rest)

    Nx.stack(entries)
  end

  defp entry(t, name, i) do
    case t.vectorized_axes do
      [{^name, _}] ->
        Nx.devectorize(t, keep_names: false)[i]

      [{^name, _} | others] ->
        Nx.vectorize(Nx.devectorize(t, keep_names: false)[i], Keyword.keys(others))

      _ ->
        t
    end
  end

  for axes <- @cases do
    test "axes of inputs: #{inspect(axes, charlists: :as_lists)}" do
      inputs = inputs(unquote(axes))

      found =
        for t <- inputs, {name, _} <- t.vectorized_axes, uniq: true, do: {name, @sizes[name]}

      for {_, way} <- ways() do
        result = way.(fn inputs -> scan(Tuple.to_list(inputs)) end, [List.to_tuple(inputs)])
        assert result.vectorized_axes == found

        assert_close(Nx.devectorize(result, keep_names: false), by_hand(inputs, found))
      end
    end
  end

  test "axes named in another order are told apart" do
    [x, dt | rest] = inputs(u: [0, 1], v: [0, 1])

    swapped =
      dt
      |> Nx.devectorize(keep_names: false)
      |> Nx.transpose(axes: [1, 0, 2, 3, 4])
      |> Nx.vectorize([:v, :u])

    assert scan([x, swapped | rest]) == scan([x, dt | rest])
  end

  test "an axis of size 1 fits any" do
    [x, dt | rest] = inputs(u: [0, 1])
    one = Nx.devectorize(dt, keep_names: false)[[0..0]]
    all = Nx.vectorize(Nx.concatenate([one, one]), :u)
    assert scan([x, Nx.vectorize(one, :u) | rest]) == scan([x, all | rest])
  end

  @tag skip: no_library()
  test "shared weights stay shared: one call of the kernel, whatever the axes" do
    [x, dt, a, b, c | _] = inputs(u: [0, 1], v: [3])
    graph = Nx.Defn.debug_expr(&Sidewinder.selective_scan/5).(x, dt, a, b, c)
    assert blocks(graph) == 1
    [x, dt, a, b, c | _] = inputs(u: [0, 2])
    assert blocks(Nx.Defn.debug_expr(&Sidewinder.selective_scan/5).(x, dt, a, b, c)) == 2
  end

  defp blocks(%{data: %{op: :block}}), do: 1

  defp blocks(t) do
    {_, count} = Nx.Defn.Tree.apply_args(t, 0, fn arg, count -> {arg, count + blocks(arg)} end)
    count
  end

  test "axes of different sizes raise" do
    [x, dt | rest] = inputs(u: [0, 1])

    wrong =
      Nx.vectorize(
        Nx.stack([dt, dt, dt] |> Enum.map(&Nx.devectorize(&1, keep_names: false)[0])),
        :u
      )

    error = assert_raise Sidewinder.Error, fn -> scan([x, wrong | rest]) end
    assert %{kind: :shape, argument: "vectorized axis u"} = error
  end

  test "names stay beside vectorized axes" do
    [x | rest] = inputs(u: [0])
    [dt, a, b, c | _] = rest
    y = Sidewinder.selective_scan(Nx.rename(x, [:batch, :time, nil]), dt, a, b, c)
    assert {y.names, y.vectorized_axes} == {[:batch, :time, nil], [u: 2]}
  end
end
