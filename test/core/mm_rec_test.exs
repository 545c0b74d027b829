defmodule Sidewinder.MMRecTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Calls, Error, Kernel, MMRec, MMRec.Memory, RandomInputs, Tensor}

  doctest Sidewinder.MMRec

  defp problem(batch, length, width \\ 4) do
    shape = "B=#{batch},L=#{length},M=1,D=#{width},I=2,F=6"
    with = ["wm", "bm", "initial_state"]
    inputs = Map.new(RandomInputs.make(:mmrec_block, shape: shape, with: with))
    weights = Map.drop(inputs, ~w(x k_mem v_mem initial_state))
    {inputs["x"], weights, inputs["initial_state"]}
  end

  defp memory(batch, width \\ 4, options \\ []) do
    Memory.new(
      [width: width, batch: batch, long_slots: 8, short_slots: 64, levels: 2] ++
        [init: {:normal, 0.5, 7}] ++ options
    )
  end

  defp near(got, expected, most \\ 1.0e-5) do
    assert got.shape == expected.shape
    pairs = Enum.zip(Tensor.to_list(got), Tensor.to_list(expected))
    assert Enum.max([0.0 | Enum.map(pairs, fn {a, b} -> abs(a - b) end)]) <= most
  end

  test "is the block over the memory's top level, and writes behind it" do
    {x, weights, initial} = problem(2, 5)
    memory = memory(2)
    {long_before, _} = Memory.read(memory, :long)
    got = MMRec.block(x, memory, weights, initial_state: initial, heads: 2)
    top = Memory.query(memory, -1)

    expected =
      Kernel.MMRec.mmrec_block(x, top, weights, initial_state: initial, heads: 2, levels: 1)

    for name <- [:y, :last_state, :summary], do: assert(got[name] == expected[name])

    # It gives what a block gives that makes the hierarchy itself.
    bank = Memory.read(memory, :long)
    own = Kernel.MMRec.mmrec_block(x, bank, weights, initial_state: initial, heads: 2, levels: 2)
    near(got.y, own.y)

    for {step, at} <- Enum.with_index(0..4) do
      {k, v} = Memory.read_step(got.memory, step)
      assert k == v
      hs = Enum.chunk_every(Tensor.to_list(expected.h), 4)
      assert Tensor.to_list(k) == Enum.at(hs, at) ++ Enum.at(hs, 5 + at)
    end

    {k, _} = Memory.read(got.memory, :long)
    slots = Enum.chunk_every(Tensor.to_list(k), 4)
    summaries = Enum.chunk_every(Tensor.to_list(got.summary), 4)
    assert [Enum.at(slots, 0), Enum.at(slots, 8)] == summaries
    assert Memory.cursor(got.memory, :long) == 1 and Memory.cursor(got.memory, :short) == 5
    # What was given stays as it was.
    assert {^long_before, _} = Memory.read(memory, :long)
    assert Memory.cursor(memory, :short) == 0
  end

  test "a part sees what the parts before wrote, and nothing of its own" do
    {x, weights, _} = problem(1, 6)
    first = MMRec.block(x, memory(1), weights)
    # The input again, with another memory and state.
    second = MMRec.block(x, first.memory, weights, initial_state: first.last_state)
    refute second.y == first.y
    same_state = MMRec.block(x, first.memory, weights)
    refute same_state.y == first.y
    assert MMRec.block(x, memory(1), weights).y == first.y
  end

  test "what is written can be chosen" do
    {x, weights, _} = problem(1, 3)
    kept = MMRec.block(x, memory(1), weights, short: false, policy: nil).memory
    assert Memory.cursor(kept, :short) == 0 and Memory.cursor(kept, :long) == 0
    all = MMRec.block(x, memory(1), weights, policy: :broadcast)
    {k, _} = Memory.read(all.memory, :long)

    assert k |> Tensor.to_list() |> Enum.chunk_every(4) |> Enum.uniq() == [
             Tensor.to_list(all.summary)
           ]

    of_layer = MMRec.block(x, memory(1, 4, layers: 2), weights, layer: 1).memory
    assert Memory.cursor(of_layer, :short, layer: 0) == 0
    assert Memory.cursor(of_layer, :short, layer: 1) == 3
  end

  for batch <- [1, 3] do
    test "pieces give the numbers of the whole, batch #{batch}" do
      {x, weights, initial} = problem(unquote(batch), 29)
      memory = memory(unquote(batch))
      whole = MMRec.block(x, memory, weights, initial_state: initial)

      for chunk <- [1, 2, 7, 28, 29, 100] do
        got = MMRec.block(x, memory, weights, initial_state: initial, chunk: chunk)
        for name <- [:y, :last_state, :summary], do: near(got[name], whole[name])

        for bank <- [:short, :long] do
          {a, b} = {Memory.read(got.memory, bank), Memory.read(whole.memory, bank)}
          near(elem(a, 0), elem(b, 0))
        end
      end
    end
  end

  test "a sequence beyond 32768 steps is cut by itself" do
    {x, weights, _} = problem(1, 40_000)
    memory = memory(1)
    got = MMRec.block(x, memory, weights)
    whole = MMRec.block(x, memory, weights, chunk: 40_000)
    for name <- [:y, :last_state, :summary], do: near(got[name], whole[name], 2.0e-5)
    assert Memory.cursor(got.memory, :short) == 40_000
  end

  test "nothing is remembered of a sequence without steps" do
    {x, weights, initial} = problem(1, 0)
    got = MMRec.block(x, memory(1), weights, initial_state: initial)
    near(got.last_state, initial)
    assert got.y.shape == {1, 0, 4}
    assert Memory.cursor(got.memory, :short) == 0 and Memory.cursor(got.memory, :long) == 0
  end

  test "runs at every level" do
    {x, weights, _} = problem(1, 9)
    expected = MMRec.block(x, memory(1), weights, level: "reference")

    for where <- Calls.levels(), where[:level] do
      near(MMRec.block(x, memory(1), weights, where).y, expected.y)
    end
  end

  @tag :cuda
  test "a memory on a GPU stays there, and gives the same numbers" do
    {x, weights, _} = problem(2, 9)
    expected = MMRec.block(x, memory(2), weights)
    memory = memory(2, 4, backend: {:cuda, 0})
    first = MMRec.block(Tensor.to_device(x, {:cuda, 0}), memory, weights)
    near(Tensor.to_host(first.y), expected.y, 1.0e-4)
    near(MMRec.block(x, memory, weights, chunk: 4).y, expected.y, 1.0e-4)
  end

  test "wrong calls say what is wrong" do
    {x, weights, initial} = problem(1, 3)
    refuse = fn args -> assert_raise(Error, fn -> apply(MMRec, :block, args) end) end
    assert %{argument: "x", kind: :argument} = refuse.([1, memory(1), weights])
    assert %{argument: "x", kind: :shape} = refuse.([initial, memory(1), weights])
    assert %{argument: "x", kind: :shape} = refuse.([x, memory(2), weights])
    assert %{argument: "memory", kind: :argument} = refuse.([x, nil, weights])
    assert %{argument: "levels", kind: :option} = refuse.([x, memory(1), weights, [levels: 2]])
    assert %{kind: :option} = refuse.([x, memory(1), weights, [chunk: 0]])
    assert %{kind: :option} = refuse.([x, memory(1), weights, [short: 1]])
    assert %{kind: :option} = refuse.([x, memory(1), weights, [colour: 1]])
    assert %{kind: :option} = refuse.([x, memory(1), weights, :none])
    assert %{argument: "wq"} = refuse.([x, memory(1), Map.delete(weights, "wq")])
  end
end
