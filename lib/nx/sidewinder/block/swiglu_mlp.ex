defmodule Sidewinder.Block.SwigluMlp do
  @moduledoc """
  `Sidewinder.swiglu_mlp/3`, as one kernel where the caller is the Evaluator or no graph at all.

  Other compilers get it as its parts, so this struct is in none of their graphs.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.SwigluMlp,
    gradient: Sidewinder.Block.SwigluMlpBackward

  alias Sidewinder.Reference.Activations

  defstruct activation: :silu, inputs: [], target: []

  @impl true
  def table do
    %{
      name: :swiglu_mlp,
      composed: true,
      params: %{required: ~w(wg wu wd), optional: []},
      inputs: %{
        "x" => {:storage, [[:..., :d]]},
        "wg" => {:storage, [[:f, :d]]},
        "wu" => {:storage, [[:f, :d]]},
        "wd" => {:storage, [[:d, :f]]}
      },
      optional: [],
      options: [activation: Activations.names()],
      outputs: [{:y, :storage, [:..., :d], :always}],
      hint: "Weights are stored {out, in}"
    }
  end
end

defmodule Sidewinder.Block.SwigluMlpBackward do
  @moduledoc "The gradient of `Sidewinder.Block.SwigluMlp`, as one kernel."
  use Sidewinder.Op, gradient_of: Sidewinder.Block.SwigluMlp
end
