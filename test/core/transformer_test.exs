defmodule Sidewinder.TransformerTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Tensor, Transformer}

  @vocabulary 13
  @sizes [layers: 3, width: 12, heads: 2, hidden: 20, vocabulary: @vocabulary]

  defp close(got, expected, tolerance) do
    assert got.shape == expected.shape
    pairs = Enum.zip(Tensor.to_list(got), Tensor.to_list(expected))
    for {a, b} <- pairs, do: assert_in_delta(a, b, tolerance)
  end

  # Rows from one of `{B, L, V}`.
  defp rows(%{shape: {batch, length, width}, type: :f32} = t, from, count) do
    row = 4 * width
    part = &binary_part(t.data, (&1 * length + from) * row, count * row)
    Tensor.new(Enum.map_join(0..(batch - 1), part), :f32, {batch, count, width})
  end

  defp part(tokens, from, count), do: for(t <- tokens, do: Enum.slice(t, from, count))

  @length 80

  defp tokens(batch) do
    for b <- 1..batch, do: for(i <- 1..@length, do: rem(i * i * b + i, @vocabulary))
  end

  for {name, options} <- [rotary: [rope_theta: 10_000.0], sinusoidal: []] do
    test "prefill and decode equal one causal pass, row for row, with #{name} positions" do
      model = Transformer.random(@sizes ++ unquote(options))
      tokens = tokens(2)
      whole = Transformer.forward(model, tokens)
      close(Transformer.forward(model, part(tokens, 0, 7)), rows(whole, 0, 7), 1.0e-4)

      state = Transformer.prefill(model, part(tokens, 0, 60))

      state =
        Enum.reduce([1, 1, 4, 1, 13], state, fn count, state ->
          {logits, longer} = Transformer.decode(model, part(tokens, state.length, count), state)
          close(logits, rows(whole, state.length, count), 1.0e-4)
          longer
        end)

      assert state.length == @length
    end
  end

  test "a state may be gone on from in several ways" do
    model = Transformer.random(@sizes)
    [tokens] = tokens(1)
    state = Transformer.prefill(model, [tokens])
    {first, _} = Transformer.decode(model, [[1]], state)
    {other, _} = Transformer.decode(model, [[2]], state)
    {again, _} = Transformer.decode(model, [[1]], state)
    assert first == again and first != other
  end

  test "generates what the largest logits of whole passes say" do
    for type <- [:f32, :bf16] do
      model = Transformer.random([type: type, rope_theta: 500.0, seed: 3] ++ @sizes)

      expected =
        Enum.reduce(1..20, [3, 1, 4], fn _, tokens ->
          logits =
            model |> Transformer.forward([tokens]) |> Tensor.to_list() |> Enum.take(-@vocabulary)

          tokens ++ [Enum.find_index(logits, &(&1 == Enum.max(logits)))]
        end)

      stream = Transformer.generate(model, [3, 1, 4], max_tokens: 20)
      if type == :f32, do: assert(Enum.to_list(stream) == Enum.drop(expected, 3))
      assert Enum.count(stream) == 20
      assert Enum.to_list(stream) == Enum.to_list(stream)
    end
  end

  test "stops, and lets others choose" do
    model = Transformer.random(@sizes)
    all = model |> Transformer.generate([5], max_tokens: 6) |> Enum.to_list()
    stop = List.last(all)
    stopped = model |> Transformer.generate([5], stop: stop) |> Enum.to_list()
    assert stopped == Enum.take_while(all, &(&1 != stop))

    choose = fn logits ->
      assert length(logits) == @vocabulary
      7
    end

    assert model |> Transformer.generate([5], max_tokens: 3, choose: choose) |> Enum.to_list() ==
             [7, 7, 7]
  end

  test "weights by name, the embedding for the output too" do
    random = Transformer.random(@sizes)
    weights = Map.take(random, [:embedding, :blocks, :ln_w, :ln_b])
    model = Transformer.new(weights, heads: 2)
    assert model.output == random.embedding
    assert Transformer.forward(model, [[1, 2]]).shape == {1, 2, @vocabulary}
  end

  describe "refuses" do
    defp refused(fun) do
      error = assert_raise Error, fun
      {error.kind, error.argument}
    end

    test "tokens that are none" do
      model = Transformer.random(@sizes)

      for tokens <- [[[13]], [[-1]], [[1.0]], [1], [[1], [1, 2]], :all, []] do
        assert refused(fn -> Transformer.forward(model, tokens) end) == {:argument, "tokens"}
      end

      assert refused(fn -> Transformer.generate(model, []) end) == {:argument, "tokens"}
      state = Transformer.prefill(model, [[1], [2]])
      assert refused(fn -> Transformer.decode(model, [[1]], state) end) |> elem(0) == :shape
    end

    test "weights and options that are none" do
      weights = Map.take(Transformer.random(@sizes), [:embedding, :blocks, :ln_w, :ln_b])
      assert refused(fn -> Transformer.new(1) end) == {:argument, "weights"}

      assert refused(fn -> Transformer.new(%{weights | embedding: nil}) end) ==
               {:argument, "embedding"}

      assert refused(fn -> Transformer.new(%{weights | blocks: 3}) end) == {:argument, "blocks"}
      assert refused(fn -> Transformer.new(Map.put(weights, :head, 1)) end) |> elem(0) == :option
      assert refused(fn -> Transformer.new(weights, head: 1) end) |> elem(0) == :option
      assert refused(fn -> Transformer.new(weights, heads: 5) end) == {:option, "heads"}
      assert refused(fn -> Transformer.random(width: 4) end) == {:option, "layers"}
    end
  end
end
