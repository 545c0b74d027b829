defmodule Sidewinder.SequenceParallelTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Kernel, Ops, Shapes, Tensor}
  alias Sidewinder.Kernel.SequenceParallel

  @ops [:selective_scan, :ssd, :gated_delta_rule, :linear_attention, :linear_scan, :causal_conv1d]

  # Inputs of a batch of 2 with 7 steps, small so that states stay so.
  defp inputs(op) do
    declared = Ops.find!(Ops.all(), op)
    sizes = %{"B" => 2, "L" => 7, "G" => 1, "W" => 4}

    for slot <- declared.inputs, slot.name not in ["cu_seqlens", "initial_z"], into: %{} do
      letters = Map.new(Shapes.letters(slot.shape), &{&1, Map.get(sizes, &1, 2)})
      shape = List.to_tuple(Shapes.sizes!(slot.name, slot.shape, letters))
      {slot.name, noise(slot.name, shape)}
    end
  end

  defp noise(name, shape) do
    sign = if name in ["A", "g"], do: -1, else: 1
    count = Tensor.elements(shape)

    Tensor.from_list(
      for(i <- 1..count//1, do: sign * rem(i * 37 + byte_size(name), 17) / 40),
      :f32,
      shape
    )
  end

  defp near(got, expected) do
    assert got.shape == expected.shape

    for {got, expected} <- Enum.zip(Tensor.to_list(got), Tensor.to_list(expected)),
        do: assert_in_delta(got, expected, 1.0e-4)
  end

  for op <- @ops do
    test "parts of #{op} and of its gradient give what the whole gives" do
      agrees(unquote(op), inputs(unquote(op)), %{})
    end
  end

  test "parts of normalized attention pass its divisor on" do
    agrees(:linear_attention, inputs(:linear_attention), %{normalize: true})
    initial_z = Tensor.from_list([1, 2, 3, 4, 5, 6, 7, 8], :f32, {2, 2, 2})
    all = Map.put(inputs(:linear_attention), "initial_z", initial_z)
    agrees(:linear_attention, all, %{normalize: true})
  end

  defp agrees(op, all, options) do
    backward = :"#{op}_backward"

    asked =
      if options[:normalize],
        do: %{return_state: true, return_z: true},
        else: %{return_state: true}

    whole = Kernel.run(op, Map.to_list(all), Map.merge(options, asked))

    for count <- [1, 2, 3] do
      devices = List.duplicate(:host, count)
      parts = SequenceParallel.split(op, all, devices)
      results = SequenceParallel.run(op, parts, options)
      joined = SequenceParallel.join(op, results)
      assert Map.keys(joined) == Map.keys(whole)
      for {name, expected} <- whole, do: near(joined[name], expected)

      gradient = Ops.find!(Ops.all(), backward)
      cotangent = fn slot, output -> noise(slot.name, output.shape) end
      given = Map.new(Ops.gradient_inputs(gradient, all, whole, cotangent))
      of_whole = Kernel.run(backward, Map.to_list(given), options)

      of_parts =
        for {part, result} <- Enum.zip(SequenceParallel.split(backward, given, devices), results),
            do: Map.merge(part, Map.take(result, ["initial_state", "initial_z"]))

      joined = SequenceParallel.join(backward, SequenceParallel.run(backward, of_parts, options))
      assert Map.keys(joined) == Map.keys(of_whole)
      for {name, expected} <- of_whole, do: near(joined[name], expected)
    end
  end

  test "gradients of weights add up in every type, and where they are not finite" do
    values = [[0.1, 0.2, 1.0e3], [0.7, -0.2, 0.25], [0.3, 1.0e-3, 0.125]]

    join = fn rows, type ->
      results = for row <- rows, do: %{"dA" => Tensor.from_list(row, type, {length(row), 1})}
      SequenceParallel.join(:selective_scan_backward, results)["dA"]
    end

    for type <- [:f64, :f32, :bf16, :f16] do
      rounded = for row <- values, do: Tensor.to_list(Tensor.from_list(row, type, {3, 1}))
      sums = Enum.zip_with(rounded, &Enum.sum/1)
      assert join.(values, type) == Tensor.from_list(sums, type, {3, 1})
    end

    {nan, infinity, one} = {0x7FC00000, 0x7F800000, 0x3F800000}

    results =
      for bits <- [[nan, infinity, infinity, one], [one, one, 0xFF800000, one]] do
        data = for bits <- bits, into: <<>>, do: <<bits::little-32>>
        %{"dA" => Tensor.new(data, :f32, {4, 1})}
      end

    sums = SequenceParallel.join(:selective_scan_backward, results)["dA"]
    assert Tensor.to_list(sums) == [:nan, :infinity, :nan, 2.0]
    assert join.([[], []], :f32) == Tensor.new(<<>>, :f32, {0, 1})
  end

  defp error(fun) do
    fun.()
    flunk("no error")
  rescue
    error in Error -> error
  end

  test "wrong calls are refused with what to do" do
    x = noise("x", {1, 4, 2})
    split = &SequenceParallel.split(&1, &2, &3)

    assert %{kind: :option, argument: "devices"} =
             error(fn -> split.(:linear_scan, %{a: x, b: x}, []) end)

    assert %{kind: :argument, argument: "c"} =
             error(fn -> split.(:linear_scan, %{c: x}, [:host]) end)

    assert %{kind: :argument, argument: "a"} =
             error(fn -> split.(:linear_scan, %{a: 1}, [:host]) end)

    assert %{kind: :argument, argument: "op"} =
             error(fn -> split.(:rms_norm, %{x: x}, [:host]) end)

    short = noise("x", {1, 3, 2})

    assert %{kind: :shape, got: "4, 3"} =
             error(fn -> split.(:linear_scan, [a: x, b: short], [:host]) end)

    run = &SequenceParallel.run(:linear_scan, &1)
    assert %{kind: :argument, argument: "parts"} = error(fn -> run.([]) end)
    assert %{kind: :option, argument: "parts"} = error(fn -> run.(%{a: x}) end)
    state = noise("h", {1, 2})

    assert %{kind: :argument, argument: "initial_state of part 1"} =
             error(fn -> run.([%{a: x, b: x}, %{a: x, b: x, initial_state: state}]) end)

    assert %{kind: :argument, argument: "op"} =
             error(fn -> SequenceParallel.run(:rms_norm, [%{x: x, gamma: state}]) end)

    assert %{
             kind: :argument,
             argument: "initial_state of part 1",
             hint: "The call of the op gives it"
           } =
             error(fn ->
               SequenceParallel.run(
                 :linear_scan_backward,
                 List.duplicate(%{a: x, h: x, dh: x}, 2)
               )
             end)
  end

  test "a backend that is not where the parts are is refused" do
    x = noise("x", {1, 4, 2})
    run = &SequenceParallel.run(:linear_scan, [%{a: x, b: x}], %{}, &1)
    expected = run.([])

    for where <- [[backend: :auto], [backend: "cpu"], [backend: nil], [allow_tf32: true]],
        do: assert(run.(where) == expected)

    assert %{kind: :option, argument: "backend", op: "linear_scan", got: "cuda:0"} =
             error = error(fn -> run.(backend: {:cuda, 0}) end)

    assert error.hint =~ "split/3"
    assert %{kind: :option, argument: "backend"} = error(fn -> run.(backend: :nx) end)
    assert %{kind: :option, argument: "allow_tf32"} = error(fn -> run.(allow_tf32: 1) end)
  end

  test "inputs, options and results that have another form are refused" do
    x = noise("x", {1, 4, 2})

    for given <- [7, nil, x, [{:a, x}, :b], [{1, x}], [{:a, x} | :b]],
        call <- [
          &Kernel.run(:linear_scan, &1, %{}),
          &Kernel.plan(:linear_scan, &1, %{}, backend: {:cuda, 0}),
          &SequenceParallel.split(:linear_scan, &1, [:host]),
          &SequenceParallel.run(:linear_scan, [&1])
        ] do
      assert %{kind: :argument, argument: "inputs", op: "linear_scan"} =
               error(fn -> call.(given) end)
    end

    assert %{kind: :argument, argument: "h", expected: "a Sidewinder.Tensor"} =
             error(fn -> SequenceParallel.join(:linear_scan, [%{h: 1}]) end)

    for results <- [[], %{"h" => x}, [[h: x]], [%{"h" => x} | %{}], nil] do
      assert %{kind: :argument, argument: "results"} =
               error(fn -> SequenceParallel.join(:linear_scan, results) end)
    end

    for options <- [[normalize: true], nil, x] do
      assert %{kind: :option, argument: "options"} =
               error(fn -> SequenceParallel.run(:linear_scan, [%{a: x, b: x}], options) end)
    end

    for devices <- [[:host | :host], [:host, :tpu], [{:cuda, -1}], :host] do
      assert %{kind: :option} =
               error(fn -> SequenceParallel.split(:linear_scan, %{a: x, b: x}, devices) end)
    end
  end

  @tag :cuda
  test "parts on devices stay there" do
    all = inputs(:selective_scan)
    devices = for ordinal <- 0..(length(Sidewinder.Device.info().gpus) - 1), do: {:cuda, ordinal}
    devices = devices ++ [hd(devices)]

    results =
      SequenceParallel.run(:selective_scan, SequenceParallel.split(:selective_scan, all, devices))

    assert Enum.map(results, &Tensor.device(&1["y"])) == devices

    assert %{kind: :option, argument: "backend"} =
             error(fn ->
               parts = SequenceParallel.split(:selective_scan, all, devices)
               SequenceParallel.run(:selective_scan, parts, %{}, backend: :cpu)
             end)

    whole = Kernel.run(:selective_scan, Map.to_list(all), %{return_state: true})
    joined = SequenceParallel.join(:selective_scan, results)
    for {name, expected} <- whole, do: near(joined[name], expected)

    mixed = [
      hd(SequenceParallel.split(:selective_scan, all, [:host])),
      hd(SequenceParallel.split(:selective_scan, all, devices))
    ]

    assert %{kind: :argument, argument: "tensors of part 0"} =
             error(fn ->
               SequenceParallel.run(
                 :selective_scan,
                 Enum.map(mixed, &Map.delete(&1, "initial_state"))
               )
             end)
  end
end
