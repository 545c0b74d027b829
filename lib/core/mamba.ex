defmodule Sidewinder.Mamba do
  @moduledoc """
  Mamba, FalconMamba and Mamba-2 models that run entirely in the native library: language models from published
  checkpoints, or backbones that take features, such as the frames of a game.

      model = Sidewinder.Mamba.load("mamba-130m-hf")
      model |> Sidewinder.Mamba.generate("Once upon a time", max_tokens: 100) |> Enum.each(&IO.write/1)

  The model is

      x = embedding[tokens]                    or features
      x = x + mixer(rms_norm(x))               for each layer
      logits = linear(rms_norm(x), head)       head is the embedding unless there is another

  The mixer of Mamba (Gu and Dao 2023) is `mamba_block`. FalconMamba's (Zuo et al. 2024) norms dt, B and C besides.
  That of Mamba-2 (Dao and Gu 2024) is

      [z | xBC | dt] = linear(u, in_proj)
      [x | B | C] = causal_conv1d(xBC)                     with silu
      y = ssd(x, dt, -exp(A_log), B, C, D, dt_bias)        with softplus, and bounds of the step size if it has any
      y = linear(gated_rms_norm(y, z), out_proj)           the gate first; each group is normed by itself

  A whole sequence is run at once (`forward/3`), or by a session (`Sidewinder.Mamba.Session`), which takes a
  prompt in and then advances by steps. The time and memory of a step do not depend on the length of the text.

  A model is loaded once, on the CPU or on a GPU, and shared by all processes and sessions that use it: it
  does not change, and its memory is freed with the last reference to it.

  In the shapes M is the width of the model, V the size of its vocabulary, B the batch and L the length.
  """

  alias Sidewinder.{Device, Error, Kernel, Native, Options}
  alias Sidewinder.{Progress, Telemetry, Tensor, Tokenizer}
  alias Sidewinder.Mamba.{Config, Random, Saving}

  @enforce_keys [:ref, :config, :type, :scheduler, :tokenizer]
  defstruct [:ref, :config, :type, :scheduler, :tokenizer, :ends, :origin]

  @typedoc """
  The sizes of a model: its `:width` M, its `:layers`, its `:vocabulary` V, 0 for a backbone, the `:inner` width,
  the `:state` per channel, the `:rank` of the projection of dt, the width of the convolution, `:conv`, and `:eps`, which
  the norms add to the mean of squares. The `:mixer` is the kind of its layers. Mamba-2 has `:heads`, `:groups` and
  `:dt_limit`, the bounds of its steps, and 0 as its rank.
  """
  @type config :: %{
          required(:width) => pos_integer,
          required(:layers) => pos_integer,
          required(:vocabulary) => non_neg_integer,
          required(:inner) => pos_integer,
          required(:state) => pos_integer,
          required(:rank) => non_neg_integer,
          required(:conv) => pos_integer,
          required(:eps) => float,
          required(:mixer) => :mamba | :falcon_mamba | :mamba2,
          optional(:heads) => pos_integer,
          optional(:groups) => pos_integer,
          optional(:dt_limit) => {float, float | :infinity}
        }

  @typedoc """
  A model. Its `:ends` are the tokens that end its texts; nil if they are its tokenizer's
  (`Sidewinder.Tokenizer.eos/1`); or the error in a configuration, which `generate/3` raises. Its `:origin` is what
  `save/2` keeps of the checkpoint.
  """
  @type t :: %__MODULE__{
          ref: reference,
          config: config,
          type: Tensor.type(),
          scheduler: :cpu | :io,
          tokenizer: Tokenizer.t() | nil,
          ends: tokens | nil | Error.t(),
          origin: %{path: Path.t() | nil, configs: [String.t()]} | nil
        }

  @typedoc "Token numbers from 0 to V - 1."
  @type tokens :: [non_neg_integer]

  @loading [:type, :backbone, :copy, :quantize, :tokenizer, :ends, :progress, :cancel]

  @doc """
  Loads a checkpoint: a folder with `config.json` and safetensors files, in one or several parts, or one such
  file. Its tensors have the names that Hugging Face's `MambaForCausalLM`, `FalconMambaForCausalLM` and
  `Mamba2ForCausalLM` give them (`mamba-130m-hf`, `falcon-mamba-7b`, `Mamba-Codestral-7B-v0.1`), or those of the `mamba_ssm`
  package (`mamba-130m`, `mamba2-130m`). Without a `config.json` a model is one of the first Mamba, with the sizes of its
  tensors.

  The files of a folder are those of its `model.safetensors.index.json`, or `model.safetensors`, or all of
  `model-00001-of-0000N.safetensors`, or the only safetensors file; several others are refused by their names. Models of
  other layers, such as hybrids with attention, are too.

  Options:

    * `:type` - `:f32`, `:bf16`, `:f16` or `:f64`: the type of the weights and of the activations between layers,
      that of the file by default. Sums and states are at least f32.
    * `:backbone` - whether to leave out embedding and head, and take features in place of tokens
    * `:copy` - whether to copy the weights into memory, in large pages where the system has them, so that steps on a
      CPU read them faster. By default files are mapped, so that loading takes no time and processes share them; as long
      as the model lives they must then not be written to or cut short.
    * `:quantize` - `:q8_0`, `:q4_0` or `:ternary`: how the large matrices of layers and head are held, of which steps
      then read 3.8, 7.1 or 16 times fewer bytes than in f32. With `:q8_0` and `:q4_0`, matrices whose rows are not
      a multiple of 32 stay as they are. Ternary weights are for models that were trained with them. The model's `:type`,
      here not `:f64`, is that of the activations between layers; such a model can't be trained. A checkpoint whose matrices
      are quantized (`save/2`, `mix sidewinder.quantize`) needs no `:quantize`, and takes no other format than its own.
    * `:tokenizer` - a `Sidewinder.Tokenizer`; by default that of the `tokenizer.json` beside the weights, or of
      bytes where the vocabulary has 256. An error in that file is raised when text is used.
    * `:ends` - a list of the tokens that end texts (`generate/3`). By default they are the `eos_token_id`, a number or
      a list, of `generation_config.json`, or else of `config.json`, or else the tokenizer's
      (`Sidewinder.Tokenizer.eos/1`). A value there that is no token is an error of `generate/3`.
    * `:backend` - `:cpu`, `{:cuda, ordinal}` or `:auto`: a GPU if there is one that can be used
    * `:level`, `:threads`, `:allow_tf32` - as in `Sidewinder.Kernel`
    * `:progress`, `:cancel` - to follow and to end the call: see `Sidewinder.Progress`

  Raises `Sidewinder.Error`, of kind `:file` for a checkpoint that is missing, damaged or not that of a Mamba model:
  one error names all tensors that are missing, have a wrong shape, or do not belong there.

      iex> folder = Path.join(System.tmp_dir!(), "sidewinder-load-\#{System.pid()}")
      iex> Sidewinder.Mamba.save(Sidewinder.Mamba.random(layers: 1, width: 32, vocabulary: 11, backend: :cpu), folder)
      iex> Sidewinder.Mamba.load(folder, quantize: :q8_0, backend: :cpu)
      #Sidewinder.Mamba<1 layers of 32, vocabulary 11, f32>
      iex> File.rm_rf!(folder)
  """
  @spec load(Path.t(), keyword) :: t
  def load(path, options \\ []) do
    path = Options.path!(path)
    {options, where} = options!(options, @loading)
    {scheduler, target} = Kernel.residence(where)

    loading = loading(options)

    path
    |> Telemetry.load(fn ->
      Progress.follow(options, &Native.mamba_load(path, loading, target, &1))
    end)
    |> from_native(
      scheduler,
      Keyword.get_lazy(options, :tokenizer, fn -> beside(path) end),
      options[:ends] || (&Native.mamba_ends(path, &1))
    )
    |> Map.put(:origin, Saving.origin(path))
  end

  @doc """
  A model of tensors on the host with the names of checkpoints, which are copied.

  `config` is a map with the keys of a `config.json`, or `nil` for the sizes that the tensors of a first Mamba
  have. Options as in `load/2`, without `:copy`; `:ends` are by default the `eos_token_id` of `config`. And `:like`, a
  model: its tokenizer and ends are the defaults, and `save/2` keeps its configuration and files. An example is the model
  before training.

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> tensors = Sidewinder.Mamba.tensors(model)
      iex> Sidewinder.Mamba.new(nil, tensors, type: :bf16, backend: :cpu)
      #Sidewinder.Mamba<1 layers of 16, vocabulary 11, bf16>
  """
  @spec new(map | nil, %{String.t() => Tensor.t()}, keyword) :: t
  def new(config, tensors, options \\ []) do
    {options, where} = options!(options, [:like | @loading -- [:copy]])
    {scheduler, target} = Kernel.residence(where)
    like = options[:like]
    Options.check!(like, is_nil(like) or is_struct(like, __MODULE__), :like, "a Sidewinder.Mamba")
    like = like || %{tokenizer: nil, ends: nil, origin: nil}
    json = Config.json(config || %{})

    {named, loading} = {named(tensors), loading(options)}

    options
    |> Progress.follow(&Native.mamba_new(json, named, loading, target, &1))
    |> from_native(
      scheduler,
      options[:tokenizer] || like.tokenizer,
      options[:ends] || like.ends || ends_in(json)
    )
    |> Map.put(:origin, Saving.origin(like.origin, json))
  end

  defp ends_in(""), do: nil
  defp ends_in(json), do: &{:ok, Error.unwrap!(Native.mamba_ends_in(json, &1))}

  defp named(tensors) when is_map(tensors) and not is_struct(tensors) do
    for {name, tensor} <- tensors do
      unless is_binary(name) and String.valid?(name) and is_struct(tensor, Tensor),
        do: wrong_tensors({name, tensor})

      {name, Tensor.to_native(tensor)}
    end
  end

  defp named(other), do: wrong_tensors(other)

  defp wrong_tensors(got),
    do: Options.wrong_argument!("tensors", "a map of tensors by their names", got)

  @doc """
  A model of random weights.

  Options besides those of `new/3`: `:layers` and `:width`, which must be given; `:vocabulary` (a backbone without),
  `:mixer` (`:mamba`, or `:mamba2`), `:expand` (2), `:state` (16, and 128 in Mamba-2), `:conv` (4), `:seed` (1); only for
  Mamba `:rank` (width / 16), only for Mamba-2 `:heads` (of 64 channels) and `:groups` (1). Weights are drawn as layers
  are initialised before training.

      iex> model = Sidewinder.Mamba.random(layers: 2, width: 16, vocabulary: 11, backend: :cpu)
      iex> Sidewinder.Mamba.forward(model, [[1, 2, 3]]).shape
      {1, 3, 11}
      iex> backbone = Sidewinder.Mamba.random(layers: 2, width: 16, backend: :cpu)
      iex> Sidewinder.Mamba.forward(backbone, Sidewinder.Tensor.from_list([1, 2], :f32, {1, 1, 2}))
      ** (Sidewinder.Error) features: expected f32 (..., 16), got f32 (1, 1, 2)
      iex> Sidewinder.Mamba.random(mixer: :mamba2, layers: 2, width: 64, backend: :cpu).config.heads
      2
  """
  @spec random(keyword) :: t
  def random(options) do
    {options, where} = options!(options, Random.options() ++ (@loading -- [:copy]))
    {own, loading} = Keyword.split(options, Random.options())
    config = Random.config(own)
    new(config, Random.weights(config, own[:seed] || 1), loading ++ where)
  end

  @doc """
  The weights on the host, copied, by the names and in the shapes of Hugging Face's files. A head that is tied to the
  embedding has no entry of its own.

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> tensors = Sidewinder.Mamba.tensors(model)
      iex> tensors["backbone.layers.0.mixer.conv1d.weight"].shape
      {32, 1, 4}
      iex> again = Sidewinder.Mamba.new(nil, tensors, backend: :cpu)
      iex> Sidewinder.Mamba.forward(again, [[1, 2]]) == Sidewinder.Mamba.forward(model, [[1, 2]])
      true
  """
  @spec tensors(t) :: %{String.t() => Tensor.t()}
  def tensors(%__MODULE__{ref: ref}) do
    for {name, tensor} <- Error.unwrap!(Native.mamba_tensors(ref)),
        into: %{},
        do: {name, Tensor.from_native({:ok, tensor})}
  end

  @doc """
  Writes the model to a folder, which is made, in the form of Hugging Face's `MambaForCausalLM`,
  `FalconMambaForCausalLM` or `Mamba2ForCausalLM`: `model.safetensors`, `config.json`, and copies of the files of the
  tokenizer, of `generation_config.json` and of a license that lie beside the weights that it was loaded from. `load/2`
  reads back the same bits.

  Other entries than sizes and types are those of the loaded checkpoint's configuration, also of models that were trained
  from one (`Sidewinder.Mamba.Trainer`) or made `:like` one (`new/3`). If there is no `eos_token_id`, that of the model's
  ends or of its tokenizer is added.

  A quantized model is written as it is: a matrix `NAME` as `NAME.q8_0` or `NAME.q4_0`, ternary ones in four parts, as
  `Sidewinder.Quantized.save!/2` does. File and configuration say so, so that no other reader takes it for a model of
  floats.

  Options are `:progress` and `:cancel`: see `Sidewinder.Progress`. A call that is ended has changed no file.

  The folder that the model was loaded from may be written to: each file is replaced as a whole. An index of several parts
  is removed there, and the parts are left.
  Raises `Sidewinder.Error` of kind `:file` where they cannot be written, or would lie beside an index of others.

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, type: :bf16, backend: :cpu)
      iex> folder = Path.join(System.tmp_dir!(), "sidewinder-doc-#{System.pid()}")
      iex> Sidewinder.Mamba.save(model, folder)
      :ok
      iex> Sidewinder.Mamba.tensors(Sidewinder.Mamba.load(folder)) == Sidewinder.Mamba.tensors(model)
      true
      iex> File.rm_rf!(folder)
  """
  @spec save(t, Path.t(), [Progress.option()]) :: :ok
  def save(model, path, options \\ [])

  def save(%__MODULE__{} = model, path, options),
    do: Saving.save(model, Options.path!(path), Options.known!(options, Progress.options()))

  def save(other, _path, _options), do: no_model(other)

  @doc """
  Runs whole sequences: the logits of the token after each token, `{B, L, V}`, or for a backbone its normed features,
  `{B, L, M}`. The result is where the model is.

    * `input` - a list of lists of tokens, all of one length, or features, `{B, L, M}`, on the host

  Options are `:progress` and `:cancel`: see `Sidewinder.Progress`.

  Raises `Sidewinder.Error`, of kind `:argument` for invalid tokens.

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> Sidewinder.Mamba.forward(model, [[1, 2, 3], [4, 5, 6]]).shape
      {2, 3, 11}
  """
  @spec forward(t, [tokens] | Tensor.t(), [Progress.option()]) :: Tensor.t()
  def forward(model, input, options \\ [])

  def forward(%__MODULE__{ref: ref, scheduler: scheduler} = model, input, options) do
    options = Options.known!(options, Progress.options())
    call = if scheduler == :cpu, do: &Native.mamba_forward_cpu/3, else: &Native.mamba_forward_io/3
    fed = fed(input)
    work = fn -> Progress.follow(options, &call.(ref, fed, &1)) end
    model |> Telemetry.model(:forward, fed, work) |> Tensor.from_native()
  end

  def forward(other, _input, _options), do: no_model(other)

  @doc false
  def no_model(other), do: Options.wrong_argument!("model", "a Sidewinder.Mamba", other)

  @doc """
  How well the model predicts a text, or a list of at least two tokens: the mean of -ln of the probability that each
  token but the first has after all before it, in nats. Divided by ln 2 it is bits a token, for a model of bytes bits
  a byte; e to its power is the perplexity.

  Options are `:progress` and `:cancel`: see `Sidewinder.Progress`.

  Raises `Sidewinder.Error` of kind `:argument` for invalid tokens and for logits that are not finite.

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 256, backend: :cpu)
      iex> abs(Sidewinder.Mamba.loss(model, "any text") - :math.log(256)) < 1
      true
  """
  @spec loss(t, String.t() | tokens, [Progress.option()]) :: float
  def loss(model, text, options \\ [])

  def loss(%__MODULE__{tokenizer: %Tokenizer{} = tokenizer} = model, text, options)
      when is_binary(text),
      do: loss(model, Tokenizer.encode(tokenizer, text), options)

  def loss(%__MODULE__{scheduler: scheduler, ref: ref} = model, tokens, options)
      when is_list(tokens) do
    options = Options.known!(options, Progress.options())
    fed = fed_rows(tokens)
    session = Error.unwrap!(Native.mamba_session(ref))
    call = if scheduler == :cpu, do: &Native.mamba_loss_cpu/3, else: &Native.mamba_loss_io/3
    work = fn -> Progress.follow(options, &call.(session, fed, &1)) end
    model |> Telemetry.model(:loss, fed, work) |> Error.unwrap!()
  end

  def loss(_model, other, _options),
    do: wrong_tokens("tokens, or a text for a model with a tokenizer", other)

  @doc """
  A stream that continues a prompt: pieces of text after a text, tokens after a list of tokens. It is lazy: each token
  is computed when it is taken.

  Options:

    * `:max_tokens` - how many at most, 128 by default
    * `:temperature` - what logits are divided by before a token is drawn; 0, the default, always takes the
      most probable one
    * `:top_k` - draws from the `top_k` most probable tokens
    * `:top_p` - draws from the fewest tokens whose probabilities sum to this
    * `:repetition_penalty` - what positive logits of tokens that the prompt or the text has are divided by, and
      others multiplied by, as in Hugging Face's `generate`: above 1 they are less probable. 1 by default
    * `:seed` - equal seeds give equal texts; a random one by default, for each prompt
    * `:stop` - what ends the stream, and is not in it, besides the model's ends: a list of tokens and, after a
      text, of texts. The name of a special token, such as `"<|im_end|>"`, stands for that token.
    * `:ignore_eos` - whether the stream continues after a token that ends texts by the model's configuration (`:ends` in
      `load/2`); `false` by default
    * `:add_bos` - whether a prompt that is a text begins with the token that begins texts; by default as the
      checkpoint's tokenizer has it: see `Sidewinder.Tokenizer.encode/3`. A list of tokens is taken as it is.
    * `:progress`, `:cancel` - to follow how the prompt is taken in, and to end the stream: see `Sidewinder.Progress`

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> tokens = model |> Sidewinder.Mamba.generate([1, 2, 3], max_tokens: 5) |> Enum.to_list()
      iex> length(tokens)
      5

  With a list of prompts, each a text or a list of tokens, all are continued as one batch, whose steps read the weights
  once. The stream is then of `{index, piece}`, with the index of the prompt from 0 and a piece of text, or a token; those
  of a prompt are in their order, among those of others. Together they are what the prompt gives alone with these options,
  `:seed` too, on a GPU within rounding; each ends on its own. Quantized weights are on a CPU still read for each prompt.

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> prompts = [[1, 2, 3], [4]]
      iex> pieces = Sidewinder.Mamba.generate(model, prompts, max_tokens: 5)
      iex> together = Enum.group_by(pieces, &elem(&1, 0), &elem(&1, 1))
      iex> together[1] == model |> Sidewinder.Mamba.generate([4], max_tokens: 5) |> Enum.to_list()
      true
  """
  @spec generate(t, String.t() | tokens | [String.t() | tokens], keyword) :: Enumerable.t()
  defdelegate generate(model, prompt, options \\ []), to: Sidewinder.Mamba.Generation

  @doc """
  The model as an `Nx.Serving`, which generates for many callers: requests that arrive together are generated as one
  batch, whose steps read the weights once. It needs Nx.

      children = [
        {Nx.Serving,
         serving: Sidewinder.Mamba.serving(model, max_tokens: 200, stream: true),
         name: MyApp.Text, batch_size: 16, batch_timeout: 10}
      ]

      MyApp.Text |> Nx.Serving.batched_run("Once upon a time") |> Enum.each(&IO.write/1)

  It runs on its own too (`Nx.Serving.run/2`), and `Nx.Serving.batched_run/2` finds it on another node of a cluster.

  Copies of one model on several GPUs serve under one name, each with batches of its own, where the serving is started with
  `partitions: true`:

      models = for i <- 0..1, do: Sidewinder.Mamba.load("mamba-130m-hf", backend: {:cuda, i})
      {Nx.Serving, serving: Sidewinder.Mamba.serving(models), name: MyApp.Text, partitions: true}

  A request is a prompt, a text or a list of tokens, or `{prompt, options}`, and gives what `generate/3` gives, within
  rounding: the text or the tokens, or with `stream: true` a stream of pieces of text or of tokens. Without streams a
  request may also be a list of such requests, and gives a list.

  Options are those of `generate/3`, for requests that do not say otherwise, and

    * `:stream` - whether requests give streams. A stream ends when all of its batch are done, and is to be read to its
      end by the process that asked.
    * `:max_tokens` - as in `generate/3`; requests may ask for fewer
    * `:max_prompt` - how many tokens a prompt may have, 8192 by default. Each request in a batch takes 4 bytes for each
      of them.

  An error in a request is raised in the process that asks, as `Sidewinder.Error`; over a cluster that process exits
  with it. A request ends with the process that asks, after the token at work; over a cluster it goes on to its end.
  """
  @spec serving(t | [t, ...], keyword) :: struct
  def serving(models, options \\ []) do
    serving = Sidewinder.Mamba.Serving
    models = if is_list(models), do: models, else: [models]
    models? = models != [] and Enum.all?(models, &is_struct(&1, __MODULE__))
    Options.check!(models, models?, :model, "a Sidewinder.Mamba, or a list of them")

    unless Code.ensure_loaded?(serving) do
      raise Error.new(:unavailable, "Nx",
              expected: "Nx 0.12 or later where Sidewinder was compiled",
              got: "none",
              hint: "Add {:nx, \"~> 0.12\"} to the dependencies; it needs Elixir 1.17"
            )
    end

    apply(serving, :new, [models, options])
  end

  @doc false
  # The model of a trainer as it is now.
  def learnt(%{ref: trainer, model: model} = from, options) do
    {options, where} = options!(options, @loading -- [:copy])

    {scheduler, target} =
      if where == [], do: {from.scheduler, nil}, else: Kernel.residence(where)

    loading = loading(options)

    options
    |> Progress.follow(&Native.mamba_learnt(trainer, loading, target, &1))
    |> from_native(
      scheduler,
      options[:tokenizer] || model.tokenizer,
      options[:ends] || model.ends
    )
    |> Map.put(:origin, model.origin)
  end

  @doc false
  # Whole sequences, as the native library takes them.
  def fed([first | _] = sequences) when is_list(first) do
    length = if Options.list?(first), do: length(first), else: 0

    unless Options.list?(sequences) and
             Enum.all?(sequences, &(Options.list?(&1) and length(&1) == length)),
           do: wrong_tokens("lists of tokens, all of one length", sequences)

    {packed(Enum.concat(sequences)), [length(sequences), length]}
  end

  def fed(input), do: fed_rows(input)

  @doc false
  # One sequence, of tokens or of frames, as the native library takes it.
  def fed_rows(%Tensor{} = features), do: features |> Tensor.to_host() |> Tensor.to_native()

  def fed_rows(tokens) do
    unless Options.list?(tokens), do: wrong_tokens("lists of tokens, or features", tokens)
    {packed(tokens), [1, length(tokens)]}
  end

  defp packed(tokens), do: for(token <- tokens, into: <<>>, do: <<token!(token)::native-32>>)

  defp token!(token) when is_integer(token) and token >= 0 and token < 0x1_0000_0000, do: token
  defp token!(other), do: wrong_tokens("token numbers", other)

  defp wrong_tokens(expected, got), do: Options.wrong_argument!("tokens", expected, got)

  ## Loading

  defp from_native(answer, scheduler, tokenizer, ends) do
    {ref, config, type} = Error.unwrap!(answer)
    tokenizer = tokenizer || if config.vocabulary == 256, do: Tokenizer.bytes()

    %__MODULE__{
      ref: ref,
      config: config,
      type: type,
      scheduler: scheduler,
      tokenizer: tokenizer,
      ends: ends(ends, config.vocabulary)
    }
  end

  # The ends that were given, or those that a function of the vocabulary finds. An error in a file is raised when its
  # ends are needed.
  defp ends(_ends, 0), do: nil

  defp ends(find, vocabulary) when is_function(find) do
    case find.(vocabulary) do
      {:ok, ends} -> ends
      {:error, fields} -> struct!(Error, fields)
    end
  end

  defp ends(ends, vocabulary) when is_list(ends) do
    fit = Enum.all?(ends, &(&1 in 0..(vocabulary - 1)))
    Options.check!(ends, fit, :ends, "a list of tokens from 0 to #{vocabulary - 1}")
  end

  defp ends(ends, _vocabulary), do: ends

  defp loading(options) do
    type = options[:type]
    Options.check!(type, is_atom(type), :type, "f64, f32, bf16 or f16")
    tokenizer = options[:tokenizer]
    fit = is_nil(tokenizer) or is_struct(tokenizer, Tokenizer)
    Options.check!(tokenizer, fit, :tokenizer, "a Sidewinder.Tokenizer")

    ends = options[:ends]
    Options.check!(ends, is_nil(ends) or Options.list?(ends), :ends, "a list of tokens")
    how = options[:quantize]

    Options.check!(
      how,
      how in [nil, :q8_0, :q4_0, :ternary],
      :quantize,
      ":q8_0, :q4_0 or :ternary"
    )

    %{
      quantize: how && Atom.to_string(how),
      dtype: type && Atom.to_string(type),
      backbone: Device.boolean!("backbone", options[:backbone] || false),
      copied: Device.boolean!("copy", options[:copy] || false)
    }
  end

  # The tokenizer that lies beside the weights.
  defp beside(path) do
    folder = if File.dir?(path), do: path, else: Path.dirname(path)
    file = Path.join(folder, "tokenizer.json")
    if File.regular?(file), do: Tokenizer.open_for_use(file)
  end

  # Splits options into those of these names and those of `Sidewinder.Kernel`.
  defp options!(options, names) do
    options |> Options.known!(names ++ Kernel.where()) |> Keyword.split(names)
  end
end

defimpl Inspect, for: Sidewinder.Mamba do
  def inspect(%{config: config, type: type}, _options) do
    "#Sidewinder.Mamba<#{config.layers} layers of #{config.width}, vocabulary #{config.vocabulary}, #{type}>"
  end
end
