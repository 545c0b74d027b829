defmodule Sidewinder.KVCacheTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Kernel, KVCache, RandomInputs, Tensor}
  alias Sidewinder.Kernel.Attention

  defp tensor(shape, seed), do: RandomInputs.tensor(shape, :f32, {-1, 1}, seed)

  # Rows from one of `{1, 2, length, 4}`.
  defp rows(tensor, from, count) do
    data =
      for head <- 0..1, into: <<>> do
        per_head = div(byte_size(tensor.data), 2)
        row = 4 * 4
        binary_part(tensor.data, head * per_head + from * row, count * row)
      end

    Tensor.new(data, :f32, {1, 2, count, 4})
  end

  @length 150

  setup_all do
    [q, k, v] = for seed <- 1..3, do: tensor({1, 2, @length, 4}, seed)
    whole = Attention.attention(q, k, v, causal: true)

    step = fn cache, count, options ->
      [q, k, v] = for t <- [q, k, v], do: rows(t, cache.length, count)
      Attention.decode(q, k, v, cache, options)
    end

    %{q: q, k: k, v: v, whole: whole, step: step}
  end

  defp close(y, expected) do
    for {a, b} <- Enum.zip(Tensor.to_list(y), Tensor.to_list(expected)),
        do: assert_in_delta(a, b, 1.0e-5)
  end

  test "token by token, over memory that grows, equals one causal pass", c do
    for capacity <- [0, 1, 64, @length],
        where <- [[], [backend: :cpu, threads: 2], [level: "reference"]] do
      cache = KVCache.new(:f32, {1, 2, 4}, capacity: capacity)
      {y, cache} = c.step.(cache, 100, where)
      close(y, rows(c.whole, 0, 100))

      cache =
        Enum.reduce(100..(@length - 1), cache, fn row, cache ->
          {y, longer} = c.step.(cache, 1, where)
          close(y, rows(c.whole, row, 1))
          assert longer.length == cache.length + 1
          longer
        end)

      assert KVCache.capacity(cache) >= @length
    end
  end

  test "memory is written in place, and copied for who goes on from before", c do
    {_, ten} = c.step.(KVCache.new(:f32, {1, 2, 4}), 10, [])
    {y, eleven} = c.step.(ten, 1, [])
    assert eleven.keys.data == ten.keys.data

    other = tensor({1, 2, 1, 4}, 9)
    {_, branch} = Attention.decode(other, other, other, ten)
    assert branch.keys.data != ten.keys.data
    {again, _} = c.step.(ten, 1, [])
    assert again == y
    {z, _} = c.step.(eleven, 1, [])
    close(z, rows(c.whole, 11, 1))

    {back, _} = c.step.(KVCache.truncate(eleven, 5), 1, [])
    close(back, rows(c.whole, 5, 1))
  end

  test "processes may go on from the same cache", c do
    {_, ten} = c.step.(KVCache.new(:f32, {1, 2, 4}), 10, [])

    1..8
    |> Task.async_stream(fn _ ->
      Enum.reduce(10..40, ten, fn row, cache ->
        {y, cache} = c.step.(cache, 1, [])
        close(y, rows(c.whole, row, 1))
        cache
      end)
    end)
    |> Enum.each(&assert match?({:ok, _}, &1))
  end

  test "a failed call leaves the cache as it was", c do
    {_, ten} = c.step.(KVCache.new(:f32, {1, 2, 4}), 10, [])
    bad = tensor({1, 2, 1, 5}, 1)
    assert_raise Error, ~r/k: expected/, fn -> Attention.decode(bad, bad, bad, ten) end
    {y, _} = c.step.(ten, 1, [])
    close(y, rows(c.whole, 10, 1))
  end

  test "layers go on from a cache" do
    width = 8
    weight = fn rows, columns, seed -> tensor({rows, columns}, {:w, seed}) end

    weights = %{
      wqkv: weight.(24, width, 1),
      wo: weight.(width, width, 2),
      ln1_w: tensor({width}, 3),
      ln1_b: tensor({width}, 4),
      ln2_w: tensor({width}, 5),
      ln2_b: tensor({width}, 6),
      wg: weight.(16, width, 7),
      wu: weight.(16, width, 8),
      wd: weight.(width, 16, 9)
    }

    x = tensor({1, 6, width}, 10)
    options = [heads: 2, causal: true, rope_theta: 10_000.0]

    for {layer, weights} <- [
          {&Attention.mha/3, Map.take(weights, [:wqkv, :wo])},
          {&Attention.transformer_block/3, weights}
        ] do
      whole = layer.(x, weights, options)

      {ys, _} =
        Enum.map_reduce([4, 1, 1], KVCache.new(:f32, {1, 2, 4}, capacity: 3), fn count, cache ->
          data = binary_part(x.data, cache.length * width * 4, count * width * 4)
          layer.(Tensor.new(data, :f32, {1, count, width}), weights, [{:cache, cache} | options])
        end)

      close(Tensor.new(Enum.map_join(ys, & &1.data), :f32, {1, 6, width}), whole)
    end
  end

  describe "refuses" do
    defp refused(fun) do
      error = assert_raise Error, fun
      {error.kind, error.argument}
    end

    test "what is no cache", c do
      for other <- [nil, 1, %{}, c.q] do
        assert refused(fn -> Attention.decode(c.q, c.k, c.v, other) end) == {:argument, "cache"}
      end

      cache = KVCache.new(:f32, {1, 2, 4})

      assert refused(fn -> Attention.attention(c.q, cache.keys, cache.keys) end) |> elem(0) ==
               :argument

      assert refused(fn -> Tensor.cast(cache.keys, :f64) end) |> elem(0) == :argument

      # One memory for keys and values, by hand.
      held = [{"keys", cache.keys}, {"values", cache.keys}]
      inputs = [{"q", c.q}, {"k", c.k}, {"v", c.v}]
      big = KVCache.new(:f32, {1, 2, 4}, capacity: @length).keys

      assert refused(fn ->
               Kernel.run(:decode, inputs ++ [{"keys", big}, {"values", big}], %{})
             end) ==
               {:argument, "values"} or
               refused(fn -> Kernel.run(:decode, inputs ++ held, %{}) end) |> elem(0) == :option
    end

    test "other sizes and types", c do
      cache = KVCache.new(:f64, {1, 2, 4})
      assert refused(fn -> Attention.decode(c.q, c.k, c.v, cache) end) == {:dtype, "keys"}
      cache = KVCache.new(:f32, {2, 2, 4})
      assert refused(fn -> Attention.decode(c.q, c.k, c.v, cache) end) |> elem(0) == :shape
      cache = KVCache.new(:f32, {1, 2, 4})
      assert refused(fn -> Attention.decode(1, c.k, c.v, cache) end) == {:argument, "q"}
      assert refused(fn -> KVCache.truncate(cache, 1) end) == {:argument, "length"}
    end

    test "options that are none" do
      assert refused(fn -> KVCache.new(:u8, {1, 2, 4}) end) == {:dtype, "type"}
      assert refused(fn -> KVCache.new(:f32, {1, 2}) end) == {:shape, "shape"}
      assert refused(fn -> KVCache.new(:f32, {1, -2, 3}) end) == {:shape, "shape"}

      assert refused(fn -> KVCache.new(:f32, {1, 2, 3}, capacity: -1) end) ==
               {:option, "capacity"}

      assert refused(fn -> KVCache.new(:f32, {1, 2, 3}, room: 1) end) == {:option, "room"}
      assert refused(fn -> KVCache.new(:f32, {1, 2, 3}, :room) end) == {:option, "options"}
      assert refused(fn -> KVCache.new(:f32, {1, 2, 3}, device: :tpu) end) == {:option, "device"}
      huge = 1_000_000_000_000
      assert refused(fn -> KVCache.new(:f32, {1, 2, 3}, capacity: huge) end) |> elem(0) == :memory
    end
  end

  test "what it looks like" do
    assert inspect(KVCache.new(:f32, {1, 2, 4}, capacity: 8)) ==
             "#Sidewinder.KVCache<f32 (1, 2, 4), 0 of 8 rows, host>"
  end
end
