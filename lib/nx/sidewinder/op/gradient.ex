defmodule Sidewinder.Op.Gradient do
  @moduledoc false
  # The gradient of an op is an op too: one call gives the gradients of all inputs. It is a custom gradient
  # around the op's node in the graph.

  alias Nx.Defn.{Expr, Tree}
  alias Sidewinder.{Error, Op, Ops}
  alias Sidewinder.Op.Warning

  import Nx.Defn.Kernel, only: [custom_grad: 3]

  @doc "The `outputs` of `op` in a graph, with its gradient with respect to each of the `tensors`."
  def attach(outputs, op, tensors, templates) do
    floats = Enum.reject(tensors, &mask?/1)
    custom_grad(outputs, floats, &gradients(&1, outputs, op, tensors, templates))
  end

  defp mask?(t), do: Nx.Type.integer?(t.type)

  defp gradients(cotangents, outputs, %module{} = op, tensors, templates) do
    unless function_exported?(module, :gradient, 2), do: raise(second_derivative(module))
    if through_while?(tensors), do: through_while(module, tensors)

    results = for {{name, _}, t} <- Enum.zip(templates, Op.unpack(outputs)), do: {"#{name}", t}

    # An input and an output may have one name; the input is the one that gradients take.
    results = Enum.reject(results, fn {name, _} -> is_map_key(module.table().inputs, name) end)

    given = Enum.zip(op.inputs, tensors) ++ results ++ cotangents(module, cotangents, templates)
    gradients = module.gradient(op, given)

    for {name, t} <- Enum.zip(op.inputs, tensors),
        not mask?(t),
        do: Map.fetch!(gradients, "d" <> name)
  end

  # Nx has the number 0 for the cotangent of an output that the result does not depend on.
  defp cotangents(module, cotangents, templates) do
    asked = for {name, _, _, asked} <- module.table().outputs, do: {name, asked}

    for {{name, template}, t} <- Enum.zip(templates, Op.unpack(cotangents)),
        asked[name] == :always or not zero?(t) do
      {"d#{name}", t |> Nx.as_type(template.type) |> Nx.broadcast(template.shape)}
    end
  end

  defp zero?(%{data: %Expr{op: :constant, args: [number]}}), do: number == 0
  defp zero?(_), do: false

  # Inside a `while` that takes no gradient itself: the gradient is then that of the whole `while`.
  defp through_while?(tensors) do
    Enum.any?(tensors, &match?({:while, _}, &1.data.context)) and
      Enum.reduce(tensors, %{}, &search/2) != :found
  end

  # The ids that the tensor depends on, or `:found` if one has `Nx.Defn.Grad`'s mark of a variable.
  defp search(_, :found), do: :found

  defp search(%{data: %{op: :metadata, args: [_, %{Nx.Defn.Grad => :to_grad}]}}, _), do: :found
  defp search(%{data: %{id: id}}, seen) when is_map_key(seen, id), do: seen

  defp search(%{data: %Expr{id: id}} = t, seen) do
    {_, seen} = Tree.apply_args(t, :scope, Map.put(seen, id, true), &{&1, search(&1, &2)})
    seen
  end

  defp search(_constant, seen), do: seen

  @unroll "Unroll the loop (`while x, i <- 0..2, unroll: true`), or take the gradient inside of it"

  defp through_while(module, tensors) do
    # Nx declares the gradients in its loop as f32, and reads the bytes of any type as f32.
    if type = Enum.find_value(tensors, &(&1.type != {:f, 32} && &1.type)) do
      raise no_gradient(module,
              expected: "f32, for Nx mixes up types in the gradient of a `while`",
              got: Nx.Type.to_string(type),
              hint: @unroll
            )
    end

    Warning.once(:while, fn ->
      "A gradient goes through a `while` with a Sidewinder op in it. Nx itself computes such " <>
        "gradients wrongly, walking the steps forwards, unless all that the steps change are sums " <>
        "that no step reads. #{@unroll}."
    end)
  end

  defp second_derivative(module) do
    no_gradient(module,
      got: "this is a gradient, and has none itself",
      hint: "There are no second derivatives; wrap what needs none in Nx.Defn.Kernel.stop_grad/1"
    )
  end

  defp no_gradient(module, fields) do
    Error.new(:unavailable, "gradient", [op: Atom.to_string(module.table().name)] ++ fields)
  end

  @doc """
  The gradients of `op` by the op `backward`, which has its options, and inputs out of `given`.
  """
  def by(backward, op, given) do
    %{inputs: known} = backward.table()
    inputs = for {name, _} = input <- given, is_map_key(known, name), do: input
    options = op |> Map.from_struct() |> Map.delete(:inputs)
    outputs = Op.call(struct(backward, options), inputs, [])
    Map.new(outputs, fn {name, t} -> {Atom.to_string(name), t} end)
  end

  @doc """
  The table of an op's gradient: its inputs are those that its kernel declares, and it has a gradient for each input
  of the op.
  """
  def table(%{outputs: outputs} = table) do
    name = :"#{table.name}_backward"
    taken = for slot <- Ops.find!(Ops.all(), name).inputs, do: slot.name

    given =
      for {output, p, dims, _} <- outputs, name <- ["#{output}", "d#{output}"], into: %{} do
        {name, {p, [dims]}}
      end

    inputs = given |> Map.merge(table.inputs) |> Map.take(taken)
    asked = for {y, _, _, asked} <- outputs, asked != :always, do: {:"d#{y}", option(asked)}
    cotangents = for {dy, _} <- asked, is_map_key(inputs, "#{dy}"), do: dy
    flags = Keyword.values(asked)

    %{
      table
      | name: name,
        inputs: inputs,
        optional: table.optional ++ cotangents,
        options: for({key, sort} <- table.options, key not in flags, do: {key, own(sort)}),
        outputs:
          for(
            {x, {p, _}} when p in [:storage, :wide] <- table.inputs,
            do: {:"d#{x}", like(x, table.inputs, inputs)}
          )
    }
    |> Map.delete(:composed)
  end

  # The input that a gradient is shaped like: its own or, if the kernel does not take it, one of the same declaration.
  defp like(name, _all, taken) when is_map_key(taken, name), do: name

  defp like(name, all, taken) do
    {alike, _} = Enum.find(taken, fn {_, input} -> input == all[name] end)
    alike
  end

  defp option({sort, option}) when sort in [:saved, :unless], do: option
  # This option also has other effects, so the gradient keeps it.
  defp option({:more, _option, _than}), do: nil
  defp option(option), do: option

  defp own({:gradient, sort}), do: sort
  defp own(sort), do: sort

  @doc "The fields of the struct of an op's gradient: its options, as the op itself has them."
  def fields(module) do
    op = struct(module)
    options = for {key, _} <- table(module.table()).options, do: {key, Map.fetch!(op, key)}
    options ++ [inputs: [], target: []]
  end

  @doc """
  The gradient of a composed op of the struct `module`, in pure Nx: its parts have gradients, so that
  of the whole is left to Nx.
  """
  def through(module, op, tensors) do
    %{inputs: known, outputs: outputs} = module.table()
    asked = for {_, _, _, asked} <- outputs, asked != :always, do: {asked, true}
    op = struct(module, Map.to_list(Map.from_struct(op)) ++ asked)

    {cotangents, tensors} =
      Map.split_with(tensors, fn {name, _} -> not is_map_key(known, name) end)

    {masks, tensors} = Map.split_with(tensors, fn {_, t} -> mask?(t) end)

    gradients =
      Nx.Defn.grad(tensors, fn tensors ->
        outputs = module.body(op, Map.merge(tensors, masks))

        for({"d" <> name, dy} <- cotangents, do: Nx.sum(Nx.multiply(outputs[:"#{name}"], dy)))
        |> Enum.reduce(&Nx.add/2)
      end)

    for {name, t} <- gradients, do: {:"d#{name}", Nx.as_type(t, tensors[name].type)}
  end

  @doc "A gradient in pure Nx, of the tensors `given`, that raises if it is differentiated, as `backward` does."
  def last(t, given, backward) do
    custom_grad(t, Enum.map(given, &elem(&1, 1)), fn _ -> raise second_derivative(backward) end)
  end

  @doc "`Nx.as_type/2` with a gradient that is cast back to the type of `t`."
  def cast(%{data: %Expr{}, type: {kind, _} = type} = t, target) when kind in [:f, :bf] do
    custom_grad(Nx.as_type(t, target), [t], &[Nx.as_type(&1, type)])
  end

  def cast(t, target), do: Nx.as_type(t, target)
end
