defmodule Sidewinder.Device do
  @moduledoc """
  What this machine has, and where ops run unless a call says otherwise.

  A backend is `:auto`, `:cpu`, `{:cuda, ordinal}` or `:nx`. With `:auto` an op runs where its
  tensors are; large work on host tensors goes to CUDA device 0 if that can be used, other work to
  the CPU. `:nx` is for Nx tensors only: the slow pure Nx functions.

  The default comes from the environment or else from the application's configuration:

      config :sidewinder, backend: :cpu, threads: 4, allow_tf32: false

      SIDEWINDER_BACKEND=cuda:1 SIDEWINDER_THREADS=4 SIDEWINDER_ALLOW_TF32=true mix run ...

  `Sidewinder.Kernel` describes them.
  """

  alias Sidewinder.{Error, Native, Ops, Tensor}

  @type backend :: :auto | :cpu | {:cuda, non_neg_integer} | :nx
  @type config :: %{backend: backend, threads: pos_integer | nil, allow_tf32: boolean}

  @config {__MODULE__, :config}
  @cuda {__MODULE__, :cuda}

  @typedoc """
  Where an op would run now, such as `"cpu avx512, 2 threads"`, and why not where it may be faster.
  """
  @type choice :: %{backend: String.t(), why_not: String.t() | nil}

  @doc """
  What is here, and where each op would run now. Never raises for what is missing.

    * `native`, `why_no_native` - whether the native library was loaded, or why not
    * `cpu` - the CPU's levels (slowest first), the best of them and threads
    * `gpus`, `why_no_gpus` - the GPUs, or why there are none
    * `backend` - the default: `:auto`, or what is forced
    * `has_native`, `has_simd`, `simd_level`, `threads` - the same in short: whether there is the
      library, whether it computes with vectors on this CPU, and with which
    * `cuda` - whether CUDA device 0 can be used, the names of all devices, and why it cannot
    * `exla` - whether programs that EXLA compiles run the kernels, on which of XLA's platforms, and why not
    * `ops` - for each op where it would run

  `why_no_native`, `why_no_gpus` and `why_not` are texts, or nil where there is nothing to explain.
  Raises `Sidewinder.Error` of kind `:option` if the configuration has invalid values.

      iex> info = Sidewinder.Device.info()
      iex> {info.native, info.cpu.best in info.cpu.levels, is_binary(info.ops["selective_scan"].backend)}
      {true, true, true}
  """
  @spec info() :: %{
          native: boolean,
          why_no_native: String.t() | nil,
          cpu: %{levels: [String.t()], best: String.t(), threads: pos_integer} | nil,
          gpus: [map],
          why_no_gpus: String.t() | nil,
          backend: backend,
          has_native: boolean,
          has_simd: boolean,
          simd_level: :amx | :avx512 | :avx2 | :neon | :scalar | nil,
          threads: pos_integer | nil,
          cuda: %{available: boolean, devices: [String.t()], why_not: String.t() | nil},
          exla: %{available: boolean, platforms: [String.t()], why_not: String.t() | nil},
          ops: %{String.t() => choice}
        }
  def info do
    %{backend: backend, threads: threads} = config()
    {gpus, why_no_gpus} = gpus()
    cpu = if Native.loaded?(), do: cpu(threads)
    why_no_cuda = why_not(gpus, 0, why_no_gpus)

    info = %{
      native: Native.loaded?(),
      why_no_native: Native.why_not_loaded(),
      cpu: cpu,
      gpus: gpus,
      why_no_gpus: why_no_gpus,
      backend: backend,
      has_native: Native.loaded?(),
      has_simd: cpu != nil and cpu.best != "scalar",
      simd_level: cpu && String.to_atom(cpu.best),
      threads: cpu && cpu.threads,
      cuda: %{
        available: why_no_cuda == nil,
        devices: for(gpu <- gpus, do: gpu.name),
        why_not: why_no_cuda
      },
      exla: exla()
    }

    Map.put(info, :ops, ops(info))
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

  # lib/exla is compiled where EXLA is.
  defp exla do
    status =
      if Code.ensure_loaded?(Sidewinder.CustomCall),
        do: apply(Sidewinder.CustomCall, :status, []),
        else: {:error, "Sidewinder was compiled without EXLA 0.12 or later"}

    case status do
      {:ok, platforms} -> %{available: true, platforms: platforms, why_not: nil}
      {:error, why} -> %{available: false, platforms: [], why_not: why}
    end
  end

  # Why a device cannot be used, or nil.
  defp why_not(gpus, ordinal, why_no_gpus) do
    case Enum.find(gpus, &(&1.ordinal == ordinal)) do
      nil -> why_no_gpus || "there are #{length(gpus)} CUDA devices, counted from 0"
      %{lost: lost} when lost != nil -> lost
      %{compiler: nil, why_no_compiler: why} -> why
      _usable -> nil
    end
  end

  ## Where ops would run

  defp ops(info) do
    pure = pure_ops()
    native = if info.native, do: Enum.map(Ops.forward(Ops.all()), & &1.name), else: []
    for name <- Enum.uniq(native ++ pure), into: %{}, do: {name, choice(info, name in pure)}
  end

  # The functions of lib/nx, if it was compiled.
  defp pure_ops do
    Application.load(:sidewinder)

    for module <- Application.spec(:sidewinder, :modules) || [],
        match?("Elixir.Sidewinder.Block." <> _, Atom.to_string(module)),
        Code.ensure_loaded?(module) and function_exported?(module, :table, 0),
        name = to_string(module.table().name),
        not String.ends_with?(name, "_backward"),
        do: name
  end

  defp choice(%{backend: :nx}, pure), do: pure(pure, "the configuration forces the backend nx")
  defp choice(%{native: false} = info, pure), do: pure(pure, info.why_no_native)

  defp choice(%{backend: {:cuda, ordinal} = forced} = info, _pure) do
    case why_not(info.gpus, ordinal, info.why_no_gpus) do
      nil -> %{backend: name(forced), why_not: nil}
      why -> %{backend: "none: #{name(forced)} is forced, and cannot be used", why_not: why}
    end
  end

  defp choice(%{backend: :auto, cuda: %{available: true}} = info, _pure),
    do: %{backend: "#{cpu_name(info)}; cuda:0 for large or resident tensors", why_not: nil}

  defp choice(%{cuda: %{available: true}} = info, _pure),
    do: %{backend: cpu_name(info), why_not: "the configuration forces the backend cpu"}

  defp choice(info, _pure), do: %{backend: cpu_name(info), why_not: info.cuda.why_not}

  defp pure(true, why), do: %{backend: "pure Nx", why_not: why}
  defp pure(false, why), do: %{backend: "none: there is no pure Nx version", why_not: why}

  defp cpu_name(%{cpu: %{best: best, threads: 1}}), do: "cpu #{best}, 1 thread"
  defp cpu_name(%{cpu: %{best: best, threads: threads}}), do: "cpu #{best}, #{threads} threads"

  @doc """
  The default backend, number of threads (nil is one per core) and whether TF32 is allowed.

      iex> %{backend: _, threads: _, allow_tf32: allowed} = Sidewinder.Device.config()
      iex> is_boolean(allowed)
      true
  """
  @spec config() :: config
  def config, do: :persistent_term.get(@config, nil) || configure([])

  @doc """
  Reads application configuration and environment anew, then takes what `options` say: `:backend`,
  `:threads` and `:allow_tf32`.

  Raises `Sidewinder.Error` of kind `:option` for invalid values.
  """
  @spec configure(
          backend: backend | String.t(),
          threads: pos_integer | nil,
          allow_tf32: boolean | nil
        ) :: config
  def configure(options \\ []) do
    config = %{
      backend: parse!(said(options, :backend, :auto)),
      threads: threads!(said(options, :threads, nil)),
      allow_tf32: boolean!("allow_tf32", said(options, :allow_tf32, false))
    }

    :persistent_term.put(@config, config)
    config
  end

  # What a call says, the environment, or the application's configuration, in this order.
  defp said(options, key, default) do
    with nil <- options[key],
         nil <- env("SIDEWINDER_#{String.upcase(to_string(key))}"),
         do: Application.get_env(:sidewinder, key, default)
  end

  defp env(name), do: if((value = System.get_env(name)) not in [nil, ""], do: value)

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

  @doc false
  def boolean!(_name, value) when is_boolean(value), do: value
  def boolean!(_name, "true"), do: true
  def boolean!(_name, "false"), do: false

  def boolean!(name, other) do
    raise Error.new(:option, name, expected: "true or false", got: Error.show(other))
  end

  @doc """
  Whether CUDA device 0 can be used. The answer is remembered.

      iex> Sidewinder.Device.cuda?() == Sidewinder.Device.info().cuda.available
      true
  """
  @spec cuda?() :: boolean
  def cuda? do
    with nil <- :persistent_term.get(@cuda, nil) do
      {gpus, why_no_gpus} = gpus()
      usable = why_not(gpus, 0, why_no_gpus) == nil
      :persistent_term.put(@cuda, usable)
      usable
    end
  end

  @doc false
  # With `:auto`, no work goes to a device that was lost.
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
