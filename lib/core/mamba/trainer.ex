defmodule Sidewinder.Mamba.Trainer do
  @moduledoc """
  Trains language models of Mamba, FalconMamba and Mamba-2 entirely in the native library: forward pass, backward pass and
  AdamW run where the model is, and need no Nx. A backbone within a model of your own is trained by Axon: see
  `Sidewinder.Axon`.

      trainer = Trainer.new(Mamba.random(layers: 4, width: 128, vocabulary: 256))
      for batch <- batches, do: Trainer.step(trainer, batch, learning_rate: 1.0e-3)
      trainer |> Trainer.model(type: :bf16) |> Mamba.save("model")

  A trainer keeps weights, gradients and both their means in f32 (f64 for a model in f64), and is changed in place by
  `step/3`. Equal steps give equal weights, bit by bit, with any number of threads. On a GPU `allow_tf32: true` when
  the model is loaded makes products faster and less exact. Several GPUs train one model with `:devices` (`new/2`).

      iex> alias Sidewinder.Mamba
      iex> alias Sidewinder.Mamba.Trainer
      iex> model = Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> trainer = Trainer.new(model)
      iex> batch = [[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]
      iex> for _ <- 1..60, do: Trainer.step(trainer, batch, learning_rate: 0.01)
      iex> learnt = Trainer.model(trainer)
      iex> Mamba.loss(learnt, hd(batch)) < 0.5 * Mamba.loss(model, hd(batch))
      true
  """

  alias Sidewinder.{Error, Kernel, Mamba, Native, Options, Progress, Telemetry}

  @options [:learning_rate, :beta1, :beta2, :eps, :weight_decay, :clip]

  @where [:level, :threads, :allow_tf32]

  @enforce_keys [:ref, :model, :scheduler]
  defstruct [:ref, :model, :scheduler]

  @type t :: %__MODULE__{ref: reference, model: Mamba.t(), scheduler: :cpu | :io}

  @doc """
  Starts from the weights of a language model, which it copies.

  Options:

    * `:devices` - a list of backends that share each batch, such as `[{:cuda, 0}, {:cuda, 1}]`: each takes some of the
      sequences, all add up their gradients, and make the same step. Losses are those of one device but for rounding. The
      list may name a device more than once, also `:cpu`, but not both GPUs and the CPU. By default it is where the model
      is.
    * `:level`, `:threads`, `:allow_tf32` - of these devices, as in `Sidewinder.Kernel`

  Raises `Sidewinder.Error` of kind `:argument` for a backbone, and for devices that cannot work together.

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> trainer = Sidewinder.Mamba.Trainer.new(model)
      iex> trainer.model == model
      true

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> trainer = Sidewinder.Mamba.Trainer.new(model, devices: [:cpu, :cpu], threads: 1)
      iex> %{loss: loss} = Sidewinder.Mamba.Trainer.step(trainer, [[1, 2, 3], [4, 5, 6]])
      iex> loss > 0
      true
  """
  @spec new(Mamba.t(), keyword) :: t
  def new(%Mamba{} = model, options \\ []) do
    options = Options.known!(options, [:devices | @where])
    {scheduler, targets} = targets(model, options[:devices], Keyword.take(options, @where))
    ref = Error.unwrap!(Native.mamba_trainer(model.ref, targets))
    %__MODULE__{ref: ref, model: model, scheduler: scheduler}
  end

  defp targets(model, nil, []), do: {model.scheduler, []}

  defp targets(_model, devices, where) do
    Options.check!(
      devices,
      Options.list?(devices) and devices != [],
      :devices,
      "a list of backends"
    )

    planned = for backend <- devices, do: Kernel.residence([backend: backend] ++ where)
    {planned |> hd() |> elem(0), Enum.map(planned, &elem(&1, 1))}
  end

  @doc """
  A step of AdamW (Loshchilov and Hutter 2019) on a batch of sequences of one length, each a list of at least two tokens:
  from each token but the last the next one is learnt. Gives the mean loss before the step, in nats (divided by ln 2 it
  is bits a token), and the norm of its gradient.

  Options:

    * `:learning_rate` - 1.0e-3 by default
    * `:beta1`, `:beta2` - the decays of the means of gradients and of their squares, 0.9 and 0.95 by default
    * `:eps` - added to the divisor of the update, for numerical stability; 1.0e-8 by default
    * `:weight_decay` - 0.1 by default; it concerns matrices, but not `A_log`
    * `:clip` - the norm that larger gradients are scaled down to, 1.0 by default; 0 for any
    * `:progress`, `:cancel` - to follow and to end the call, which then changes nothing: see `Sidewinder.Progress`

  Raises `Sidewinder.Error` for invalid tokens and, naming `learning_rate`, where loss or gradient are not finite: the
  weights are then unchanged.

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> trainer = Sidewinder.Mamba.Trainer.new(model)
      iex> %{loss: loss, norm: norm} = Sidewinder.Mamba.Trainer.step(trainer, [[1, 2, 3], [4, 5, 6]])
      iex> loss > 0 and norm > 0
      true
  """
  @spec step(t, [Mamba.tokens()], keyword) :: %{loss: float, norm: float}
  def step(%__MODULE__{ref: ref, model: model} = trainer, sequences, options \\ []) do
    call =
      if trainer.scheduler == :cpu, do: &Native.mamba_learn_cpu/4, else: &Native.mamba_learn_io/4

    options = Options.known!(options, @options ++ Progress.options())
    {watched, how} = Keyword.split(options, Progress.options())
    how = for {name, value} <- how, into: %{}, do: {name, number!(name, value)}
    fed = Mamba.fed(sequences)
    work = fn -> Progress.follow(watched, &call.(ref, fed, how, &1)) end
    {loss, norm} = model |> Telemetry.model(:train, fed, work) |> Error.unwrap!()
    %{loss: loss, norm: norm}
  end

  # Larger integers have no float.
  defp number!(name, value) do
    fit = is_float(value) or (is_integer(value) and abs(value) < 0x1_0000_0000_0000_0000)
    Options.check!(value, fit, name, "a number") * 1.0
  end

  @doc """
  A copy of the current model, independent of the trainer.

  Options are those of `Sidewinder.Mamba.new/3`; by default it is where the trainer is, in the trainer's type, with the
  tokenizer of the model that it started from.

      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> trainer = Sidewinder.Mamba.Trainer.new(model)
      iex> Sidewinder.Mamba.Trainer.model(trainer, type: :bf16).type
      :bf16
  """
  @spec model(t, keyword) :: Mamba.t()
  def model(%__MODULE__{} = trainer, options \\ []), do: Mamba.learnt(trainer, options)
end

defimpl Inspect, for: Sidewinder.Mamba.Trainer do
  def inspect(%{model: model}, _options), do: "#Sidewinder.Mamba.Trainer<#{inspect(model)}>"
end
