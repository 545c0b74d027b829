defmodule Sidewinder.Block.Mha do
  @moduledoc """
  `Sidewinder.mha/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Mha,
    gradient: Sidewinder.Block.MhaBackward

  defstruct heads: 1,
            causal: false,
            rope_theta: nil,
            pairing: :half,
            inputs: [],
            target: []

  @impl true
  def table do
    %{
      name: :mha,
      composed: true,
      params: %{required: ~w(wqkv wo), optional: ~w(bo)},
      inputs: %{
        "x" => {:storage, [[:b, :l, {:multiple, :heads, :d}]]},
        "wqkv" => {:storage, [[{:sum, [:d, :d, :d], 0}, :d]]},
        "wo" => {:storage, [[:d, :d]]},
        "bo" => {:storage, [[:d]]},
        "mask" => {:mask, [{:repeated, [:b, :heads, :l, :l]}]}
      },
      optional: [:mask],
      options: [
        heads: :size,
        causal: :flag,
        rope_theta: :positive,
        pairing: [:half, :interleaved]
      ],
      outputs: [{:y, :storage, [:b, :l, :d], :always}],
      hint: "x is {batch, length, width}, and weights are stored {out, in}"
    }
  end
end

defmodule Sidewinder.Block.MhaBackward do
  @moduledoc "The gradient of `Sidewinder.Block.Mha`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.Mha
end
