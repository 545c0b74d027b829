defmodule Sidewinder.Block.MdiUpdate do
  @moduledoc """
  `Sidewinder.mdi_update/5` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.MdiUpdate,
    gradient: Sidewinder.Block.MdiUpdateBackward

  declare(:mdi_update)
end

defmodule Sidewinder.Block.MdiUpdateBackward do
  @moduledoc "The gradient of `Sidewinder.Block.MdiUpdate`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.MdiUpdate,
    gradient_of: Sidewinder.Block.MdiUpdate
end

defmodule Sidewinder.Block.MdiGamma do
  @moduledoc """
  `Sidewinder.mdi_gamma/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.MdiGamma,
    gradient: Sidewinder.Block.MdiGammaBackward

  declare(:mdi_gamma,
    composed: true
  )

  @doc false
  def weights, do: @table.params.required ++ @table.params.optional

  @doc false
  # A context and all weights of its network are given together.
  def complete!(op, params, opts) do
    names = @table.params.optional
    there = if is_map(params), do: for({k, t} <- params, t != nil, do: to_string(k)), else: []
    context = if Keyword.keyword?(opts) && opts[:context] != nil, do: ["context"], else: []
    given = context ++ Enum.filter(names, &(&1 in there))

    with [first | _] <- given, [missing | _] <- ["context" | names] -- given do
      raise Sidewinder.Error.new(:argument, missing,
              op: op,
              expected: "a tensor beside #{first}",
              got: "none",
              hint: "Give all of context, #{Enum.join(names, ", ")} or none of them"
            )
    end
  end
end

defmodule Sidewinder.Block.MdiGammaBackward do
  @moduledoc "The gradient of `Sidewinder.Block.MdiGamma`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.MdiGamma
end

defmodule Sidewinder.Block.Mdi do
  @moduledoc """
  `Sidewinder.mdi/4`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Mdi,
    gradient: Sidewinder.Block.MdiBackward

  declare(:mdi,
    composed: true,
    rest: :return_parts
  )
end

defmodule Sidewinder.Block.MdiBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Mdi`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.Mdi
end
