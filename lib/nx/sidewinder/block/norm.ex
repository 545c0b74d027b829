defmodule Sidewinder.Block.RmsNorm do
  @moduledoc """
  `Sidewinder.rms_norm/3` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Norm,
    gradient: Sidewinder.Block.RmsNormBackward

  defstruct eps: 1.0e-6, eps_mode: :inside, inputs: [], target: []

  @impl true
  def table do
    %{
      name: :rms_norm,
      inputs: %{"x" => {:storage, [[:..., :d]]}, "w" => {:wide, [[:d]]}},
      optional: [],
      options: [eps: :not_negative, eps_mode: [:inside, :outside]],
      outputs: [{:y, :storage, [:..., :d], :always}],
      hint: "Rows are normalised over the last axis of x"
    }
  end
end

defmodule Sidewinder.Block.RmsNormBackward do
  @moduledoc "The gradient of `Sidewinder.Block.RmsNorm`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Norm,
    gradient_of: Sidewinder.Block.RmsNorm
end

defmodule Sidewinder.Block.LayerNorm do
  @moduledoc """
  `Sidewinder.layer_norm/4` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Norm,
    gradient: Sidewinder.Block.LayerNormBackward

  defstruct eps: 1.0e-5, return_statistics: false, inputs: [], target: []

  @impl true
  def table do
    %{
      name: :layer_norm,
      inputs: %{
        "x" => {:storage, [[:..., :d]]},
        "w" => {:wide, [[:d]]},
        "b" => {:wide, [[:d]]}
      },
      optional: [],
      options: [eps: :not_negative, return_statistics: {:here, :flag}],
      outputs: [
        {:y, :storage, [:..., :d], :always},
        {:mean, :wide, [:...], :return_statistics},
        {:rstd, :wide, [:...], :return_statistics}
      ],
      hint: "Rows are normalised over the last axis of x"
    }
  end

  @impl true
  def gradient(%{return_statistics: false} = op, given), do: super(op, given)

  def gradient(op, given) do
    through = &Sidewinder.Reference.Norm.through_statistics(&1, Map.new(given))
    last = &Sidewinder.Op.Gradient.last(through.(&1), given, Sidewinder.Block.LayerNormBackward)
    op |> super(given) |> Map.update!("dx", last)
  end
end

defmodule Sidewinder.Block.LayerNormBackward do
  @moduledoc "The gradient of `Sidewinder.Block.LayerNorm`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Norm,
    gradient_of: Sidewinder.Block.LayerNorm

  # Its kernel takes no cotangents of statistics.
  @table %{@table | inputs: Map.drop(@table.inputs, ~w(dmean drstd)), optional: []}

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.LayerNormGelu do
  @moduledoc """
  `Sidewinder.layer_norm_gelu/4` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Norm,
    gradient: Sidewinder.Block.LayerNormGeluBackward

  defstruct eps: 1.0e-5, gelu: :tanh, inputs: [], target: []

  @norm Sidewinder.Block.LayerNorm.table()
  @table %{
    @norm
    | name: :layer_norm_gelu,
      options: [eps: :not_negative, gelu: [:tanh, :erf]],
      outputs: [hd(@norm.outputs)]
  }

  @impl true
  def table, do: @table
end

defmodule Sidewinder.Block.LayerNormGeluBackward do
  @moduledoc "The gradient of `Sidewinder.Block.LayerNormGelu`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Norm,
    gradient_of: Sidewinder.Block.LayerNormGelu
end
