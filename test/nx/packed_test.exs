defmodule Sidewinder.PackedTest do
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans, only: [random: 5]
  alias Sidewinder.Error

  @lengths [0, 3, 1, 5, 0, 8]
  @length Enum.sum(@lengths)
  @count length(@lengths)
  @ops [:linear_scan, :causal_conv1d, :selective_scan, :ssd, :gated_delta_rule, :linear_attention]

  defp ends, do: Nx.tensor(Enum.scan([0 | @lengths], &+/2), type: :s32)

  # Arguments, options that are tensors, and the names of what sequences share, by the kernels' names.
  defp shapes(:linear_scan), do: {[a: {1, @length, 3}, b: {1, @length, 3}], [], {3}, []}

  defp shapes(:causal_conv1d),
    do: {[x: {1, @length, 3}, w: {3, 4}], [bias: {3}], {3, 3}, [:w, :bias]}

  defp shapes(:selective_scan) do
    {[x: {1, @length, 3}, dt: {1, @length, 3}, a: {3, 2}, b: {1, @length, 2}, c: {3, 2}],
     [d: {3}, z: {1, @length, 3}, dt_bias: {3}], {3, 2}, [:a, :c, :d, :dt_bias]}
  end

  defp shapes(:ssd) do
    {[
       x: {1, @length, 2, 3},
       dt: {1, @length, 2},
       a: {2},
       b: {1, @length, 1, 2},
       c: {1, @length, 1, 2}
     ], [d: {2}, z: {1, @length, 2, 3}], {2, 3, 2}, [:a, :d]}
  end

  defp shapes(:gated_delta_rule) do
    {[q: {1, @length, 1, 2}, k: {1, @length, 1, 2}, v: {1, @length, 2, 3}, beta: {1, @length, 2}],
     [g: {1, @length, 2}], {2, 2, 3}, []}
  end

  # The form of `g` with the lower rank: one decay for each head.
  defp shapes(:linear_attention) do
    {[q: {1, @length, 1, 2}, k: {1, @length, 1, 2}, v: {1, @length, 2, 3}], [g: {1, @length, 2}],
     {2, 2, 3}, []}
  end

  defp problem(op) do
    {args, opts, state, shared} = shapes(op)
    all = args ++ opts ++ [initial_state: Tuple.insert_at(state, 0, @count)]

    tensors =
      for {{name, shape}, seed} <- Enum.with_index(all), into: %{} do
        {lo, hi} = if name in [:a, :g] and op != :linear_scan, do: {-0.5, -0.1}, else: {-0.5, 0.5}
        {name, random(seed, shape, lo, hi, :f32)}
      end

    {tensors, Keyword.keys(args), shared}
  end

  defp call(op, tensors, args, more) do
    opts = tensors |> Map.drop(args) |> Map.to_list()
    apply(Sidewinder, op, Enum.map(args, &tensors[&1]) ++ [opts ++ [return_state: true] ++ more])
  end

  # The calls of all sequences but the empty ones, whose states pass through.
  defp separately(op, tensors, args, shared) do
    results =
      for {length, at} <- Enum.with_index(@lengths) do
        start = Enum.sum(Enum.take(@lengths, at))

        own =
          Map.new(tensors, fn {name, t} ->
            cond do
              name in shared -> {name, t}
              name == :initial_state -> {name, t[at..at]}
              length == 0 -> {name, nil}
              true -> {name, Nx.slice_along_axis(t, start, length, axis: 1)}
            end
          end)

        if length == 0, do: {nil, own.initial_state}, else: call(op, own, args, [])
      end

    {ys, states} = Enum.unzip(results)
    {Nx.concatenate(Enum.reject(ys, &is_nil/1), axis: 1), Nx.concatenate(states)}
  end

  defp close({y, state}, {y2, state2}) do
    close(y, y2)
    close(state, state2)
  end

  defp close(got, expected) do
    assert got.shape == expected.shape
    assert Nx.to_number(Nx.all_close(got, expected, atol: 1.0e-5, rtol: 1.0e-4)) == 1
  end

  for op <- @ops do
    test "#{op} of packed sequences is that of each" do
      {tensors, args, shared} = problem(unquote(op))
      expected = separately(unquote(op), tensors, args, shared)
      call = &call(unquote(op), &1, args, cu_seqlens: &2)
      {y, state} = call.(tensors, ends())
      assert {y, state} == expected
      close(Nx.Defn.jit_apply(call, [tensors, ends()], compiler: Nx.Defn.Evaluator), expected)
      # Integers of other types are cast.
      assert {y, state} == call.(tensors, Nx.as_type(ends(), :s64))
      close(call(unquote(op), tensors, args, cu_seqlens: ends(), backend: :nx), expected)
    end

    test "#{op} of packed sequences starts from zeros" do
      {tensors, args, shared} = problem(unquote(op))
      zeros = Nx.multiply(tensors.initial_state, 0)
      expected = separately(unquote(op), %{tensors | initial_state: zeros}, args, shared)
      tensors = Map.delete(tensors, :initial_state)
      close(call(unquote(op), tensors, args, cu_seqlens: ends()), expected)
      close(call(unquote(op), tensors, args, cu_seqlens: ends(), backend: :nx), expected)
    end

    test "the gradient of #{op} of packed sequences is that of each" do
      {tensors, args, shared} = problem(unquote(op))
      loss = fn {y, state} -> Nx.add(Nx.sum(Nx.sin(y)), Nx.sum(Nx.cos(state))) end
      expected = Nx.Defn.grad(tensors, &loss.(separately(unquote(op), &1, args, shared)))
      packed = fn more -> &loss.(call(unquote(op), &1, args, more)) end
      got = Nx.Defn.grad(tensors, packed.(cu_seqlens: ends()))
      pure = Nx.Defn.grad(tensors, packed.(cu_seqlens: ends(), backend: :nx))

      for {name, gradient} <- expected do
        close(got[name], gradient)
        close(pure[name], gradient)
      end
    end
  end

  # The state and the divisor, of sums of positive numbers.
  defp normalized(tensors, more) do
    {[q, k, v], opts} = Enum.map_reduce([:q, :k, :v], tensors, &Map.pop!(&2, &1))
    asked = [normalize: true, return_state: true, return_z: true]
    Sidewinder.linear_attention(q, k, v, Map.to_list(opts) ++ asked ++ more)
  end

  defp normalized_separately(tensors) do
    {of_steps, states} = Map.split(tensors, [:q, :k, :v, :g])

    results =
      for {length, at} <- Enum.with_index(@lengths) do
        start = Enum.sum(Enum.take(@lengths, at))
        states = Map.new(states, fn {name, t} -> {name, t[at..at]} end)

        slice = fn {name, t} -> {name, Nx.slice_along_axis(t, start, length, axis: 1)} end

        if length == 0,
          do: {nil, states.initial_state, states.initial_z},
          else: of_steps |> Map.new(slice) |> Map.merge(states) |> normalized([])
      end

    [ys, states, zs] = for i <- 0..2, do: Enum.map(results, &elem(&1, i))

    {Nx.concatenate(Enum.reject(ys, &is_nil/1), axis: 1), Nx.concatenate(states),
     Nx.concatenate(zs)}
  end

  test "normalized linear attention of packed sequences, with its divisor, is that of each" do
    {tensors, _args, _shared} = problem(:linear_attention)

    tensors =
      tensors
      |> Map.merge(Map.new([:q, :k], &{&1, Nx.add(tensors[&1], 0.6)}))
      |> Map.put(:initial_z, random(9, {@count, 2, 2}, 0.1, 1.0, :f32))

    expected = normalized_separately(tensors)

    loss = fn {y, state, z} ->
      Nx.sum(Nx.sin(y)) |> Nx.add(Nx.sum(Nx.cos(state))) |> Nx.add(Nx.sum(Nx.cos(z)))
    end

    gradients = Nx.Defn.grad(tensors, &loss.(normalized_separately(&1)))
    assert Map.keys(gradients) == ~w(g initial_state initial_z k q v)a

    for backend <- [:auto, :nx] do
      packed = &normalized(&1, cu_seqlens: ends(), backend: backend)
      for i <- 0..2, do: close(elem(packed.(tensors), i), elem(expected, i))
      got = Nx.Defn.grad(tensors, &loss.(packed.(&1)))
      for {name, gradient} <- gradients, do: close(got[name], gradient)
    end
  end

  # q, k and v, and the axis of their steps.
  defp attention(:heads_last) do
    shapes = [{1, @length, 4, 3}, {1, @length, 2, 3}, {1, @length, 2, 5}]
    {for({shape, seed} <- Enum.with_index(shapes), do: random(seed, shape, -1.0, 1.0, :f32)), 1}
  end

  defp attention(:heads_first) do
    {tensors, 1} = attention(:heads_last)
    {for(t <- tensors, do: Nx.transpose(t, axes: [0, 2, 1, 3])), 2}
  end

  defp attend([q, k, v], opts), do: Sidewinder.attention(q, k, v, [return_lse: true] ++ opts)

  defp attend_separately(tensors, axis, opts) do
    results =
      for {length, at} <- Enum.with_index(@lengths), length > 0 do
        start = Enum.sum(Enum.take(@lengths, at))
        own = for t <- tensors, do: Nx.slice_along_axis(t, start, length, axis: axis)
        attend(own, opts)
      end

    {ys, lses} = Enum.unzip(results)
    {Nx.concatenate(ys, axis: axis), Nx.concatenate(lses, axis: 2)}
  end

  for layout <- [:heads_first, :heads_last], causal <- [false, true] do
    test "attention of packed sequences is that of each, #{layout}, causal: #{causal}" do
      {tensors, axis} = attention(unquote(layout))
      opts = [layout: unquote(layout), causal: unquote(causal)]
      expected = attend_separately(tensors, axis, opts)
      packed = fn more -> &attend(&1, [cu_seqlens: ends()] ++ opts ++ more) end
      assert packed.([]).(tensors) == expected
      close(packed.(backend: :nx).(tensors), expected)
      jitted = fn q, k, v, ends -> attend([q, k, v], [cu_seqlens: ends] ++ opts) end
      arguments = tensors ++ [ends()]
      close(Nx.Defn.jit_apply(jitted, arguments, compiler: Nx.Defn.Evaluator), expected)

      loss = fn {y, lse} -> Nx.add(Nx.sum(Nx.sin(y)), Nx.sum(Nx.cos(lse))) end
      grad = fn fun -> Nx.Defn.grad(List.to_tuple(tensors), &loss.(fun.(Tuple.to_list(&1)))) end
      gradients = grad.(&attend_separately(&1, axis, opts))

      for more <- [[], [backend: :nx]],
          {got, at} <- Enum.with_index(Tuple.to_list(grad.(packed.(more)))) do
        close(got, elem(gradients, at))
      end
    end
  end

  test "attention of packed sequences takes no mask and no bias, and as many keys as queries" do
    {[q, k, v], 1} = attention(:heads_last)

    refused = fn k, v, opts ->
      opts = [layout: :heads_last, cu_seqlens: ends()] ++ opts
      assert_raise(Error, fn -> Sidewinder.attention(q, k, v, opts) end)
    end

    for backend <- [:auto, :nx], name <- [:mask, :bias] do
      value = Nx.broadcast(if(name == :mask, do: Nx.u8(1), else: Nx.f32(1)), {1, 1, 1, @length})
      error = refused.(k, v, [{name, value}, backend: backend])
      assert error.argument == "#{name}" and error.expected == "none beside cu_seqlens"
    end

    error =
      refused.(Nx.slice_along_axis(k, 1, 5, axis: 1), Nx.slice_along_axis(v, 1, 5, axis: 1), [])

    assert error.kind == :shape and error.argument == "k"
  end

  test "the states of all steps are those of each sequence" do
    {tensors, args, _} = problem(:selective_scan)

    %{y: y, states: states} =
      call(:selective_scan, tensors, args, cu_seqlens: ends(), return_states: true)

    {plain, last} = call(:selective_scan, tensors, args, cu_seqlens: ends())
    close(y, plain)
    close(states[[0, @length - 1]], last[@count - 1])
  end

  test "wrong ends are refused" do
    t = Nx.iota({1, 5, 2}, type: :f32)

    for backend <- [:auto, :nx],
        {ends, expected} <- [
          {[1, 5], "0 as its first element"},
          {[0, 4], "the length 5 as its last element"},
          {[0, 3, 2, 5], "at least 3 after 3"}
        ] do
      error =
        assert_raise Error, fn ->
          Sidewinder.linear_scan(t, t, cu_seqlens: Nx.tensor(ends), backend: backend)
        end

      assert error.kind == :argument and error.argument == "cu_seqlens" and
               error.expected == expected
    end
  end

  test "wrong shapes and types are refused" do
    t = Nx.iota({1, 5, 2}, type: :f32)
    refused = fn x, opts -> assert_raise(Error, fn -> Sidewinder.linear_scan(x, x, opts) end) end
    ends = Nx.tensor([0, 2, 5])
    assert refused.(Nx.concatenate([t, t]), cu_seqlens: ends).argument == "a"

    assert refused.(t, cu_seqlens: ends, initial_state: Nx.iota({1, 2}, type: :f32)).argument =~
             ~r/cu_seqlens|initial_state/

    assert refused.(t, cu_seqlens: Nx.tensor([0.0, 5.0])).kind == :dtype

    assert refused.(Nx.vectorize(Nx.new_axis(t, 0), :models), cu_seqlens: ends).hint =~
             "each entry"

    assert refused.(t, initial_state: Nx.iota({2, 2}, type: :f32)).argument == "initial_state"
  end
end
