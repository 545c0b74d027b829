defmodule Mix.Tasks.Sidewinder.Generate do
  @shortdoc "Continues a text with a Mamba language model"

  @moduledoc """
  Loads a Mamba language model and writes what follows a prompt, word by word.

      mix sidewinder.generate --model DIR --prompt TEXT [OPTIONS]
      mix sidewinder.generate --model DIR --prompt-file FILE [OPTIONS]

  The model is a folder with safetensors files and a `config.json`, or such a file: see `Sidewinder.Mamba.load/2`.

    * `--prompt TEXT`, `--prompt-file FILE` - a text, or the text of a file, of standard input where it is `-`, to the last
      byte: a line end that it has is part of the prompt. Both may be given several times; all are then continued as one
      batch, each as it would be alone, and written when all are done, each below a line `==> prompt N <==`.
    * `--max-tokens N` - how many tokens at most, 128 by default
    * `--temperature X`, `--top-k N`, `--top-p X`, `--seed N` - how they are drawn; by default always the most
      probable one
    * `--repetition-penalty X` - makes tokens that the text has less probable, where it is above 1, the default
    * `--stop TEXT` - ends before this text, or at the special token of this name; may be given several times
    * `--stop-token N` - ends at this token; may be given several times
    * `--ignore-eos` - continues after the token that ends texts
    * `--add-bos`, `--no-add-bos` - whether the prompt begins with the token that begins texts; by default as the
      tokenizer has it: see `Sidewinder.Tokenizer.encode/3`
    * `--tokenizer FILE` - a `tokenizer.json`, by default the one beside the weights
    * `--type f32|bf16|f16|f64` - the type to run in, by default that of the weights
    * `--quantize q8_0|q4_0|ternary` - how large matrices are held: see `Sidewinder.Mamba.load/2`
    * `--backend auto|cpu|cuda|cuda:N`, `--level LEVEL`, `--threads N`, `--allow-tf32` - where and how to run

  Texts are UTF-8 in any locale. The prompt and what follows it go to standard output, and at the end a line
  about the speed to standard error. On a terminal a line tells the progress of loading and of long prompts. The exit
  code is 1 if something is wrong.
  """

  use Mix.Task

  alias Sidewinder.{CommandLine, Mamba, OpArguments, Tokenizer}

  @task "sidewinder.generate"

  @generation [
    max_tokens: :integer,
    temperature: :float,
    top_k: :integer,
    top_p: :float,
    seed: :integer,
    repetition_penalty: :float,
    stop: :keep,
    stop_token: [:integer, :keep],
    ignore_eos: :boolean,
    add_bos: :boolean
  ]
  @where [backend: :string, level: :string, threads: :integer, allow_tf32: :boolean]
  @loading [model: :string, tokenizer: :string, type: :string, quantize: :string] ++ @where
  @switches [prompt: [:string, :keep], prompt_file: [:string, :keep]] ++ @loading ++ @generation

  @impl true
  def run(args) do
    Mix.Task.run("app.config")
    CommandLine.run(args, &main(parse!(&1)))
  end

  defp parse!(args) do
    options = CommandLine.options!(args, @switches, @task)
    for {name, ""} when name in [:prompt, :prompt_file] <- options, do: missing(name)
    if options[:model] in [nil, ""], do: missing(:model)
    unless options[:prompt] || options[:prompt_file], do: missing(:prompt)
    options
  end

  defp missing(name) do
    option = "--" <> String.replace(to_string(name), "_", "-")
    CommandLine.wrong!(option, "a value", "none", @task)
  end

  defp main(options) do
    prompts = Enum.flat_map(options, &prompt/1)
    {model, loading} = CommandLine.timed(fn -> load(options) end)
    generation = Keyword.take(options, Keyword.keys(@generation) -- [:stop, :stop_token])
    stop = Keyword.get_values(options, :stop) ++ Keyword.get_values(options, :stop_token)
    options = [stop: stop] ++ generation ++ CommandLine.progress("prompt")
    write = fn -> write(model, prompts, options) end
    {times, ms} = CommandLine.timed(write)
    CommandLine.tell(about(model, loading, times, ms), &IO.puts(:stderr, &1))
  end

  # In the order in which they were given.
  defp prompt({:prompt, text}), do: [text]
  defp prompt({:prompt_file, path}), do: [CommandLine.text!(path)]
  defp prompt(_other), do: []

  defp load(options) do
    where = Keyword.take(options, Keyword.keys(@where))
    tokenizer = if file = options[:tokenizer], do: [tokenizer: Tokenizer.open(file)], else: []
    type = OpArguments.type!(options[:type])
    quantize = CommandLine.format!(options[:quantize], "--quantize", @task)
    progress = CommandLine.progress("loading")

    Mamba.load(
      options[:model],
      [type: type, quantize: quantize] ++ tokenizer ++ where ++ progress
    )
  end

  # The prompt is written with the first piece, when the line of its progress is gone.
  defp write(model, [prompt], options) do
    first = &if(&1 == 0, do: prompt, else: "")
    pieces = Mamba.generate(model, prompt, options)
    {_, {count, _} = times} = written(pieces, &IO.write([first.(&2), &1]))
    IO.puts(first.(count))
    times
  end

  # Pieces of several texts come in turns.
  defp write(model, prompts, options) do
    {pieces, times} = model |> Mamba.generate(prompts, options) |> written(fn _, _ -> :ok end)
    texts = Enum.group_by(pieces, &elem(&1, 0), &elem(&1, 1))

    parts =
      for {prompt, i} <- Enum.with_index(prompts),
          do: ["==> prompt #{i + 1} <==\n", prompt, texts[i] || [], "\n"]

    parts |> Enum.intersperse("\n") |> IO.write()
    times
  end

  # The pieces, how many there were, and when the first of them came.
  defp written(pieces, write) do
    start = System.monotonic_time(:microsecond)

    Enum.map_reduce(pieces, {0, nil}, fn piece, {count, first} ->
      write.(piece, count)
      {piece, {count + 1, first || (System.monotonic_time(:microsecond) - start) / 1000}}
    end)
  end

  defp about(_model, _loading, {0, nil}, _ms), do: "nothing followed"

  defp about(model, loading, {count, first}, ms) do
    short = &CommandLine.short/1

    speed =
      if count > 1,
        do: ", then #{short.((count - 1) / max(ms - first, 0.001) * 1000)} a second",
        else: ""

    "#{inspect(model)} loaded in #{short.(loading)} ms; #{count} pieces of text, " <>
      "the first after #{short.(first)} ms#{speed}"
  end
end
