defmodule Sidewinder.Op.Params do
  @moduledoc false
  # Ops with many weights take them as a map, by atoms or strings.

  alias Sidewinder.{Error, Op}

  @typedoc "Names, in the order in which their shapes bind sizes, and aliases."
  @type t :: %{
          required(:required) => [String.t()],
          required(:optional) => [String.t()],
          required(:aliases) => %{String.t() => String.t()}
        }

  @doc "`Sidewinder.Op.call/3` with `x`, or some inputs by name, and the weights."
  @spec call(struct, Nx.t() | [{String.t(), Nx.t()}], map, keyword) :: [{atom, Nx.Tensor.t()}]
  def call(op, x, params, opts), do: Op.call(op, inputs!(op, x, params), opts)

  @doc "The inputs of an op: `x`, or some inputs by name, and then the weights."
  @spec inputs!(struct, Nx.t() | [{String.t(), Nx.t()}], map) :: [{String.t(), Nx.t()}]
  def inputs!(%module{}, [{_, _} | _] = inputs, params),
    do: inputs ++ tensors!(module.table(), params)

  def inputs!(%module{}, x, params), do: [{"x", x} | tensors!(module.table(), params)]

  defp tensors!(%{params: known} = table, params) when is_map(params) and not is_struct(params) do
    own = fn name -> Map.get(known.aliases, name, name) end
    given = Map.new(params, fn {key, t} -> {own.(to_string(key)), t} end)
    all = known.required ++ known.optional

    with [unknown | _] <- Map.keys(given) -- all,
         do: raise(wrong(table, unknown, "one of #{Enum.join(all, ", ")}", unknown))

    with [missing | _] <- Enum.reject(known.required, &given[&1]),
         do: raise(wrong(table, missing, "a tensor", "none"))

    for name <- all, t = given[name], do: {name, t}
  end

  defp tensors!(table, other) do
    raise wrong(table, "params", "a map of tensors", Error.show(other))
  end

  defp wrong(table, name, expected, got) do
    Error.new(:argument, name, op: Atom.to_string(table.name), expected: expected, got: got)
  end
end
