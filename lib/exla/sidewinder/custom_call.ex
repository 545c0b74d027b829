defmodule Sidewinder.CustomCall do
  @moduledoc """
  Sidewinder's kernels in programs that EXLA compiles.

  EXLA calls this module for each block with a struct of `Sidewinder.Block`. The result is a custom call of XLA
  (its typed FFI), which runs the op's kernel on XLA's own memory, without copies. For a block without a kernel the
  result is `:skip`, and XLA compiles the block's default, the op in pure Nx.

  The handlers of these calls have to be registered with the XLA that EXLA has loaded. That happens when the
  application `:sidewinder` starts after `:exla`, so that executables from EXLA's disk cache find them, or else with
  the first block.
  """

  alias EXLA.CustomCall.Spec
  alias Sidewinder.{Device, Error, Native, Op}
  alias Sidewinder.Op.Warning

  @platforms %{host: "Host", cuda: "CUDA"}

  @doc "The result of `EXLA.CustomCall.call/4` for a block of Sidewinder."
  @spec call(struct, Nx.Container.t(), [Nx.Tensor.t()], struct) :: {:ok, struct} | :skip
  def call(op, out, args, client) do
    with false <- Op.pure?(op),
         true <- @platforms[client.platform] in register(),
         {:ok, target, attributes} <- described(op, Op.unpack(out), args, client.platform) do
      {:ok, %Spec{call_target_name: target, attributes: attributes}}
    else
      _ -> :skip
    end
  end

  @doc """
  Registers the handlers with EXLA's XLA, once, and returns the names of XLA's platforms that have
  one. There are none if registration fails, which is logged once.
  """
  @spec register() :: [String.t()]
  def register do
    case status() do
      {:ok, platforms} ->
        platforms

      {:error, why} ->
        Warning.once(:exla, fn -> "Under EXLA Sidewinder's ops run as plain XLA: #{why}" end)
        []
    end
  end

  @doc "The platforms as in `register/0`, or why there are none."
  @spec status() :: {:ok, [String.t()]} | {:error, String.t()}
  def status do
    with {:ok, library} <- library(),
         {:error, fields} <- Native.xla_register(library),
         do: {:error, Exception.message(struct!(Error, fields))}
  rescue
    error in Error -> {:error, Exception.message(error)}
  end

  # EXLA's module loads it.
  defp library do
    with {:module, _} <- Code.ensure_loaded(EXLA.NIF),
         folder when is_list(folder) <- :code.priv_dir(:exla) do
      {:ok, Path.join(folder, "libexla.so")}
    else
      _ -> {:error, "EXLA's native library could not be loaded"}
    end
  end

  # XLA's name of the handler, and its attributes as MLIR; an error if the kernels refuse the call.
  defp described(_op, _out, [], _platform), do: {:error, :no_operands}

  defp described(op, out, args, platform) do
    %{name: name, inputs: inputs, options: options} = kernel = Op.kernel(op)
    outputs = Enum.map(kernel.outputs, &Atom.to_string/1)
    where = where(op)
    tf32 = if platform == :cuda, do: where[:allow_tf32]

    with {:ok, operands} <- specs(inputs, args),
         {:ok, results} <- specs(outputs, out),
         {:ok, target} <- Native.xla_target(name, operands, results, options, tf32) do
      names = [op: name, inputs: Enum.join(inputs, ","), outputs: Enum.join(outputs, ",")]
      all = Enum.reject(names ++ where ++ Enum.sort(options), &match?({_, nil}, &1))
      {:ok, target, for({key, value} <- all, do: {Atom.to_string(key), mlir(value)})}
    end
  end

  defp specs(names, tensors) do
    types = Enum.map(tensors, &Op.kernel_type(&1.type))
    shapes = Enum.map(tensors, &Tuple.to_list(&1.shape))
    if nil in types, do: {:error, :type}, else: {:ok, Enum.zip([names, types, shapes])}
  end

  defp where(%{target: target}) do
    config = Device.config()
    tf32 = Keyword.get(target, :allow_tf32, config.allow_tf32)
    [level: target[:level], threads: target[:threads] || config.threads, allow_tf32: tf32]
  end

  defp mlir(value) when is_boolean(value), do: to_string(value)
  defp mlir(value) when is_integer(value), do: "#{value} : i64"
  # MLIR's floats need a digit on both sides of the point, also before an exponent.
  defp mlir(value) when is_float(value), do: "#{value} : f64"
  defp mlir(value) when is_binary(value), do: inspect(value)
  defp mlir(value) when is_atom(value), do: value |> Atom.to_string() |> inspect()
  defp mlir(value) when is_tuple(value), do: mlir(Tuple.to_list(value))

  defp mlir(value) when is_list(value),
    do: "array<f64: #{Enum.map_join(value, ", ", &to_string(&1 * 1.0))}>"
end
