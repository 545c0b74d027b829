defmodule Sidewinder.Mamba.Saving do
  @moduledoc false
  # Models as folders that other programs read too: the weights, what `config.json` says of them, and the files of the
  # tokenizer and of the license in the folder of the weights.

  alias Sidewinder.{Error, Native, Progress, Tokenizer}

  @index "model.safetensors.index.json"
  @generation "generation_config.json"
  @tokenizer "tokenizer.json"

  @doc "What a model keeps of the checkpoint that it is loaded from: where that is, and the text of its configuration."
  def origin(path) do
    path = Path.expand(path)

    case File.read(Path.join(folder(path), "config.json")) do
      {:ok, config} -> %{path: path, configs: [config]}
      {:error, _} -> %{path: path, configs: []}
    end
  end

  @doc "The origin of a model that is made like another one, with its own configuration, which may be empty."
  def origin(nil, ""), do: nil
  def origin(nil, config), do: %{path: nil, configs: [config]}
  def origin(origin, ""), do: origin
  def origin(origin, config), do: %{origin | configs: origin.configs ++ [config]}

  defp folder(path), do: if(File.dir?(path), do: path, else: Path.dirname(path))

  @doc "Writes a model to a folder: see `Sidewinder.Mamba.save/3`."
  def save(model, folder, options) do
    make_folder(folder)
    index = index!(model, folder)
    # The weights are written first, so that a call that is ended changes nothing in the folder.
    path = Path.join(folder, "model.safetensors")
    {} = Error.unwrap!(Progress.follow(options, &Native.mamba_save(model.ref, path, &1)))
    write(Path.join(folder, "config.json"), config(model))
    copy_beside(files(model), folder)
    tell_ends(model, folder)
    # The single file now replaces the parts.
    if index, do: File.rm(index)
    :ok
  end

  @doc false
  def make_folder(path) do
    with {:error, reason} <- File.mkdir_p(path), do: failed(path, "a folder", reason)
  end

  # The index of the folder that the model was loaded from names the old parts.
  defp index!(model, folder) do
    index = Path.join(folder, @index)

    cond do
      not File.exists?(index) ->
        nil

      from?(model, folder) ->
        index

      true ->
        no_index!(folder)
    end
  end

  @doc "Refuses a folder with an index, which names other files."
  def no_index!(folder) do
    index = Path.join(folder, @index)

    if File.exists?(index),
      do:
        raise(Error.new(:file, index, expected: "a folder without it", got: "an index of files"))
  end

  defp from?(%{origin: %{path: path}}, folder) when is_binary(path), do: same?(path, folder)
  defp from?(_model, _folder), do: false

  defp same?(path, other) do
    with {:ok, %{type: :directory} = stat} <- File.stat(path),
         {:ok, again} <- File.stat(other) do
      {stat.major_device, stat.inode} == {again.major_device, again.inode}
    else
      _ -> false
    end
  end

  ## The configuration

  defp config(model) do
    configs = default_end(model) ++ ((model.origin && model.origin.configs) || [])
    Error.unwrap!(Native.mamba_described(model.ref, configs))
  end

  # Readers take token 0 for the end where a configuration has none.
  defp default_end(%{config: %{vocabulary: 0}}), do: []
  defp default_end(%{ends: [_ | _] = ends}), do: [ends_json(ends)]
  defp default_end(%{ends: nil, tokenizer: %Tokenizer{} = tokenizer}), do: eos(tokenizer)
  defp default_end(_model), do: []

  defp eos(tokenizer) do
    for token <- List.wrap(Tokenizer.eos(tokenizer)), do: ends_json([token])
  rescue
    # Files that cannot be used are copied as they are.
    Error -> []
  end

  defp ends_json([token]), do: ~s({"eos_token_id": #{token}})
  defp ends_json(tokens), do: ~s({"eos_token_id": [#{Enum.join(tokens, ", ")}]})

  # If the files there have other ends than the model, `generation_config.json` must have the model's.
  defp tell_ends(%{ends: [_ | _] = ends, config: %{vocabulary: vocabulary}}, folder) do
    with answer when answer != {:ok, ends} <- Native.mamba_ends(folder, vocabulary) do
      path = Path.join(folder, @generation)
      own = ends_json(ends)
      before = with {:ok, text} <- File.read(path), do: Native.json_merged([text, own])
      {:ok, text} = with {:error, _} <- before, do: {:ok, own}
      write(path, text)
    end
  end

  defp tell_ends(_model, _folder), do: :ok

  ## Other files of the folder

  @doc "Copies files to a folder, `{name there, path}`; each appears whole, in place of one that was there."
  def copy_beside(files, folder) do
    for {name, path} <- files do
      target = Path.join(folder, name)

      replace(target, fn unfinished ->
        case File.copy(path, unfinished) do
          {:ok, _bytes} -> :ok
          {:error, reason} -> failed(path, "a file that can be copied to #{folder}", reason)
        end
      end)
    end
  end

  @doc "The files in the folder of the weights at `path` that hold for a model made of them, too: `{name, path}`."
  def beside(path), do: among(folder(path), &(of_tokenizer?(&1) or of_model?(&1)))

  # Those of a model: the tokenizer may come from elsewhere.
  defp files(%{tokenizer: %Tokenizer{file: file}, origin: origin}) when is_binary(file) do
    of_model = if path = origin && origin.path, do: among(folder(path), &of_model?/1), else: []
    parts = among(Path.dirname(file), &(of_tokenizer?(&1) and &1 != @tokenizer))
    [{@tokenizer, file} | parts ++ of_model]
  end

  defp files(%{origin: %{path: path}}) when is_binary(path), do: beside(path)
  defp files(_model), do: []

  defp among(folder, take?) do
    names = with {:error, _} <- File.ls(folder), do: {:ok, []}

    for name <- Enum.sort(elem(names, 1)),
        take?.(name),
        path = Path.join(folder, name),
        File.regular?(path),
        do: {name, path}
  end

  defp of_tokenizer?(name) do
    name =~
      ~r/\A(tokenizer|chat_template|special_tokens_map|added_tokens|vocab|merges|spiece|sentencepiece)\b/ or
      name =~ ~r/\A(tokenizer|tokenization)_\w+\.(json|py)\z/ or
      name =~ ~r/\.(tiktoken|jinja)\z/
  end

  defp of_model?(name) do
    name in [@generation, "preprocessor_config.json"] or
      name =~ ~r/\A(LICEN[CS]E|NOTICE)\b/i
  end

  ## Files

  @doc "Writes a text to a file, which appears whole."
  def write(path, text), do: replace(path, &File.write(&1, text))

  defp replace(path, make) do
    unfinished = unfinished(path)

    with :ok <- make.(unfinished),
         :ok <- File.rename(unfinished, path) do
      :ok
    else
      {:error, reason} -> failed(path, "a file that can be written", reason)
    end
  after
    # If all went well it has been renamed, so there is none.
    File.rm(unfinished(path))
  end

  # A process writes one at a time.
  defp unfinished(path) do
    self = self() |> :erlang.pid_to_list() |> List.to_string()
    Path.join(Path.dirname(path), ".#{Path.basename(path)}.#{System.pid()}#{self}")
  end

  defp failed(path, expected, reason) do
    raise Error.new(:file, path,
            expected: expected,
            got: List.to_string(:file.format_error(reason))
          )
  end
end
