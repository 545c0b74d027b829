defmodule Sidewinder.NxTest.Wrapper do
  @moduledoc "A compiler of another name that leaves all work to the Evaluator."
  @behaviour Nx.Defn.Compiler

  alias Nx.Defn.Evaluator

  @impl true
  defdelegate __partitions_options__(opts), to: Evaluator
  @impl true
  defdelegate __to_backend__(opts), to: Evaluator
  @impl true
  defdelegate __jit__(key, vars, fun, args, opts), to: Evaluator
  @impl true
  defdelegate __compile__(key, vars, fun, opts), to: Evaluator
end

defmodule Sidewinder.NxTest.Inline do
  @moduledoc """
  A compiler that knows no block and so takes its default function into the graph, as a compiler to
  machine code does. It looks for blocks outside of `while` and `cond` only.
  """
  @behaviour Nx.Defn.Compiler

  alias Nx.Defn.{Composite, Evaluator, Expr, Tree}

  @impl true
  defdelegate __partitions_options__(opts), to: Evaluator
  @impl true
  defdelegate __to_backend__(opts), to: Evaluator

  @impl true
  def __jit__(key, vars, fun, args, opts) do
    Evaluator.__jit__(key, vars, &inlined(fun, &1), args, opts)
  end

  @impl true
  def __compile__(key, vars, fun, opts) do
    Evaluator.__compile__(key, vars, &inlined(fun, &1), opts)
  end

  defp inlined(fun, vars) do
    {out, _done} = Composite.traverse(fun.(vars), %{}, &inline/2)
    out
  end

  # Each node once, for many have several that depend on them.
  defp inline(%Nx.Tensor{data: %Expr{id: id}, names: names} = t, done) do
    case done do
      %{^id => inlined} ->
        {%{inlined | names: names}, done}

      %{} ->
        {inlined, done} = inside(t, done)
        {inlined, Map.put(done, id, inlined)}
    end
  end

  # These nodes have the names that their expressions lack.
  defp inside(%{data: %Expr{op: :elem, args: [%{data: %{op: :metadata}} = of, i]}} = t, done) do
    [tuple, _] = of.data.args
    {inlined, done} = inline(elem(tuple, i), done)
    {%{inlined | names: t.names}, done}
  end

  defp inside(%{data: %Expr{op: :metadata, args: [expr, _]}} = t, done) do
    {inlined, done} = inline(expr, done)
    {%{inlined | names: t.names}, done}
  end

  defp inside(%{data: %Expr{op: :block, args: [struct, args, default, fun]}}, done) do
    {args, done} = Enum.map_reduce(args, done, &inline/2)
    opts = [struct: struct, fun: fun]
    out = Nx.to_template(default)

    case Expr.runtime_call(out, List.to_tuple(args), opts, &__MODULE__.default/2) do
      %Nx.Tensor{} = t -> {t, done}
      tuple -> {hd(elem(tuple, 0).data.args), done}
    end
  end

  defp inside(%{data: %Expr{op: op}} = t, done) when op in [:while, :cond, :fun], do: {t, done}

  defp inside(t, done) do
    {args, done} = Tree.apply_args(t, done, &inline/2)
    {put_in(t.data.args, args), done}
  end

  @doc false
  def default(args, struct: struct, fun: fun) do
    Nx.Defn.jit_apply(&apply(fun, [struct | Tuple.to_list(&1)]), [args], compiler: Evaluator)
  end
end
