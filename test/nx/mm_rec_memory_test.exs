defmodule Sidewinder.MMRecMemoryNxTest do
  # The hierarchy of a memory and queries to it: what the tests of all ops do not say.
  use ExUnit.Case, async: true

  import Sidewinder.NxTest.Scans,
    only: [assert_close: 2, assert_close: 3, random: 5, types: 0, ways: 0]

  alias Sidewinder.{Error, NxTest.Golden}

  @backends [:nx, :cpu]

  defp refused(fun) do
    error = assert_raise Error, fun
    {error.kind, error.argument}
  end

  for backend <- @backends do
    describe "on #{backend}" do
      @describetag backend: backend

      test "the hierarchy agrees with the golden values", %{backend: backend} do
        for %{inputs: %{"k" => k, "v" => v}, attrs: attrs} = golden <-
              Golden.cases("hds_construct") do
          opts = [levels: attrs.levels, ratio: attrs.ratio, backend: backend]

          outputs =
            for {{k, v}, level} <-
                  Sidewinder.hds_construct(k, v, opts) |> Tuple.to_list() |> Enum.with_index(1),
                {name, t} <- [k: k, v: v],
                into: %{},
                do: {:"#{name}#{level}", t}

          assert map_size(outputs) == map_size(Map.new(golden.outputs))
          Golden.check(golden, outputs)
        end
      end

      test "queries agree with the golden values, in every way", %{backend: backend} do
        for %{inputs: i, attrs: attrs} = golden <- Golden.cases("hds_query_topk") do
          opts = [{:backend, backend} | Map.to_list(attrs)]

          for {_, way} <- ways() do
            {context, slots} =
              way.(&Sidewinder.hds_query_topk(&1, &2, &3, opts), [i["q"], i["k"], i["v"]])

            Golden.check(golden, %{context: context})
            assert slots == golden.outputs["slots"].tensor
          end
        end
      end

      test "queries have the gradients of attention over what they find", %{backend: backend} do
        for {batch, of_memory} <- [{1, 1}, {2, 2}, {2, 1}] do
          [q, k, v] =
            for {seed, shape} <- [
                  {1, {batch, 3, 4}},
                  {2, {of_memory, 32, 4}},
                  {3, {of_memory, 32, 4}}
                ],
                do: random(seed, shape, -1.0, 1.0, :f64)

          opts = [top_k: 1, ratio: 2, backend: backend]

          loss = fn [q, k, v] ->
            {context, _slots} = Sidewinder.hds_query_topk(q, k, v, opts)
            Nx.sum(Nx.sin(context))
          end

          gradients =
            for {_, way} <- ways(),
                do:
                  way.(fn q, k, v -> Nx.Defn.grad({q, k, v}, &loss.(Tuple.to_list(&1))) end, [
                    q,
                    k,
                    v
                  ])

          for other <- tl(gradients), do: assert_close(other, hd(gradients))

          for {t, i} <- Enum.with_index([q, k, v]) do
            direction = random(9 + i, t.shape, -1.0, 1.0, :f64)

            at = fn step ->
              [q, k, v]
              |> List.replace_at(i, Nx.add(t, Nx.multiply(direction, step)))
              |> loss.()
              |> Nx.to_number()
            end

            expected = (at.(1.0e-6) - at.(-1.0e-6)) / 2.0e-6
            got = Nx.to_number(Nx.sum(Nx.multiply(elem(hd(gradients), i), direction)))
            assert_in_delta got, expected, 1.0e-6 * (1 + abs(expected))
          end
        end
      end

      test "a query's gradient has none itself", %{backend: backend} do
        q = random(1, {1, 1, 2}, -1.0, 1.0, :f32)
        k = random(2, {1, 16, 2}, -1.0, 1.0, :f32)
        loss = fn q -> Nx.sum(elem(Sidewinder.hds_query_topk(q, k, k, backend: backend), 0)) end
        twice = fn q -> Nx.sum(Nx.Defn.grad(q, loss)) end
        assert {:unavailable, "gradient"} = refused(fn -> Nx.Defn.grad(q, twice) end)
      end

      test "of equal scores the lower slot counts more, and NaN least", %{backend: backend} do
        slots = fn keys, top_k ->
          keys = Nx.tensor(keys) |> Nx.reshape({1, length(keys), 1})
          opts = [levels: 2, ratio: 2, top_k: top_k, backend: backend]
          {_, slots} = Sidewinder.hds_query_topk(Nx.tensor([[[1.0]]]), keys, keys, opts)
          Nx.to_flat_list(slots)
        end

        assert slots.(List.duplicate(1.0, 8), 2) == [0, 1, 2, 3]
        assert slots.([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == [2, 3, 4, 5]
        assert slots.([:nan, 1.0, :neg_infinity, :neg_infinity, 0.0, 0.0], 1) == [4, 5]
        assert slots.([:nan, :nan, :neg_infinity, :neg_infinity], 1) == [2, 3]
        assert slots.([:nan, :nan, :nan, :nan], 1) == [0, 1]
      end

      test "levels agree in all types, in every way", %{backend: backend} do
        for {type, rtol} <- types() do
          [k, v] = for seed <- 1..2, do: random(seed, {2, 37, 3}, 0.5, 1.0, type)

          exact =
            Sidewinder.hds_construct(Nx.as_type(k, :f64), Nx.as_type(v, :f64),
              cursor: 5,
              levels: 4
            )

          for {_, way} <- ways() do
            levels =
              way.(&Sidewinder.hds_construct(&1, &2, cursor: 5, levels: 4, backend: backend), [
                k,
                v
              ])

            assert elem(elem(levels, 2), 1).type == k.type
            assert_close(levels, exact, rtol: 2 * rtol)
          end
        end
      end

      test "what does not fit is refused", %{backend: backend} do
        bank = fn shape -> Nx.broadcast(1.0, shape) end
        hds = &Sidewinder.hds_construct(&1, &2, [{:backend, backend} | &3])
        assert refused(fn -> hds.(bank.({2, 8}), bank.({2, 8}), []) end) == {:shape, "k"}
        assert refused(fn -> hds.(bank.({2, 8, 3}), bank.({2, 8, 4}), []) end) == {:shape, "v"}
        k = bank.({1, 8, 2})

        for levels <- [1, 17],
            do: assert(refused(fn -> hds.(k, k, levels: levels) end) == {:option, "levels"})

        assert refused(fn -> hds.(k, k, levels: 0) end) == {:option, "levels"}
        assert refused(fn -> hds.(k, k, ratio: 1) end) == {:option, "ratio"}
        assert refused(fn -> hds.(k, k, cursor: -1) end) == {:option, "cursor"}
        query = &Sidewinder.hds_query_topk(&1, &2, &2, [{:backend, backend} | &3])
        q = bank.({1, 2, 2})
        assert refused(fn -> query.(q, k, []) end) == {:shape, "k"}
        assert refused(fn -> query.(q, k, levels: 2, top_k: 0) end) == {:option, "top_k"}
        assert refused(fn -> query.(q, bank.({2, 16, 2}), []) end) == {:shape, "k"}
        params = %{waq: Nx.eye(2, type: :f32), wao: Nx.eye(2, type: :f32)}
        attend = &Sidewinder.multi_memory_attention(q, &1, &2, &3, backend: backend, heads: &4)
        assert refused(fn -> attend.(bank.({2, 8, 2}), k, params, 1) end) == {:shape, "k_mem"}
        assert refused(fn -> attend.(k, bank.({1, 7, 2}), params, 1) end) == {:shape, "v_mem"}
        assert refused(fn -> attend.(k, k, params, 3) end) == {:shape, "h"}
        assert refused(fn -> attend.(k, k, Map.delete(params, :wao), 1) end) == {:argument, "wao"}
        assert refused(fn -> attend.(k, k, Map.put(params, :wo, k), 1) end) == {:argument, "wo"}
      end
    end
  end

  test "a memory may be that of each of the batch" do
    [h, k, v] =
      for {seed, n} <- [{1, 3}, {2, 5}, {3, 5}], do: random(seed, {2, n, 4}, -1.0, 1.0, :f32)

    params =
      for {name, seed} <- [waq: 4, wao: 5],
          into: %{},
          do: {name, random(seed, {4, 4}, -1.0, 1.0, :f32)}

    y = Sidewinder.multi_memory_attention(h, k, v, params, heads: 2)
    assert_close(Sidewinder.multi_memory_attention(h, k, v, params, heads: 2, backend: :nx), y)

    for i <- 0..1 do
      [h, k, v] = for t <- [h, k, v], do: t[i..i]
      assert_close(Sidewinder.multi_memory_attention(h, k, v, params, heads: 2), y[i..i])
    end
  end
end
