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

  alias Sidewinder.{Error, Native, Tensor}

  @doc "What a file holds, in the order of its data. The type is as the file names it, such as `F32`."
  @spec index(Path.t()) :: [%{name: String.t(), type: String.t(), shape: tuple}]
  def index(path) do
    for {name, type, sizes} <- Error.unwrap!(Native.safetensors_index(text(path))) do
      %{name: name, type: type, shape: List.to_tuple(sizes)}
    end
  end

  @doc """
  Reads the tensors of these names, or all of them.

  Raises `Sidewinder.Error` of kind `:dtype` for a tensor of a type that is not one of
  `Sidewinder.Tensor`'s. Truth values (`BOOL`) come as `:u8`.
  """
  @spec read(Path.t(), [String.t()] | :all) :: %{String.t() => Tensor.t()}
  def read(path, names \\ :all)
  def read(path, :all), do: read(path, for(entry <- index(path), do: entry.name))

  def read(path, names) do
    path = text(path)
    Map.new(names, &{&1, Tensor.from_native(Native.safetensors_read(path, &1))})
  end

  @doc "Writes tensors on the host to a file, which appears whole or not at all."
  @spec write(Path.t(), %{String.t() => Tensor.t()} | [{String.t(), Tensor.t()}]) :: :ok
  def write(path, tensors) do
    {} = Error.unwrap!(Native.safetensors_write(text(path), natives(tensors)))
    :ok
  end

  @doc """
  Writes tensors to a file one after another, so that they need not be in memory all at once. `specs` are the name, type
  and shape of each; `tensors` gives `{name, tensor}` pairs in any order, such as a stream that makes them as they
  are wanted. The file appears whole, or not at all where something is missing or raises.

      iex> path = Path.join(System.tmp_dir!(), "sidewinder-pieces-#{System.pid()}.safetensors")
      iex> ones = &Sidewinder.Tensor.from_list(List.duplicate(1, &1), :f32, {&1})
      iex> pieces = Stream.map([3, 2], &{"ones." <> to_string(&1), ones.(&1)})
      iex> Sidewinder.Safetensors.write_each(path, [{"ones.2", :f32, {2}}, {"ones.3", :f32, {3}}], pieces)
      :ok
      iex> Sidewinder.Safetensors.read(path)["ones.3"]
      #Sidewinder.Tensor<f32 (3) [1.0, 1.0, 1.0]>
      iex> File.rm(path)
      :ok
  """
  @spec write_each(
          Path.t(),
          [{String.t(), Tensor.type(), Tensor.shape()}],
          Enumerable.t()
        ) :: :ok
  def write_each(path, specs, tensors) do
    specs = for {name, type, shape} <- specs, do: {name, type, Tuple.to_list(shape)}
    file = Error.unwrap!(Native.safetensors_create(text(path), specs))

    try do
      for {name, tensor} <- tensors,
          do: Error.unwrap!(Native.safetensors_put(file, name, Tensor.to_native(tensor)))

      {} = Error.unwrap!(Native.safetensors_finish(file))
      :ok
    after
      Native.safetensors_abandon(file)
    end
  end

  defp natives(tensors),
    do: for({name, %Tensor{} = tensor} <- tensors, do: {name, Tensor.to_native(tensor)})

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
  """
  @spec decode(binary) :: %{String.t() => Tensor.t()}
  def decode(bytes) when is_binary(bytes) do
    pairs = Error.unwrap!(Native.safetensors_decode(bytes))
    Map.new(pairs, fn {name, tensor} -> {name, Tensor.from_native({:ok, tensor})} end)
  end

  def decode(other) do
    raise Error.new(:argument, "bytes", expected: "a binary", got: Error.show(other))
  end

  defp text(path), do: IO.chardata_to_string(path)
end
