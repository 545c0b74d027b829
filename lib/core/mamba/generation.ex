defmodule Sidewinder.Mamba.Generation do
  @moduledoc false
  # The streams of `Sidewinder.Mamba.generate/3`.

  alias Sidewinder.{Error, Mamba, Native, Options, Progress, Tensor, Tokenizer}
  alias Sidewinder.Mamba.{Batch, Session}

  @sampling [:temperature, :top_k, :top_p, :seed, :repetition_penalty]
  @options [:max_tokens, :stop, :ignore_eos, :add_bos] ++ @sampling
  @seeds 0x1_0000_0000_0000_0000

  def generate(%Mamba{} = model, [first | _] = prompts, options) when not is_integer(first) do
    unless Options.list?(prompts) and Enum.all?(prompts, &(is_binary(&1) or is_list(&1))),
      do: Options.wrong_argument!("prompt", "texts, or lists of tokens, in a list", prompts)

    stream(model, for(prompt <- prompts, do: request(model, prompt, options)))
  end

  def generate(%Mamba{} = model, prompt, options),
    do: model |> stream([request(model, prompt, options)]) |> Stream.map(&elem(&1, 1))

  def generate(other, _prompt, _options), do: Mamba.no_model(other)

  # The requests that `Sidewinder.Mamba.Batch` takes.
  defp request(model, prompt, options) do
    options = known!(options, @options ++ Progress.options())
    {watched, own} = Keyword.split(options, Progress.options())
    own = settled(own)
    read? = is_binary(prompt)
    tokens = prompt!(model.tokenizer, prompt, own)
    in_vocabulary!(tokens, model.config.vocabulary)
    stops!(own[:stop], read?, model.config.vocabulary)
    ends = %{stop_tokens: stop_tokens(model, own), stop_texts: stop_texts(own)}
    Map.merge(ends, %{tokens: tokens, own: own, read?: read?, watched: watched})
  end

  # Pieces of texts, or tokens, with the indices of their prompts.
  defp stream(model, requests) do
    start = fn -> {:prompts, Enum.with_index(requests)} end
    Stream.resource(start, &go_on(model, &1), fn _ -> :ok end)
  end

  defp go_on(model, {:prompts, requests}) do
    rows = for {request, i} <- requests, do: model |> Batch.start(request) |> Map.put(:index, i)
    said(model, rows)
  end

  defp go_on(model, rows) do
    for row <- rows, do: Progress.go_on!(row.watched)
    # Each equals its text generated alone, bit by bit where the model allows it.
    case Batch.step(rows, Native.mamba_alike(model.ref)) do
      nil -> {:halt, rows}
      rows -> said(model, rows)
    end
  end

  # Rows that have ended drop their sessions, so that their memory can be freed.
  defp said(model, rows) do
    rows = Batch.say(rows, model.tokenizer)
    pieces = for row <- rows, piece <- row.pieces, do: {row.index, piece}
    {pieces, Enum.filter(rows, & &1.token)}
  end

  @doc false
  # The options of a text, with a seed. Wrong ones raise here, not when the first token is taken.
  def settled(options) do
    own = known!(options, @options)
    count!(own[:max_tokens])
    for name <- [:ignore_eos, :add_bos], do: choice!(name, own[name])
    seed = own[:seed] || :rand.uniform(@seeds) - 1
    own = Keyword.put(own, :seed, seed)
    {} = own |> choices() |> sampling() |> Native.mamba_sampling() |> Error.unwrap!()
    own
  end

  defp known!(options, known),
    do: Options.known!(options, known, hint: "Where a model runs is said when it is loaded")

  defp count!(count) do
    fit = is_nil(count) or (is_integer(count) and count >= 0)
    Options.check!(count, fit, :max_tokens, "a number, not negative")
  end

  defp choice!(name, choice),
    do: Options.check!(choice, choice in [nil, true, false], name, "true or false")

  @doc false
  # Stop texts need a prompt that is a text, and a token outside of the vocabulary would never stop.
  def stops!(nil, _read?, _vocabulary), do: :ok

  def stops!(stop, read?, vocabulary) do
    all = if is_list(stop), do: stop, else: [stop]
    ends? = &((token?(&1) and &1 < vocabulary) or (read? and is_binary(&1)))
    fit = Options.list?(all) and Enum.all?(all, ends?)
    what = if read?, do: " and texts", else: ", as after a list of tokens"
    Options.check!(stop, fit, :stop, "a list of tokens below #{vocabulary}" <> what)
  end

  defp token?(term), do: is_integer(term) and term >= 0

  @doc false
  # The options of the native library. It refuses wrong ones, and draws no token without a temperature.
  def sampling(options) do
    options
    |> known!(@sampling)
    |> Enum.reject(&match?({_, nil}, &1))
    |> Map.new(fn {name, value} -> {name, typed!(name, value)} end)
    |> Map.put_new(:temperature, 0.0)
  end

  defp typed!(:seed, seed) do
    fit = is_integer(seed) and seed >= 0 and seed < @seeds
    Options.check!(seed, fit, :seed, "a whole number from 0 to #{@seeds - 1}")
  end

  defp typed!(:top_k, count) do
    fit = is_integer(count) and count > 0 and count < @seeds
    Options.check!(count, fit, :top_k, "a positive whole number below #{@seeds}")
  end

  # Larger integers have no float.
  defp typed!(name, number) do
    fit = is_float(number) or (is_integer(number) and abs(number) < @seeds)
    Options.check!(number, fit, name, "a number") / 1
  end

  ## Tokens

  @doc false
  # The tokens of a prompt. A list of them is taken as it is.
  def prompt!(nil, text, _own) when is_binary(text) do
    raise Error.new(:argument, "prompt",
            expected: "a list of tokens, for the model has no tokenizer",
            got: "a text",
            hint: "Load the model with a :tokenizer, or put its tokenizer.json beside the weights"
          )
  end

  def prompt!(tokenizer, prompt, own) do
    tokens =
      if is_binary(prompt),
        do: Tokenizer.encode(tokenizer, prompt, add_bos: own[:add_bos]),
        else: prompt

    unless Options.list?(tokens) and tokens != [],
      do: Options.wrong_argument!("prompt", "a text or a list of tokens, not empty", prompt)

    tokens
  end

  @doc false
  def in_vocabulary!(_prompt, 0) do
    Options.wrong_argument!("model", "one with a vocabulary", :backbone,
      hint: "A backbone takes features: see Sidewinder.Mamba.Session"
    )
  end

  def in_vocabulary!(prompt, vocabulary) do
    for token <- prompt,
        not (token?(token) and token < vocabulary),
        do: Options.wrong_argument!("prompt", "tokens from 0 to #{vocabulary - 1}", token)
  end

  @doc false
  # The token that follows a prompt, which the session takes in; `watched` are options of `Sidewinder.Progress`.
  def first(session, prompt, own, watched),
    do: session |> Session.prefill(prompt, [logits: true] ++ watched) |> draw(session, own)

  @doc false
  def choices(own), do: Keyword.take(own, @sampling)

  @doc false
  def max_tokens(own), do: own[:max_tokens] || 128

  defp draw(logits, session, own) do
    sampling = own |> choices() |> sampling()
    Error.unwrap!(Native.mamba_choose(session.ref, Tensor.to_native(logits), sampling))
  end

  @doc false
  # The tokens that end a text. The name of a special token is never part of a text, so it stands for its token.
  def stop_tokens(%{tokenizer: tokenizer} = model, own) do
    given = for token <- List.wrap(own[:stop]), is_integer(token), do: token
    texts = if tokenizer, do: stop_texts(own), else: []
    named = for text <- texts, token = Tokenizer.special(tokenizer, text), do: token
    Enum.uniq(given ++ named ++ if(own[:ignore_eos], do: [], else: ends(model)))
  end

  defp ends(%{ends: %Error{} = error}), do: raise(error)
  defp ends(%{ends: nil, tokenizer: nil}), do: []

  # Tokens alone do not need a tokenizer that can be read.
  defp ends(%{ends: nil, tokenizer: tokenizer}),
    do: if(Tokenizer.readable?(tokenizer), do: List.wrap(Tokenizer.eos(tokenizer)), else: [])

  defp ends(%{ends: ends}), do: ends

  ## Texts

  @doc false
  # The texts that end a text.
  def stop_texts(own),
    do: for(text <- List.wrap(own[:stop]), is_binary(text) and text != "", do: text)

  @doc false
  # Pieces up to the first of these texts, and then `:done`. A possible beginning of one is held back.
  def until(pieces, []), do: pieces

  def until(pieces, stop) do
    Stream.transform(
      pieces,
      fn -> "" end,
      &until_next(stop, &1, &2),
      fn held -> {held |> List.wrap() |> Enum.flat_map(&piece/1), nil} end,
      fn _ -> :ok end
    )
  end

  @doc false
  # The pieces to emit for a piece and the text held back before it: none after the end, where `nil` is held.
  def until_next(_stop, _piece, nil), do: {[], nil}
  def until_next([], piece, held), do: {piece(held <> piece), ""}

  def until_next(stop, piece, held) do
    text = held <> piece

    case :binary.match(text, stop) do
      {at, _} -> {piece(binary_part(text, 0, at)) ++ [:done], nil}
      :nomatch -> split(text, longest_beginning(text, stop))
    end
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
