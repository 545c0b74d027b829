defmodule Sidewinder.Mamba.Generation do
  @moduledoc false
  # The stream of `Sidewinder.Mamba.generate/3`.

  alias Sidewinder.{Error, Native, Tensor, Tokenizer}
  alias Sidewinder.Mamba.Session

  @sampling [:temperature, :top_k, :top_p, :seed]
  @options [:max_tokens, :stop] ++ @sampling
  @seeds 0x1_0000_0000_0000_0000

  def generate(model, prompt, options) do
    own = settled(options)
    read? = is_binary(prompt)
    prompt = prompt!(model.tokenizer, prompt)
    tokens = tokens(model, prompt, own)
    if read?, do: texts(tokens, model.tokenizer, own), else: tokens
  end

  @doc false
  # The options of a text, with a seed. They are refused here, not when the first token is asked for.
  def settled(options) do
    own = known!(options, @options)
    seed = own[:seed] || :rand.uniform(@seeds) - 1
    own = Keyword.put(own, :seed, seed)
    draw(Tensor.from_list([0], :f32, {1}), own, 0)
    own
  end

  defp known!(options, known) do
    for {name, _} <- options, name not in known, do: unknown(name, known)
    options
  end

  defp unknown(name, known) do
    raise Error.new(:option, to_string(name),
            expected: "an option out of #{Enum.join(known, ", ")}",
            got: to_string(name),
            hint: "Where a model runs is said when it is loaded"
          )
  end

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

  defp float(number) when is_integer(number), do: number / 1
  defp float(other), do: other

  ## Tokens

  @doc false
  # The tokens of a prompt.
  def prompt!(nil, text) when is_binary(text) do
    raise Error.new(:argument, "prompt",
            expected: "a list of tokens, for the model has no tokenizer",
            got: "a text",
            hint: "Load the model with a :tokenizer, or put its tokenizer.json beside the weights"
          )
  end

  def prompt!(tokenizer, prompt) do
    tokens = if is_binary(prompt), do: Tokenizer.encode(tokenizer, prompt), else: prompt
    if is_list(tokens) and tokens != [], do: tokens, else: no_prompt(prompt)
  end

  defp no_prompt(prompt) do
    raise Error.new(:argument, "prompt",
            expected: "a text or a list of tokens, not empty",
            got: Error.show(prompt)
          )
  end

  defp tokens(model, prompt, own) do
    stop = stop_tokens(model.tokenizer, own)
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
  # The tokens that end a text.
  def stop_tokens(tokenizer, own) do
    case own[:stop] do
      nil -> List.wrap(tokenizer && Tokenizer.token(tokenizer, "<|endoftext|>"))
      stop -> for token <- List.wrap(stop), is_integer(token), do: token
    end
  end

  ## Texts

  defp texts(tokens, tokenizer, own) do
    tokens
    |> Tokenizer.decode_stream(tokenizer)
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
