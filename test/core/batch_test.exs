defmodule Sidewinder.BatchTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Mamba, Tensor, Tokenizer}
  alias Sidewinder.Mamba.Session

  @scripted Path.expand("../golden/scripted", __DIR__)

  defp model(options \\ []) do
    defaults = [layers: 2, width: 64, vocabulary: 90, backend: :cpu]
    Mamba.random(Keyword.merge(defaults, options))
  end

  defp scripted(name), do: Mamba.load(Path.join(@scripted, name), backend: :cpu)

  # What each prompt gives in a batch, by its index.
  defp together(model, prompts, options) do
    pieces = model |> Mamba.generate(prompts, options) |> Enum.to_list()
    for i <- 0..(length(prompts) - 1), do: for({^i, piece} <- pieces, do: piece)
  end

  defp alone(model, prompts, options),
    do: for(prompt <- prompts, do: model |> Mamba.generate(prompt, options) |> Enum.to_list())

  defp prompts(count),
    do: for(i <- 1..count, do: for(j <- 1..(1 + rem(7 * i, 11)), do: rem(13 * i + 5 * j, 90)))

  test "each prompt of a batch gives what it gives alone, bit for bit" do
    for own <-
          [[], [type: :bf16], [type: :f16], [type: :f64]] ++
            for(how <- [:q8_0, :q4_0, :ternary], do: [quantize: how]),
        model = model(own),
        count <- [1, 2, 5, 15, 16, 33],
        how <- [[], [temperature: 1.3, seed: 5], [temperature: 1, top_k: 20, seed: 6]] do
      prompts = prompts(count)
      options = [max_tokens: 12, stop: [3, 40, 41, 77]] ++ how
      assert together(model, prompts, options) == alone(model, prompts, options)
    end
  end

  test "prompts end each on its own, by tokens, by texts and by their number" do
    for name <- ["chat_eos", "llama_space"],
        model = scripted(name),
        options <- [
          [],
          [max_tokens: 0],
          [max_tokens: 5, ignore_eos: true],
          [max_tokens: 9, ignore_eos: true, stop: ["he c", "you"]],
          [max_tokens: 9, ignore_eos: true, temperature: 2, seed: 3]
        ] do
      prompts = ["Hello", "Hello world how", "The", "The cat is é", "Hello"]
      assert together(model, prompts, options) == alone(model, prompts, options)

      tokens = for prompt <- prompts, do: Tokenizer.encode(model.tokenizer, prompt)
      options = Keyword.delete(options, :stop)
      assert together(model, tokens, options) == alone(model, tokens, options)

      mixed = [hd(prompts), hd(tokens)]
      assert together(model, mixed, options) == alone(model, mixed, options)
    end
  end

  test "without a seed equal prompts are drawn apart, with one alike" do
    model = model()
    prompts = List.duplicate([1, 2], 4)
    drawn = together(model, prompts, max_tokens: 20, temperature: 2)
    assert length(Enum.uniq(drawn)) == 4
    drawn = together(model, prompts, max_tokens: 20, temperature: 2, seed: 9)
    assert length(Enum.uniq(drawn)) == 1
  end

  test "no more is computed than is asked for" do
    prompts = [[1], [2, 3]]
    assert [{0, _}, {1, _}, {0, _}] = model() |> Mamba.generate(prompts) |> Enum.take(3)
    endless = Mamba.generate(model(), prompts, max_tokens: 1_000_000_000_000)
    assert length(Enum.take(endless, 7)) == 7
    # A stream can be read anew.
    assert Enum.take(endless, 7) == Enum.take(endless, 7)
  end

  test "a list of prompts is refused where any of them would be, before it is read" do
    model = scripted("chat_eos")

    for {prompts, part} <- [
          {["Hello", ""], "not empty"},
          {[[1], []], "not empty"},
          {["Hello", 3], "texts, or lists of tokens"},
          {["Hello" | "more"], "texts, or lists of tokens"},
          {[[1, 2], [1, 400]], "tokens from 0 to 399"},
          {[["Hello"]], "tokens from 0 to 399"},
          {["Hello", <<"H", 255>>], "UTF-8"},
          {[:hello], "texts, or lists of tokens"}
        ] do
      error = assert_raise Error, fn -> Mamba.generate(model, prompts) end
      assert error.kind == :argument and Exception.message(error) =~ part
    end
  end

  ## The repetition penalty

  # The tokens of greedy choice by Hugging Face's formula, from the logits of steps.
  defp penalized(model, prompt, penalty, count) do
    session = Session.new(model)
    logits = Session.prefill(session, prompt, logits: true)
    {tokens, _} = Enum.map_reduce(1..count, {logits, prompt}, &next(session, penalty, &1, &2))
    tokens
  end

  defp next(session, penalty, _i, {logits, seen}) do
    changed =
      for {logit, token} <- Enum.with_index(Tensor.to_list(logits)) do
        cond do
          token not in seen -> logit
          logit > 0 -> logit / penalty
          true -> logit * penalty
        end
      end

    token = Enum.find_index(changed, &(&1 == Enum.max(changed)))
    {token, {Session.step(session, token), [token | seen]}}
  end

  test "a repetition penalty changes the logits of all tokens that prompt and text have" do
    model = model(vocabulary: 12)

    for prompt <- [[1], [5, 5, 2, 7], Enum.to_list(0..11)], penalty <- [0.7, 1.2, 5] do
      options = [max_tokens: 15, repetition_penalty: penalty]
      got = model |> Mamba.generate(prompt, options) |> Enum.to_list()
      assert got == penalized(model, prompt, penalty, 15)

      assert together(model, [prompt, [3], prompt], options) ==
               alone(model, [prompt, [3], prompt], options)
    end

    plain = model |> Mamba.generate([1], max_tokens: 15) |> Enum.to_list()
    same = model |> Mamba.generate([1], max_tokens: 15, repetition_penalty: 1) |> Enum.to_list()
    assert same == plain

    # So strong a penalty repeats nothing until all tokens were there.
    strong = model |> Mamba.generate([1], max_tokens: 11, repetition_penalty: 1.0e9)
    assert Enum.sort([1 | Enum.to_list(strong)]) |> Enum.uniq() |> length() == 12
  end

  test "forks, dumps and resets carry what was seen" do
    model = model(vocabulary: 12)
    options = [repetition_penalty: 3.0]
    session = Session.new(model)
    Session.prefill(session, [4, 2, 9])
    others = [Session.fork(session), Session.restore(model, Session.dump(session))]
    token = Session.next(session, 7, options)
    for other <- others, do: assert(Session.next(other, 7, options) == token)

    fresh = Session.new(model)
    Session.reset(session)
    assert Session.dump(session) == Session.dump(fresh)
    assert Session.next(session, 7, options) == Session.next(fresh, 7, options)
  end

  test "numbers that mean nothing are refused by name" do
    for {name, value} <- [
          seed: -1,
          seed: 1.0,
          seed: 0x1_0000_0000_0000_0000,
          seed: "1",
          top_k: 0,
          top_k: -3,
          top_k: 2.0,
          top_k: 0x1_0000_0000_0000_0000,
          top_p: 0,
          top_p: 1.5,
          top_p: "0.5",
          temperature: -0.1,
          temperature: :hot,
          temperature: 0x1_0000_0000_0000_0000,
          repetition_penalty: 0,
          repetition_penalty: -1.1,
          repetition_penalty: "1"
        ] do
      for call <- [
            fn -> Mamba.generate(model(), [1], [{name, value}]) end,
            fn -> Mamba.generate(model(), [[1], [2]], [{name, value}]) end,
            fn -> Session.next(Session.new(model()), 1, [{name, value}]) end
          ] do
        error = assert_raise Error, call
        assert error.kind == :option and error.argument == to_string(name)
      end
    end

    for value <- [-1, 2.0, "2"] do
      error = assert_raise Error, fn -> Mamba.generate(model(), [1], max_tokens: value) end
      assert error.argument == "max_tokens"
    end
  end
end
