defmodule Sidewinder.NxTest.Elsewhere do
  @moduledoc "A backend of another name: `Nx.BinaryBackend` that keeps its tensors for itself."
  @behaviour Nx.Backend

  alias Nx.BinaryBackend

  defstruct [:state]

  Code.ensure_loaded!(BinaryBackend)

  for {name, arity} <- Nx.Backend.behaviour_info(:callbacks),
      name not in [:backend_transfer, :backend_copy],
      function_exported?(BinaryBackend, name, arity) do
    args = Macro.generate_arguments(arity, __MODULE__)
    @impl true
    def unquote(name)(unquote_splicing(args)) do
      hide(apply(BinaryBackend, unquote(name), Enum.map(unquote(args), &show/1)))
    end
  end

  for name <- [:backend_transfer, :backend_copy] do
    @impl true
    def unquote(name)(t, backend, opts), do: BinaryBackend.unquote(name)(show(t), backend, opts)
  end

  defp show(%Nx.Tensor{data: %__MODULE__{state: state}} = t),
    do: %{t | data: %BinaryBackend{state: state}}

  defp show(list) when is_list(list), do: Enum.map(list, &show/1)
  defp show(other), do: other

  defp hide(%Nx.Tensor{data: %BinaryBackend{state: state}} = t),
    do: %{t | data: %__MODULE__{state: state}}

  defp hide(list) when is_list(list), do: Enum.map(list, &hide/1)
  defp hide(tuple) when is_tuple(tuple), do: List.to_tuple(hide(Tuple.to_list(tuple)))
  defp hide(other), do: other
end
