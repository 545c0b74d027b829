defmodule Sidewinder.PlanTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Calls, Error, Kernel, Ops, Shapes, Tensor}
  alias Sidewinder.Kernel.SequenceParallel

  # How many elements a call on a normal scheduler may read.
  @limit 131_072

  # What an op needs one of beside its required inputs, and options without which it does nothing.
  @needed %{
    "convert_ternary" => ["values"],
    "matmul_ternary" => ["x"],
    "stats_ternary" => ["values"]
  }
  @options %{
    "activations" => %{fn: "silu"},
    "activations_backward" => %{fn: "silu"},
    "convert_ternary" => %{to: "planes"},
    "dequantize" => %{format: "q8_0"}
  }

  # Bytes that hold eight cells of another letter's.
  @packed %{"P" => "I", "Q" => "H"}
  # Letters whose sizes are at least those of others: heads of queries and of keys, a cache and what it takes in.
  @room %{"H" => "K", "C" => "L"}

  defp scheduler(op, inputs, options) do
    {scheduler, _target} = Kernel.plan(op, inputs, options, backend: :cpu)
    scheduler
  end

  defp slots(op) do
    needed = Map.get(@needed, op.name, [])
    Enum.filter(op.inputs, &(not &1.optional or &1.name in needed))
  end

  defp letters(op), do: op |> slots() |> Enum.flat_map(&Shapes.letters(&1.shape)) |> Enum.uniq()

  # Rows of whole blocks, and bytes of whole blocks of either format.
  defp least(letter) when letter in ["I", "N"], do: 32
  defp least("Q"), do: 306
  defp least("M"), do: 16
  defp least("G"), do: 1
  defp least(_letter), do: 4

  # The sizes of all letters where one of them has grown.
  defp sizes(letters, grown, factor) do
    own = &(least(&1) * if(&1 == grown, do: factor, else: 1))

    for letter <- letters, into: %{} do
      {whole, other} = {@packed[letter], @room[letter]}

      size =
        cond do
          whole in letters -> div(own.(whole) + 7, 8)
          other in letters -> max(own.(letter), own.(other))
          true -> own.(letter)
        end

      {letter, if(letter == "...", do: [size], else: size)}
    end
  end

  defp zeros(slot, sizes) do
    shape = List.to_tuple(Shapes.sizes!(slot.name, slot.shape, sizes))
    bytes = Tensor.new(<<0::size(Tensor.elements(shape))-unit(8)>>, :u8, shape)
    {slot.name, Tensor.cast(bytes, Ops.type(slot, :f32))}
  end

  defp elements(inputs),
    do: Enum.sum(for {_name, tensor} <- inputs, do: Tensor.elements(tensor.shape))

  # The factor from which on the call is not quick any more, and what it reads there.
  defp leaves(op, letter, factor) do
    inputs = for slot <- slots(op), do: zeros(slot, sizes(letters(op), letter, factor))
    options = Map.get(@options, op.name, %{})

    case scheduler(String.to_atom(op.name), inputs, options) do
      :cpu -> elements(inputs)
      :quick -> if elements(inputs) < @limit, do: leaves(op, letter, 2 * factor), else: :never
    end
  end

  test "whatever input of whatever op grows, its call leaves the normal scheduler" do
    for op <- Ops.all(),
        letter <- letters(op),
        letter != "G",
        @packed[letter] not in letters(op) do
      at = leaves(op, letter, 1)

      assert is_integer(at),
             "#{op.name} reads #{@limit} elements, grown by #{letter}, and is quick"
    end
  end

  test "an op counts what it multiplies, not only what it reads" do
    ones = &Calls.uniform(&1, 1, 1)

    at = fn op, count, inputs ->
      inputs = inputs.(count)
      assert elements(inputs) < @limit / 2
      scheduler(op, inputs, %{})
    end

    for {op, few, many, inputs} <- [
          {:linear, 10, 14, &[x: ones.({&1, 100}), w: ones.({100, 100})]},
          {:matmul, 10, 14, &[a: ones.({&1, 100}), b: ones.({100, 100})]},
          {:attention, 80, 90, &attention(ones, &1)},
          {:multi_memory_attention, 100, 500, &memory(ones, &1)},
          {:selective_scan, 100, 200, &Calls.inputs({1, &1, 64, 16})},
          {:selective_scan_backward, 25, 40, &with_dy({1, &1, 64, 16})},
          {:causal_conv1d, 200, 700, &[x: ones.({1, &1, 50}), w: ones.({50, 4})]}
        ] do
      assert {op, at.(op, few, inputs), at.(op, many, inputs)} == {op, :quick, :cpu}
    end
  end

  defp attention(ones, keys) do
    kv = ones.({1, 2, keys, 8})
    [q: ones.({1, 2, 100, 8}), k: kv, v: kv]
  end

  defp memory(ones, slots) do
    kv = ones.({1, slots, 16})
    [h: ones.({1, 20, 16}), k_mem: kv, v_mem: kv, waq: ones.({16, 16}), wao: ones.({16, 16})]
  end

  defp with_dy({batch, length, channels, _state} = sizes) do
    Calls.inputs(sizes) ++ [{"dy", Calls.uniform({batch, length, channels}, -1, 1)}]
  end

  test "memories of many slots are no work for a normal scheduler" do
    ones = &Calls.uniform(&1, 1, 1)
    kv = ones.({1, 65_536, 128})
    q = ones.({1, 1, 128})
    square = ones.({128, 128})
    assert scheduler(:hds_query_topk, [q: q, k: kv, v: kv], %{}) == :cpu

    inputs = [h: q, k_mem: kv, v_mem: kv, waq: square, wao: square]
    assert scheduler(:multi_memory_attention, inputs, %{}) == :cpu
  end

  test "a plan of a wrong call is the error of the call" do
    inputs = [x: Calls.uniform({2, 3}, 0, 1), w: Calls.uniform({4, 5}, 0, 1)]
    error = catch_error(Kernel.run(:linear, inputs, %{}))
    assert error.kind == :shape
    assert catch_error(Kernel.plan(:linear, inputs)) == error
  end

  test "options of where to run that are unknown are refused, and nil is none" do
    inputs = [x: Calls.uniform({2, 3}, 0, 1), w: Calls.uniform({4, 3}, 0, 1)]

    calls = [
      &Kernel.run(:linear, inputs, %{}, &1),
      &Kernel.plan(:linear, inputs, %{}, &1),
      &SequenceParallel.run(:linear_scan, [], %{}, &1),
      &Kernel.residence/1
    ]

    for call <- calls do
      assert %Error{kind: :option, argument: "threds", got: "threds", expected: expected} =
               catch_error(call.(threds: 1))

      assert expected == "an option out of backend, level, threads, allow_tf32"
      assert %Error{kind: :option, argument: "options"} = catch_error(call.(%{threads: 1}))
    end

    absent = for name <- Kernel.where(), do: {name, nil}
    assert Kernel.run(:linear, inputs, %{}, absent) == Kernel.run(:linear, inputs, %{})
    assert Kernel.residence(absent) == Kernel.residence()
  end
end
