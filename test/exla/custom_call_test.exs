# Without EXLA there is nothing to test, which test_helper.exs says.
if Code.ensure_loaded?(Sidewinder.CustomCall) do
  defmodule Sidewinder.CustomCallTest do
    # It sends what EXLA's compiler sends for a block, without EXLA's native library.
    use ExUnit.Case, async: true

    import Sidewinder.NxTest.Ops

    # The blocks in the graph of a call's loss and gradients.
    defp blocks(call) do
      {_, inputs, _, _} = call
      graph = Nx.Defn.debug_expr_apply(&value_and_grad(put_elem(call, 1, &1)), [inputs])
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
        for op <- ops(),
            args <- blocks(problem(op, {1, 3, 2, 2}, :f32)),
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
