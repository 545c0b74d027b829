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

  @norms ~w(ln1_w ln1_b ln2_w ln2_b)

  @impl true
  def table do
    {mha, mlp} = {Mha.table(), SwigluMlp.table()}
    norms = Map.new(@norms, &{&1, {:wide, [[:d]]}})

    %{
      mha
      | name: :transformer_block,
        params: %{required: ~w(wqkv wo wg wu wd) ++ @norms, optional: ~w(bo)},
        inputs: mlp.inputs |> Map.merge(mha.inputs) |> Map.merge(norms),
        options: mha.options ++ [eps: :not_negative]
    }
  end
end

defmodule Sidewinder.Block.TransformerBlockBackward do
  @moduledoc "The gradient of `Sidewinder.Block.TransformerBlock`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.TransformerBlock
end
