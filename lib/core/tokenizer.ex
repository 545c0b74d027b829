defmodule Sidewinder.Tokenizer do
  @moduledoc """
  Converts text to tokens and back: by the `tokenizer.json` of a checkpoint, such as the byte pairs of GPT-NeoX, or
  byte by byte.

      iex> bytes = Sidewinder.Tokenizer.bytes()
      iex> Sidewinder.Tokenizer.encode(bytes, "hé")
      [104, 195, 169]
      iex> Sidewinder.Tokenizer.decode(bytes, [104, 195, 169])
      "hé"
  """

  alias Sidewinder.{Error, Native, Options}

  @enforce_keys [:ref, :vocabulary]
  defstruct [:ref, :vocabulary, :file]

  @typedoc """
  A tokenizer, the size of its vocabulary, and the file that it was read from. In place of a tokenizer it may hold the
  error of a file that could not be read, which is raised upon use.
  """
  @type t :: %__MODULE__{
          ref: reference | {:error, map},
          vocabulary: non_neg_integer,
          file: String.t() | nil
        }

  @doc """
  The tokenizer of a `tokenizer.json`, or of a folder with one.

  Raises `Sidewinder.Error` of kind `:file` where there is none that can be read.
  """
  @spec open(Path.t()) :: t
  def open(path) do
    path = Options.path!(path)
    path |> Native.tokenizer_open() |> from_native(file(path))
  end

  @doc false
  # Like `open/1`, but an error in the file is raised when the tokenizer is used: tokens alone need none.
  def open_for_use(path) do
    case path |> Options.path!() |> Native.tokenizer_open() do
      {:ok, _} = answer -> from_native(answer, file(path))
      {:error, _} = unread -> %__MODULE__{ref: unread, vocabulary: 0, file: file(path)}
    end
  end

  defp file(path),
    do: Path.expand(if File.dir?(path), do: Path.join(path, "tokenizer.json"), else: path)

  @doc false
  def readable?(%__MODULE__{ref: ref}), do: not match?({:error, _}, ref)

  defp ref!(%__MODULE__{ref: {:error, _} = unread}), do: Error.unwrap!(unread)
  defp ref!(%__MODULE__{ref: ref}), do: ref

  @doc """
  The tokenizer whose tokens are bytes.

      iex> Sidewinder.Tokenizer.bytes().vocabulary
      256
  """
  @spec bytes() :: t
  def bytes, do: from_native(Native.tokenizer_open(""), nil)

  defp from_native(answer, file) do
    {ref, vocabulary} = Error.unwrap!(answer)
    %__MODULE__{ref: ref, vocabulary: vocabulary, file: file}
  end

  @doc """
  The tokens of a text. Names of special tokens in it become these tokens.

  Options:

    * `:add_bos` - whether the token that begins texts comes first, `false` by default; `nil` is as the files have it:
      `add_bos_token` in a `tokenizer_config.json` beside `tokenizer.json`, else what the latter's post-processor adds,
      such as `<s>` in the manner of Llama. The token is that of the post-processor, or else `bos_token` of
      `tokenizer_config.json` or `special_tokens_map.json`, or else the first of `<s>`, `<|begin_of_text|>`, `<bos>` and
      `<|endoftext|>` that is a token. A text that begins with that token does not get a second one.

      iex> Sidewinder.Tokenizer.encode(Sidewinder.Tokenizer.bytes(), "hi")
      [104, 105]
  """
  @spec encode(t, String.t(), keyword) :: [non_neg_integer]
  def encode(tokenizer, text, options \\ [])

  def encode(%__MODULE__{} = tokenizer, text, options) when is_binary(text) do
    wanted = options |> Options.known!([:add_bos]) |> Keyword.get(:add_bos, false)
    Options.check!(wanted, wanted in [true, false, nil], :add_bos, "true, false or nil")
    ref = ref!(tokenizer)
    first = Error.unwrap!(Native.tokenizer_beginning(ref, wanted))
    tokens = Error.unwrap!(Native.tokenizer_encode(ref, text))
    if List.starts_with?(tokens, first), do: tokens, else: first ++ tokens
  end

  def encode(%__MODULE__{}, other, _options), do: no_text(other)
  def encode(other, _text, _options), do: no_tokenizer(other)

  defp no_text(other), do: Options.wrong_argument!("text", "a text", other)

  defp no_tokenizer(other),
    do: Options.wrong_argument!("tokenizer", "a Sidewinder.Tokenizer", other)

  @doc """
  The text of tokens; special ones give none.

      iex> Sidewinder.Tokenizer.decode(Sidewinder.Tokenizer.bytes(), [104, 105])
      "hi"
  """
  @spec decode(t, [non_neg_integer]) :: String.t()
  def decode(%__MODULE__{} = tokenizer, tokens) do
    tokens!(tokens)
    Error.unwrap!(Native.tokenizer_decode(ref!(tokenizer), tokens))
  end

  def decode(other, _tokens), do: no_tokenizer(other)

  defp token?(term), do: is_integer(term) and term >= 0 and term < 0x1_0000_0000

  @doc """
  The number of a token by its text, or nil.

      iex> for text <- ["a", "ab"], do: Sidewinder.Tokenizer.token(Sidewinder.Tokenizer.bytes(), text)
      [97, nil]
  """
  @spec token(t, String.t()) :: non_neg_integer | nil
  def token(%__MODULE__{} = tokenizer, text) when is_binary(text),
    do: Error.unwrap!(Native.tokenizer_token(ref!(tokenizer), text))

  def token(%__MODULE__{}, other), do: no_text(other)
  def token(other, _text), do: no_tokenizer(other)

  @doc false
  # The number of a special token, which has no text, or nil.
  def special(%__MODULE__{} = tokenizer, text),
    do: Error.unwrap!(Native.tokenizer_special(ref!(tokenizer), text))

  @doc """
  The token that ends texts, or nil: `eos_token` of a `tokenizer_config.json` or `special_tokens_map.json` beside
  `tokenizer.json`, or else the first of `<|endoftext|>`, `</s>`, `<|end_of_text|>`, `<|im_end|>` and `<eos>` that
  is a token. Raises `Sidewinder.Error` if the files name an unknown one.

      iex> Sidewinder.Tokenizer.eos(Sidewinder.Tokenizer.bytes())
      nil
  """
  @spec eos(t) :: non_neg_integer | nil
  def eos(%__MODULE__{} = tokenizer), do: Error.unwrap!(Native.tokenizer_end(ref!(tokenizer)))
  def eos(other), do: no_tokenizer(other)

  @doc """
  The texts of a stream of tokens that follow others, `before`, piece by piece. All pieces together are the text of all
  tokens without that of `before`, however they are divided; no piece ends within a character, and invalid bytes become a
  U+FFFD.

      iex> bytes = Sidewinder.Tokenizer.bytes()
      iex> [104, 195, 169] |> Sidewinder.Tokenizer.decode_stream(bytes) |> Enum.to_list()
      ["h", "é"]
      iex> [169, 33] |> Sidewinder.Tokenizer.decode_stream(bytes, [104, 195]) |> Enum.to_list()
      ["é", "!"]

  Where the whole text does not begin with that of `before`, because a character was not complete there, the pieces are
  what follows their longest common prefix.

  A piece is emitted when later tokens cannot change it. With byte tokens (`<0xE2>`) that is at the end of a run of them:
  the run is text if all of it is UTF-8, and else a U+FFFD for each byte. A run of more than 256 is emitted in parts.
  """
  @spec decode_stream(Enumerable.t(), t, [non_neg_integer]) :: Enumerable.t()
  def decode_stream(tokens, tokenizer, before \\ [])

  def decode_stream(tokens, %__MODULE__{} = tokenizer, before) do
    tokens!(before)

    Stream.transform(
      tokens,
      fn -> decoding(tokenizer, before) end,
      &decode_next(tokenizer, &1, &2),
      &{decode_rest(tokenizer, &1), nil},
      fn _ -> :ok end
    )
  end

  def decode_stream(_tokens, other, _before), do: no_tokenizer(other)

  @doc false
  # Where the decoding of a stream starts that follows these tokens.
  def decoding(tokenizer, before),
    do: Error.unwrap!(Native.tokenizer_start(ref!(tokenizer), before))

  @doc false
  # The pieces of text, at most one, that a token completes.
  def decode_next(tokenizer, token, window) do
    tokens!([token])
    {text, window} = Error.unwrap!(Native.tokenizer_next(ref!(tokenizer), window, token))
    {piece(text), window}
  end

  @doc false
  # The pieces of text, at most one, that no token completes any more.
  def decode_rest(tokenizer, window),
    do: piece(Error.unwrap!(Native.tokenizer_rest(ref!(tokenizer), window)))

  defp piece(""), do: []
  defp piece(text), do: [text]

  defp tokens!(tokens) do
    unless Options.list?(tokens) and Enum.all?(tokens, &token?/1),
      do: Options.wrong_argument!("tokens", "a list of token numbers", tokens)
  end
end
