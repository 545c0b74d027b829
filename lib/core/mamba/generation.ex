defmodule Sidewinder.Mamba.Generation do
  @moduledoc false
  # The stream of `Sidewinder.Mamba.generate/3`.

  alias Sidewinder.{Error, Mamba, Native, Tensor, Tokenizer}
  alias Sidewinder.Mamba.Session

  @options [:max_tokens, :temperature, :top_k, :top_p, :seed, :stop]
  @seeds 0x1_0000_0000_0000_0000

  def generate(model, prompt, options) do
    {own, []} = Mamba.options!(options, @options) |> only_own!()
    sampling = sampling(own)
    # Options are refused here, not when the stream is asked for its first token.
    draw(Tensor.from_list([0], :f32, {1, 1}), sampling, 0)

    case prompt do
      text when is_binary(text) -> texts(model, text, own, sampling)
      tokens -> tokens(model, tokens, stop_tokens(model, own), own, sampling)
    end
  end

  defp only_own!({own, []}), do: {own, []}

  defp only_own!({_own, [{name, _} | _]}) do
    raise Error.new(:option, to_string(name),
            expected: "an option out of #{Enum.join(@options, ", ")}",
            got: to_string(name),
            hint: "Where a model runs is said when it is loaded"
          )
  end

  defp sampling(own) do
    own
    |> Keyword.take([:temperature, :top_k, :top_p, :seed])
    |> Enum.reject(&match?({_, nil}, &1))
    |> Map.new()
    |> Map.put_new(:temperature, 0)
    |> Map.put_new_lazy(:seed, fn -> :rand.uniform(@seeds) - 1 end)
    |> Map.update!(:temperature, &float/1)
    |> then(&if &1[:top_p], do: Map.update!(&1, :top_p, fn p -> float(p) end), else: &1)
  end

  defp float(number) when is_integer(number), do: number / 1
  defp float(other), do: other

  ## Tokens

  defp tokens(model, prompt, stop, own, sampling) do
    unless is_list(prompt) and prompt != [] do
      raise Error.new(:argument, "prompt",
              expected: "a text or a list of tokens, not empty",
              got: Error.show(prompt)
            )
    end

    start = fn -> {Session.new(model), &Session.prefill(&1, prompt, logits: true), 0} end

    next = fn {session, step, draws} ->
      token = draw(step.(session), sampling, draws)

      if token in stop,
        do: {:halt, session},
        else: {[token], {session, &Session.step(&1, token), draws + 1}}
    end

    start |> Stream.resource(next, fn _ -> :ok end) |> Stream.take(own[:max_tokens] || 128)
  end

  defp draw(%Tensor{} = logits, sampling, draws) do
    [token] = Error.unwrap!(Native.mamba_choose(Tensor.to_native(logits), sampling, [draws]))
    token
  end

  defp stop_tokens(%{tokenizer: tokenizer}, own) do
    case own[:stop] do
      nil -> List.wrap(tokenizer && Tokenizer.token(tokenizer, "<|endoftext|>"))
      stop -> for token <- List.wrap(stop), is_integer(token), do: token
    end
  end

  ## Texts

  defp texts(%{tokenizer: nil}, _prompt, _own, _sampling) do
    raise Error.new(:argument, "prompt",
            expected: "a list of tokens, for the model has no tokenizer",
            got: "a text",
            hint: "Load the model with a :tokenizer, or put its tokenizer.json beside the weights"
          )
  end

  defp texts(model, prompt, own, sampling) do
    stop = for text <- List.wrap(own[:stop]), is_binary(text) and text != "", do: text
    prompt = Tokenizer.encode(model.tokenizer, prompt)

    model
    |> tokens(prompt, stop_tokens(model, own), own, sampling)
    |> Tokenizer.decode_stream(model.tokenizer)
    |> until(stop)
  end

  # Ends before the first of these texts. What may be the beginning of one is held back.
  defp until(pieces, []), do: pieces

  defp until(pieces, stop) do
    pieces
    |> Stream.transform(
      fn -> "" end,
      fn piece, held ->
        text = held <> piece

        case :binary.match(text, stop) do
          {at, _} -> {piece(binary_part(text, 0, at)) ++ [:done], ""}
          :nomatch -> split(text, longest_beginning(text, stop))
        end
      end,
      fn held -> {piece(held), ""} end,
      fn _ -> :ok end
    )
    |> Stream.take_while(&(&1 != :done))
  end

  defp piece(""), do: []
  defp piece(text), do: [text]

  defp split(text, held) do
    out = byte_size(text) - held
    {text |> binary_part(0, out) |> piece(), binary_part(text, out, held)}
  end

  # How many bytes at the end of a text may be the beginning of a stop.
  defp longest_beginning(text, stop) do
    longest = stop |> Enum.map(&(byte_size(&1) - 1)) |> Enum.max() |> min(byte_size(text))

    Enum.find(longest..1//-1, 0, fn bytes ->
      ending = binary_part(text, byte_size(text) - bytes, bytes)
      Enum.any?(stop, &String.starts_with?(&1, ending))
    end)
  end
end
