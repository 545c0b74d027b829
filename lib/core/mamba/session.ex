defmodule Sidewinder.Mamba.Session do
  @moduledoc """
  A running sequence of a `Sidewinder.Mamba`: the states of its layers after all that it has seen, in memory of
  constant size, where the model is.

  A session is changed in place by `prefill/3`, `step/2`, `next/3` and `reset/1`, whichever process calls them. Calls
  wait for each other, and a call that fails leaves the session as it was. A session lives as long as there is a
  reference to it, not as long as the process that made it.

      iex> alias Sidewinder.{Mamba, Tensor}
      iex> alias Sidewinder.Mamba.Session
      iex> model = Mamba.random(layers: 2, width: 16, vocabulary: 11, backend: :cpu)
      iex> session = Session.new(model)
      iex> Session.prefill(session, [1, 2])
      iex> logits = Session.step(session, 3)
      iex> whole = Mamba.forward(model, [[1, 2, 3]])
      iex> last = Enum.take(Tensor.to_list(whole), -11)
      iex> Enum.zip_with(Tensor.to_list(logits), last, &(abs(&1 - &2) < 1.0e-5)) |> Enum.all?()
      true
      iex> Session.length(session)
      3
  """

  alias Sidewinder.{Device, Error, Mamba, Native, Options, Progress, Telemetry, Tensor}
  alias Sidewinder.Mamba.Generation

  @enforce_keys [:ref, :model]
  defstruct [:ref, :model]

  @type t :: %__MODULE__{ref: reference, model: Mamba.t()}

  @doc """
  A session that has seen nothing. Raises `Sidewinder.Error` of kind `:memory` where no memory is left.

      iex> alias Sidewinder.Mamba.Session
      iex> session = Session.new(Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu))
      iex> Session.length(session)
      0
  """
  @spec new(Mamba.t()) :: t
  def new(%Mamba{} = model), do: held(model, Native.mamba_session(model.ref))
  def new(other), do: Mamba.no_model(other)

  defp held(model, answer), do: %__MODULE__{ref: Error.unwrap!(answer), model: model}

  @doc """
  Processes a list of tokens, or features, `{L, M}`, in one pass.

  With `logits: true` it returns the model's output for the last of them: logits, `{V}`, or normed features, `{M}`;
  otherwise `:ok`. Other options are `:progress` and `:cancel`: see `Sidewinder.Progress`.

      iex> alias Sidewinder.Mamba.Session
      iex> session = Session.new(Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu))
      iex> {Session.prefill(session, [1, 2]), Session.prefill(session, [3], logits: true).shape}
      {:ok, {11}}
  """
  @spec prefill(t, Mamba.tokens() | Tensor.t(), keyword) :: :ok | Tensor.t()
  def prefill(session, input, options \\ [])

  def prefill(%__MODULE__{ref: ref, model: model}, input, options) do
    options = Options.known!(options, [:logits | Progress.options()])
    logits = Device.boolean!("logits", options[:logits] || false)

    call =
      if model.scheduler == :cpu,
        do: &Native.mamba_prefill_cpu/4,
        else: &Native.mamba_prefill_io/4

    rows = rows(input)
    work = fn -> Progress.follow(options, &call.(ref, rows, logits, &1)) end

    case model |> Telemetry.model(:prefill, rows, work) |> Error.unwrap!() do
      nil -> :ok
      tensor -> first(tensor)
    end
  end

  def prefill(other, _input, _options), do: no_session(other)

  # Tokens, or features row by row: not those of several sequences.
  defp rows(%Tensor{shape: shape}) when tuple_size(shape) > 2 do
    raise Error.new(:shape, "features", expected: "at most two axes", got: Error.show(shape))
  end

  defp rows(input), do: Mamba.fed_rows(input)

  @doc """
  Advances by one token, or one frame of features, `{M}`: the logits of the next token, `{V}`, or the normed features,
  `{M}`, on the host.

  With a list of sessions of one model all of them advance in one call, which reads the weights once: each by its own
  of a list of tokens, or by its row of features, `{B, M}`. It gives a row for each, `{B, V}` or `{B, M}`.

  Raises `Sidewinder.Error` of kind `:argument` for invalid tokens, for features that are not finite, for sessions of
  several models and for a session that is given twice; no session has then advanced.

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> sessions = for _ <- 1..3, do: Sidewinder.Mamba.Session.new(model)
      iex> Sidewinder.Mamba.Session.step(sessions, [1, 2, 3]).shape
      {3, 11}
  """
  @spec step(t, non_neg_integer | Tensor.t()) :: Tensor.t()
  @spec step([t], Mamba.tokens() | Tensor.t()) :: Tensor.t()
  def step(%__MODULE__{} = session, %Tensor{} = frame), do: first(stepped([session], frame))
  def step(%__MODULE__{} = session, token), do: first(stepped([session], [token]))

  def step([%__MODULE__{} | _] = sessions, input),
    do: Tensor.from_native({:ok, stepped(sessions, input)})

  def step(other, _input), do: no_session(other)

  defp no_session(other),
    do: Options.wrong_argument!("sessions", "a session, or a list of them", other)

  defp stepped([%{model: model} | _] = sessions, input) do
    refs = refs(sessions)
    rows = rows(input)

    call =
      if model.scheduler == :cpu, do: &Native.mamba_step_cpu/2, else: &Native.mamba_step_io/2

    model |> Telemetry.model(:step, rows, fn -> call.(refs, rows) end) |> Error.unwrap!()
  end

  defp refs(sessions) do
    unless Options.list?(sessions) and Enum.all?(sessions, &is_struct(&1, __MODULE__)),
      do: no_session(sessions)

    for session <- sessions, do: session.ref
  end

  # The only row there is.
  defp first({type, {1, width}, data}), do: Tensor.from_native({:ok, {type, {width}, data}})

  @doc """
  Advances by one token and chooses the next one, where the model is: on a GPU only tokens are copied to the device and
  back.

  Options are `:temperature`, `:top_k`, `:top_p`, `:repetition_penalty` and `:seed` as in
  `Sidewinder.Mamba.generate/3`, the seed being 0 by default. A token is drawn by the seed and by its place in the text;
  the penalty concerns all tokens that the session has seen. With a penalty logits come to the host.

  With a list of sessions it takes a list of tokens and gives one; the options are then those of all, or a list of one
  for each.

      iex> alias Sidewinder.Mamba
      iex> alias Sidewinder.Mamba.Session
      iex> model = Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> [session, other] = sessions = for _ <- 1..2, do: Session.new(model)
      iex> token = Session.next(session, 3)
      iex> Session.next(other, 3) == token
      true
      iex> length(Session.next(sessions, [1, 2], [[temperature: 0.7], [top_k: 5, temperature: 1]]))
      2
  """
  @spec next(t, non_neg_integer, keyword) :: non_neg_integer
  @spec next([t], Mamba.tokens(), keyword | [keyword]) :: Mamba.tokens()
  def next(sessions, tokens, options \\ [])

  def next(%__MODULE__{} = session, token, options) do
    [chosen] = next([session], [token], options)
    chosen
  end

  def next([%__MODULE__{model: model} | _] = sessions, tokens, options) do
    refs = refs(sessions)
    samplings = samplings(options, Kernel.length(refs))

    call =
      if model.scheduler == :cpu, do: &Native.mamba_next_cpu/3, else: &Native.mamba_next_io/3

    rows = rows(tokens)
    work = fn -> call.(refs, rows, samplings) end
    model |> Telemetry.model(:step, rows, work) |> Error.unwrap!()
  end

  def next(other, _tokens, _options), do: no_session(other)

  defp samplings(options, count) do
    cond do
      Keyword.keyword?(options) ->
        List.duplicate(Generation.sampling(options), count)

      Options.list?(options) and Kernel.length(options) == count and
          Enum.all?(options, &Keyword.keyword?/1) ->
        Enum.map(options, &Generation.sampling/1)

      true ->
        raise Error.new(:option, "options",
                expected: "a keyword list, or one for each of #{count} sessions",
                got: Error.show(options)
              )
    end
  end

  @doc """
  How many tokens or frames it has seen.

      iex> alias Sidewinder.Mamba.Session
      iex> session = Session.new(Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu))
      iex> Session.prefill(session, [1, 2, 3])
      iex> Session.length(session)
      3
  """
  @spec length(t) :: non_neg_integer
  def length(%__MODULE__{ref: ref}), do: Error.unwrap!(Native.mamba_length(ref))
  def length(other), do: no_session(other)

  @doc """
  A copy of the session; from here on the two are independent.

      iex> alias Sidewinder.Mamba.Session
      iex> session = Session.new(Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu))
      iex> other = Session.fork(session)
      iex> Session.step(session, 1)
      iex> {Session.length(session), Session.length(other)}
      {1, 0}
  """
  @spec fork(t) :: t
  def fork(%__MODULE__{ref: ref, model: model}), do: held(model, Native.mamba_fork(ref))
  def fork(other), do: no_session(other)

  @doc """
  Forgets all that it has seen.

      iex> alias Sidewinder.Mamba.Session
      iex> session = Session.new(Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu))
      iex> Session.prefill(session, [1, 2, 3])
      iex> {Session.reset(session), Session.length(session)}
      {:ok, 0}
  """
  @spec reset(t) :: :ok
  def reset(%__MODULE__{ref: ref}) do
    {} = Error.unwrap!(Native.mamba_reset(ref))
    :ok
  end

  def reset(other), do: no_session(other)

  @doc """
  The session as a binary, to be kept or sent: the bytes of a safetensors file with `conv_state`, `ssm_state`,
  `length` and `seen`, a bit for each token of the vocabulary.

      iex> alias Sidewinder.Mamba.Session
      iex> session = Session.new(Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu))
      iex> session |> Session.dump() |> Sidewinder.Safetensors.decode() |> Map.keys()
      ["conv_state", "length", "seen", "ssm_state"]
  """
  @spec dump(t) :: binary
  def dump(%__MODULE__{ref: ref}), do: Error.unwrap!(Native.mamba_dump(ref))
  def dump(other), do: no_session(other)

  @doc """
  The session that was dumped, bit by bit, of a model of the same sizes and type; it may be on another machine.

  Raises `Sidewinder.Error` of kind `:argument` for a binary that is damaged or does not fit the model.

      iex> alias Sidewinder.Mamba.Session
      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> session = Session.new(model)
      iex> Session.prefill(session, [1, 2, 3])
      iex> other = Session.restore(model, Session.dump(session))
      iex> Session.step(other, 4) == Session.step(session, 4)
      true
  """
  @spec restore(Mamba.t(), binary) :: t
  def restore(%Mamba{} = model, dump) when is_binary(dump),
    do: held(model, Native.mamba_restore(model.ref, dump))

  def restore(%Mamba{}, other),
    do: Options.wrong_argument!("dump", "a binary, as dump/1 gives it", other)

  def restore(other, _dump), do: Mamba.no_model(other)
end
