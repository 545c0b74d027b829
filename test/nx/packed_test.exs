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
