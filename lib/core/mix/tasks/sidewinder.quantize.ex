defmodule Mix.Tasks.Sidewinder.Quantize do
  @shortdoc "Quantizes the weights of a safetensors file"

  @moduledoc """
  Quantizes the weights of a safetensors file into another, and prints the errors.

      mix sidewinder.quantize IN.safetensors OUT.safetensors --format q4_0
      mix sidewinder.quantize IN.safetensors OUT.safetensors --format ternary --only "*proj.weight"
      mix sidewinder.quantize mamba-130m-hf mamba-130m-q8 --format q8_0

  Tensors of floats with two axes whose rows fit the format are quantized; all others are copied.
  `Sidewinder.Quantized.load!/3` reads the output.

  Of a whole Mamba the matrices of its products are quantized, with the head, which is written in addition to the
  embedding; ternary matrices get a scale for each row. `Sidewinder.Mamba.load/2` of the output gives, bit by bit, the
  model that it makes of the input with `:quantize`. IN and OUT may be folders: several files become one. If the output's
  folder is not that of the input, the configuration and the tokenizer's files are written too. Other tensors that
  `--only` asks for are dequantized when the model is loaded.

    * `--format q8_0|q4_0|ternary` - what to quantize to. Rows of `q8_0` and `q4_0` are multiples of 32
    * `--only PATTERN`, `--except PATTERN` - names to quantize, and names not to, where `*` stands for any characters; both
      may be given several times
    * `--rule absmean|twn|threshold`, `--threshold X`, `--per-row` - how ternary numbers are found: see
      `Sidewinder.Quantized.quantize/3`
    * `--force` - replaces OUT.safetensors, and a configuration beside it, if they are there
    * `--backend auto|cpu|cuda|cuda:N`, `--level LEVEL`, `--threads N` - where and how to run

  Each tensor gets a line when it is done: its size before and after, the relative error, which is the root mean square
  of what was lost by that of what was there, and the largest error of a number. The last line sums up. Tensors are
  read, quantized and written one after another, so that memory is needed only for the largest. The output is complete
  or absent; the exit code is 1 if something is wrong.
  """

  use Mix.Task

  alias Sidewinder.{CommandLine, Error, Native, Quantized, Safetensors, Tensor}
  alias Sidewinder.Mamba.Quantizing

  @task "sidewinder.quantize"
  @where [backend: :string, level: :string, threads: :integer]
  @ternary [rule: :string, threshold: :float, per_row: :boolean]
  @switches [format: :string, only: :keep, except: :keep, force: :boolean] ++ @ternary ++ @where
  @floats ~w(F64 F32 BF16 F16)

  @impl true
  def run(args) do
    Mix.Task.run("app.config")
    CommandLine.run(args, &main(CommandLine.parse!(&1, @switches, @task)))
  end

  defp main({options, [input, output]}) do
    format = format!(options)
    # Refused even if nothing is quantized.
    options |> Keyword.take(Keyword.keys(@where)) |> Sidewinder.Kernel.residence()
    {files, output} = Quantizing.files(input, output)
    unless options[:force], do: absent!(output)
    Quantizing.prepare!(input, output)
    {model?, plan} = plan(files, format, options)
    options = if model?, do: per_row(format, options), else: options
    specs = Enum.flat_map(plan, &specs(&1, format, options))
    names = for {name, _type, _shape} <- specs, do: name

    work = fn write ->
      for {entry, i} <- Enum.with_index(plan, 1) do
        label = "#{i} of #{length(plan)}: #{entry.name}"
        result = CommandLine.ticking(label, fn -> one(entry, format, options, write) end)
        CommandLine.tell(line(entry, format, result))
        result
      end
    end

    metadata = Quantizing.metadata(files, names, model?)
    results = Safetensors.write_each(output, specs, work, metadata: metadata)
    if model?, do: Quantizing.write_beside(files, output, options[:force] == true)
    CommandLine.tell("#{total(results, format)}, written to #{output}")
  end

  defp main({_options, words}) do
    CommandLine.wrong!("files", "IN.safetensors OUT.safetensors", Enum.join(words, " "), @task)
  end

  defp format!(options) do
    format = CommandLine.format!(options[:format] || "none", "--format", @task)

    if format == :ternary, do: format, else: no_ternary!(options, format)
  end

  defp no_ternary!(options, format) do
    for {name, _} <- Keyword.take(options, Keyword.keys(@ternary)) do
      dashed = "--" <> String.replace(to_string(name), "_", "-")
      CommandLine.wrong!(dashed, "options of #{format}", "one of ternary", @task)
    end

    format
  end

  # The default for models.
  defp per_row(:ternary, options) do
    if Keyword.take(options, Keyword.keys(@ternary)) == [],
      do: [per_row: true] ++ options,
      else: options
  end

  defp per_row(_blocks, options), do: options

  defp absent!(output) do
    if File.exists?(output) do
      raise Error.new(:file, output,
              expected: "a file that is not there",
              got: "one that is",
              hint: "--force replaces it"
            )
    end
  end

  # What is done with each tensor: `why` it is copied, or nil if it is quantized. And whether they are a model.
  defp plan(files, format, options) do
    [only, except] =
      for key <- [:only, :except],
          do: for(text <- Keyword.get_values(options, key), do: like(text))

    index = for file <- files, entry <- Safetensors.index(file), do: Map.put(entry, :file, file)
    model? = Quantizing.model?(index)
    why = &Map.put(&1, :why, why(&1, format, {only, except}, model?))
    plan = Enum.map(index, why)

    heads = if model?, do: Enum.map(Quantizing.with_head(index) -- index, why), else: []
    {model?, plan ++ for(%{why: nil} = head <- heads, not quantized?(plan, head.of), do: head)}
  end

  defp quantized?(plan, name), do: Enum.any?(plan, &(&1.name == name and &1.why == nil))

  defp like(pattern) do
    parts = for part <- String.split(pattern, "*"), do: Regex.escape(part)
    Regex.compile!("\\A#{Enum.join(parts, ".*")}\\z", "s")
  end

  defp why(%{name: name, type: type, shape: shape}, format, {only, except}, model?) do
    named? = fn patterns -> Enum.any?(patterns, &Regex.match?(&1, name)) end

    cond do
      type not in @floats -> "no floats"
      tuple_size(shape) != 2 -> "not two axes"
      not Quantized.fits?(format, shape) -> "rows of #{elem(shape, 1)} do not fit"
      named?.(except) -> "excepted"
      only != [] and not named?.(only) -> "not asked for"
      only == [] and model? and not Quantizing.matrix?(name) -> "read as floats"
      true -> nil
    end
  end

  defp specs(%{why: nil, name: name, shape: shape}, format, options) do
    tensors =
      Quantized.to_tensors(Quantized.blank(format, shape, options[:per_row] == true), name)

    for {name, tensor} <- tensors, do: {name, tensor.type, tensor.shape}
  end

  defp specs(%{name: name, type: type, shape: shape}, _format, _options),
    do: [{name, our_type!(type, name), shape}]

  # Truth values are read as bytes.
  defp our_type!("BOOL", _name), do: :u8

  defp our_type!(type, name) do
    Enum.find(Tensor.types(), &(to_string(&1) == String.downcase(type))) ||
      raise Error.new(:dtype, name,
              expected: "F64, F32, BF16, F16, I64, I32, I16, I8, U8 or BOOL",
              got: type
            )
  end

  defp one(%{why: nil, name: name} = entry, format, options, write) do
    tensor = read(entry)
    where = Keyword.take(options, Keyword.keys(@where))
    quantized = Quantized.quantize(floats(tensor), format, rule(format, options) ++ where)
    for {name, part} <- Quantized.to_tensors(quantized, name), do: write.(name, part)
    back = Tensor.to_native(Quantized.dequantize(quantized, where))

    {squares, reference, largest} =
      Error.unwrap!(Native.tensor_difference(back, Tensor.to_native(tensor)))

    %{
      quantized?: true,
      before: if(entry[:of], do: 0, else: byte_size(tensor.data)),
      after: Quantized.bytes(quantized),
      squares: squares,
      reference: reference,
      largest: largest
    }
  end

  defp one(%{name: name} = entry, _format, _options, write) do
    tensor = read(entry)
    write.(name, tensor)
    bytes = byte_size(tensor.data)
    %{quantized?: false, before: bytes, after: bytes, squares: 0.0, reference: 0.0, largest: 0.0}
  end

  defp read(%{file: file} = entry) do
    name = entry[:of] || entry.name
    Safetensors.read(file, [name])[name]
  end

  # Quantizers compute in f32.
  defp floats(%Tensor{type: :f64} = tensor), do: Tensor.cast(tensor, :f32)
  defp floats(tensor), do: tensor

  defp rule(:ternary, options), do: Keyword.take(options, Keyword.keys(@ternary))
  defp rule(_blocks, _options), do: []

  defp line(%{why: nil} = entry, format, result),
    do: "#{describe(entry)} -> #{format}: #{sizes(result)}, #{errors([result])}"

  defp line(%{why: why} = entry, _format, result),
    do: "#{describe(entry)}: copied (#{why}), #{Quantized.size(result.before)}"

  defp describe(%{name: name, type: type, shape: shape}) do
    "#{name} #{String.downcase(type)} (#{Enum.map_join(Tuple.to_list(shape), ", ", &to_string/1)})"
  end

  # The head of a model whose head is tied to the embedding.
  defp sizes(%{before: 0, after: now}), do: "#{Quantized.size(now)} more"

  defp sizes(%{before: before, after: now}) do
    smaller = CommandLine.short(before / max(now, 1))
    "#{Quantized.size(before)} -> #{Quantized.size(now)} (#{smaller}x smaller)"
  end

  defp errors(results) do
    largest = Enum.max([0.0 | for(result <- results, do: result.largest)])
    relative = relative(sum(results, :squares), sum(results, :reference))
    "relative error #{CommandLine.short(relative)}, largest #{CommandLine.short(largest)}"
  end

  defp relative(squares, _reference) when squares == 0, do: 0
  defp relative(_squares, reference) when reference == 0, do: :infinity
  defp relative(squares, reference), do: :math.sqrt(squares / reference)

  defp sum(results, key), do: Enum.sum(for result <- results, do: Map.fetch!(result, key))

  defp total(results, format) do
    quantized = Enum.filter(results, & &1.quantized?)
    sizes = sizes(%{before: sum(results, :before), after: sum(results, :after)})
    count = "#{length(quantized)} of #{length(results)} tensors quantized to #{format}"
    "#{count}: #{sizes}, #{errors(quantized)}"
  end
end
