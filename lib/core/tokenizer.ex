defmodule Sidewinder.Tokenizer do
  @moduledoc """
  From text to tokens and back: by the `tokenizer.json` of a checkpoint, such as the byte pairs of GPT-NeoX, or
  byte by byte.

      iex> bytes = Sidewinder.Tokenizer.bytes()
      iex> Sidewinder.Tokenizer.encode(bytes, "hé")
      [104, 195, 169]
      iex> Sidewinder.Tokenizer.decode(bytes, [104, 195, 169])
      "hé"
  """

  alias Sidewinder.{Error, Native, Options}

  @enforce_keys [:ref, :vocabulary]
  defstruct [:ref, :vocabulary]

  @typedoc "A tokenizer with so many tokens; or the error of a file that could not be read, which is raised upon use."
  @type t :: %__MODULE__{ref: reference | {:error, map}, vocabulary: non_neg_integer}

  @doc """
  The tokenizer of a `tokenizer.json`, or of a folder with one.

  Raises `Sidewinder.Error` of kind `:file` where there is none that can be read.
  """
  @spec open(Path.t()) :: t
  def open(path), do: path |> Options.path!() |> Native.tokenizer_open() |> from_native()

  @doc false
  # The same, but what is wrong with the file is raised when the tokenizer is used: tokens alone need none.
  def open_for_use(path) do
    case path |> Options.path!() |> Native.tokenizer_open() do
      {:ok, _} = answer -> from_native(answer)
      {:error, _} = unread -> %__MODULE__{ref: unread, vocabulary: 0}
    end
  end

  @doc false
  def readable?(%__MODULE__{ref: ref}), do: not match?({:error, _}, ref)

  defp ref!(%__MODULE__{ref: {:error, _} = unread}), do: Error.unwrap!(unread)
  defp ref!(%__MODULE__{ref: ref}), do: ref

  @doc "The tokenizer whose tokens are bytes."
  @spec bytes() :: t
  def bytes, do: from_native(Native.tokenizer_open(""))

  defp from_native(answer) do
    {ref, vocabulary} = Error.unwrap!(answer)
    %__MODULE__{ref: ref, vocabulary: vocabulary}
  end

  @doc "The tokens of a text. Special tokens are known by their names in it, and none are added."
  @spec encode(t, String.t()) :: [non_neg_integer]
  def encode(%__MODULE__{} = tokenizer, text) when is_binary(text),
    do: Error.unwrap!(Native.tokenizer_encode(ref!(tokenizer), text))

  def encode(%__MODULE__{}, other), do: no_text(other)
  def encode(other, _text), do: no_tokenizer(other)

  defp no_text(other), do: Options.wrong_argument!("text", "a text", other)

  defp no_tokenizer(other),
    do: Options.wrong_argument!("tokenizer", "a Sidewinder.Tokenizer", other)

  @doc "The text of tokens; special ones give none."
  @spec decode(t, [non_neg_integer]) :: String.t()
  def decode(%__MODULE__{} = tokenizer, tokens) do
    unless Options.list?(tokens) and Enum.all?(tokens, &token?/1),
      do: Options.wrong_argument!("tokens", "a list of token numbers", tokens)

    Error.unwrap!(Native.tokenizer_decode(ref!(tokenizer), tokens))
  end

  def decode(other, _tokens), do: no_tokenizer(other)

  defp token?(term), do: is_integer(term) and term >= 0 and term < 0x1_0000_0000

  @doc "The number of a token by its text, or nil."
  @spec token(t, String.t()) :: non_neg_integer | nil
  def token(%__MODULE__{} = tokenizer, text) when is_binary(text),
    do: Error.unwrap!(Native.tokenizer_token(ref!(tokenizer), text))

  def token(%__MODULE__{}, other), do: no_text(other)
  def token(other, _text), do: no_tokenizer(other)

  # Who waits for more tokens than this for the rest of a character waits for what is none.
  @longest 8

  @doc """
  The texts of a stream of tokens, piece by piece; no piece ends within a character, and for bytes that are none
  there is a U+FFFD.

      iex> bytes = Sidewinder.Tokenizer.bytes()
      iex> [104, 195, 169] |> Sidewinder.Tokenizer.decode_stream(bytes) |> Enum.to_list()
      ["h", "é"]
  """
  @spec decode_stream(Enumerable.t(), t) :: Enumerable.t()
  def decode_stream(tokens, %__MODULE__{} = tokenizer) do
    Stream.transform(
      tokens,
      fn -> decoding() end,
      &decode_next(tokenizer, &1, &2),
      &decode_rest(tokenizer, &1),
      fn _ -> :ok end
    )
  end

  def decode_stream(_tokens, other), do: no_tokenizer(other)

  @doc false
  # Where the decoding of a stream starts: no tokens of a last piece, and none held back.
  def decoding, do: {[], []}

  @doc false
  # The pieces of text that a token completes. A token's text may depend on the one before: the tokens of the last piece
  # are decoded along.
  def decode_next(tokenizer, token, {last, held}) do
    held = held ++ [token]
    text = after_last(tokenizer, last, held)

    if not within?(text) or length(held) > @longest,
      do: {piece(text), {held, []}},
      else: {[], {last, held}}
  end

  defp decode_rest(_tokenizer, {_last, []}), do: {[], nil}
  defp decode_rest(tokenizer, {last, held}), do: {piece(after_last(tokenizer, last, held)), nil}

  defp after_last(tokenizer, last, held) do
    before = decode(tokenizer, last)
    all = decode(tokenizer, last ++ held)
    start = byte_size(before)

    if String.starts_with?(all, before),
      do: binary_part(all, start, byte_size(all) - start),
      else: decode(tokenizer, held)
  end

  # Whether a text ends within a character.
  defp within?(text) do
    case :unicode.characters_to_binary(text) do
      {:error, _good, <<_byte, rest::binary>>} -> within?(rest)
      {:incomplete, _good, _rest} -> true
      good -> String.ends_with?(good, "\uFFFD")
    end
  end

  defp piece(""), do: []
  defp piece(text), do: [valid(text)]

  defp valid(text) do
    case :unicode.characters_to_binary(text) do
      {:error, good, <<_byte, rest::binary>>} -> good <> "\uFFFD" <> valid(rest)
      {:incomplete, good, _rest} -> good <> "\uFFFD"
      good -> good
    end
  end
end
