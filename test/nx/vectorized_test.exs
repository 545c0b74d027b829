defmodule Sidewinder.VectorizedTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans
  alias Sidewinder.NxTest.Ops

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

  # Which of the inputs x dt a b c d z dt_bias initial has which axes.
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

  # The vectorized scan by hand: one call for each entry of the axes.
  defp by_hand(inputs, []), do: scan(inputs)

  defp by_hand(inputs, [{name, _} | rest]) do
    entries =
      for i <- 0..(@sizes[name] - 1), do: by_hand(Enum.map(inputs, &entry(&1, name, i)), rest)

    Nx.stack(entries)
  end

  defp entry(t, name, i) do
    case Enum.find_index(t.vectorized_axes, &(elem(&1, 0) == name)) do
      nil ->
        t

      at ->
        plain = Nx.devectorize(t, keep_names: false)
        one = Nx.squeeze(Nx.slice_along_axis(plain, i, 1, axis: at), axes: [at])
        others = Keyword.keys(t.vectorized_axes) -- [name]
        if others == [], do: one, else: Nx.vectorize(one, others)
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

  for axes <- @cases do
    test "gradients, axes of inputs: #{inspect(axes, charlists: :as_lists)}" do
      inputs = inputs(unquote(axes))

      found =
        for t <- inputs, {name, _} <- t.vectorized_axes, uniq: true, do: {name, @sizes[name]}

      for {t, k} <- Enum.with_index(inputs) do
        with_input = &List.replace_at(inputs, k, &1)
        expected = Nx.Defn.grad(t, &squares(by_hand(with_input.(&1), found)))
        actual = Nx.Defn.grad(t, &squares(scan(with_input.(&1))))
        assert actual.vectorized_axes == t.vectorized_axes
        assert_close(actual, expected, of: "input #{k}")
      end
    end
  end

  defp squares(t), do: Nx.sum(Nx.multiply(t, t))

  test "gradients to all inputs at once are those of each entry, under every compiler" do
    inputs = inputs(u: [0, 2], v: [0, 1])
    gradient = fn inputs -> Nx.Defn.grad(inputs, &squares(scan(Tuple.to_list(&1)))) end

    expected =
      for i <- 0..1, j <- 0..2 do
        inputs
        |> Enum.map(&(&1 |> entry(:u, i) |> entry(:v, j)))
        |> List.to_tuple()
        |> gradient.()
      end

    for {_, way} <- ways() do
      for {t, k} <- Enum.with_index(Tuple.to_list(way.(gradient, [List.to_tuple(inputs)]))) do
        assert t.vectorized_axes == [u: 2, v: 3]
        plain = Nx.flatten(Nx.devectorize(t, keep_names: false), axes: [0, 1])
        assert_close(plain, Nx.stack(Enum.map(expected, &elem(&1, k))))
      end
    end
  end

  test "the gradient as a function sums over the axes that an input lacks" do
    for axes <- @cases do
      [x, dt, a, b, c, d, z, dt_bias, initial] = inputs = inputs(axes)
      dy = input(11, [], {2, 3, 4})
      opts = [d: d, z: z, dt_bias: dt_bias, initial_state: initial]
      actual = Sidewinder.selective_scan_backward(dy, x, dt, a, b, c, opts)

      loss = fn [x, dt, a, b, c, d, z, dt_bias, initial] ->
        opts = [d: d, z: z, dt_bias: dt_bias, initial_state: initial]
        Nx.sum(Nx.multiply(Sidewinder.selective_scan(x, dt, a, b, c, opts), dy))
      end

      names = [:dx, :ddt, :dA, :dB, :dC, :dD, :dz, :ddt_bias, :dinitial_state]

      for {{t, name}, k} <- Enum.with_index(Enum.zip(inputs, names)) do
        expected = Nx.Defn.grad(t, &loss.(List.replace_at(inputs, k, &1)))
        assert_close(actual[name], expected, of: "#{name}, #{inspect(axes)}")
      end
    end
  end

  @tag skip: no_library()
  test "weights that data shares in its axes take one call backwards" do
    [x, dt, a, b, c | _] = inputs(u: [0, 1], v: [3])
    loss = &squares(Sidewinder.selective_scan(x, dt, &1, b, c))
    calls = Sidewinder.NxTest.Ops.kernel_calls(fn -> Nx.Defn.value_and_grad(a, loss) end)
    assert calls == [:selective_scan, :selective_scan_backward]
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

  # A batch of 1 is one that masks and biases repeat in.
  for {op, batch} <- [{"attention", 1}, {"mha", 1} | Enum.map(Ops.ops(), &{&1, 2})] do
    test "of #{op}, with a batch of #{batch}: axes of any inputs, and gradients" do
      {op, inputs, cotangents, opts} = Ops.problem(unquote(op), {unquote(batch), 3, 2, 2})
      opts = Ops.asking(op, cotangents, opts)
      names = Map.keys(inputs)

      odd =
        for {name, i} <- Enum.with_index(names),
            do: {name, if(rem(i, 2) == 0, do: [:u], else: [:v])}

      for axes <- [Enum.map(names, &{&1, [:u]}), odd] ++ Enum.map(names, &[{&1, [:u]}]) do
        inputs =
          Enum.reduce(axes, inputs, fn {name, axes}, i ->
            Map.update!(i, name, &several(&1, axes))
          end)

        sum = fn inputs ->
          for({_, t} <- Ops.run(op, inputs, opts), do: Nx.sum(Nx.sin(t)))
          |> Enum.reduce(&Nx.add/2)
        end

        entries =
          for u <- 0..1, v <- 0..2, Enum.any?(axes, &(:v in elem(&1, 1))) or v == 0, do: {u, v}

        at = fn inputs, {u, v} ->
          Map.new(inputs, fn {name, t} -> {name, t |> entry(:u, u) |> entry(:v, v)} end)
        end

        outputs = Ops.run(op, inputs, opts)

        for entry <- entries do
          expected = Ops.run(op, at.(inputs, entry), opts)
          assert_close(at.(outputs, entry), expected, rtol: 1.0e-10, of: inspect(axes))
        end

        for {name, _} <- axes,
            length(axes) == 1 or name == hd(names),
            inputs[name].type == {:f, 64} do
          with_input = &%{inputs | name => &1}
          actual = Nx.Defn.grad(inputs[name], &sum.(with_input.(&1)))

          expected =
            Nx.Defn.grad(inputs[name], fn t ->
              for(entry <- entries, do: sum.(at.(with_input.(t), entry)))
              |> Enum.reduce(&Nx.add/2)
            end)

          assert actual.vectorized_axes == inputs[name].vectorized_axes
          assert_close(actual, expected, rtol: 1.0e-9, of: "#{name}, #{inspect(axes)}")
        end
      end
    end
  end

  @tag skip: no_library()
  test "masks and biases with axes take one call, whatever shape repeats" do
    {_, %{"q" => q, "k" => k, "v" => v}, _, _} = Ops.problem("attention", {1, 3, 2, 2})
    mask = Nx.vectorize(Nx.tensor([[0, 1, 1, 0], [1, 1, 0, 0]]), :u)
    bias = several(random(1, {3, 1}, -1.0, 1.0, :f64), [:v])
    call = fn -> Sidewinder.attention(q, k, v, mask: mask, bias: bias) end
    assert Ops.kernel_calls(call) == [:attention]
    y = call.()
    assert y.vectorized_axes == [u: 2, v: 3]

    for i <- 0..1, j <- 0..2 do
      opts = [mask: entry(mask, :u, i), bias: entry(bias, :v, j)]
      alone = Sidewinder.attention(q, k, v, opts)
      assert_close(y |> entry(:u, i) |> entry(:v, j), alone, rtol: 1.0e-12)
    end
  end

  # Different tensors like this one, along these axes.
  defp several(t, axes) do
    for name <- axes, reduce: t do
      t -> for(i <- 0..(@sizes[name] - 1), do: like(t, i)) |> Nx.stack() |> Nx.vectorize(name)
    end
  end

  defp like(%{type: {:u, 8}} = mask, i),
    do: if(rem(i, 2) == 0, do: mask, else: Nx.broadcast(Nx.tensor(1, type: :u8), mask))

  defp like(t, i), do: Nx.multiply(t, 1 - 0.3 * i)
end
