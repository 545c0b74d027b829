defmodule Sidewinder.CompareTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Calls, Compare, Device, Error, Kernel, Ops, RandomInputs, Tensor}

  @quick [iterations: 3, warmup: 1, max_ms: 200]

  defp scan(options) do
    Compare.levels(:linear_scan, scan_inputs(), options ++ @quick)
  end

  defp scan_inputs, do: RandomInputs.make(:linear_scan, shape: "2x33x5", with: ["initial_state"])

  defp row(rows, level), do: Enum.find(rows, &(&1.level == level))

  # What a level does that computes with the kernels, then changes the result.
  defp other(change, options \\ %{}) do
    fn inputs ->
      outputs = Kernel.run(:linear_scan, Map.to_list(inputs), options, backend: :cpu)
      Map.update!(outputs, "h", change)
    end
  end

  defp changed(tensor, value) do
    [_ | rest] = Tensor.to_list(tensor)
    <<_::binary-4, bytes::binary>> = Tensor.from_list([0 | rest], :f32, tensor.shape).data
    Tensor.new(value <> bytes, :f32, tensor.shape)
  end

  # They take one layout of several, or have sizes in bits; their own tests compare them at every level.
  @elsewhere ~w(convert_ternary stats_ternary quantize_ternary activation_i8 dot_ternary matmul_ternary
                matmul_i8_ternary matmul_f32_ternary ternary_linear simple_rotor_net column_sums_ternary
                verify_sums_ternary)

  test "every op agrees at every level, forward and backward, in every type" do
    for op <- Ops.forward(Ops.all()),
        op.name not in @elsewhere,
        type <- Tensor.float_types(),
        to_string(type) in op.storage,
        given <- given(op) do
      shape = if "cu_seqlens" in given, do: small(op) <> packed(op), else: small(op)
      inputs = RandomInputs.make(op.name, shape: shape, type: type, with: given)
      result = Compare.levels(op.name, inputs, options: options(op, given), max_ms: 1)
      label = "#{op.name} #{type} #{inspect(given)}\n#{Compare.table(result)}"
      assert result.ok?, label
      assert result.op == op.name and Enum.map(result.inputs, &elem(&1, 0)) == names(inputs)
      assert result.gradient != [] == (Ops.backward(Ops.all(), op) != nil), label
    end
  end

  # None of the optional inputs, and all of them: packed sequences take none that is repeated, such as a mask.
  defp given(op) do
    optional = for %{optional: true} = slot <- op.inputs, do: slot
    names = for slot <- optional, do: slot.name
    repeated = for %{shape: shape, name: name} <- optional, shape =~ "|1", do: name

    if "cu_seqlens" in names and repeated != [],
      do: [[], names -- ["cu_seqlens"], names -- repeated],
      else: [[], names]
  end

  # Small, and odd where that is possible: heads and pairs must come out even.
  @small %{
    "..." => 5,
    "B" => 2,
    "L" => 17,
    "M" => 9,
    "H" => 8,
    "K" => 4,
    "W" => 4,
    "V" => 5,
    "D" => 16,
    "N" => 3,
    "R" => 2,
    "I" => 33,
    "O" => 7,
    "F" => 11
  }

  # Packed sequences lie in a batch of 1, and have as many keys as queries.
  defp packed(op) do
    keys? = Enum.any?(op.inputs, &("M" in Sidewinder.Shapes.letters(&1.shape)))
    if keys?, do: ",B=1,M=#{@small["L"]}", else: ",B=1"
  end

  # A cache has room for all tokens, heads as wide as the layers cut them, and nothing in it yet.
  @with_cache Map.merge(@small, %{"C" => 24, "W" => 2, "M" => @small["L"]})

  defp small(op) do
    letters = Enum.uniq(Enum.flat_map(op.inputs, &Sidewinder.Shapes.letters(&1.shape)))
    sizes = if "C" in letters, do: @with_cache, else: @small
    # All slots have parents.
    sizes = if op.name == "hds_query_topk", do: %{sizes | "M" => 32}, else: sizes
    # Rows of whole blocks.
    blocks? = op.name =~ ~r/^(quantize|dequantize|matmul_.*_q[48]$)/
    sizes = if blocks?, do: Map.merge(sizes, %{"N" => 96, "I" => 160, "Q" => 612}), else: sizes
    Enum.map_join(letters, ",", &"#{&1}=#{Map.get(sizes, &1, 8)}")
  end

  # With all that an op may give and be given.
  defp options(op, given) do
    known = for option <- op.options, do: String.to_atom(option.name)
    # Without the second gate of a recurrence nothing is mixed in.
    all = if given == [], do: %{mix: 0.0}, else: %{return_state: true}
    Map.take(Map.merge(%{heads: 8, fn: "gelu_erf"}, all), known)
  end

  defp names(inputs), do: for({name, _} <- inputs, do: name)

  test "rows tell levels, errors, times and speed-ups, or why there is none" do
    %{cpu: cpu} = Device.info()
    result = scan(threads: 2)

    assert result.ok? and
             result.inputs == [
               {"a", "f32 (2, 33, 5)"},
               {"b", "f32 (2, 33, 5)"},
               {"initial_state", "f32 (2, 5)"}
             ]

    for rows <- [result.forward, result.gradient] do
      assert ~w(reference scalar avx2 avx512 amx neon threads cuda cuda_resident) ==
               Enum.map(rows, & &1.level)

      assert %{status: :ok, max_abs_err: error, time: %{iterations: 1}} = hd(rows)
      assert error == 0
      assert %{status: :ok, speedup: 1.0, time: time} = scalar = row(rows, "scalar")
      assert time.iterations == 3 and time.min > 0 and time.std >= 0
      assert time.min <= time.median and time.min <= time.mean
      assert scalar.max_abs_err < 1.0e-5 and scalar.within_tolerance
      assert row(rows, "threads").label == "#{cpu.best}, 2 threads"

      for level <- ~w(avx2 avx512 amx neon), level not in cpu.levels do
        assert %{status: {:unavailable, why}, time: nil, speedup: nil} = row(rows, level)
        assert why =~ "no such instructions"
      end
    end

    assert Map.keys(row(result.forward, "scalar").outputs) == ["h"]
    assert Map.keys(row(result.gradient, "scalar").outputs) == ~w(da db dinitial_state)
    assert %{status: {:unavailable, _}} = row(scan(threads: 1).forward, "threads")
  end

  @tag :no_cuda
  test "without a GPU the levels of CUDA tell why" do
    for level <- ~w(cuda cuda_resident) do
      assert %{status: {:unavailable, why}} = row(scan([]).forward, level)
      assert why == Device.info().cuda.why_not
    end
  end

  @tag :cuda
  test "CUDA from the host and resident" do
    # Time for compiling, too.
    result = scan(max_ms: 60_000)

    for rows <- [result.forward, result.gradient], level <- ~w(cuda cuda_resident) do
      assert %{status: :ok, time: %{iterations: 3}} = row(rows, level)
    end
  end

  test "a level out of tolerance failed, however fast it is" do
    far = &changed(&1, <<1.0e3::float-native-32>>)
    nan = &changed(&1, <<0x7FC00000::32-native>>)
    infinite = &changed(&1, <<0x7F800000::32-native>>)
    others = [good: &Function.identity/1, far: far, nan: nan, infinite: infinite]
    others = for {name, change} <- others, do: {Atom.to_string(name), other(change)}
    result = scan(levels: ["scalar"], others: others)
    refute result.ok?

    assert ["reference", "scalar", "good", "far", "nan", "infinite"] ==
             Enum.map(result.forward, & &1.level)

    assert %{status: :ok, speedup: speedup} = row(result.forward, "good")
    assert speedup > 0

    for {level, error?} <- [
          far: &(&1 > 900),
          nan: &(&1 == :infinity),
          infinite: &(&1 == :infinity)
        ] do
      row = row(result.forward, Atom.to_string(level))
      assert %{status: :wrong, within_tolerance: false, speedup: nil} = row
      assert error?.(row.max_abs_err) and error?.(row.outputs["h"].max_abs_err)
      assert row.time.iterations == 3
    end

    assert Enum.all?(
             result.gradient,
             &(&1.status in [:ok] or match?({:unavailable, _}, &1.status))
           )

    table = Compare.table(result)
    assert table =~ "WRONG" and table =~ "far is out of tolerance: h by "
  end

  test "a level that fails reports its error, and the rest still run" do
    failing = [
      {"raises", fn _ -> raise "no luck" end},
      {"throws", fn _ -> throw(:ball) end},
      {"exits", fn _ -> exit(:now) end},
      {"nothing", fn _ -> %{} end},
      {"unknown", fn inputs -> %{"y" => inputs["a"]} end},
      {"shape", fn inputs -> %{"h" => inputs["initial_state"]} end},
      {"slow", fn _ -> Process.sleep(:infinity) end},
      {"good", other(& &1)}
    ]

    result = scan(levels: ["scalar"], others: failing, gradient: false, limit_ms: 300)
    refute result.ok?
    assert result.gradient == []

    texts =
      for %{status: {:error, error}, time: nil, speedup: nil} <- result.forward,
          do: Exception.message(error)

    assert ["no luck", throws, exits, nothing, unknown, shape, "stopped after 300 ms"] = texts
    assert throws =~ ":ball" and exits =~ ":now"
    assert nothing =~ "outputs: expected some out of h, got none"
    assert unknown =~ "got y"
    assert shape =~ "h: expected f64 (2, 33, 5), got f32 (2, 5)"
    assert row(result.forward, "good").status == :ok
    assert Compare.table(result) =~ "raises failed: no luck"
  end

  test "speed-ups are against the first level that is right" do
    slow = fn inputs -> Process.sleep(20) && other(& &1).(inputs) end
    wrong = other(&changed(&1, <<9.0e9::float-native-32>>))

    rows =
      scan(levels: [], others: [{"wrong", wrong}, {"slow", slow}, {"fast", other(& &1)}]).forward

    assert row(rows, "wrong").speedup == nil and row(rows, "slow").speedup == 1.0
    assert row(rows, "fast").speedup > 1
    assert row(rows, "slow").time.median >= 20
  end

  test "slow levels end early, and tell how often they ran" do
    sleep = fn ms -> fn inputs -> Process.sleep(ms) && other(& &1).(inputs) end end
    others = [{"once", sleep.(120)}, {"few", sleep.(10)}]
    options = [max_ms: 100, iterations: 50, warmup: 10, others: others, levels: []]
    rows = Compare.levels(:linear_scan, scan_inputs(), options).forward
    assert row(rows, "once").time.iterations == 1
    assert row(rows, "few").time.iterations in 1..9
  end

  test "others get the gradient's inputs by name, the op's outputs and cotangents among them" do
    test = self()

    gradient = fn inputs ->
      send(test, {:keys, Map.keys(inputs)})

      Kernel.run(
        :linear_scan_backward,
        [{"a", inputs["a"]} | Map.to_list(Map.delete(inputs, "a"))],
        %{}
      )
    end

    wrong = fn inputs -> Map.update!(gradient.(inputs), "da", &Calls.uniform(&1.shape, 8, 9)) end
    others = [{"good", gradient}, {"wrong", wrong}]
    result = scan(levels: [], gradient_others: others)
    assert_received {:keys, ["a", "dh", "h", "initial_state"]}
    assert row(result.gradient, "good").status == :ok
    assert %{status: :wrong, outputs: outputs} = row(result.gradient, "wrong")
    assert for({name, %{within_tolerance: false}} <- outputs, do: name) == ["da"]
    refute result.ok?
  end

  test "cotangents are given, or ones, or random from a seed" do
    dh = Tensor.from_list(List.duplicate(0, 330), :f32, {2, 33, 5})
    tell = fn inputs -> Process.put(:dh, inputs["dh"]) && %{} end
    options = [levels: [], gradient_others: [{"tell", tell}], max_ms: 1]

    cotangent = fn inputs, more ->
      Compare.levels(:linear_scan, inputs, more ++ options)
      Process.get(:dh)
    end

    assert cotangent.(scan_inputs() ++ [{"dh", dh}], []) == dh
    assert Enum.uniq(Tensor.to_list(cotangent.(scan_inputs(), cotangents: :ones))) == [1.0]
    one = cotangent.(scan_inputs(), [])
    assert cotangent.(scan_inputs(), seed: 1) == one and cotangent.(scan_inputs(), seed: 2) != one
    assert length(Enum.uniq(Tensor.to_list(one))) > 300
  end

  test "tolerances follow the type, the largest value and the number of terms, or the options" do
    inputs = RandomInputs.make(:linear, shape: "4x100")

    off = fn by ->
      fn i ->
        shifted(Kernel.run(:linear, Enum.sort_by(Map.to_list(i), &(elem(&1, 0) != "x")), %{}), by)
      end
    end

    options = [levels: [], gradient: false, max_ms: 1]

    status = fn by, more ->
      others = [{"off", off.(by)}]

      row(Compare.levels(:linear, inputs, [{:others, others} | more ++ options]).forward, "off").status
    end

    # The largest is about 3, the square root of the terms is 16.
    assert status.(1.0e-5, []) == :ok
    assert status.(1.0e-3, []) == :wrong
    assert status.(1.0e-5, terms: 1, rtol: 0.0) == :wrong
    assert status.(1.0e-3, atol: 2.0e-3) == :ok
    assert status.(1.0e-5, atol: 0.0, rtol: 0.0) == :wrong
  end

  defp shifted(%{"y" => y}, by) do
    %{"y" => Tensor.from_list(for(v <- Tensor.to_list(y), do: v + by), :f32, y.shape)}
  end

  test "what is no number passes where the reference has the same" do
    special = [<<0x7F800000::32-native>>, <<0xFF800000::32-native>>, <<0x7FC00000::32-native>>]
    tensors = for bits <- special ++ [<<1.0::float-native-32>>], do: Tensor.new(bits, :f32, {1})

    for {a, i} <- Enum.with_index(tensors), {b, j} <- Enum.with_index(tensors) do
      difference = Compare.difference(a, b, rtol: 0, atol: 0)
      assert difference.within_tolerance == (i == j)
      assert difference.max_abs_err == if(i == j, do: 0.0, else: :infinity)
    end

    signalling = Tensor.new(<<0x7FA00001::32-native>>, :f32, {1})
    assert Compare.difference(signalling, Enum.at(tensors, 2), rtol: 0, atol: 0).within_tolerance

    # A query that sees nothing has an infinite lse.
    inputs = RandomInputs.make(:attention, shape: "B=1,H=2,K=1,L=3,M=4,W=5,V=2")
    mask = Tensor.from_list([true, false, true, true] ++ List.duplicate(false, 8), :u8, {3, 4})
    assert Compare.levels(:attention, inputs ++ [{"mask", mask}], max_ms: 1).ok?
  end

  test "relative errors count what is near zero against the tensor's largest" do
    [a, b] = for v <- [1.0e-6, 0.0], do: Tensor.from_list([v, 1000], :f64, {2})

    assert %{max_abs_err: 1.0e-6, max_rel_err: 1.0e-6} =
             Compare.difference(a, b, rtol: 0, atol: 1)

    [a, b] = for v <- [0.5, 0], do: Tensor.from_list([v], :f32, {1})
    assert %{max_rel_err: 0.5} = Compare.difference(a, b, rtol: 0, atol: 1)
    assert_raise Error, fn -> Compare.difference(a, Tensor.from_list([], :f32, {0}), []) end
  end

  test "wrong calls raise" do
    inputs = scan_inputs()

    mixed =
      for {name, t} <- inputs, do: {name, if(name == "b", do: Tensor.cast(t, :f16), else: t)}

    for {work, kind, argument} <- [
          {fn -> Compare.levels(:no_op, inputs) end, :argument, "op"},
          {fn -> Compare.levels(:linear_scan, inputs, iteration: 1) end, :option, "iteration"},
          {fn -> Compare.levels(:linear_scan, inputs, levels: ["sse"]) end, :option, "levels"},
          {fn -> Compare.levels(:linear_scan, [{"c", hd(inputs)} | inputs]) end, :argument, "c"},
          {fn -> Compare.levels(:linear_scan, tl(inputs)) end, :argument, "a"},
          {fn -> Compare.levels(:linear_scan, inputs, options: %{odd: 1}) end, :option,
           "options"},
          {fn -> Compare.levels(:linear_scan, inputs, threads: 0) end, :option, "threads"},
          {fn -> Compare.levels(:linear_scan, inputs, threads: 1025) end, :option, "threads"},
          {fn -> Compare.levels(:linear_scan, inputs, iterations: 0) end, :option, "iterations"},
          {fn -> Compare.levels(:linear_scan, inputs, rtol: "1") end, :option, "rtol"},
          {fn -> Compare.levels(:linear_scan, a: 1, b: 2) end, :argument, "a"},
          {fn -> Compare.levels(:linear_scan, []) end, :argument, "a"},
          {fn -> Compare.levels(:linear_scan, mixed) end, :dtype, "b"}
        ] do
      error = assert_raise Error, work
      assert {error.kind, error.argument} == {kind, argument}
    end
  end

  test "maps, atoms as names, an op that is a gradient, and progress" do
    test = self()
    options = [levels: ["scalar"], progress: &send(test, {:label, &1})] ++ @quick
    inputs = for {name, t} <- scan_inputs(), into: %{}, do: {String.to_atom(name), t}
    assert Compare.levels("linear_scan", inputs, options).ok?
    assert_received {:label, "f64 reference"}
    assert_received {:label, "scalar, 1 thread"}

    shape = {2, 33, 5}
    inputs = for name <- ~w(a h dh), do: {name, Calls.uniform(shape, -1, 1)}
    assert %{ok?: true, gradient: []} = Compare.levels(:linear_scan_backward, inputs, options)
  end
end
