defmodule Sidewinder.NxTest.Ops do
  @moduledoc """
  All ops with their tensors by the kernels' names, so that a test is written once for all.

  A call is `{op, inputs, cotangents, opts}`; its loss is the sum of the products of outputs and
  cotangents, `"dy"` being that of the output `:y`.
  """

  import Sidewinder.NxTest.Scans, only: [random: 5]
  alias Sidewinder.NxTest.Sizes
  alias Sidewinder.Op.Check
  alias Sidewinder.Ops

  @activations ~w(sigmoid silu gelu softplus relu)

  # Functions of one token take the state first.
  @steps ~w(selective_state_update causal_conv1d_update)

  # Optional inputs of which all are given, or none.
  @together ~w(w_mix b_mix wm bm context wc1 bc1 wc2 bc2 k_mem v_mem)

  @doc "The names of all ops but `hds_query_topk`, whose result is not continuous in its inputs."
  def ops do
    names = for op <- Ops.forward(Ops.all()), Code.ensure_loaded?(block(op.name)), do: op.name
    @activations ++ (names -- ["activations", "hds_query_topk"])
  end

  @doc "The declarations of ops that take and give rows of one width, and weights of that width."
  def of_rows do
    for op <- Ops.forward(Ops.all()),
        op.name in ops(),
        op.outputs != [],
        Enum.all?(op.inputs ++ op.outputs, &(&1.shape in ["(..., D)", "(D)"])),
        do: op
  end

  @doc "The names of all functions that are one kernel."
  def activations, do: @activations

  @doc "The name of the kernel of an op."
  def kernel(op), do: if(op in @activations, do: "activations", else: op)

  defp block(op), do: Module.concat(Sidewinder.Block, Macro.camelize(kernel(op)))

  # What the op takes and gives, for the options that `problem/3` has for it.
  defp table(op) do
    module = block(op)
    Check.choose(module.table(), struct(module, defaults(op)))
  end

  defp params(table, kinds \\ [:required, :optional]),
    do: Enum.flat_map(kinds, &(get_in(table, [:params, &1]) || []))

  # The tensors among its options: `{option, input}`.
  defp tensors(table) do
    for input <- table.optional,
        do: if(is_tuple(input), do: input, else: {input, Atom.to_string(input)})
  end

  # All inputs in the order of the declaration.
  defp inputs(op, table) do
    for %{name: name} <- Ops.find!(Ops.all(), kernel(op)).inputs,
        is_map_key(table.inputs, name),
        name != "cu_seqlens",
        do: name
  end

  # Those that are arguments of its function, in order.
  defp arguments(op, table) do
    options = for {_option, name} <- tensors(table), do: name
    arguments = (inputs(op, table) -- options) -- params(table)

    if op in @steps,
      do: ["initial_state" | List.delete(arguments, "initial_state")],
      else: arguments
  end

  @doc "The names of an op's optional inputs."
  def optional(op) do
    table = table(op)
    options = for {_option, name} <- tensors(table), do: name
    ((params(table, [:optional]) ++ options) -- @together) -- ["cu_seqlens"]
  end

  @doc "Whether an op is a sequence of others where it is no kernel."
  def composed?(op), do: Map.get(table(op), :composed, false)

  @doc "The options that `problem/3` has for an op."
  def defaults("attention"), do: [causal: true, q_offset: 1]
  def defaults("decode"), do: [cached: 1]

  def defaults("mmrec_block"), do: [heads: 2, levels: 2, ratio: 2, cursor: 1]

  def defaults(op) when op in ~w(mha transformer_block),
    do: [heads: 2, causal: true, rope_theta: 100.0]

  def defaults("multi_memory_attention"), do: [heads: 2]
  def defaults("hds_construct"), do: [ratio: 2, cursor: 3]
  def defaults(_op), do: []

  @doc "All lists of some elements of a list."
  def subsets([]), do: [[]]
  def subsets([first | rest]), do: for(s <- subsets(rest), t <- [s, [first | s]], do: t)

  @doc "Calls the function of `Sidewinder`; returns all outputs that cotangents may want, by name."
  def run(op, inputs, opts) do
    table = table(op)
    data = inputs(op, table) -- params(table)
    params = if is_map_key(table, :params), do: [Map.drop(inputs, data)], else: []
    args = for(name <- arguments(op, table), do: inputs[name]) ++ params
    tensors = for {option, name} <- tensors(table), t = inputs[name], do: {option, t}
    outputs = apply(Sidewinder, String.to_atom(op), args ++ [tensors ++ opts])
    named(outputs, for(output <- table.outputs, do: elem(output, 0)))
  end

  # A map, the first output with a map of the others, or a tuple in the order of the table.
  defp named(outputs, _names) when is_map(outputs) and not is_struct(outputs), do: outputs

  defp named({first, others}, [name | _]) when is_map(others) and not is_struct(others),
    do: Map.put(others, name, first)

  defp named(outputs, names), do: Map.new(Enum.zip(names, flat(outputs)))

  defp flat(tuple) when is_tuple(tuple), do: Enum.flat_map(Tuple.to_list(tuple), &flat/1)
  defp flat(t), do: [t]

  @doc "The options with which the op returns what has a cotangent."
  def asking(op, cotangents, opts) do
    wanted =
      for {output, _, _, asked} <- table(op).outputs,
          cotangents["d#{output}"],
          flag = flag(asked),
          do: {flag, true}

    opts ++ flags(op, wanted)
  end

  # The last flag gives the outputs of the flags before it, too; but those of linear attention are independent.
  defp flags("linear_attention", [_ | _]), do: [return_state: true, return_z: true]
  defp flags(_op, wanted), do: Enum.take(Enum.reverse(wanted), 1)

  defp flag({:saved, option}), do: option
  defp flag(asked) when is_tuple(asked) or asked == :always, do: nil
  defp flag(option), do: option

  @doc "The sum of the products of outputs and cotangents."
  def loss({op, inputs, cotangents, opts}) do
    outputs = run(op, inputs, asking(op, cotangents, opts))

    for({"d" <> name, c} <- cotangents, do: outputs |> Map.fetch!(:"#{name}") |> product(c))
    |> Enum.reduce(&Nx.add/2)
  end

  defp product(t, cotangent) do
    [t, cotangent] = for t <- [t, cotangent], do: if(narrow?(t), do: Nx.as_type(t, :f32), else: t)
    Nx.sum(Nx.multiply(t, cotangent))
  end

  defp narrow?(t), do: t.type in [{:f, 16}, {:bf, 16}]

  @doc """
  The gradients by the names of the inputs, but for masks, in one of the ways of
  `Sidewinder.NxTest.Scans`.
  """
  def gradients(call, way \\ &apply/2), do: derive(call, way, &Nx.Defn.grad/2)

  @doc "Loss and gradients."
  def value_and_grad(call, way \\ &apply/2), do: derive(call, way, &Nx.Defn.value_and_grad/2)

  defp derive({op, inputs, cotangents, opts}, way, derive) do
    {masks, inputs} = Map.split_with(inputs, fn {_, t} -> mask?(t) end)

    way.(
      fn inputs, masks ->
        derive.(inputs, &loss({op, Map.merge(&1, masks), cotangents, opts}))
      end,
      [inputs, masks]
    )
  end

  defp mask?(t), do: t.type == {:u, 8}

  @doc """
  A call with random tensors: all inputs, and cotangents of all outputs. `sizes` are `{b, l, d, n}`;
  other sizes are made of them.
  """
  def problem(op, sizes, type \\ :f64) do
    table = table(op)
    wide = if type == :f64, do: :f64, else: :f32
    inputs = for name <- inputs(op, table), do: input(name, table.inputs[name])
    cotangents = for output <- table.outputs, there?(output, op), do: cotangent(output)
    options = Map.merge(Map.from_struct(struct(block(op))), Map.new(defaults(op)))
    letters = Map.merge(options, Sizes.letters(kernel(op), sizes))

    tensors =
      for {{name, precision, dims}, seed} <- Enum.with_index(inputs ++ cotangents, 1),
          into: %{} do
        {lo, hi} = Sizes.range(kernel(op), name)
        shape = Sizes.shape(kernel(op), name, sizes) || shape(dims, letters)

        case precision do
          :storage -> {name, random(seed, shape, lo, hi, type)}
          :wide -> {name, random(seed, shape, lo, hi, wide)}
          :mask -> {name, mask(random(seed, shape, lo, hi, :f32))}
        end
      end

    {cotangents, inputs} = Map.split(tensors, for({name, _, _} <- cotangents, do: name))
    {op, inputs, cotangents, defaults(op)}
  end

  defp input(name, {precision, [dims | _]}), do: {name, precision, dims}
  defp cotangent({name, precision, dims, _asked}), do: {"d#{name}", precision, dims}

  # Whether flags that ask for outputs are enough for a call to have it.
  defp there?({_, _, _, {:unless, _}}, _op), do: false

  defp there?({_, _, _, {:more, option, than}}, op),
    do: Map.fetch!(struct(block(op), defaults(op)), option) > than

  defp there?(_output, _op), do: true

  defp shape(dims, letters) do
    sizes = for dim <- dims, size <- List.wrap(Check.size!(dim, letters)), do: size
    List.to_tuple(sizes)
  end

  # The first key is seen by all.
  defp mask(t), do: Nx.logical_or(Nx.greater(t, 0), Nx.equal(Nx.iota(t.shape, axis: -1), 0))

  @doc "The call with some more options, or without some of its tensors."
  def with_options({op, inputs, cotangents, opts}, more),
    do: {op, inputs, cotangents, opts ++ more}

  def without({op, inputs, cotangents, opts}, names) do
    {op, Map.drop(inputs, names), Map.drop(cotangents, names), opts}
  end

  @doc "All tensors of a call in a type, weights and states in that of the arithmetic."
  def as_type({op, inputs, cotangents, opts}, type) do
    change = fn tensors ->
      Map.new(tensors, fn {name, t} -> {name, if(mask?(t), do: t, else: Nx.as_type(t, type))} end)
    end

    {op, change.(inputs), change.(cotangents), opts}
  end

  @doc """
  Asserts that each gradient has the shape of its input and agrees with the central
  difference along a random direction, in f64.
  """
  def check_differences({op, inputs, cotangents, opts} = call, gradients \\ nil) do
    gradients = gradients || gradients(call)

    for {{name, t}, seed} <- Enum.with_index(inputs), not mask?(t) do
      direction = random(seed + 77, t.shape, -1.0, 1.0, :f64)

      at = fn step ->
        moved = Map.put(inputs, name, Nx.add(t, Nx.multiply(direction, step)))
        Nx.to_number(loss({op, moved, cotangents, opts}))
      end

      expected = (at.(1.0e-5) - at.(-1.0e-5)) / 2.0e-5
      got = Nx.to_number(Nx.sum(Nx.multiply(gradients[name], direction)))

      unless abs(got - expected) <= 1.0e-6 * (1 + abs(expected)) and
               gradients[name].shape == t.shape do
        ExUnit.Assertions.flunk(
          "#{op}, d#{name}, #{inspect(opts)}, #{inspect(Map.keys(inputs))}: " <>
            "#{got}, not #{expected}"
        )
      end
    end
  end

  @doc "The names of the kernels that `fun` calls in this process, in order."
  def kernel_calls(fun) do
    tracer = spawn_link(fn -> collect([]) end)
    Code.ensure_loaded!(Sidewinder.Kernel)
    :erlang.trace_pattern({Sidewinder.Kernel, :run, 4}, true, [:global])
    :erlang.trace(self(), true, [:call, {:tracer, tracer}])
    fun.()
    :erlang.trace(self(), false, [:call])
    reference = :erlang.trace_delivered(self())
    receive do: ({:trace_delivered, _, ^reference} -> :ok)
    send(tracer, {:calls, self()})
    receive do: ({:calls, calls} -> calls)
  end

  defp collect(calls) do
    receive do
      {:trace, _, :call, {_, _, [name | _]}} -> collect([name | calls])
      {:calls, to} -> send(to, {:calls, Enum.reverse(calls)})
    end
  end
end
