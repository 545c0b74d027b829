defmodule Sidewinder.Device do
  @moduledoc """
  What this machine has, and where ops run unless a call says otherwise.

  A backend is `:auto`, `:cpu`, `{:cuda, ordinal}` or `:nx`. With `:auto` an op runs where its
  tensors are; large work on host tensors goes to CUDA device 0 if that can be used, all other to
  the CPU. `:nx` is for Nx tensors only: the slow pure Nx functions.

  The default comes from the application's configuration, or from the environment, which goes
  first:

      config :sidewinder, backend: :cpu, threads: 4

      SIDEWINDER_BACKEND=cuda:1 SIDEWINDER_THREADS=4 mix run ...
  """

  alias Sidewinder.{Error, Native, Tensor}

  @type backend :: :auto | :cpu | {:cuda, non_neg_integer} | :nx
  @type config :: %{backend: backend, threads: pos_integer | nil}

  @config {__MODULE__, :config}
  @cuda {__MODULE__, :cuda}

  @doc """
  What is here: whether the native library was loaded, the CPU's levels (slowest first) and
  threads, the GPUs, and where ops run by default.

  `why_no_native` and `why_no_gpus` are texts, or nil where there is nothing to explain.
  """
  @spec info() :: %{
          native: boolean,
          why_no_native: String.t() | nil,
          cpu: %{levels: [String.t()], best: String.t(), threads: pos_integer} | nil,
          gpus: [map],
          why_no_gpus: String.t() | nil,
          backend: backend
        }
  def info do
    %{backend: backend, threads: threads} = config()
    {gpus, why_no_gpus} = gpus()

    %{
      native: Native.loaded?(),
      why_no_native: Native.why_not_loaded(),
      cpu: if(Native.loaded?(), do: cpu(threads)),
      gpus: gpus,
      why_no_gpus: why_no_gpus,
      backend: backend
    }
  end

  defp cpu(threads) do
    cpu = Error.unwrap!(Native.cpu_info())
    if threads, do: %{cpu | threads: threads}, else: cpu
  end

  defp gpus do
    case Native.cuda_info() do
      {:ok, []} -> {[], "the driver reports no device"}
      {:ok, gpus} -> {gpus, nil}
      {:error, fields} -> {[], Exception.message(struct!(Error, fields))}
    end
  rescue
    error in Error -> {[], Exception.message(error)}
  end

  @doc "The default backend and number of threads (nil is one per core)."
  @spec config() :: config
  def config, do: :persistent_term.get(@config, nil) || configure([])

  @doc """
  Reads application configuration and environment anew, then takes what `options` say: `:backend`
  and `:threads`.

  Raises `Sidewinder.Error` of kind `:option` for values that are none.
  """
  @spec configure(backend: backend | String.t(), threads: pos_integer | nil) :: config
  def configure(options \\ []) do
    config = %{
      backend: options[:backend] || env("SIDEWINDER_BACKEND") || setting(:backend, :auto),
      threads: options[:threads] || env("SIDEWINDER_THREADS") || setting(:threads, nil)
    }

    config = %{backend: parse!(config.backend), threads: threads!(config.threads)}
    :persistent_term.put(@config, config)
    config
  end

  defp env(name), do: if((value = System.get_env(name)) not in [nil, ""], do: value)
  defp setting(key, default), do: Application.get_env(:sidewinder, key, default)

  @doc """
  A backend from a text (or from itself).

      iex> Sidewinder.Device.parse!("cuda:1")
      {:cuda, 1}
      iex> Sidewinder.Device.parse!("cuda")
      {:cuda, 0}
      iex> Sidewinder.Device.parse!("tpu")
      ** (Sidewinder.Error) backend: expected auto, cpu, cuda, cuda:N or nx, got "tpu"
  """
  @spec parse!(backend | String.t()) :: backend
  def parse!(backend) when backend in [:auto, :cpu, :nx], do: backend
  def parse!({:cuda, ordinal} = backend) when is_integer(ordinal) and ordinal >= 0, do: backend
  def parse!(name) when name in ["auto", "cpu", "nx"], do: String.to_existing_atom(name)
  def parse!(name) when name in ["cuda", :cuda], do: {:cuda, 0}

  def parse!("cuda:" <> number = name) do
    case Integer.parse(number) do
      {ordinal, ""} when ordinal >= 0 -> {:cuda, ordinal}
      _ -> wrong_backend(name)
    end
  end

  def parse!(other), do: wrong_backend(other)

  defp wrong_backend(got) do
    raise Error.new(:option, "backend",
            expected: "auto, cpu, cuda, cuda:N or nx",
            got: Error.show(got)
          )
  end

  defp threads!(nil), do: nil
  defp threads!(threads) when is_integer(threads) and threads > 0, do: threads

  defp threads!(threads) do
    case is_binary(threads) and Integer.parse(threads) do
      {number, ""} when number > 0 ->
        number

      _ ->
        raise Error.new(:option, "threads",
                expected: "a positive number",
                got: Error.show(threads)
              )
    end
  end

  @doc "Whether CUDA device 0 can be used. The answer is remembered."
  @spec cuda?() :: boolean
  def cuda? do
    with nil <- :persistent_term.get(@cuda, nil) do
      usable = match?({[%{compiler: {_, _}, lost: nil} | _], nil}, gpus())
      :persistent_term.put(@cuda, usable)
      usable
    end
  end

  @doc false
  # Work that may choose keeps off a device that was lost.
  def forget_cuda, do: :persistent_term.put(@cuda, false)

  @doc """
  A device as a text.

      iex> Sidewinder.Device.name({:cuda, 1})
      "cuda:1"
  """
  @spec name(backend | Tensor.device()) :: String.t()
  def name({:cuda, ordinal}), do: "cuda:#{ordinal}"
  def name(other), do: Atom.to_string(other)
end
