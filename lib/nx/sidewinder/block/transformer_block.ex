defmodule Sidewinder.Block.TransformerBlock do
  @moduledoc """
  `Sidewinder.transformer_block/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.TransformerBlock,
    gradient: Sidewinder.Block.TransformerBlockBackward

  alias Sidewinder.Block.{Mha, SwigluMlp}

  defstruct heads: 1,
            causal: false,
            rope_theta: nil,
            pairing: :half,
            eps: 1.0e-5,
            inputs: [],
            target: []

  @mha Mha.table()
  @mlp SwigluMlp.table()
  @norms ~w(ln1_w ln1_b ln2_w ln2_b)

  @table %{
    @mha
    | name: :transformer_block,
      params: %{
        required: @mha.params.required ++ @mlp.params.required ++ @norms,
        optional: @mha.params.optional
      },
      inputs:
        @mlp.inputs
        |> Map.merge(@mha.inputs)
        |> Map.merge(Map.new(@norms, &{&1, {:wide, [[:d]]}})),
      options: @mha.options ++ [eps: :not_negative]
  }

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.TransformerBlockBackward do
  @moduledoc "The gradient of `Sidewinder.Block.TransformerBlock`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.TransformerBlock
end
