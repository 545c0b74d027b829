defmodule Sidewinder.Mamba.Quantizing do
  @moduledoc false
  # What `mix sidewinder.quantize` does with a whole Mamba. `Sidewinder.Mamba.load/2` of its output is the model that
  # `:quantize` makes of its input.

  alias Sidewinder.{Error, Native, Safetensors}
  alias Sidewinder.Mamba.Saving

  @model "model.safetensors"
  @head "lm_head.weight"

  @doc "The input files and the output file; both arguments may be folders."
  def files(input, output) do
    if File.dir?(input),
      do: {Error.unwrap!(Native.mamba_files(input)), Path.join(output, @model)},
      else: {[input], output}
  end

  @doc "Whether tensors are those of a whole Mamba or Mamba-2."
  def model?(index) do
    of_first =
      for %{name: name} <- index,
          [_, part] <- [Regex.run(~r/layers\.0\.mixer\.(.+)\z/, name)],
          do: part

    Enum.all?(["in_proj.weight", "A_log", "out_proj.weight"], &(&1 in of_first))
  end

  @doc "Whether a model multiplies with the matrix of this name as it is quantized; others are read as floats."
  def matrix?(name),
    do: name == @head or name =~ ~r/\.mixer\.(in_proj|x_proj|out_proj)\.weight\z/

  @doc "The tensors of a model, with a head of its own: the embedding stays as it is."
  def with_head(index) do
    table = Enum.find(index, &(&1.name =~ ~r/\A(backbone\.)?embeddings?\.weight\z/))

    if table == nil or Enum.any?(index, &(&1.name == @head)),
      do: index,
      else: index ++ [%{table | name: @head} |> Map.put(:of, table.name)]
  end

  @doc "The output's metadata: that of the input, and the formats of its matrices."
  def metadata(files, names, model?) do
    told = Map.new(Error.unwrap!(Native.mamba_told(names)))
    own = if model?, do: told, else: Map.delete(told, "format")
    before = files |> hd() |> Safetensors.metadata() |> Map.delete("sidewinder.quantized")
    Map.merge(before, own)
  end

  @doc "Makes the folder of the output; refuses a folder with an index, which names other files."
  def prepare!(input, output) do
    folder = Path.dirname(output)
    if File.dir?(input), do: Saving.make_folder(folder)
    if Path.basename(output) == @model, do: Saving.no_index!(folder)
  end

  @doc """
  Writes what else a folder needs to be a model: the configuration, which tells the formats, and the files of the
  tokenizer. The input's own folder has them already, and its configuration is that of the input unless it is replaced.
  """
  def write_beside([file | _] = files, output, force?) do
    [from, to] = for path <- [file, output], do: Path.dirname(Path.expand(path))
    config = File.read(Path.join(from, "config.json"))
    target = Path.join(to, "config.json")

    cond do
      match?({:error, _}, config) ->
        :ok

      from == to ->
        if Path.expand(output) in Enum.map(files, &Path.expand/1),
          do: describe(config, output, target)

      force? or not File.exists?(target) ->
        describe(config, output, target)
        Saving.copy_beside(Saving.beside(file), to)

      true ->
        :ok
    end
  end

  defp describe({:ok, config}, output, target) do
    names = for entry <- Safetensors.index(output), do: entry.name
    Saving.write(target, Error.unwrap!(Native.mamba_quantized_config(config, names)))
  end
end
