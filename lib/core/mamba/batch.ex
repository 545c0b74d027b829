defmodule Sidewinder.Mamba.Batch do
  @moduledoc false
  # Texts that are generated together. Each has a row: its session, the token that was chosen but not yet emitted, and
  # the number of tokens that it may still emit. Rows that continue step in one call, which reads the weights once; each ends on its own.

  alias Sidewinder.Mamba.{Generation, Session}
  alias Sidewinder.Tokenizer

  @doc """
  The row of a request, whose session has processed the prompt. A request has `tokens`, the prompt's; `own`, its options;
  `stop_tokens` and `stop_texts`; `read?`, whether tokens are read as a text, which stop texts need; and `watched`, the
  options of `Sidewinder.Progress`.
  """
  def start(model, %{tokens: prompt, own: own} = request) do
    session = Session.new(model)
    left = Generation.max_tokens(own)
    reading = if request.read?, do: {Tokenizer.decoding(model.tokenizer, prompt), ""}
    token = if left > 0, do: Generation.first(session, prompt, own, request.watched)
    started = %{session: session, token: token, left: left, reading: reading, pieces: []}
    Map.merge(request, started)
  end

  @doc """
  Emits the tokens that were chosen. A row's `token` is then the emitted token, or nil if the row had ended; its
  `pieces` are texts, or tokens where they are not read as a text.
  """
  def say(rows, tokenizer), do: for(row <- rows, do: say_one(row, tokenizer))

  defp say_one(%{token: token, left: left} = row, _) when token == nil or left == 0,
    do: %{row | token: nil, pieces: []}

  defp say_one(%{token: token} = row, tokenizer) do
    if token in row.stop_tokens,
      do: finish(%{row | token: nil, left: 0, pieces: []}, tokenizer),
      else: %{row | left: row.left - 1} |> read(tokenizer) |> finish(tokenizer)
  end

  defp read(%{reading: nil, token: token} = row, _), do: %{row | pieces: [token]}

  defp read(%{reading: {decoding, _held}} = row, tokenizer) do
    {texts, decoding} = Tokenizer.decode_next(tokenizer, row.token, decoding)
    come(%{row | pieces: []}, texts, decoding)
  end

  # A text is held back while it may be the beginning of a stop, which would end the row.
  defp come(%{reading: {_, held}} = row, texts, decoding) do
    next = &Generation.until_next(row.stop_texts, &1, &2)
    {pieces, held} = Enum.flat_map_reduce(texts, held, next)
    left = if :done in pieces, do: 0, else: row.left
    pieces = row.pieces ++ List.delete(pieces, :done)
    %{row | pieces: pieces, reading: {decoding, held}, left: left}
  end

  # At the end, what was held back is emitted.
  defp finish(%{left: 0, reading: {decoding, _}} = row, tokenizer) do
    %{reading: {_, held}} = row = come(row, Tokenizer.decode_rest(tokenizer, decoding), decoding)
    %{row | pieces: row.pieces ++ Enum.reject([held], &(&1 in [nil, ""]))}
  end

  defp finish(row, _tokenizer), do: row

  @doc """
  Chooses the next tokens of the rows that continue, at most `most` of them in one call; nil where none continues.
  """
  def step(rows, most) do
    case Enum.filter(rows, &(&1.token && &1.left > 0)) do
      [] -> nil
      live -> chosen(rows, live |> Enum.chunk_every(most) |> Enum.flat_map(&next/1) |> Map.new())
    end
  end

  # The next tokens of rows by their sessions.
  defp next(live) do
    sessions = for row <- live, do: row.session
    tokens = for row <- live, do: row.token
    choices = for row <- live, do: Generation.choices(row.own)
    Enum.zip(sessions, Session.next(sessions, tokens, choices))
  end

  defp chosen(rows, next),
    do: for(row <- rows, do: %{row | token: next[row.session] || row.token})
end
