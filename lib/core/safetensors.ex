defmodule Sidewinder.Safetensors do
  @moduledoc """
  Safetensors files, as PyTorch, JAX and Nx write and read them.

      iex> path = Path.join(System.tmp_dir!(), "sidewinder-doc-#{System.pid()}.safetensors")
      iex> Sidewinder.Safetensors.write(path, %{"x" => Sidewinder.Tensor.from_list([1, 2], :f32, {2})})
      :ok
      iex> Sidewinder.Safetensors.index(path)
      [%{name: "x", type: "F32", shape: {2}}]
      iex> Sidewinder.Safetensors.read(path)
      %{"x" => Sidewinder.Tensor.from_list([1, 2], :f32, {2})}
      iex> File.rm(path)
      :ok

  All functions raise `Sidewinder.Error` of kind `:file` for a file that is missing, damaged or
  cannot be written.
  """

  alias Sidewinder.{Error, Native, Options, Progress, Tensor}

  @doc "What a file holds, in the order of its data. The type is as the file names it, such as `F32`."
  @spec index(Path.t()) :: [%{name: String.t(), type: String.t(), shape: tuple}]
  def index(path) do
    for {name, type, sizes} <- Error.unwrap!(Native.safetensors_index(text(path))) do
      %{name: name, type: type, shape: List.to_tuple(sizes)}
    end
  end

  @doc """
  A file's metadata, such as `%{"format" => "pt"}` in files that PyTorch reads.

      iex> path = Path.join(System.tmp_dir!(), "sidewinder-told-\#{System.pid()}.safetensors")
      iex> Sidewinder.Safetensors.write(path, %{}, metadata: %{"format" => "pt"})
      iex> Sidewinder.Safetensors.metadata(path)
      %{"format" => "pt"}
      iex> File.rm(path)
      :ok
  """
  @spec metadata(Path.t()) :: %{String.t() => String.t()}
  def metadata(path), do: Map.new(Error.unwrap!(Native.safetensors_metadata(text(path))))

  @doc """
  Reads the tensors of these names, or all of them.

  Options are `:progress` and `:cancel`: see `Sidewinder.Progress`. Raises `Sidewinder.Error` of kind `:dtype` for a tensor
  of a type that is not one of `Sidewinder.Tensor`'s. Truth values (`BOOL`) come as `:u8`.
  """
  @spec read(Path.t(), [String.t()] | :all, [Progress.option()]) :: %{String.t() => Tensor.t()}
  def read(path, names \\ :all, options \\ [])

  def read(path, :all, options),
    do: read(path, for(entry <- index(path), do: entry.name), options)

  def read(path, names, options) do
    path = text(path)
    options = Options.known!(options, Progress.options())
    read = &Native.safetensors_read(path, names, &1)
    tensors = Error.unwrap!(Progress.follow(options, read))
    Map.new(Enum.zip(names, tensors), fn {name, tensor} -> {name, from_native(tensor)} end)
  end

  defp from_native(tensor), do: Tensor.from_native({:ok, tensor})

  @doc """
  Writes tensors on the host to a file, which is complete or absent.

  Options:

    * `:metadata` - a map of texts by name
    * `:progress`, `:cancel` - to follow and to end the call: see `Sidewinder.Progress`
  """
  @spec write(Path.t(), %{String.t() => Tensor.t()} | [{String.t(), Tensor.t()}], keyword) :: :ok
  def write(path, tensors, options \\ []) do
    options = Options.known!(options, [:metadata | Progress.options()])
    {path, tensors, told} = {text(path), natives(tensors), told(options)}
    write = &Native.safetensors_write(path, tensors, told, &1)
    {} = Error.unwrap!(Progress.follow(options, write))
    :ok
  end

  defp told(options) do
    told = options[:metadata] || %{}
    text? = &(is_binary(&1) and String.valid?(&1))
    fit = is_map(told) and Enum.all?(told, fn {key, value} -> text?.(key) and text?.(value) end)
    told |> Options.check!(fit, :metadata, "a map of texts by their names") |> Map.to_list()
  end

  @doc """
  Writes tensors to a file one after another, so that they need not all be in memory at once.

  `specs` are the name, type and shape of each. `work` gets a function that writes one of them, and calls it for each in
  any order; its result is the result. The file is complete, or absent if a tensor is missing or
  something raises. Takes the option `:metadata`, as `write/3` does.

      iex> path = Path.join(System.tmp_dir!(), "sidewinder-pieces-\#{System.pid()}.safetensors")
      iex> Sidewinder.Safetensors.write_each(path, [{"a", :f32, {1}}, {"b", :u8, {2}}], fn write ->
      ...>   write.("b", Sidewinder.Tensor.from_list([1, 2], :u8, {2}))
      ...>   write.("a", Sidewinder.Tensor.from_list([0.5], :f32, {1}))
      ...> end)
      :ok
      iex> Sidewinder.Safetensors.read(path)["a"]
      #Sidewinder.Tensor<f32 (1) [0.5]>
      iex> File.rm(path)
      :ok
  """
  @spec write_each(
          Path.t(),
          [{String.t(), Tensor.type(), Tensor.shape()}],
          ((String.t(), Tensor.t() -> :ok) -> result),
          keyword
        ) :: result
        when result: term
  def write_each(path, specs, work, options \\ []) do
    told = told(Options.known!(options, [:metadata]))
    file = Error.unwrap!(Native.safetensors_create(text(path), specs, told))

    try do
      result = work.(&put(file, &1, &2))
      {} = Error.unwrap!(Native.safetensors_finish(file))
      result
    after
      Native.safetensors_abandon(file)
    end
  end

  defp put(file, name, %Tensor{} = tensor) do
    {} = Error.unwrap!(Native.safetensors_put(file, name, Tensor.to_native(tensor)))
    :ok
  end

  defp natives(tensors) when is_map(tensors) and not is_struct(tensors),
    do: natives(Map.to_list(tensors))

  defp natives([{name, %Tensor{} = tensor} | rest]) when is_binary(name),
    do: [{name, Tensor.to_native(tensor)} | natives(rest)]

  defp natives([]), do: []
  defp natives([other | _rest]), do: no_tensors(other)
  defp natives(other), do: no_tensors(other)

  defp no_tensors(got),
    do: Options.wrong_argument!("tensors", "pairs of a text and a Sidewinder.Tensor", got)

  @doc """
  Tensors on the host as the bytes of a file.

      iex> tensor = Sidewinder.Tensor.from_list([7], :i64, {1})
      iex> Sidewinder.Safetensors.decode(Sidewinder.Safetensors.encode(%{"x" => tensor}))
      %{"x" => tensor}
  """
  @spec encode(%{String.t() => Tensor.t()} | [{String.t(), Tensor.t()}]) :: binary
  def encode(tensors), do: Error.unwrap!(Native.safetensors_encode(natives(tensors)))

  @doc """
  The tensors of the bytes of a file. Raises `Sidewinder.Error` of kind `:argument` if they are damaged or of
  types that are not `Sidewinder.Tensor`'s.

      iex> bytes = Sidewinder.Safetensors.encode(%{"x" => Sidewinder.Tensor.from_list([1, 2], :f32, {2})})
      iex> Sidewinder.Safetensors.decode(bytes)["x"]
      #Sidewinder.Tensor<f32 (2) [1.0, 2.0]>
  """
  @spec decode(binary) :: %{String.t() => Tensor.t()}
  def decode(bytes) when is_binary(bytes) do
    pairs = Error.unwrap!(Native.safetensors_decode(bytes))
    Map.new(pairs, fn {name, tensor} -> {name, from_native(tensor)} end)
  end

  def decode(other) do
    raise Error.new(:argument, "bytes", expected: "a binary", got: Error.show(other))
  end

  defp text(path), do: IO.chardata_to_string(path)
end
