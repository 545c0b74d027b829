# Without EXLA there is nothing to test, which test_helper.exs says.
if Code.ensure_loaded?(Sidewinder.CustomCall) do
  defmodule Sidewinder.CustomCallTest do
    # It sends what EXLA's compiler sends for a block, without EXLA's native library.
    use ExUnit.Case, async: true

    import Sidewinder.NxTest.Ops

    # The blocks in the graph of a call's loss and gradients.
    defp blocks(call) do
      {_, inputs, _, _} = call
      in_graph(&value_and_grad(put_elem(call, 1, &1)), inputs)
    end

    # It is not among the ops of the tests: there is no kernel for its gradient.
    defp blocks_of_query,
      do: in_graph(&Sidewinder.hds_query_topk(&1, &1, &1), Nx.template({1, 16, 2}, :f32))

    defp in_graph(fun, inputs) do
      graph = Nx.Defn.debug_expr_apply(fun, [inputs])
      [graph] |> Nx.Defn.Composite.flatten_list() |> Enum.reduce(%{}, &collect/2) |> Map.values()
    end

    defp collect(%{data: %{id: id}}, found) when is_map_key(found, id), do: found

    defp collect(%{data: %{id: id, op: op, args: args}} = t, found) do
      {_, found} =
        Nx.Defn.Tree.apply_args(t, :scope, Map.put(found, id, nil), &{&1, collect(&1, &2)})

      if op == :block, do: Map.put(found, id, args), else: found
    end

    test "all blocks, forwards and backwards, are left to XLA" do
      found =
        for blocks <- [
              blocks_of_query() | Enum.map(ops(), &blocks(problem(&1, {1, 3, 2, 2}, :f32)))
            ],
            args <- blocks,
            args != nil,
            uniq: true do
          [block, inputs, out, _callback] = args
          assert EXLA.CustomCall.call(block, out, inputs, %{platform: :host}) == :skip
          block.__struct__
        end

      # Composed ops are blocks of their parts.
      assert Enum.sort(found) ==
               for(module <- modules(), not whole?(module), do: module) |> Enum.sort()
    end

    test "every op has an answer of its own, not that for any struct" do
      for module <- modules(),
          do:
            assert(
              EXLA.CustomCall.impl_for(struct(module)) == Module.concat(EXLA.CustomCall, module)
            )
    end

    defp modules do
      {:ok, modules} = :application.get_key(:sidewinder, :modules)
      for module <- modules, match?(["Sidewinder", "Block", _], Module.split(module)), do: module
    end

    defp whole?(module) do
      whole = String.replace_suffix(Atom.to_string(module), "Backward", "")
      Map.has_key?(String.to_existing_atom(whole).table(), :composed)
    end
  end
end
