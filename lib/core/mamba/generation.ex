defmodule Sidewinder.Mamba.Generation do
  @moduledoc false
  # The stream of `Sidewinder.Mamba.generate/3`.

  alias Sidewinder.{Error, Mamba, Native, Options, Tensor, Tokenizer}
  alias Sidewinder.Mamba.Session

  @sampling [:temperature, :top_k, :top_p, :seed]
  @options [:max_tokens, :stop] ++ @sampling
  @seeds 0x1_0000_0000_0000_0000

  def generate(%Mamba{} = model, prompt, options) do
    own = known!(options, @options)
    count!(own[:max_tokens])
    seed = own[:seed] || :rand.uniform(@seeds) - 1
    own = Keyword.put(own, :seed, seed)
    sampling = own |> Keyword.take(@sampling) |> sampling()
    # Options are refused here, not when the stream is asked for its first token.
    draw(Tensor.from_list([0], :f32, {1}), sampling, 0)

    case prompt do
      text when is_binary(text) ->
        stops!(own[:stop], &(token?(&1) or is_binary(&1)), "tokens and texts")
        texts(model, text, own, sampling)

      tokens ->
        stops!(own[:stop], &token?/1, "tokens, as after a list of tokens")
        tokens(model, tokens, stop_tokens(model, own), own, sampling)
    end
  end

  def generate(other, _prompt, _options), do: Mamba.no_model(other)

  defp known!(options, known),
    do: Options.known!(options, known, hint: "Where a model runs is said when it is loaded")

  defp count!(count) do
    fit = is_nil(count) or (is_integer(count) and count >= 0)
    Options.check!(count, fit, :max_tokens, "a number, not negative")
  end

  defp stops!(nil, _stop?, _what), do: :ok

  defp stops!(stop, stop?, what) do
    all = if is_list(stop), do: stop, else: [stop]
    fit = Options.list?(all) and Enum.all?(all, stop?)
    Options.check!(stop, fit, :stop, "a list of " <> what)
  end

  defp token?(term), do: is_integer(term) and term >= 0

  @doc false
  # What the native library takes; it refuses what is wrong, and draws nothing without a temperature.
  def sampling(options) do
    options
    |> known!(@sampling)
    |> Enum.reject(&match?({_, nil}, &1))
    |> Map.new(fn
      {name, value} when name in [:temperature, :top_p] -> {name, float(value)}
      pair -> pair
    end)
    |> Map.put_new(:temperature, 0.0)
  end

  # Larger ones have no float, and mean nothing.
  defp float(number) when is_integer(number) and abs(number) < 0x1_0000_0000_0000_0000,
    do: number / 1

  defp float(other), do: other

  ## Tokens

  defp tokens(model, prompt, stop, own, sampling) do
    prompt!(prompt, model.config.vocabulary)

    first = fn session ->
      session |> Session.prefill(prompt, logits: true) |> draw(sampling, Session.length(session))
    end

    choices = Keyword.take(own, @sampling)

    next = fn {session, choose} ->
      token = choose.(session)

      if token in stop,
        do: {:halt, session},
        else: {[token], {session, &Session.next(&1, token, choices)}}
    end

    start = fn -> {Session.new(model), first} end

    start |> Stream.resource(next, fn _ -> :ok end) |> Stream.take(own[:max_tokens] || 128)
  end

  defp prompt!(_prompt, 0) do
    Options.wrong_argument!("model", "one with a vocabulary", :backbone,
      hint: "A backbone takes features: see Sidewinder.Mamba.Session"
    )
  end

  defp prompt!(prompt, vocabulary) do
    unless Options.list?(prompt) and prompt != [],
      do: Options.wrong_argument!("prompt", "a text or a list of tokens, not empty", prompt)

    for token <- prompt,
        not (token?(token) and token < vocabulary),
        do: Options.wrong_argument!("prompt", "tokens from 0 to #{vocabulary - 1}", token)
  end

  defp draw(%Tensor{data: data, type: type} = logits, sampling, place) do
    row = {type, {1, Tensor.elements(logits.shape)}, data}
    [token] = Error.unwrap!(Native.mamba_choose(row, sampling, [place]))
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
