defmodule Mix.Tasks.Sidewinder.Generate do
  @shortdoc "Continues a text with a Mamba language model"

  @moduledoc """
  Loads a Mamba language model and writes what follows a prompt, word by word.

      mix sidewinder.generate --model DIR --prompt TEXT [OPTIONS]

  The model is a folder with safetensors files and a `config.json`, or such a file: see `Sidewinder.Mamba.load/2`.

    * `--max-tokens N` - how many tokens at most, 128 by default
    * `--temperature X`, `--top-k N`, `--top-p X`, `--seed N` - how they are drawn; by default always the most
      probable one
    * `--stop TEXT` - ends before this text, or at the special token of this name; may be given several times
    * `--stop-token N` - ends at this token; may be given several times
    * `--ignore-eos` - goes on after the token that ends texts
    * `--add-bos`, `--no-add-bos` - whether the prompt begins with the token that begins texts; by default as the
      tokenizer has it: see `Sidewinder.Tokenizer.encode/3`
    * `--tokenizer FILE` - a `tokenizer.json`, by default the one beside the weights
    * `--type f32|bf16|f16|f64` - the type to run in, by default that of the weights
    * `--backend auto|cpu|cuda|cuda:N`, `--level LEVEL`, `--threads N`, `--allow-tf32` - where and how to run

  The prompt and what follows it go to standard output, and at the end a line about the speed to standard
  error. The exit code is 1 if something is wrong.
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
    stop: :keep,
    stop_token: [:integer, :keep],
    ignore_eos: :boolean,
    add_bos: :boolean
  ]
  @where [backend: :string, level: :string, threads: :integer, allow_tf32: :boolean]
  @loading [model: :string, tokenizer: :string, type: :string] ++ @where
  @switches [prompt: :string] ++ @loading ++ @generation

  @impl true
  def run(args) do
    Mix.Task.run("app.config")
    CommandLine.run(fn -> args |> parse!() |> main() end)
  end

  defp parse!(args) do
    options = CommandLine.options!(args, @switches, @task)

    for name <- [:model, :prompt],
        options[name] in [nil, ""],
        do: CommandLine.wrong!("--#{name}", "a value", "none", @task)

    options
  end

  defp main(options) do
    {model, loading} = CommandLine.timed(fn -> load(options) end)
    generation = Keyword.take(options, Keyword.keys(@generation) -- [:stop, :stop_token])
    stop = Keyword.get_values(options, :stop) ++ Keyword.get_values(options, :stop_token)
    pieces = Mamba.generate(model, options[:prompt], [stop: stop] ++ generation)
    IO.write(options[:prompt])
    {times, ms} = CommandLine.timed(fn -> write(pieces) end)
    IO.puts("")
    IO.puts(:stderr, about(model, loading, times, ms))
  end

  defp load(options) do
    where = Keyword.take(options, Keyword.keys(@where))
    tokenizer = if file = options[:tokenizer], do: [tokenizer: Tokenizer.open(file)], else: []
    type = OpArguments.type!(options[:type])
    Mamba.load(options[:model], [type: type] ++ tokenizer ++ where)
  end

  # How many pieces there were, and when the first of them came.
  defp write(pieces) do
    start = System.monotonic_time(:microsecond)

    Enum.reduce(pieces, {0, nil}, fn piece, {count, first} ->
      IO.write(piece)
      {count + 1, first || (System.monotonic_time(:microsecond) - start) / 1000}
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
