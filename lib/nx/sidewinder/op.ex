defmodule Sidewinder.Op do
  @moduledoc false
  # The path from Nx tensors to an op. An op is a struct whose module has a `table/0` (its inputs, options and
  # outputs) and a `body/2` (the op in pure Nx); everything else is here, once for all ops.
  #
  # `Nx.Defn.Compiler.current/0` tells which compiler a graph is built for. It is set only during
  # tracing, so a plain call inside a callback counts as eager. It can be wrong in two cases, both
  # with correct results: a compiler that passes its graphs to the Evaluator gets a block, whose
  # default function runs the kernel on concrete tensors; and a runtime call in the graph of another
  # compiler calls back into Elixir.

  alias Nx.Defn.{Compiler, Evaluator, Expr}
  alias Sidewinder.{Device, Kernel, Native, Tensor}
  alias Sidewinder.Op.{Check, Gradient, Packed, Vectorize, Warning}

  @typedoc """
  An op's inputs, options and outputs. Sizes are letters, or options of the kinds `:size` and
  `:count` by their names.
  `{:divides, size}` is any divisor of a size, `{:divides, size, letter}` binds it to a letter,
  `{:multiple, size, letter}` binds the letter to the quotient, `{:sum, letters, plus}` is a sum, and
  `{:by, {module, function, more}}` the function's value for all sizes, and `{:after, letter}` binds the letter to a number
  that is less by 1. The batch is
  `:b`, and a leading `:...` any axes, which are flattened into the batch. Inputs whose shape starts with
  either are data, all others are weights. A `{:repeated, sizes}` is broadcast: each size may be 1, and
  leading axes may be missing. It is data if it has a batch.

    * `inputs` - by the kernel's names: precision and allowed shapes
    * `optional` - the options that are inputs, with the kernel's names where these differ
    * `options` - the other options, with the sort of their values: a list has the choices,
      `{:gradient, sort}` is an option of the gradient's kernel alone, `{:here, sort}` of no kernel, and
      `:fixed` options are not the caller's
    * `outputs` - in order: name, precision, shape, and when a call has it: `:always`, if an option is true,
      `{:saved, option}` likewise, but computed always for the gradient, `{:unless, option}` if that is false, or
      `{:more, option, number}` if the option is greater; or the name of a gradient and the input that it is
      shaped like, if that is given
    * `composed` - whether the body is a composition of other ops, which have gradients: compilers get it in
      place of a block
    * `chosen_by` - an option: maps in place of shapes have a shape for each of its values
    * `params` - the inputs that come as a map, see `Sidewinder.Op.Params`
    * `hint` - the hint in errors about shapes
  """
  @type table :: %{
          required(:name) => atom,
          required(:inputs) => %{String.t() => {precision, [dims]}},
          required(:optional) => [atom | {atom, String.t()}],
          required(:options) => [{atom, sort | {:gradient | :here, sort} | :fixed}],
          required(:outputs) => [
            {atom, precision, dims, atom | {:saved | :unless, atom} | {:more, atom, integer}}
            | {atom, String.t()}
          ],
          optional(:composed) => boolean,
          optional(:chosen_by) => atom,
          optional(:params) => Sidewinder.Op.Params.t(),
          required(:hint) => String.t()
        }

  @typedoc """
  `:storage` is the type of the first input, `:wide` that of the arithmetic, and a `:mask` has bytes,
  where any number but 0 is true. A `:mask`, integers of type `:i32` and an output that is an `:index` have no gradient.
  """
  @type precision :: :storage | :wide | :mask | :index | :i32
  @type sort ::
          :flag
          | :pair
          | :number
          | :positive
          | :not_negative
          | :not_positive
          | :share
          | :integer
          | :size
          | :count
          | [atom]
  @type size :: atom | pos_integer
  @type dims :: sizes | {:repeated, sizes} | %{atom => sizes}
  @type sizes :: [
          size
          | {:divides, size}
          | {:divides | :multiple, size, atom}
          | {:sum, [atom], integer}
          | {:by, {module, atom, list}}
        ]

  @callback table() :: table
  @callback body(struct, %{String.t() => Nx.Tensor.t()}) :: [{atom, Nx.Tensor.t() | nil}]

  @doc """
  The gradients by name, `"dx"` for the input `"x"`, of the tensors `given` by name: inputs, outputs,
  and the cotangents, `"dy"` for the output `"y"`, that are not zero or whose outputs the table
  always has. An op without this function has no gradient.
  """
  @callback gradient(struct, given :: [{String.t(), Nx.Tensor.t()}]) ::
              %{String.t() => Nx.Tensor.t()}
  @optional_callbacks gradient: 2

  @doc """
  The common part of ops' modules: `table/0` is their attribute `@table`, which `Sidewinder.Op.Declared.declare/2`
  makes of the kernel's declaration. Of an op:

      use Sidewinder.Op, reference: module with body/2, gradient: module of the gradient

  where a composed op may leave out the last, and leave its gradient to Nx; and of its gradient:

      use Sidewinder.Op, reference: module with backward/2, gradient_of: module of the op

  which needs no reference if the op is composed. Without any of them the module has functions of its own.
  """
  defmacro __using__(opts) do
    [
      common(),
      cond do
        opts[:gradient_of] -> use_gradient(opts)
        opts[:reference] -> use_op(opts)
        true -> nil
      end
    ]
  end

  defp common do
    quote do
      import Sidewinder.Op.Declared, only: [declare: 1, declare: 2]
      @behaviour Sidewinder.Op
      @before_compile Sidewinder.Op
    end
  end

  defp use_op(opts) do
    quote do
      @impl true
      defdelegate body(op, inputs), to: unquote(opts[:reference])

      @impl true
      def gradient(var!(op), var!(given)), do: unquote(gradient(opts[:gradient]))
      defoverridable gradient: 2
    end
  end

  defp gradient(nil) do
    quote do
      gradients = Sidewinder.Op.Gradient.through(__MODULE__, var!(op), Map.new(var!(given)))
      Map.new(gradients, fn {name, t} -> {Atom.to_string(name), t} end)
    end
  end

  defp gradient(module) do
    quote do: Sidewinder.Op.Gradient.by(unquote(module), var!(op), var!(given))
  end

  defp use_gradient(opts) do
    quote do
      defstruct Sidewinder.Op.Gradient.fields(unquote(opts[:gradient_of]))

      @table Sidewinder.Op.Gradient.table(unquote(opts[:gradient_of]).table())

      @impl true
      unquote(gradient_body(opts))
    end
  end

  defp gradient_body(opts) do
    if reference = opts[:reference] do
      quote do: defdelegate(body(op, inputs), to: unquote(reference), as: :backward)
    else
      quote do
        def body(op, inputs),
          do: Sidewinder.Op.Gradient.through(unquote(opts[:gradient_of]), op, inputs)
      end
    end
  end

  defmacro __before_compile__(_env) do
    quote do
      @impl true
      def table, do: @table

      unquote(custom_call())
    end
  end

  # EXLA asks this implementation for the custom call of a block.
  defp custom_call do
    if Code.ensure_loaded?(EXLA.CustomCall) do
      quote do
        defimpl EXLA.CustomCall do
          defdelegate call(op, out, args, client), to: Sidewinder.CustomCall
        end
      end
    end
  end

  @doc """
  Runs `op` on its required `inputs` and on `opts`, which are the optional inputs, the op's options
  and those of `Sidewinder.Kernel`. Returns the outputs by name, in the table's order.
  """
  @spec call(struct, [{String.t(), Nx.t()}], keyword) :: [{atom, Nx.Tensor.t()}]
  def call(op, inputs, opts) do
    {op, table, inputs, sizes} = checked!(op, inputs, opts)
    outputs = outputs(table, op, inputs)

    inputs
    |> Vectorize.map(Enum.map(outputs, &like/1), &once(op, &1, templates(outputs, &1, sizes, &2)))
    |> Enum.zip_with(outputs, &{elem(&2, 0), Check.restore(&1, &2, sizes)})
    |> without(
      for {name, _, _, {:saved, option}} <- outputs, not Map.fetch!(op, option), do: name
    )
  end

  defp checked!(%module{} = op, inputs, opts) do
    %{name: name, options: options, optional: optional} = table = module.table()
    known = for {key, sort} <- options, sort != :fixed, do: key
    {more, own, where} = Kernel.sort_options!(name, opts, optional, known)
    op = op |> struct!(Check.options!(table, own)) |> Map.update!(:target, &(&1 ++ where))

    table = table |> Check.choose(op) |> Packed.choose(inputs ++ more)
    {inputs, sizes} = Check.inputs!(table, op, inputs ++ more)
    {op, table, inputs, sizes}
  end

  @doc """
  Checks the inputs and options of a composed op, as `call/3` does, and passes them to `compose`, which builds it of
  parts under every compiler.
  """
  @spec compose(struct, [{String.t(), Nx.t()}], keyword, (struct, map -> result)) :: result
        when result: term
  def compose(op, inputs, opts, compose) do
    {op, _table, inputs, _sizes} = checked!(op, inputs, opts)
    compose.(op, Map.new(inputs, fn {name, t, _kind} -> {name, t} end))
  end

  @doc """
  Runs a part of the composed op `whole` on the same target, on those inputs that are not nil.
  """
  @spec part(struct, struct, [{String.t(), Nx.t() | nil}]) :: [{atom, Nx.Tensor.t()}]
  def part(whole, part, inputs) do
    call(%{part | target: whole.target}, Enum.filter(inputs, &elem(&1, 1)), [])
  end

  defp outputs(table, op, inputs), do: Enum.filter(table.outputs, &there?(&1, op, inputs))

  defp there?({_, _, _, :always}, _op, _inputs), do: true
  defp there?({_, _, _, {:saved, _}}, _op, _inputs), do: true
  defp there?({_, _, _, {:unless, option}}, op, _inputs), do: not Map.fetch!(op, option)
  defp there?({_, _, _, {:more, option, than}}, op, _inputs), do: Map.fetch!(op, option) > than
  defp there?({_, _, _, option}, op, _inputs), do: Map.fetch!(op, option)
  defp there?({_, input}, _op, inputs), do: List.keymember?(inputs, input, 0)

  defp without(outputs, []), do: outputs
  defp without(outputs, names), do: Keyword.drop(outputs, names)

  defp like({_, _, _, _}), do: nil
  defp like({_, input}), do: input

  defp templates(outputs, inputs, sizes, copies) do
    for output <- outputs, do: {elem(output, 0), template(output, inputs, sizes, copies)}
  end

  defp template({_, precision, [first | dims], _}, _inputs, sizes, copies) do
    shape = [first(first, sizes, copies) | Enum.map(dims, &Check.size!(&1, sizes.dims))]
    Check.template!(List.to_tuple(shape), Map.fetch!(sizes, precision))
  end

  defp template({_, input}, inputs, _sizes, _copies) do
    {_, t} = List.keyfind!(inputs, input, 0)
    Nx.template(t.shape, t.type)
  end

  # Leading axes are flattened into the batch; packed calls have a batch of 1, and states of their own number.
  defp first(first, sizes, copies) when first in [:b, :...], do: copies * sizes.dims.b
  defp first(first, sizes, _copies), do: Check.size!(first, sizes.dims)

  # Tensors of the right types, without names and vectorized axes.
  defp once(op, inputs, templates) do
    {names, tensors} = Enum.unzip(inputs)
    op = %{op | inputs: names}

    if tracing?(tensors),
      do: traced(op, Enum.map(tensors, &Expr.tensor/1), templates),
      else: eager(op, tensors, templates)
  end

  defp tracing?(tensors), do: Compiler.current() != nil or Enum.any?(tensors, &expr?/1)

  defp expr?(t), do: is_struct(t.data, Expr)

  ## In a graph

  # Without the custom gradient a runtime call has a gradient of zero, and a `while` a wrong one.
  defp traced(op, tensors, templates) do
    if composed?(op) and (pure?(op) or Compiler.current() != Evaluator),
      do: op |> body(Enum.map(tensors, &Gradient.cast(&1, &1.type)), templates) |> unpack(),
      else: op |> node(tensors, templates) |> Gradient.attach(op, tensors, templates) |> unpack()
  end

  defp composed?(%module{}), do: Map.get(module.table(), :composed, false)

  defp node(op, tensors, templates) do
    cond do
      pure?(op) -> body(op, tensors, templates)
      Compiler.current() == Evaluator -> runtime_call(op, tensors, templates)
      true -> Nx.block(op, tensors, outline(templates), block(length(tensors), templates))
    end
  end

  defp runtime_call(op, tensors, templates, callback \\ &__MODULE__.callback/2) do
    opts = [op: op, templates: templates]
    Nx.runtime_call(outline(templates), List.to_tuple(tensors), opts, callback)
  end

  @doc false
  def callback(tensors, op: op, templates: templates) do
    op |> eager(Tuple.to_list(tensors), templates) |> pack()
  end

  # A block takes each of its tensors as an argument of its default function.
  for count <- 1..32 do
    args = Macro.generate_arguments(count, __MODULE__)

    defp block(unquote(count), templates),
      do: fn op, unquote_splicing(args) -> default(op, unquote(args), templates) end
  end

  defp default(op, tensors, templates) do
    if Enum.any?(tensors, &expr?/1),
      do: body(op, tensors, templates),
      else: op |> eager(tensors, templates) |> pack()
  end

  # The lengths of packed sequences are known when the program runs.
  defp body(op, tensors, templates) do
    cond do
      not Packed.packed?(op.inputs) -> plain_body(op, tensors, templates)
      Enum.any?(tensors, &expr?/1) -> runtime_call(op, tensors, templates, &__MODULE__.packed/2)
      true -> op |> packed_body(tensors, templates) |> pack()
    end
  end

  defp packed_body(op, tensors, templates) do
    Packed.pure(op, Enum.zip(op.inputs, tensors), templates, &jitted/3)
  end

  @doc false
  def packed(tensors, op: op, templates: templates) do
    op |> packed_body(Tuple.to_list(tensors), templates) |> pack()
  end

  defp plain_body(%module{} = op, tensors, templates) do
    outputs = module.body(op, Map.new(Enum.zip(op.inputs, tensors)))
    templates |> Enum.map(fn {name, _} -> Keyword.fetch!(outputs, name) end) |> pack()
  end

  defp outline(templates), do: templates |> Enum.map(&elem(&1, 1)) |> pack()

  defp pack([t]), do: t
  defp pack(list), do: List.to_tuple(list)

  @doc false
  def unpack(tuple) when is_tuple(tuple), do: Tuple.to_list(tuple)
  def unpack(t), do: [t]

  ## Eagerly

  defp eager(op, tensors, templates) do
    if pure?(op), do: pure(op, tensors, templates), else: native(op, tensors, templates)
  end

  defp pure(op, tensors, templates) do
    if Packed.packed?(op.inputs),
      do: packed_body(op, tensors, templates),
      else: jitted(op, tensors, templates)
  end

  defp jitted(op, tensors, templates) do
    fun = &body(op, Tuple.to_list(&1), templates)
    unpack(Nx.Defn.jit_apply(fun, [List.to_tuple(tensors)], on_conflict: :force))
  end

  defp native(op, tensors, templates) do
    kernel = kernel(op)
    inputs = Enum.zip_with(op.inputs, tensors, &{&1, to_kernel(&2)})
    outputs = Kernel.run(kernel.name, inputs, kernel.options, op.target)
    backend = backend(tensors)

    for {name, template} <- templates do
      outputs |> Map.fetch!(Atom.to_string(name)) |> from_kernel(template) |> transfer(backend)
    end
  end

  @doc "The kernel's call for a checked op: its name, the names of inputs and outputs, and the options."
  @spec kernel(struct) :: %{name: atom, inputs: [String.t()], outputs: [atom], options: map}
  def kernel(%module{inputs: inputs} = op) do
    table = module.table()
    outputs = for output <- outputs(table, op, Enum.map(inputs, &{&1})), do: elem(output, 0)
    %{name: table.name, inputs: inputs, outputs: outputs, options: to_options(op, table.options)}
  end

  defp to_options(op, options) do
    for {key, sort} <- options, not match?({_, _}, sort), into: %{} do
      {key, to_option(Map.fetch!(op, key))}
    end
  end

  # Kernels know a choice by its name.
  defp to_option(value) when is_boolean(value) or value == nil or not is_atom(value), do: value
  defp to_option(choice), do: Atom.to_string(choice)

  defp backend([%{data: %backend{}} | _]), do: backend

  defp transfer(t, Nx.BinaryBackend), do: t

  defp transfer(t, backend) do
    case Nx.default_backend() do
      {^backend, _} = with_options -> Nx.backend_transfer(t, with_options)
      _ -> Nx.backend_transfer(t, backend)
    end
  end

  @doc "The tensor for the kernels. A tensor of `Nx.BinaryBackend` is not copied."
  @spec to_kernel(Nx.Tensor.t()) :: Tensor.t()
  def to_kernel(%Nx.Tensor{shape: shape, type: type} = t) do
    %Tensor{type: kernel_type(type), shape: shape, data: Nx.to_binary(t)}
  end

  @doc "The kernels' name of a type, or nil for a type that they do not have."
  @spec kernel_type(Nx.Type.t()) :: Tensor.type() | nil
  def kernel_type({:f, 32}), do: :f32
  def kernel_type({:f, 64}), do: :f64
  def kernel_type({:bf, 16}), do: :bf16
  def kernel_type({:f, 16}), do: :f16
  def kernel_type({:u, 8}), do: :u8
  def kernel_type({:s, 8}), do: :i8
  def kernel_type({:s, 16}), do: :i16
  def kernel_type({:s, 32}), do: :i32
  def kernel_type({:s, 64}), do: :i64
  def kernel_type(_type), do: nil

  @doc "The tensor for Nx, on `Nx.BinaryBackend`, with the type, shape and names of `template`."
  @spec from_kernel(Tensor.t(), Nx.Tensor.t()) :: Nx.Tensor.t()
  def from_kernel(%Tensor{} = t, template) do
    Nx.BinaryBackend.from_binary(template, Tensor.to_host(t).data, [])
  end

  @doc "Like `from_kernel/2`, with type and shape of the tensor itself."
  @spec from_kernel(Tensor.t()) :: Nx.Tensor.t()
  def from_kernel(%Tensor{type: type, shape: shape} = t) do
    from_kernel(t, Nx.template(shape, nx_type(type)))
  end

  defp nx_type(:i8), do: :s8
  defp nx_type(:i16), do: :s16
  defp nx_type(:i32), do: :s32
  defp nx_type(:i64), do: :s64
  defp nx_type(type), do: type

  ## Pure Nx or the kernel

  @doc "Whether an op runs in pure Nx. A call that names a GPU fails without one, rather than be slow."
  @spec pure?(struct) :: boolean
  def pure?(%{target: target}) do
    case Device.parse!(target[:backend] || Device.config().backend) do
      :nx -> true
      {:cuda, _} -> false
      _ -> not Native.loaded?() and Warning.once(:no_library, &no_library/0) == :ok
    end
  end

  defp no_library do
    """
    Sidewinder's native library is not there (#{Native.why_not_loaded()}). Its ops run in pure Nx, \
    hundreds of times slower. Build the library with `mix compile --force` where cargo is \
    installed, or configure `backend: :nx` if this is what you want.\
    """
  end
end
