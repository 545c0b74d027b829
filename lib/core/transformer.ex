defmodule Sidewinder.Transformer do
  @moduledoc """
  A causal language model of transformer blocks:

      x = embedding[tokens] + sinusoidal positions           or without them, if blocks rotate
      x = transformer_block(x; block)                        for each block
      logits = linear(layer_norm(x; ln_w, ln_b), output)

  A sequence is run at once (`forward/3`), or in parts over a cache that keeps what attention needs of all
  tokens before (`prefill/4`, `decode/4`): logits are the same, row for row, for any parts. `generate/3`
  returns a stream of tokens.

  In the shapes D is the width of the model, V the size of its vocabulary, B the batch and L the length.
  """

  alias Sidewinder.{Error, KVCache, Ops, RandomInputs, Tensor}
  alias Sidewinder.Kernel.{Attention, NN}

  @enforce_keys [:embedding, :blocks, :ln_w, :ln_b, :output, :options]
  defstruct [:embedding, :blocks, :ln_w, :ln_b, :output, :options]

  @type t :: %__MODULE__{
          embedding: Tensor.t(),
          blocks: [Sidewinder.Kernel.weights()],
          ln_w: Tensor.t(),
          ln_b: Tensor.t(),
          output: Tensor.t(),
          options: keyword
        }

  @typedoc "Token numbers from 0 to V - 1: a list for each sequence of the batch, all of one length."
  @type tokens :: [[non_neg_integer]]

  @typedoc "What attention needs of the `length` tokens so far: a cache for each block."
  @type state :: %{caches: [KVCache.t()], length: non_neg_integer}

  @weights [:embedding, :blocks, :ln_w, :ln_b]
  @options [:heads, :rope_theta, :pairing, :eps]

  @doc """
  A model of these weights: a map of

    * `:embedding` - `{V, D}`
    * `:blocks` - a list of the weights of `Sidewinder.Kernel.Attention.transformer_block/3`
    * `:ln_w`, `:ln_b` - `{D}`, of the last norm
    * `:output` - `{V, D}`, the embedding by default

  Options: `:heads`, `:rope_theta`, `:pairing` and `:eps` as in `transformer_block/3`. Without a `:rope_theta`
  the model has sinusoidal positions.

  Raises `Sidewinder.Error` for weights and options that are missing or unknown.

      iex> model = Sidewinder.Transformer.random(layers: 1, width: 8, heads: 2, vocabulary: 11)
      iex> weights = Map.take(model, [:embedding, :blocks, :ln_w, :ln_b, :output])
      iex> Sidewinder.Transformer.new(weights, heads: 2) == model
      true
  """
  @spec new(map, keyword) :: t
  def new(weights, options \\ [])

  def new(%{} = weights, options) do
    for name <- Map.keys(weights) -- [:output | @weights],
        do: unknown("weights", name, [:output | @weights])

    for name <- @weights, weights[name] == nil, do: missing(name)
    for {name, _} <- options, name not in @options, do: unknown("options", name, @options)
    %{embedding: embedding, blocks: blocks} = weights
    unless match?(%Tensor{shape: {_, _}}, embedding), do: wrong_embedding(embedding)
    unless is_list(blocks) and Enum.all?(blocks, &is_map/1), do: wrong_blocks(blocks)
    heads!(options[:heads] || 1, elem(embedding.shape, 1))

    %__MODULE__{
      # Its rows are gathered there.
      embedding: Tensor.to_host(embedding),
      blocks: blocks,
      ln_w: weights.ln_w,
      ln_b: weights.ln_b,
      output: weights[:output] || embedding,
      options: options
    }
  end

  def new(other, _options) do
    raise Error.new(:argument, "weights", expected: "a map", got: Error.show(other))
  end

  @doc """
  A model of random weights, normally distributed with a deviation of `sqrt(2 / in)`; norms start at 1 and 0.

  Options: `:layers`, `:width`, `:heads` and `:vocabulary`, which must be given; `:hidden` of the feed-forward
  layers, four times the width by default, `:type`, `:f32` by default, `:seed`, and those of `new/2`.

      iex> model = Sidewinder.Transformer.random(layers: 1, width: 8, heads: 2, vocabulary: 11)
      iex> Sidewinder.Transformer.forward(model, [[1, 2, 3]]).shape
      {1, 3, 11}
  """
  @spec random(keyword) :: t
  def random(options) do
    {own, options} = Keyword.split(options, [:layers, :width, :vocabulary, :hidden, :type, :seed])
    [layers, width, vocabulary] = for name <- [:layers, :width, :vocabulary], do: size!(own, name)
    hidden = own[:hidden] || 4 * width
    type = own[:type] || :f32
    normal = &normal(&1, type, {own[:seed] || 1, &2})

    norm =
      &Tensor.from_list(List.duplicate(&1, width), Ops.type(%{precision: "wide"}, type), {width})

    block = fn layer ->
      %{
        wqkv: normal.({3 * width, width}, {layer, :wqkv}),
        wo: normal.({width, width}, {layer, :wo}),
        wg: normal.({hidden, width}, {layer, :wg}),
        wu: normal.({hidden, width}, {layer, :wu}),
        wd: normal.({width, hidden}, {layer, :wd}),
        ln1_w: norm.(1),
        ln1_b: norm.(0),
        ln2_w: norm.(1),
        ln2_b: norm.(0)
      }
    end

    weights = %{
      embedding: normal.({vocabulary, width}, :embedding),
      blocks: for(layer <- 1..layers//1, do: block.(layer)),
      ln_w: norm.(1),
      ln_b: norm.(0),
      output: normal.({vocabulary, width}, :output)
    }

    new(weights, options)
  end

  defp normal({_rows, columns} = shape, type, seed),
    do: RandomInputs.normal(shape, type, :math.sqrt(2 / max(columns, 1)), seed)

  @doc """
  The model with its weights on a device; the embedding, whose rows are gathered, stays on the host.

      iex> model = Sidewinder.Transformer.random(layers: 1, width: 8, heads: 2, vocabulary: 11)
      iex> Sidewinder.Transformer.to_device(model, :host) == model
      true
  """
  @spec to_device(t, Tensor.device()) :: t
  def to_device(%__MODULE__{} = model, device) do
    move = &Tensor.to_device(&1, device)

    blocks =
      for block <- model.blocks,
          do: Map.new(block, fn {name, weight} -> {name, weight && move.(weight)} end)

    %{
      model
      | blocks: blocks,
        ln_w: move.(model.ln_w),
        ln_b: move.(model.ln_b),
        output: move.(model.output)
    }
  end

  @doc """
  The logits of the token after each token, `{B, L, V}`, of whole sequences.

  `options` are those of `Sidewinder.Kernel`. Raises `Sidewinder.Error`, of kind `:argument` for invalid
  tokens.

      iex> model = Sidewinder.Transformer.random(layers: 1, width: 8, heads: 2, vocabulary: 11)
      iex> Sidewinder.Transformer.forward(model, [[1, 2, 3], [4, 5, 6]]).shape
      {2, 3, 11}
  """
  @spec forward(t, tokens, keyword) :: Tensor.t()
  def forward(%__MODULE__{} = model, tokens, options \\ []) do
    x = embed(model, tokens, 0, options)
    run = &Attention.transformer_block(&2, &1, block_options(model, options))
    model.blocks |> Enum.reduce(x, run) |> logits(model, options)
  end

  @doc """
  Processes tokens without computing logits. Returns the state after them and after the tokens of `state`, none
  by default.

      iex> model = Sidewinder.Transformer.random(layers: 1, width: 8, heads: 2, vocabulary: 11)
      iex> Sidewinder.Transformer.prefill(model, [[1, 2, 3]]).length
      3
  """
  @spec prefill(t, tokens, state | nil, keyword) :: state
  def prefill(%__MODULE__{} = model, tokens, state \\ nil, options \\ []) do
    {_x, state} = blocks(model, tokens, state, options)
    state
  end

  @doc """
  Processes tokens, usually one. Returns the logits of the token after each, `{B, L, V}`, and the new state. The given
  state is unchanged, and can be continued again.

      iex> alias Sidewinder.{Tensor, Transformer}
      iex> model = Transformer.random(layers: 2, width: 8, heads: 2, vocabulary: 11)
      iex> state = Transformer.prefill(model, [[1, 2]])
      iex> {logits, state} = Transformer.decode(model, [[3]], state)
      iex> whole = Transformer.forward(model, [[1, 2, 3]])
      iex> last = Enum.take(Tensor.to_list(whole), -11)
      iex> {state.length, Enum.zip_with(Tensor.to_list(logits), last, &(abs(&1 - &2) < 1.0e-5)) |> Enum.all?()}
      {3, true}
  """
  @spec decode(t, tokens, state | nil, keyword) :: {Tensor.t(), state}
  def decode(%__MODULE__{} = model, tokens, state, options \\ []) do
    {x, state} = blocks(model, tokens, state, options)
    {logits(x, model, options), state}
  end

  @doc """
  A stream of the tokens that follow a prompt, a list of at least one token.

  Options besides those of `Sidewinder.Kernel`:

    * `:max_tokens` - how many, 128 by default
    * `:stop` - a token that ends the stream; it is not emitted
    * `:choose` - a function from the logits of a token, a list of V numbers, to the next token; that of the
      largest by default

      iex> model = Sidewinder.Transformer.random(layers: 1, width: 8, heads: 2, vocabulary: 11)
      iex> model |> Sidewinder.Transformer.generate([1, 2, 3], max_tokens: 5) |> Enum.count()
      5
  """
  @spec generate(t, [non_neg_integer], keyword) :: Enumerable.t()
  def generate(%__MODULE__{} = model, prompt, options \\ []) do
    unless is_list(prompt) and prompt != [],
      do: wrong_tokens("a list of tokens, not empty", prompt)

    {own, options} = Keyword.split(options, [:max_tokens, :stop, :choose])
    choose = own[:choose] || (&largest/1)
    {before, last} = Enum.split(prompt, -1)

    next = fn {tokens, state} ->
      {logits, state} = decode(model, [tokens], state, options)
      token = choose.(Tensor.to_list(logits))
      if token == own[:stop], do: {:halt, state}, else: {[token], {[token], state}}
    end

    start = fn ->
      {last, if(before != [], do: prefill(model, [before], nil, options))}
    end

    start |> Stream.resource(next, fn _ -> :ok end) |> Stream.take(own[:max_tokens] || 128)
  end

  defp largest(logits) do
    {_, token} = logits |> Enum.with_index() |> Enum.max_by(&elem(&1, 0))
    token
  end

  ## The parts

  defp blocks(model, tokens, state, options) do
    state = state || start(model, length(tokens))
    x = embed(model, tokens, state.length, options)
    options = block_options(model, options)
    run = &Attention.transformer_block(&2, &1, [{:cache, &3} | options])

    {x, caches} =
      model.blocks
      |> Enum.zip(state.caches)
      |> Enum.reduce({x, []}, fn {block, cache}, {x, caches} ->
        {x, cache} = run.(block, x, cache)
        {x, [cache | caches]}
      end)

    {x, %{caches: Enum.reverse(caches), length: state.length + elem(x.shape, 1)}}
  end

  defp start(%{embedding: %{type: type, shape: {_, width}}} = model, batch) do
    heads = model.options[:heads] || 1
    device = Tensor.device(model.output)

    caches =
      for _ <- model.blocks,
          do: KVCache.new(type, {batch, heads, div(width, heads)}, device: device)

    %{caches: caches, length: 0}
  end

  defp block_options(model, options), do: [{:causal, true} | model.options] ++ options

  defp logits(x, model, options) do
    x
    |> NN.layer_norm(model.ln_w, model.ln_b, Keyword.take(model.options, [:eps]) ++ options)
    |> NN.linear(model.output, options)
  end

  defp embed(
         %{embedding: %{type: type, shape: {_, width}} = table} = model,
         tokens,
         first,
         options
       ) do
    length = length!(tokens)
    row = div(byte_size(table.data), max(elem(table.shape, 0), 1))
    data = for sequence <- tokens, token <- sequence, into: <<>>, do: row(table, token, row)

    data
    |> Tensor.new(type, {length(tokens), length, width})
    |> Tensor.to_device(Tensor.device(model.output))
    |> positions(model, first, options)
  end

  defp positions(x, model, first, options) do
    if model.options[:rope_theta],
      do: x,
      else: Attention.sinusoidal_positions(x, [{:first_position, first} | options])
  end

  defp row(%{data: data, shape: {vocabulary, _}}, token, bytes)
       when is_integer(token) and token >= 0 and token < vocabulary,
       do: binary_part(data, token * bytes, bytes)

  defp row(%{shape: {vocabulary, _}}, token, _bytes),
    do: wrong_tokens("tokens from 0 to #{vocabulary - 1}", token)

  defp length!([first | _] = tokens) when is_list(first) do
    length = length(first)

    if Enum.all?(tokens, &(is_list(&1) and length(&1) == length)),
      do: length,
      else: wrong_tokens(tokens)
  end

  defp length!(tokens), do: wrong_tokens(tokens)

  defp wrong_tokens(tokens), do: wrong_tokens("lists of tokens, all of one length", tokens)

  defp wrong_tokens(expected, tokens) do
    raise Error.new(:argument, "tokens", expected: expected, got: Error.show(tokens))
  end

  defp heads!(heads, width) when is_integer(heads) and heads > 0 and rem(width, heads) == 0,
    do: :ok

  defp heads!(heads, width) do
    raise Error.new(:option, "heads", expected: "a divisor of #{width}", got: Error.show(heads))
  end

  defp size!(options, name) do
    case options[name] do
      size when is_integer(size) and size >= 0 ->
        size

      other ->
        raise Error.new(:option, to_string(name), expected: "a size", got: Error.show(other))
    end
  end

  defp unknown(what, name, known) do
    raise Error.new(:option, Error.show(name),
            expected: "#{what} out of #{Enum.join(known, ", ")}",
            got: Error.show(name)
          )
  end

  defp missing(name) do
    raise Error.new(:argument, to_string(name), expected: "a weight", got: "none")
  end

  defp wrong_embedding(other) do
    raise Error.new(:shape, "embedding",
            expected: "a tensor of shape (V, D)",
            got: Error.show(other)
          )
  end

  defp wrong_blocks(other) do
    raise Error.new(:argument, "blocks",
            expected: "a list of maps of weights",
            got: Error.show(other)
          )
  end
end
