defmodule Mix.Tasks.Sidewinder.Compare do
  @shortdoc "Compares and measures an op at every level of this machine"

  @moduledoc """
  Runs an op and its gradient at every level that this machine has, on the same inputs, and prints for
  each how far it is from the plain reference in f64, and how long it takes.

      mix sidewinder.compare OP [OPTIONS]
      mix sidewinder.compare selective_scan --shape B=1,L=2048,D=1536 --dt-softplus
      mix sidewinder.compare causal_conv1d --shape 2x100x64 --type bf16 --with bias
      mix sidewinder.compare --help

  The inputs are random. Their shapes are those that `--help` lists, with a size for each letter:

    * `--shape B=1,L=2048` - sizes of letters, or the shape of the op's first input, as in `2x100x64`
    * `--type f32|bf16|f16|f64` - the storage type, f32 by default
    * `--with mask,bias` - makes optional inputs too
    * `--seed N` - other random numbers

  or they come from a safetensors file, cotangents too:

    * `--file IN.safetensors`, `--case NAME` - as in `mix sidewinder.run`

  What is done with them:

    * `--iterations N` (50), `--warmup N` (10), `--max-ms N` (2000) - how often, and how long at most,
      each level runs
    * `--threads N` - how many are all threads
    * `--rtol X`, `--atol X` - the tolerance, in place of that of `Sidewinder.Compare`
    * `--no-gradient` - only the op itself
    * `--json`, `--svg` - prints the result as JSON, or as an SVG picture of the times, in place of the table
    * the op's own options, as in `mix sidewinder.run`

  The exit code is 1 if a level is out of tolerance or failed, or if something is wrong with the call.
  """

  use Mix.Task

  alias Sidewinder.{CommandLine, Compare, Error, OpArguments, Ops, RandomInputs}

  @measured [
    iterations: :integer,
    warmup: :integer,
    max_ms: :integer,
    threads: :integer,
    rtol: :float,
    atol: :float,
    gradient: :boolean,
    seed: :integer
  ]
  @common [shape: :string, type: :string, with: :string, file: :string, case: :string] ++
            [help: :boolean, json: :boolean, svg: :boolean] ++ @measured

  # Optional inputs that some ops need.
  @needed %{heads: 8, fn: "silu"}

  @impl true
  def run(args) do
    Mix.Task.run("app.config")
    CommandLine.run(args, &main(&1, Ops.all()))
  end

  defp main(args, ops) do
    case OpArguments.name(args, ops, @common) do
      :help -> Mix.shell().info(help(Ops.forward(ops)))
      name -> compare(Ops.find!(Ops.forward(ops), name), args)
    end
  end

  defp compare(op, args) do
    {options, words} = OpArguments.parse!(op, args, @common)
    form = form(options)
    if words != [], do: refuse("words", "none after the op's name", Enum.join(words, " "))
    own = own_options(op, options)
    inputs = inputs(op, options, own)
    work = fn -> Compare.levels(op.name, inputs, [{:options, own} | measured(options)]) end
    result = CommandLine.ticking(op.name, work)
    Mix.shell().info(form.(result))
    unless result.ok?, do: exit({:shutdown, 1})
  end

  defp form(options) do
    case for(name <- [:json, :svg], options[name], do: name) do
      [] -> &Compare.table/1
      [:json] -> &Compare.json/1
      [:svg] -> &Compare.svg/1
      _both -> refuse("--svg", "one of --json and --svg", "both")
    end
  end

  defp measured(options), do: Keyword.take(options, Keyword.keys(@measured))

  defp own_options(op, options) do
    known = for option <- op.options, do: String.to_atom(option.name)
    Map.merge(Map.take(@needed, known), OpArguments.own(op, options))
  end

  defp inputs(op, options, own) do
    type = OpArguments.type!(options[:type])

    if options[:file] do
      made = Keyword.take(options, [:shape, :with, :seed])
      for {key, value} <- made, do: refuse("--#{key}", "no such option beside --file", value)
      {inputs, cotangents} = OpArguments.read(op, options[:file], options[:case])
      OpArguments.cast(inputs, op, type) ++ cotangents
    else
      with_inputs = String.split(options[:with] || "", ",", trim: true)
      made = [type: type, with: with_inputs, options: own]
      RandomInputs.make(op.name, made ++ Keyword.take(options, [:shape, :seed]))
    end
  end

  defp refuse(argument, expected, got) do
    raise Error.new(:option, argument, expected: expected, got: to_string(got))
  end

  defp help(ops) do
    """
    mix sidewinder.compare OP [OPTIONS]

    Every op: --shape B=1,L=100 | --shape 2x100x64  --type f32|bf16|f16|f64  --with NAME,NAME  --seed N
              --file IN.safetensors  --case NAME  --iterations N  --warmup N  --max-ms N  --threads N
              --rtol X  --atol X  --no-gradient  --json  --svg

    #{Enum.map_join(ops, "\n", &OpArguments.help/1)}\
    """
  end
end
