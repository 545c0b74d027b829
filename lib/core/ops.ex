defmodule Sidewinder.Ops do
  @moduledoc false
  # The ops' declarations: code that iterates over this list needs no change when an op is added.

  alias Sidewinder.{Error, OpTable, Tensor}

  @typedoc """
  An op: its inputs, outputs, options and cotangents, and the op that it is the gradient of.
  There are no `outputs` where they do not follow from sizes and flags alone.
  """
  @type op :: %{
          name: String.t(),
          about: String.t(),
          hint: String.t(),
          inputs: [slot],
          outputs: [output],
          storage: [String.t()],
          options: [option],
          cotangents: [String.t()],
          backward_of: String.t() | nil
        }

  @typedoc """
  An option: it takes a `"flag"`, a `"pair"`, an `"integer"`, a `"float"` or a `"text"`, which is one of its `choices`.
  """
  @type option :: %{
          name: String.t(),
          takes: String.t(),
          choices: [String.t()],
          range: :any | :positive | :not_negative | :not_positive | :share,
          default: boolean | number | String.t() | nil,
          help: String.t()
        }

  @typedoc "An output, and when a call has it: always, only with a flag (`:asked`), or only without it (`:unless`)."
  @type output :: %{
          name: String.t(),
          shape: String.t(),
          precision: String.t(),
          when: :always | {:asked | :unless, atom}
        }

  @typedoc "An input: its shape in words, and `\"storage\"`, `\"wide\"`, `\"mask\"` or a type as its precision."
  @type slot :: %{
          name: String.t(),
          shape: String.t(),
          precision: String.t(),
          optional: boolean
        }

  @doc "All ops."
  @spec all() :: [op]
  def all, do: OpTable.ops()

  @doc "The ops that are not the gradient of another."
  @spec forward([op]) :: [op]
  def forward(ops), do: for(op <- ops, op.backward_of == nil, do: op)

  @doc "The op of that name out of `ops`. Raises `Sidewinder.Error` of kind `:argument` if there is none."
  @spec find!([op], String.t() | atom) :: op
  def find!(ops, name) do
    Enum.find(ops, &(&1.name == to_string(name))) ||
      raise Error.new(:argument, "op",
              expected: Enum.map_join(ops, " or ", & &1.name),
              got: to_string(name)
            )
  end

  @doc "The gradient of an op, or nil."
  @spec backward([op], op) :: op | nil
  def backward(ops, op), do: Enum.find(ops, &(&1.backward_of == op.name))

  @doc "The type of an input where the storage type is `storage`."
  @spec type(slot, Tensor.type()) :: Tensor.type()
  def type(%{precision: "storage"}, storage), do: storage
  def type(%{precision: "wide"}, storage), do: wide(storage)
  def type(%{precision: "mask"}, _storage), do: :u8
  def type(%{precision: type}, _storage), do: String.to_existing_atom(type)

  @doc "Inputs in f64 as far as the op computes in it, for its reference."
  @spec wide_inputs(op, [{String.t(), Tensor.t()}]) :: [{String.t(), Tensor.t()}]
  def wide_inputs(op, inputs) do
    floats =
      if "f64" in op.storage, do: for(slot <- op.inputs, float?(slot), do: slot.name), else: []

    for {name, tensor} <- inputs,
        do: {name, if(name in floats, do: Tensor.cast(tensor, :f64), else: tensor)}
  end

  # Options whose names are clearer than those of their inputs.
  @keys %{"b" => :bias, "w_mix" => :wm, "b_mix" => :bm}

  @doc "An optional input as an option: its name in lower case, and its own name too where the two differ."
  @spec optional(slot) :: atom | {atom, String.t()}
  def optional(%{name: name}) do
    key = @keys[name] || name |> String.downcase() |> String.to_atom()
    if Atom.to_string(key) == name, do: key, else: {key, name}
  end

  @doc "Whether an input is a weight: it has no batch and no other first axes."
  @spec weight?(slot) :: boolean
  def weight?(%{shape: shape}), do: not String.starts_with?(shape, ["(B", "(..."])

  @doc """
  What functions that call an op by its name take and give: optional inputs with their options, the op's options, the
  `kinds` of both (an option is `:own`, or the name of an input), weights and outputs.
  """
  @spec called(op) :: %{
          optional: [{String.t(), atom | {atom, String.t()}}],
          options: [atom],
          kinds: %{atom => :own | String.t()},
          weights: [String.t()],
          outputs: [String.t()]
        }
  def called(op) do
    optional = for %{optional: true} = slot <- op.inputs, do: {slot.name, optional(slot)}
    options = for option <- options(op), do: String.to_atom(option.name)

    %{
      optional: optional,
      options: options,
      kinds: Map.new(Enum.map(options, &{&1, :own}) ++ Enum.map(optional, &kind/1)),
      weights: for(slot <- op.inputs, weight?(slot), do: slot.name),
      outputs: for(output <- op.outputs, do: output.name)
    }
  end

  defp kind({_name, {option, name}}), do: {option, name}
  defp kind({name, option}), do: {option, name}

  # A gradient has no options that ask for outputs of its op.
  defp options(%{backward_of: nil, options: options}), do: options

  defp options(%{backward_of: name, options: options}) do
    asked = for %{when: {:asked, flag}} <- find!(all(), name).outputs, do: Atom.to_string(flag)
    Enum.reject(options, &(&1.name in asked))
  end

  @doc "Whether an input's type follows from the storage type, so that it has a gradient."
  @spec float?(slot) :: boolean
  def float?(%{precision: precision}), do: precision in ["storage", "wide"]

  defp wide(:f64), do: :f64
  defp wide(_), do: :f32

  @doc """
  The inputs of the op `backward`: the tensors `given` by name that it takes, the `outputs` of its op that it requires,
  and for each output `y` the result of `cotangent` for the slot `dy` and that output, unless that is nil.
  """
  @spec gradient_inputs(op, map, map, (slot, Tensor.t() -> Tensor.t() | nil)) ::
          [{String.t(), Tensor.t()}]
  def gradient_inputs(backward, given, outputs, cotangent) do
    for slot <- backward.inputs,
        tensor = given[slot.name] || gradient_input(slot, outputs, cotangent),
        do: {slot.name, tensor}
  end

  # An optional input with the name of an output is an initial state, not that output.
  defp gradient_input(%{name: name, optional: false}, outputs, _) when is_map_key(outputs, name),
    do: outputs[name]

  defp gradient_input(%{name: "d" <> output} = slot, outputs, cotangent)
       when is_map_key(outputs, output),
       do: cotangent.(slot, outputs[output])

  defp gradient_input(_slot, _outputs, _cotangent), do: nil
end
