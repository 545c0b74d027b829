defmodule Sidewinder.MMRec.MemoryTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Kernel, RandomInputs, Safetensors, Tensor}
  alias Sidewinder.MMRec.Memory
  import Bitwise

  @width 3

  defp random(shape, seed), do: RandomInputs.tensor(shape, :f32, {-1, 1}, seed)

  defp values(tensor), do: Tensor.to_list(tensor)

  # A plain list of slots, each a list of numbers, for a batch of 1.
  defp model_write(slots, rows, start) do
    rows
    |> Enum.with_index(start)
    |> Enum.reduce(slots, fn {row, slot}, slots ->
      List.replace_at(slots, rem(slot, length(slots)), row)
    end)
  end

  defp rows(tensor), do: tensor |> values() |> Enum.chunk_every(@width)

  defp small(options \\ []),
    do: Memory.new([width: @width, short_slots: 5, long_slots: 8] ++ options)

  describe "the short bank" do
    test "is a ring, whatever is written where" do
      :rand.seed(:exsss, 7)

      for slots <- [1, 2, 5, 7], _ <- 1..20 do
        memory = Memory.new(width: @width, short_slots: slots, long_slots: 2)
        zeros = List.duplicate(List.duplicate(0.0, @width), slots)

        Enum.reduce(1..12, {memory, zeros, zeros, 0}, fn step, {memory, ks, vs, cursor} ->
          count = :rand.uniform(slots + 3) - 1
          jump = :rand.uniform(4) == 1
          start = if jump, do: :rand.uniform(20) - 1, else: cursor
          [k, v] = for part <- [:k, :v], do: random({1, count, @width}, {step, part, start})
          options = if jump, do: [start: start], else: []
          memory = Memory.write_short(memory, k, v, options)
          {ks, vs} = {model_write(ks, rows(k), start), model_write(vs, rows(v), start)}
          {got_k, got_v} = Memory.read(memory, :short)
          assert {rows(got_k), rows(got_v)} == {ks, vs}
          # No rows change nothing.
          cursor = if count == 0, do: cursor, else: start + count
          assert Memory.cursor(memory, :short) == cursor

          for slot <- 0..(slots - 1) do
            {k, v} = Memory.read_step(memory, slot)
            assert {values(k), values(v)} == {Enum.at(ks, slot), Enum.at(vs, slot)}
          end

          {memory, ks, vs, cursor}
        end)
      end
    end

    test "has rows for each of the batch" do
      memory = small(batch: 2)
      k = random({2, 4, @width}, 1)
      [first, second] = k |> rows() |> Enum.chunk_every(4)
      memory = Memory.write_short(memory, k, k)
      {read, _} = Memory.read(memory, :short)
      zero = List.duplicate(0.0, @width)
      assert rows(read) == first ++ [zero] ++ second ++ [zero]
      {step, _} = Memory.read_step(memory, 2)
      assert rows(step) == [Enum.at(first, 2), Enum.at(second, 2)]
    end

    test "refuses rows past its last slot in the strict mode" do
      memory = small()
      rows = random({1, 3, @width}, 1)
      memory = Memory.write_short(memory, rows, rows, mode: :strict)
      memory = Memory.write_short(memory, rows, rows, mode: :strict, start: 2)

      error =
        assert_raise Error, fn -> Memory.write_short(memory, rows, rows, mode: :strict) end

      assert {error.kind, error.argument} == {:option, "start"}
      assert Memory.cursor(Memory.write_short(memory, rows, rows), :short) == 8
    end

    test "takes memory as it is written" do
      memory = Memory.new(width: 64, long_slots: 1, short_slots: 268_435_456)
      row = random({1, 1, 64}, 1)

      memory =
        Enum.reduce(1..200, memory, fn _, memory -> Memory.write_short(memory, row, row) end)

      {k, _} = Memory.read_step(memory, 199)
      assert values(k) == values(row)
    end
  end

  describe "the long bank" do
    test "takes summaries in as the policy says, with all levels above it" do
      memory = small(init: {:normal, 0.02, 3})
      {bank, _} = Memory.read(memory, :long)
      summaries = for i <- 1..11, do: random({1, @width}, i)

      ring = Enum.reduce(summaries, memory, &Memory.write_long(&2, &1, &1))
      assert Memory.cursor(ring, :long) == 11
      expected = model_write(rows(bank), Enum.map(summaries, &values/1), 0)
      {k, v} = Memory.read(ring, :long)
      assert rows(k) == expected
      {k1, v1} = Memory.query(ring, 1)
      [{expected_k, expected_v} | _] = Kernel.MMRec.hds_construct(k, v, cursor: 11)
      assert {k1, v1} == {expected_k, expected_v}
      assert Memory.query(ring) == Memory.query(ring, 2)
      assert Memory.query(ring, 99) == Memory.query(ring, 2)
      assert Memory.query(ring, 0) == Memory.read(ring, :long)
      {top, _} = Memory.query(ring)
      assert top.shape == {1, 1, @width}

      [summary | _] = summaries
      ema = Memory.write_long(memory, summary, summary, policy: :ema, decay: 0.5)
      {k, _} = Memory.read(ema, :long)
      assert Memory.cursor(ema, :long) == 0

      for {row, old} <- Enum.zip(rows(k), rows(bank)),
          {new, old, summary} <- Enum.zip([row, old, values(summary)]),
          do: assert_in_delta(new, 0.5 * old + 0.5 * summary, 1.0e-6)

      all = Memory.write_long(memory, summary, summary, policy: :broadcast)

      for level <- 0..2,
          {k, _} = Memory.query(all, level),
          do: assert(Enum.uniq(rows(k)) == [values(summary)])
    end

    test "with all slots equal makes attention constant" do
      memory = Memory.new(width: 8, long_slots: 1024, init: {:normal, 1, 1})
      summary = random({1, 8}, 1)
      memory = Memory.write_long(memory, summary, summary, policy: :broadcast)
      {k, v} = Memory.query(memory)
      h = random({1, 33, 8}, 2)
      weights = %{waq: random({8, 8}, 3), wao: random({8, 8}, 4)}
      y = Kernel.MMRec.multi_memory_attention(h, k, v, weights, heads: 2)
      assert y |> values() |> Enum.chunk_every(8) |> Enum.uniq() |> length() == 1
    end

    test "may have one level" do
      memory = small(levels: 1)
      assert Memory.query(memory) == Memory.read(memory, :long)
      summary = random({1, @width}, 1)
      memory = Memory.write_long(memory, summary, summary)
      assert Memory.query(memory) == Memory.read(memory, :long)
    end
  end

  test "layers are apart" do
    memory = small(layers: 3)
    [a, b] = for seed <- 1..2, do: random({1, 2, @width}, seed)
    [c, d] = for seed <- 3..4, do: random({1, @width}, seed)
    written = Memory.write_short(memory, a, b, layer: 1)
    written = Memory.write_long(written, c, d, layer: 2)

    for layer <- 0..2, bank <- [:short, :long] do
      same = Memory.read(written, bank, layer: layer) == Memory.read(memory, bank, layer: layer)
      assert same == {layer, bank} not in [{1, :short}, {2, :long}]
    end

    assert Memory.reset(written) |> Memory.dump() == Memory.dump(memory)
  end

  describe "a memory is a value:" do
    test "the one that was given stays as it was" do
      memories =
        Enum.scan([small() | Enum.to_list(1..30)], fn step, memory ->
          rows = random({1, rem(step, 4), @width}, step)
          summary = random({1, @width}, step)
          memory |> Memory.write_short(rows, rows) |> Memory.write_long(summary, summary)
        end)

      # Each again from the one before it, which has been continued already.
      for {{before, memory}, step} <- memories |> Enum.zip(tl(memories)) |> Enum.with_index(1) do
        rows = random({1, rem(step, 4), @width}, step)
        summary = random({1, @width}, step)
        again = before |> Memory.write_short(rows, rows) |> Memory.write_long(summary, summary)
        assert Memory.dump(again) == Memory.dump(memory)
      end
    end

    test "200 processes go on from the same one" do
      rows = random({1, 3, @width}, 0)
      memory = Memory.write_short(small(), rows, rows)
      dump = Memory.dump(memory)

      write = fn memory, branch ->
        Enum.reduce(1..10, memory, fn step, memory ->
          rows = random({1, rem(step, 3), @width}, {branch, step})
          summary = random({1, @width}, {branch, step})
          memory |> Memory.write_short(rows, rows) |> Memory.write_long(summary, summary)
        end)
      end

      got =
        1..200
        |> Task.async_stream(&Memory.dump(write.(memory, &1)),
          max_concurrency: 32,
          timeout: 60_000
        )
        |> Enum.map(fn {:ok, dump} -> dump end)

      for {got, branch} <- Enum.with_index(got, 1),
          rem(branch, 20) == 0,
          do: assert(got == Memory.dump(write.(Memory.restore(dump), branch)))

      assert length(Enum.uniq(got)) == 200
      assert Memory.dump(memory) == dump
    end
  end

  describe "dumps" do
    test "give back the same bits, and the same go on" do
      for type <- Tensor.float_types() do
        memory = small(layers: 2, batch: 2, type: type, init: {:normal, 0.02, 5})

        write = fn memory, steps ->
          Enum.reduce(steps, memory, fn step, memory ->
            rows = RandomInputs.tensor({2, rem(step, 4), @width}, type, {-1, 1}, step)
            summary = RandomInputs.tensor({2, @width}, type, {-1, 1}, step)
            layer = rem(step, 2)

            memory
            |> Memory.write_short(rows, rows, layer: layer)
            |> Memory.write_long(summary, summary, layer: layer)
          end)
        end

        memory = write.(memory, 1..9)
        dump = Memory.dump(memory)
        restored = Memory.restore(dump)
        assert Memory.dump(restored) == dump

        for layer <- 0..1,
            level <- 0..2,
            do:
              assert(
                Memory.query(restored, level, layer: layer) ==
                  Memory.query(memory, level, layer: layer)
              )

        assert Memory.dump(write.(restored, 10..20)) == Memory.dump(write.(memory, 10..20))
      end
    end

    test "are safetensors with these names" do
      tensors = Safetensors.decode(Memory.dump(small(layers: 2)))
      assert map_size(tensors) == 12
      assert tensors["layer.1.short.k"].shape == {1, 5, @width}
      assert tensors["layer.1.long.v"].shape == {1, 8, @width}
      assert tensors["layer.0.long.cursor"] == Tensor.new(<<0::64>>, :i64, {1})
    end

    test "that are damaged are refused" do
      dump = Memory.dump(small(layers: 2))
      tensors = Safetensors.decode(dump)
      refused = fn bytes -> assert_raise(Error, fn -> Memory.restore(bytes) end).kind end
      assert refused.(binary_part(dump, 0, byte_size(dump) - 1)) == :argument
      assert refused.("") == :argument
      assert refused.(:dump) == :argument
      assert refused.(Safetensors.encode(%{})) == :argument

      for {name, _} <- tensors,
          do: assert(refused.(Safetensors.encode(Map.delete(tensors, name))) == :argument)

      for {name, tensor} <- tensors,
          other <- [
            Tensor.from_list([1], :f32, {1}),
            Tensor.from_list([1, 2], :i64, {2}),
            Tensor.from_list([-1], :i64, {1}),
            if(tensor.type == :f32, do: Tensor.cast(tensor, :f64), else: tensor)
          ],
          other != tensor,
          do: assert(refused.(Safetensors.encode(%{tensors | name => other})) == :argument)

      extra = Map.put(tensors, "layer.2.short.k", tensors["layer.0.short.k"])
      assert refused.(Safetensors.encode(extra)) == :argument
    end
  end

  describe "refuses" do
    defp refused(fun) do
      error = assert_raise Error, fun
      {error.kind, error.argument}
    end

    test "options that are none" do
      for {options, name} <- [
            {[width: 0], "width"},
            {[], "width"},
            {[width: 1.5], "width"},
            {[width: 1, batch: -1], "batch"},
            {[width: 100_000, batch: 100_000], "width"},
            {[width: 1, layers: 0], "layers"},
            {[width: 1, short_slots: 0], "short_slots"},
            {[width: 1, long_slots: :many], "long_slots"},
            {[width: 1, levels: 17], "levels"},
            {[width: 1, ratio: 1], "ratio"},
            {[width: 1, init: :ones], "init"},
            {[width: 1, init: {:normal, -1, 2}], "init"},
            {[width: 1, backend: :tpu], "backend"},
            {[width: 1, slots: 2], "slots"},
            {:width, "options"}
          ] do
        assert refused(fn -> Memory.new(options) end) == {:option, name}
      end

      assert refused(fn -> Memory.new(width: 1, type: :i32) end) == {:dtype, "type"}
      huge = [width: 268_435_456, long_slots: 268_435_456]
      assert elem(refused(fn -> Memory.new(huge) end), 0) in [:memory, :size]
    end

    test "tensors that do not fit" do
      memory = small()
      [rows, row] = [random({1, 2, @width}, 1), random({1, @width}, 1)]
      short = &Memory.write_short(memory, &1, &2)
      long = &Memory.write_long(memory, &1, &2)

      for {bad, kind} <- [
            {random({2, 2, @width}, 1), :shape},
            {random({1, 2, 4}, 1), :shape},
            {random({1, 4}, 1), :shape},
            {nil, :argument}
          ] do
        assert refused(fn -> short.(bad, rows) end) == {kind, "k"}
        assert refused(fn -> short.(rows, bad) end) == {kind, "v"}
        assert refused(fn -> long.(bad, row) end) == {kind, "k"}
        assert refused(fn -> long.(row, bad) end) == {kind, "v"}
      end

      assert refused(fn -> short.(rows, random({1, 3, @width}, 1)) end) == {:shape, "v"}
      wide = Tensor.cast(rows, :f64)
      assert refused(fn -> short.(wide, rows) end) == {:dtype, "k"}
    end

    test "layers, slots, levels and ways of writing that are none" do
      memory = small()
      [rows, row] = [random({1, 2, @width}, 1), random({1, @width}, 1)]
      short = &Memory.write_short(memory, rows, rows, &1)
      long = &Memory.write_long(memory, row, row, &1)

      for layer <- [-1, 1, 0.0, :all],
          do: assert(refused(fn -> short.(layer: layer) end) == {:option, "layer"})

      assert refused(fn -> short.(start: -1) end) == {:option, "start"}
      assert refused(fn -> short.(start: 1 <<< 64) end) == {:option, "start"}
      assert refused(fn -> short.(mode: :round) end) == {:option, "mode"}
      assert refused(fn -> short.(slot: 1) end) == {:option, "slot"}
      assert refused(fn -> long.(policy: :lru) end) == {:option, "policy"}
      assert refused(fn -> long.(policy: :ema, decay: 1.5) end) == {:option, "decay"}
      assert refused(fn -> long.(decay: "1") end) == {:option, "decay"}
      assert refused(fn -> Memory.read(memory, :middle) end) == {:argument, "bank"}
      assert refused(fn -> Memory.read_step(memory, 5) end) == {:argument, "step"}
      assert refused(fn -> Memory.read_step(memory, -1) end) == {:argument, "step"}
      assert refused(fn -> Memory.query(memory, -2) end) == {:argument, "level"}
      assert refused(fn -> Memory.query(memory, :top) end) == {:argument, "level"}
      assert refused(fn -> Memory.cursor(memory, :none) end) == {:argument, "bank"}
    end
  end

  # Writes are copies and sums in the same order wherever they are done.
  @tag :cuda
  test "a memory on a GPU holds what one on the host does" do
    [here, there] =
      for backend <- [:cpu, {:cuda, 0}] do
        memory = small(layers: 2, batch: 2, init: {:normal, 0.02, 5}, backend: backend)

        Enum.reduce(1..40, memory, fn step, memory ->
          rows = random({2, rem(step, 7), @width}, step)
          summary = random({2, @width}, step)
          options = [layer: rem(step, 2)] ++ if(rem(step, 5) == 0, do: [start: step], else: [])
          memory = Memory.write_short(memory, rows, rows, options)
          Memory.write_long(memory, summary, summary, layer: rem(step, 2))
        end)
      end

    assert Memory.dump(there) == Memory.dump(here)

    for layer <- 0..1, level <- 0..2 do
      [{a, _}, {b, _}] = for m <- [here, there], do: Memory.query(m, level, layer: layer)
      assert Tensor.device(b) == {:cuda, 0}
      for {x, y} <- Enum.zip(values(a), values(b)), do: assert_in_delta(x, y, 1.0e-6)
    end

    for slot <- 0..4 do
      [{a, _}, {b, _}] = for m <- [here, there], do: Memory.read_step(m, slot, layer: 1)
      assert values(a) == values(b)
    end

    restored = Memory.restore(Memory.dump(there), backend: {:cuda, 0})
    assert Memory.dump(restored) == Memory.dump(here)
    assert inspect(restored) =~ "cuda:0"
    assert Memory.dump(Memory.reset(there)) == Memory.dump(Memory.reset(here))
  end

  describe "kernels" do
    alias Sidewinder.{Golden, Kernel.MMRec}

    defp close(got, golden) do
      for {name, tensor} <- got do
        %{tensor: expected, rtol: rtol, atol: atol} = golden.outputs[to_string(name)]
        Golden.assert_close(tensor, expected, rtol, atol, name)
      end
    end

    test "attention over a memory and its gradient, by their functions" do
      for %{inputs: i, attrs: attrs} = golden <- Golden.cases(:multi_memory_attention) do
        weights = Map.take(i, ~w(waq baq wao bao))
        options = [heads: attrs.heads, q_in: i["q_in"]]
        call = &MMRec.multi_memory_attention(i["h"], i["k_mem"], i["v_mem"], weights, &1)
        {y, lse} = call.([{:return_lse, true} | options])
        close([y: y, lse: lse], golden)
        assert call.(options) == y

        got =
          MMRec.multi_memory_attention_backward(i["h"], i["k_mem"], i["v_mem"], weights, i["dy"],
            heads: attrs.heads,
            q_in: i["q_in"]
          )

        assert map_size(got) == map_size(golden.outputs) - 2
        close(got, golden)
      end
    end

    test "the hierarchy and queries to it, by their functions" do
      for %{inputs: i, attrs: attrs} = golden <- Golden.cases(:hds_construct) do
        levels = MMRec.hds_construct(i["k"], i["v"], Map.to_list(attrs))
        assert length(levels) == attrs.levels - 1

        for {{k, v}, level} <- Enum.with_index(levels, 1),
            do: close([{:"k#{level}", k}, {:"v#{level}", v}], golden)
      end

      for %{inputs: i, attrs: attrs} = golden <- Golden.cases(:hds_query_topk) do
        {context, slots} = MMRec.hds_query_topk(i["q"], i["k"], i["v"], Map.to_list(attrs))
        close([context: context, slots: slots], golden)
        assert slots.type == :i32
      end
    end

    test "cotangents that are none are refused" do
      bank = random({1, 8, 2}, 1)
      backward = fn cotangents -> MMRec.hds_construct_backward(bank, bank, cotangents) end
      assert backward.([]).dk |> values() |> Enum.uniq() == [0.0]

      for other <- [nil, %{}, [bank], [{bank, nil} | bank]],
          do: assert(refused(fn -> backward.(other) end) == {:argument, "cotangents"})

      assert refused(fn -> backward.([{bank, nil}]) end) == {:shape, "dk1"}
      top = random({1, 1, 2}, 1)

      assert refused(fn -> backward.([nil, nil, {top, nil}] |> Enum.map(&(&1 || {nil, nil}))) end) ==
               {:argument, "dk3"}
    end
  end

  test "what it looks like" do
    rows = random({1, 2, @width}, 1)

    assert inspect(Memory.write_short(small(), rows, rows)) ==
             "#Sidewinder.MMRec.Memory<f32, 1 layer of width 3, batch 1, 2 of 5 short slots, 8 long slots in 3 levels, cpu>"
  end
end
