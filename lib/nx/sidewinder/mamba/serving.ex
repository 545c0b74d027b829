defmodule Sidewinder.Mamba.Serving do
  @moduledoc false
  # `Sidewinder.Mamba.serving/2`. Batches of Nx have rows of one shape: a request is the bytes of a term, and tokens are
  # padded with -1.

  @behaviour Nx.Serving

  alias Nx.Serving
  alias Sidewinder.{Error, Mamba, Tokenizer}
  alias Sidewinder.Mamba.{Batch, Generation}

  @own [stream: false, max_prompt: 8192]
  # Bytes for a request's options, in addition to the longest prompt.
  @room 1024
  @none -1

  def new([%Mamba{config: %{vocabulary: vocabulary}} = model | others] = models, options) do
    for other <- others, other.config != model.config, do: wrong("models", "copies of one", other)
    {own, options} = Keyword.split(options, Keyword.keys(@own))
    own = Map.new(Keyword.merge(@own, own))
    unless vocabulary > 0, do: wrong("model", "a language model", "a backbone")
    unless is_boolean(own.stream), do: wrong(:stream, "true or false", own.stream)
    options = Keyword.put_new(options, :max_tokens, Generation.max_tokens([]))
    size!(:max_prompt, own.max_prompt)
    size!(:max_tokens, options[:max_tokens])
    Generation.settled(options)
    Generation.stops!(options[:stop], true, vocabulary)
    # Nx keeps the clients' functions for the serving's lifetime, so these have no model.
    clients =
      own
      |> Map.merge(%{vocabulary: vocabulary, options: options})
      |> Map.merge(Map.take(model, [:tokenizer, :ends]))

    __MODULE__
    |> Serving.new({models, options[:max_tokens]})
    # With `partitions: true`, as many as there are models.
    |> Serving.defn_options(compiler: Nx.Defn.Evaluator, max_concurrency: length(models))
    |> Serving.client_preprocessing(&batch(clients, &1))
    |> Serving.client_postprocessing(&answer(clients, &1, &2))
    |> then(&if own.stream, do: Serving.streaming(&1, hooks: [:token]), else: &1)
  end

  ## In the client

  defp batch(clients, input) do
    many? = many?(input)
    if many? and clients.stream, do: wrong("request", "one, where answers are streams", input)
    requests = for one <- if(many?, do: input, else: [input]), do: request(clients, one)
    rows = for request <- requests, do: row(request, clients)
    {Nx.Batch.stack(rows), {many?, requests}}
  end

  defp many?([first | _]), do: not is_integer(first)
  defp many?(_), do: false

  defp request(clients, {prompt, options}) do
    unless Keyword.keyword?(options), do: wrong("options", "a keyword list", options)
    own = clients.options |> Keyword.merge(options) |> Generation.settled()
    most = clients.options[:max_tokens]

    unless own[:max_tokens] in 1..most,
      do: wrong(:max_tokens, "1 to #{most}, as the serving has it", own[:max_tokens])

    prompt!(clients, prompt, own)
  end

  defp request(clients, prompt), do: request(clients, {prompt, []})

  defp prompt!(%{tokenizer: tokenizer, vocabulary: vocabulary} = clients, prompt, own) do
    tokens = Generation.prompt!(tokenizer, prompt, own)

    for token <- tokens,
        token not in 0..(vocabulary - 1),
        do: wrong("tokens", "numbers from 0 to #{vocabulary - 1}", token)

    unless length(tokens) <= clients.max_prompt do
      wrong("prompt", "at most #{clients.max_prompt} tokens, :max_prompt", "#{length(tokens)}")
    end

    # The serving's stop texts apply to prompts that are texts.
    texts? = is_binary(prompt) or own[:stop] == clients.options[:stop]
    Generation.stops!(own[:stop], texts?, vocabulary)

    %{
      caller: self(),
      tokens: tokens,
      text?: is_binary(prompt),
      own: own,
      stop_tokens: Generation.stop_tokens(clients, own),
      stop_texts: if(is_binary(prompt), do: Generation.stop_texts(own), else: [])
    }
  end

  defp row(request, %{max_prompt: max_prompt}) do
    packed = for token <- request.tokens, into: <<>>, do: <<token::32>>
    term = :erlang.term_to_binary(%{request | tokens: packed})
    room = 4 * max_prompt + @room - byte_size(term)
    if room < 0, do: wrong("options", "less than #{@room} bytes of them", request.own)
    Nx.from_binary(<<term::binary, 0::size(room)-unit(8)>>, :u8, backend: Nx.BinaryBackend)
  end

  defp answer(%{stream: true} = clients, events, {_many?, [request]}) do
    events
    |> Stream.flat_map(fn
      {:token, token} -> tokens(token)
      {:batch, _all, _metadata} -> []
    end)
    |> read(request, clients)
  end

  defp answer(clients, {rows, _metadata}, {many?, requests}) do
    answers =
      for {request, i} <- Enum.with_index(requests) do
        read = rows[i] |> tokens() |> read(request, clients)
        if request.text?, do: Enum.join(read), else: read
      end

    if many?, do: answers, else: hd(answers)
  end

  defp tokens(tensor), do: tensor |> Nx.to_flat_list() |> Enum.take_while(&(&1 != @none))

  defp read(tokens, %{text?: false}, _clients), do: tokens

  # Streams are read to their end after a stop: otherwise Nx would leave later messages in the mailbox.
  defp read(tokens, request, clients) do
    tokens
    |> Tokenizer.decode_stream(clients.tokenizer, request.tokens)
    |> Generation.until(request.stop_texts)
    |> Stream.reject(&(&1 == :done))
  end

  ## In the serving process

  @impl true
  def init(type, {models, max_tokens}, partitions) do
    if type == :process and length(partitions) < length(models),
      do: wrong(:partitions, "true, where a serving has several models", false)

    hooks = for options <- partitions, do: options[:hooks][:token]
    {:ok, %{models: List.to_tuple(models), max_tokens: max_tokens, hooks: hooks}}
  end

  @impl true
  def handle_batch(
        batch,
        partition,
        %{models: models, max_tokens: max_tokens, hooks: hooks} = state
      ) do
    model = elem(models, partition)
    tell = Enum.at(hooks, partition) || fn _ -> :ok end
    {:execute, fn -> {generate(model, batch, tell, max_tokens), :done} end, state}
  end

  defp generate(model, batch, tell, max_tokens) do
    rows = for request <- requests(batch), do: start(model, request)
    rows = go_on(rows, model.tokenizer, tell)
    for row <- rows, do: Process.demonitor(row.caller, [:flush])

    numbers =
      for %{said: said} <- rows, token <- padded(Enum.reverse(said), max_tokens), do: token

    numbers |> integers() |> Nx.reshape({length(rows), max_tokens})
  end

  defp requests(batch) do
    tensor = Nx.Defn.jit_apply(&Function.identity/1, [batch], compiler: Nx.Defn.Evaluator)
    size = div(Nx.size(tensor), batch.size)
    for <<row::binary-size(size) <- Nx.to_binary(tensor)>>, do: :erlang.binary_to_term(row)
  end

  defp start(model, %{tokens: packed} = request) do
    prompt = for <<token::32 <- packed>>, do: token

    request =
      Map.merge(%{request | tokens: prompt}, %{
        caller: Process.monitor(request.caller),
        read?: request.stop_texts != [],
        watched: []
      })

    model |> Batch.start(request) |> Map.put(:said, [])
  end

  # Sends the tokens that rows emit, until all are done.
  defp go_on(rows, tokenizer, tell) do
    rows = for row <- Batch.say(rows, tokenizer), do: %{row | said: said(row)}
    tell.(integers(for row <- rows, do: row.token || @none))
    rows = Enum.map(rows, &while_asked/1)
    if next = Batch.step(rows, length(rows)), do: go_on(next, tokenizer, tell), else: rows
  end

  # A row ends with the process that asked for it.
  defp while_asked(%{caller: monitor} = row) do
    receive do
      {:DOWN, ^monitor, :process, _pid, _reason} -> %{row | token: nil, left: 0}
    after
      0 -> row
    end
  end

  defp said(%{token: nil, said: said}), do: said
  defp said(%{token: token, said: said}), do: [token | said]

  defp integers(numbers), do: Nx.tensor(numbers, type: :s64, backend: Nx.BinaryBackend)

  defp padded(tokens, size), do: tokens ++ List.duplicate(@none, size - length(tokens))

  defp size!(name, size) do
    unless is_integer(size) and size > 0, do: wrong(name, "a positive number", size)
  end

  defp wrong(name, expected, got) do
    got = if is_binary(got), do: got, else: Error.show(got)
    kind = if is_atom(name), do: :option, else: :argument
    raise Error.new(kind, to_string(name), expected: expected, got: got)
  end
end
