defmodule Sidewinder.Block.RmsNorm do
  @moduledoc """
  `Sidewinder.rms_norm/3` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Norm,
    gradient: Sidewinder.Block.RmsNormBackward

  declare(:rms_norm)
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

  declare(:layer_norm,
    rest: :return_statistics
  )

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
end

defmodule Sidewinder.Block.LayerNormGelu do
  @moduledoc """
  `Sidewinder.layer_norm_gelu/4` in the graph of a compiler; see
  `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Norm,
    gradient: Sidewinder.Block.LayerNormGeluBackward

  declare(:layer_norm_gelu)
end

defmodule Sidewinder.Block.LayerNormGeluBackward do
  @moduledoc "The gradient of `Sidewinder.Block.LayerNormGelu`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.Norm,
    gradient_of: Sidewinder.Block.LayerNormGelu
end
