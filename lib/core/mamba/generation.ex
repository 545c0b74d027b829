defmodule Sidewinder.Mamba.Generation do
  @moduledoc false
  # The stream of `Sidewinder.Mamba.generate/3`.

  alias Sidewinder.{Error, Mamba, Native, Options, Tensor, Tokenizer}
  alias Sidewinder.Mamba.Session

  @sampling [:temperature, :top_k, :top_p, :seed]
  @options [:max_tokens, :stop, :ignore_eos, :add_bos] ++ @sampling
  @seeds 0x1_0000_0000_0000_0000

  def generate(%Mamba{} = model, prompt, options) do
    own = settled(options)
    read? = is_binary(prompt)
    prompt = prompt!(model.tokenizer, prompt, own)
    in_vocabulary!(prompt, model.config.vocabulary)
    stops!(own[:stop], read?, model.config.vocabulary)
    tokens = tokens(model, prompt, own)
    if read?, do: texts(tokens, model.tokenizer, prompt, own), else: tokens
  end

  def generate(other, _prompt, _options), do: Mamba.no_model(other)

  @doc false
  # The options of a text, with a seed. They are refused here, not when the first token is asked for.
  def settled(options) do
    own = known!(options, @options)
    count!(own[:max_tokens])
    for name <- [:ignore_eos, :add_bos], do: choice!(name, own[name])
    seed = own[:seed] || :rand.uniform(@seeds) - 1
    own = Keyword.put(own, :seed, seed)
    draw(Tensor.from_list([0], :f32, {1}), own, 0)
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
  # Texts can only end a text, and tokens that there are not would end none.
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

  defp tokens(model, prompt, own) do
    stop = stop_tokens(model, own)
    choices = choices(own)

    next = fn {session, choose} ->
      token = choose.(session)

      if token in stop,
        do: {:halt, session},
        else: {[token], {session, &Session.next(&1, token, choices)}}
    end

    start = fn -> {Session.new(model), &first(&1, prompt, own)} end

    start |> Stream.resource(next, fn _ -> :ok end) |> Stream.take(max_tokens(own))
  end

  @doc false
  # The token that follows a prompt, which the session takes in.
  def first(session, prompt, own),
    do: session |> Session.prefill(prompt, logits: true) |> draw(own, Session.length(session))

  @doc false
  def choices(own), do: Keyword.take(own, @sampling)

  @doc false
  def max_tokens(own), do: own[:max_tokens] || 128

  defp draw(%Tensor{data: data, type: type} = logits, own, place) do
    row = {type, {1, Tensor.elements(logits.shape)}, data}
    sampling = own |> choices() |> sampling()
    [token] = Error.unwrap!(Native.mamba_choose(row, sampling, [place]))
    token
  end

  @doc false
  # The tokens that end a text, of a model or what there is of one. The name of a special token is no text that would
  # come out, so it is one of them.
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

  defp texts(tokens, tokenizer, prompt, own) do
    tokens
    |> Tokenizer.decode_stream(tokenizer, prompt)
    |> until(stop_texts(own))
    |> Stream.take_while(&(&1 != :done))
  end

  @doc false
  # The texts that end a text.
  def stop_texts(own),
    do: for(text <- List.wrap(own[:stop]), is_binary(text) and text != "", do: text)

  @doc false
  # Pieces up to the first of these texts, and then `:done`. What may be the beginning of one is held back.
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
  # What comes out with a piece after what was held back before; nothing after the end, where `nil` is held.
  def until_next(_stop, _piece, nil), do: {[], nil}

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
