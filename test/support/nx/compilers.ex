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

  defp inlined(fun, vars), do: Composite.traverse(fun.(vars), &inline/1)

  # These nodes have the names that their expressions lack.
  defp inline(%Nx.Tensor{data: %Expr{op: :elem, args: [%{data: %{op: :metadata}} = of, i]}} = t) do
    [tuple, _] = of.data.args
    %{inline(elem(tuple, i)) | names: t.names}
  end

  defp inline(%Nx.Tensor{data: %Expr{op: :metadata, args: [expr, _]}} = t) do
    %{inline(expr) | names: t.names}
  end

  defp inline(%Nx.Tensor{data: %Expr{op: :block, args: [struct, args, default, fun]}}) do
    args = args |> Enum.map(&inline/1) |> List.to_tuple()
    out = Nx.to_template(default)

    case Expr.runtime_call(out, args, [struct: struct, fun: fun], &__MODULE__.default/2) do
      %Nx.Tensor{} = t -> t
      tuple -> hd(elem(tuple, 0).data.args)
    end
  end

  defp inline(%Nx.Tensor{data: %Expr{op: op}} = t) when op in [:while, :cond, :fun], do: t

  defp inline(%Nx.Tensor{} = t) do
    {args, nil} = Tree.apply_args(t, nil, fn arg, nil -> {inline(arg), nil} end)
    put_in(t.data.args, args)
  end

  @doc false
  def default(args, struct: struct, fun: fun) do
    Nx.Defn.jit_apply(&apply(fun, [struct | Tuple.to_list(&1)]), [args], compiler: Evaluator)
  end
end
