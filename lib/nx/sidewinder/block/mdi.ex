defmodule Sidewinder.Block.MdiUpdate do
  @moduledoc """
  `Sidewinder.mdi_update/5` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.MdiUpdate,
    gradient: Sidewinder.Block.MdiUpdateBackward

  alias Sidewinder.Op.Declared

  defstruct inputs: [], target: []

  @table Declared.table(:mdi_update, hint: "All tensors have the shape of z")

  @impl true
  def table, do: @table
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

  defstruct inputs: [], target: []

  @shapes [{"1", [:i, :d]}, {"2", [:d, :i]}]
  @weights for net <- ~w(g c),
               {layer, [out | _] = w} <- @shapes,
               {kind, dims} <- [{"w", w}, {"b", [out]}],
               into: %{},
               do: {kind <> net <> layer, {:storage, [dims]}}

  @doc false
  def weights, do: @weights

  @impl true
  def table do
    %{
      name: :mdi_gamma,
      composed: true,
      params: %{required: ~w(wg1 bg1 wg2 bg2), optional: ~w(wc1 bc1 wc2 bc2)},
      inputs:
        Map.merge(@weights, %{
          "z" => {:storage, [[:..., :d]]},
          "context" => {:storage, [[:..., :d]]}
        }),
      optional: [:context],
      options: [],
      outputs: [{:gamma, :storage, [:..., :d], :always}],
      hint: "Weights are stored {out, in}, and both networks have the same inner width"
    }
  end

  @doc false
  # A context and its network are both there or not at all.
  def complete!(op, params, opts) do
    names = ~w(wc1 bc1 wc2 bc2)
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

  defstruct return_parts: false, inputs: [], target: []

  @gamma Sidewinder.Block.MdiGamma.table()

  @impl true
  def table do
    %{
      @gamma
      | name: :mdi,
        params: %{@gamma.params | required: @gamma.params.required ++ ~w(wm bm)},
        inputs:
          Map.merge(@gamma.inputs, %{
            "h_prev" => {:storage, [[:..., :d]]},
            "wm" => {:storage, [[:d, {:sum, [:d, :d], 0}]]},
            "bm" => {:storage, [[:d]]}
          }),
        options: [return_parts: {:here, :flag}],
        outputs: [
          {:h_new, :storage, [:..., :d], :always},
          {:gamma, :storage, [:..., :d], :return_parts},
          {:gate, :storage, [:..., :d], :return_parts}
        ]
    }
  end
end

defmodule Sidewinder.Block.MdiBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Mdi`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.Mdi
end
