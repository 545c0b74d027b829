defmodule Sidewinder.SsdTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Ops

  import Sidewinder.NxTest.Scans,
    only: [assert_close: 3, random: 5, types: 0, ways: 0]

  @op "ssd"

  # Batch, length, heads, width, groups, states; and which of the optional inputs are there.
  @all ~w(D z dt_bias initial_state)
  @sizes [
    {{1, 1, 1, 1, 1, 1}, @all},
    {{2, 5, 4, 3, 2, 7}, @all},
    {{1, 9, 2, 2, 1, 3}, []},
    {{2, 3, 2, 2, 2, 3}, ~w(D dt_bias)}
  ]

  defp call({sizes, there}, type \\ :f64, opts \\ [dt_softplus: true]) do
    {batch, length, heads, width, groups, state} = sizes
    wide = if type == :f64, do: :f64, else: :f32
    rows = {batch, length, heads, width}
    states = {batch, length, groups, state}

    inputs = %{
      "x" => random(1, rows, -1.0, 1.0, type),
      "dt" => random(2, {batch, length, heads}, -2.0, 1.0, type),
      "A" => random(3, {heads}, -1.0, -0.1, wide),
      "B" => random(4, states, -1.0, 1.0, type),
      "C" => random(5, states, -1.0, 1.0, type),
      "D" => random(6, {heads}, -1.0, 1.0, wide),
      "z" => random(7, rows, -2.0, 2.0, type),
      "dt_bias" => random(8, {heads}, -0.5, 0.5, wide),
      "initial_state" => random(9, {batch, heads, width, state}, -1.0, 1.0, wide)
    }

    cotangents = %{"dy" => random(10, rows, -1.0, 1.0, type)}
    {@op, Map.drop(inputs, @all -- there), cotangents, opts}
  end

  # By the other side of the duality: y_i = sum_j (c_i . b_j) exp(delta a summed over (j, i]) delta_j x_j.
  defp formula(inputs, opts) do
    inputs = Map.new(inputs, fn {name, t} -> {name, Nx.as_type(t, :f64)} end)
    %{"x" => x, "A" => a} = inputs
    {_, length, heads, _} = x.shape
    per_head = &Nx.as_type(&1, :f64)
    dt = if bias = inputs["dt_bias"], do: Nx.add(inputs["dt"], bias), else: inputs["dt"]
    delta = if opts[:dt_softplus], do: dt |> Nx.exp() |> Nx.log1p(), else: dt

    # [B, H, L, N], [B, H, L], [B, H, L, P]
    [b, c] =
      for name <- ["B", "C"] do
        {batch, length, groups, state} = inputs[name].shape

        inputs[name]
        |> Nx.reshape({batch, length, groups, 1, state})
        |> Nx.broadcast({batch, length, groups, div(heads, groups), state})
        |> Nx.reshape({batch, length, heads, state})
        |> Nx.transpose(axes: [0, 2, 1, 3])
      end

    delta = Nx.transpose(delta, axes: [0, 2, 1])
    rows = x |> Nx.transpose(axes: [0, 2, 1, 3]) |> Nx.multiply(Nx.new_axis(delta, -1))
    sums = delta |> Nx.multiply(Nx.reshape(a, {1, heads, 1})) |> Nx.cumulative_sum(axis: 2)
    exponents = Nx.subtract(Nx.new_axis(sums, 3), Nx.new_axis(sums, 2))
    mask = Nx.greater_equal(Nx.iota({length, 1}), Nx.iota({1, length}))
    # Not of positive exponents, whose gradient would be infinite times 0.
    mask = Nx.broadcast(mask, exponents.shape)
    decays = mask |> Nx.select(exponents, -1.0e3) |> Nx.exp() |> Nx.multiply(mask)
    scores = c |> Nx.dot([3], [0, 1], b, [3], [0, 1]) |> Nx.multiply(decays)
    y = Nx.dot(scores, [3], [0, 1], rows, [2], [0, 1])

    y =
      if initial = inputs["initial_state"] do
        from_state = Nx.dot(c, [3], [0, 1], initial, [3], [0, 1])
        Nx.add(y, Nx.multiply(from_state, Nx.exp(Nx.new_axis(sums, -1))))
      else
        y
      end

    y = Nx.transpose(y, axes: [0, 2, 1, 3])
    d = inputs["D"]

    y =
      if d, do: Nx.add(y, Nx.multiply(x, Nx.reshape(per_head.(d), {1, 1, heads, :auto}))), else: y

    if z = inputs["z"], do: y |> Nx.multiply(z) |> Nx.multiply(Nx.sigmoid(z)), else: y
  end

  for backend <- [:nx, :cpu] do
    test "is its formula, in every way and type, on #{backend}" do
      for sizes <- @sizes, {type, rtol} <- types() do
        {_, inputs, _, opts} = call(sizes, type)
        expected = formula(inputs, opts)

        for {_, way} <- ways() do
          %{y: y} = way.(&run(@op, &1, [backend: unquote(backend)] ++ opts), [inputs])
          assert y.type == Nx.Type.normalize!(type)
          assert_close(y, expected, rtol: 4 * rtol, of: inspect({sizes, type}))
        end
      end
    end

    test "has the gradient of its formula, in every way, on #{backend}" do
      for {_, there} = sizes <- @sizes do
        {_, inputs, %{"dy" => dy}, opts} = call = call(sizes)
        expected = Nx.Defn.grad(inputs, &Nx.sum(Nx.multiply(formula(&1, opts), dy)))

        for {_, way} <- ways() do
          got = call |> with_options(backend: unquote(backend)) |> gradients(way)
          assert Enum.sort(Map.keys(got)) == Enum.sort(~w(x dt A B C) ++ there)

          for {name, t} <- got,
              do: assert_close(t, expected[name], rtol: 1.0e-8, of: inspect({name, sizes}))
        end
      end
    end

    test "agrees with differences where steps are clamped, on #{backend}" do
      call = call(List.last(@sizes), :f64, dt_softplus: true, dt_clamp: {0.3, 0.8})
      call |> with_options(backend: unquote(backend)) |> check_differences()
    end

    test "a sequence may be cut anywhere, on #{backend}" do
      {_, inputs, _, opts} = call({{2, 7, 2, 3, 1, 4}, @all}, :f32)
      opts = [backend: unquote(backend), return_state: true] ++ opts
      whole = run(@op, inputs, opts)

      of_time = fn range ->
        Map.new(inputs, fn {name, t} ->
          {name, if(name in ~w(x dt B C z), do: t[[.., range]], else: t)}
        end)
      end

      first = run(@op, of_time.(0..2), opts)
      second = run(@op, %{of_time.(3..6) | "initial_state" => first.last_state}, opts)
      assert_close(Nx.concatenate([first.y, second.y], axis: 1), whole.y, rtol: 1.0e-5)
      assert_close(second.last_state, whole.last_state, rtol: 1.0e-5)
    end
  end

  # A step by `ssd` itself, and by the update of Mamba's first scan, which has numbers for each channel.
  defp step(:ssd, i, t, state, opts) do
    Sidewinder.ssd(at(i["x"], t), at(i["dt"], t), i["A"], at(i["B"], t), at(i["C"], t), [
      {:z, at(i["z"], t)},
      {:d, i["D"]},
      {:dt_bias, i["dt_bias"]},
      {:initial_state, state},
      {:return_state, true} | opts
    ])
  end

  defp step(:update, i, t, state, opts) do
    {batch, heads, width, states} = state.shape
    row = fn t -> Nx.reshape(t, {batch, heads * width}) end
    [b, c] = for name <- ["B", "C"], do: Nx.squeeze(at(i[name], t), axes: [1])
    channels = &(&1 |> Nx.new_axis(-1) |> Nx.broadcast(&2) |> Nx.flatten())
    [a, d, bias] = for name <- ~w(A D dt_bias), do: channels.(i[name], {heads, width})
    dt = i["dt"] |> at(t) |> Nx.reshape({batch, heads, 1}) |> Nx.broadcast({batch, heads, width})

    {y, state} =
      Sidewinder.selective_state_update(
        Nx.reshape(state, {batch, heads * width, states}),
        row.(at(i["x"], t)),
        row.(dt),
        a |> Nx.new_axis(1) |> Nx.broadcast({heads * width, states}),
        b,
        c,
        [d: d, z: row.(at(i["z"], t)), dt_bias: bias] ++ opts
      )

    {Nx.reshape(y, {batch, 1, heads, width}), Nx.reshape(state, {batch, heads, width, states})}
  end

  defp at(tensor, t), do: tensor[[.., t..t]]

  test "steps one by one are the scan" do
    {_, inputs, _, opts} = call({{2, 6, 4, 3, 2, 5}, @all})
    whole = run(@op, inputs, [return_state: true] ++ opts)

    for way <- [:ssd, :update], backend <- [:nx, :cpu] do
      step = &step(way, inputs, &1, &2, [backend: backend] ++ opts)
      {ys, last_state} = Enum.map_reduce(0..5, inputs["initial_state"], step)
      assert_close(Nx.concatenate(ys, axis: 1), whole.y, rtol: 1.0e-10, of: way)
      assert_close(last_state, whole.last_state, rtol: 1.0e-10, of: way)
    end
  end

  test "is one kernel forward and one backward" do
    call = call({{2, 3, 2, 2, 1, 3}, @all}, :f32) |> with_options(backend: :cpu)
    assert kernel_calls(fn -> value_and_grad(call) end) == [:ssd, :ssd_backward]
  end

  test "the skip may have a number for each row" do
    {_, inputs, _, opts} = call({{1, 4, 2, 3, 1, 2}, @all})
    wide = %{inputs | "D" => random(6, {2, 3}, -1.0, 1.0, :f64)}

    for backend <- [:nx, :cpu] do
      %{y: y} = run(@op, wide, [backend: backend] ++ opts)
      assert_close(y, formula(wide, opts), rtol: 1.0e-8)
    end
  end

  test "axes have their names" do
    {_, inputs, _, _} = call({{1, 4, 2, 3, 1, 2}, []}, :f32)
    x = Nx.rename(inputs["x"], [:b, :l, :h, :p])
    y = Sidewinder.ssd(x, inputs["dt"], inputs["A"], inputs["B"], inputs["C"])
    assert y.names == [:b, :l, :h, :p]
  end

  test "what does not fit raises, in every way" do
    {_, i, _, _} = call({{2, 3, 4, 5, 2, 6}, []}, :f32)
    ssd = &Sidewinder.ssd(i["x"], i["dt"], i["A"], &1, &2, &3)
    [b, c] = [i["B"], i["C"]]
    three = Nx.iota({2, 3, 3, 6}, type: :f32)

    for {kind, argument, message, fun} <- [
          {:shape, "B", "a divisor of 4", fn -> ssd.(three, three, []) end},
          {:shape, "C", "{2, 3, 2, 6}", fn -> ssd.(b, three, []) end},
          {:shape, "D", "{4}", fn -> ssd.(b, c, d: Nx.iota({5})) end},
          {:shape, "initial_state", "{2, 4, 5, 6}",
           fn -> ssd.(b, c, initial_state: Nx.iota({2, 4, 6, 5})) end},
          {:option, "dt_clamp", "lo <= hi", fn -> ssd.(b, c, dt_clamp: {1.0, 0.5}) end},
          {:option, "dt_softplus", "true or false", fn -> ssd.(b, c, dt_softplus: 1) end}
        ],
        {_, way} <- ways() do
      error = assert_raise Sidewinder.Error, fn -> way.(fun, []) end
      assert %{kind: ^kind, argument: ^argument} = error, Exception.message(error)
      assert Exception.message(error) =~ message
    end
  end
end
