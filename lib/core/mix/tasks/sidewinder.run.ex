defmodule Mix.Tasks.Sidewinder.Run do
  @shortdoc "Runs an op on a safetensors file"

  @moduledoc """
  Runs an op on the tensors of a safetensors file and writes its outputs to another.

      mix sidewinder.run OP IN.safetensors OUT.safetensors [OPTIONS]
      mix sidewinder.run --help

  The op's inputs are the tensors of its inputs' names; optional ones may be absent. Tensors named
  `out.*` are ignored: sample files have the expected outputs there. Any other tensor is an error. The
  output is complete or absent.

  Where the file has cotangents too, gradients of a loss with respect to the op's outputs, such as `dy`
  for `y`, the gradients with respect to all given inputs are written too: `dx` for `x`. Missing cotangents
  are zero.

  `--help` lists the ops with their inputs, cotangents, shapes and options. Options of an op have
  dashes here: `--dt-softplus`, `--no-dt-softplus`, `--dt-clamp 0.001,0.1`, `--activation silu`. The
  last state, and the derivative of an activation, are written unless `--no-return-state` or
  `--no-return-derivative` is given. Every op takes these as well:

    * `--backend auto|cpu|cuda|cuda:N` - where to run
    * `--level LEVEL`, `--threads N` - how to run on the CPU
    * `--allow-tf32` - on CUDA, matrix products of f32 may round their factors to TF32
    * `--type f32|bf16|f16|f64` - rounds the inputs to that type first; those that are always in the
      type of the arithmetic to `f32`, or `f64` for `f64`; masks stay the bytes that they are
    * `--case NAME` - takes the tensors named `NAME.*` out of a file of several cases

  On a terminal a line tells the progress of reading and writing. On success one line is printed; otherwise one line on
  standard error describes the error, and the exit code is 1.
  """

  use Mix.Task

  alias Sidewinder.{CommandLine, Error, Kernel, OpArguments, Ops, Safetensors, Tensor}

  @rounds "--type TYPE rounds all inputs to what fits together"
  @where [backend: :string, level: :string, threads: :integer, allow_tf32: :boolean]
  @common [type: :string, case: :string, help: :boolean] ++ @where

  @impl true
  def run(args) do
    Mix.Task.run("app.config")
    CommandLine.run(args, &main(&1, Ops.all()))
  end

  # Gradients are asked for by cotangents, not by name.
  defp main(args, ops) do
    case OpArguments.name(args, ops, @common) do
      :help -> Mix.shell().info(help(Ops.forward(ops)))
      name -> job(Ops.find!(Ops.forward(ops), name), ops, args)
    end
  end

  defp job(op, ops, args) do
    {options, files} = OpArguments.parse!(op, args, @common)
    [input, output] = files!(files)
    backward = Ops.backward(ops, op)
    type = OpArguments.type!(options[:type])
    {inputs, cotangents} = OpArguments.read(op, input, options[:case])
    inputs = OpArguments.cast(inputs, op, type)
    cotangents = if cotangents == [], do: [], else: OpArguments.cast(cotangents, backward, type)
    where = Keyword.take(options, Keyword.keys(@where))
    own = own_options(op, options)

    work = fn ->
      outputs = compute(op, inputs, own, where)
      Map.merge(outputs, gradients(backward, inputs, outputs, cotangents, own, where))
    end

    {outputs, ms} = CommandLine.timed(fn -> CommandLine.ticking(op.name, work) end)
    Safetensors.write(output, outputs, CommandLine.progress(output))
    done = "#{op.name}: #{describe(Enum.take(inputs, 1))} -> #{describe(outputs)}"
    place = CommandLine.place(String.to_atom(op.name), inputs, own, where)
    Mix.shell().info("#{done} in #{CommandLine.short(ms)} ms on #{place}, written to #{output}")
  end

  defp compute(op, inputs, own, where) do
    Kernel.run(String.to_atom(op.name), inputs, own, where)
  rescue
    error in Error -> raise if(error.kind == :dtype, do: %{error | hint: @rounds}, else: error)
  end

  defp gradients(_backward, _inputs, _outputs, [], _own, _where), do: %{}

  defp gradients(backward, inputs, outputs, cotangents, own, where) do
    given = Map.new(inputs ++ cotangents)
    compute(backward, Ops.gradient_inputs(backward, given, outputs, &zeros/2), own, where)
  end

  # The cotangent of an output that the loss does not depend on.
  defp zeros(%{optional: true}, _output), do: nil

  defp zeros(_slot, %Tensor{type: type, shape: shape}) do
    Tensor.from_list(List.duplicate(0, Tensor.elements(shape)), type, shape)
  end

  # Long work should not be lost to a misspelt folder.
  defp files!([_input, output] = files) do
    folder = Path.dirname(output)
    unless File.dir?(folder), do: no_folder(output, folder)
    files
  end

  defp files!(files) do
    raise Error.new(:argument, "files",
            expected: "an input and an output",
            got: Enum.join(files, " ")
          )
  end

  defp no_folder(output, folder) do
    raise Error.new(:file, output, expected: "an existing folder", got: folder)
  end

  defp describe(tensors) do
    Enum.map_join(tensors, ", ", fn {name, tensor} -> "#{name} #{Tensor.describe(tensor)}" end)
  end

  # The last state is written, so that another run can continue from it.
  @asked %{return_state: true, return_derivative: true}

  defp own_options(op, options) do
    known = for option <- op.options, do: String.to_atom(option.name)
    Map.merge(Map.take(@asked, known), OpArguments.own(op, options))
  end

  defp help(ops) do
    """
    mix sidewinder.run OP IN.safetensors OUT.safetensors [OPTIONS]

    Every op: --backend auto|cpu|cuda|cuda:N  --level LEVEL  --threads N  --type f32|bf16|f16|f64
              --allow-tf32  --case NAME (tensors named NAME.* of a file of several cases)
    Tensors have one type; those marked wide are f32 beside bf16 and f16, and are cast so by --type.
    Those marked mask are bytes (U8 or BOOL), where any number but 0 is true. With cotangents in the
    file, gradients are written too.

    #{Enum.map_join(ops, "\n", &OpArguments.help/1)}\
    """
  end
end
