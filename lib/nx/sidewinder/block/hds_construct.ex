defmodule Sidewinder.Block.HdsConstruct do
  @moduledoc """
  `Sidewinder.hds_construct/3` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.HdsConstruct,
    gradient: Sidewinder.Block.HdsConstructBackward

  declare(:hds_construct,
    axes: Sidewinder.Reference.HdsConstruct.axes(),
    numbered: :levels
  )

  @doc false
  def call(op, k, v, opts) do
    levels = op |> Sidewinder.Op.call([{"k", k}, {"v", v}], opts) |> Keyword.values()
    levels |> Enum.chunk_every(2) |> Enum.map(&List.to_tuple/1) |> List.to_tuple()
  end
end

defmodule Sidewinder.Block.HdsConstructBackward do
  @moduledoc "The gradient of `Sidewinder.Block.HdsConstruct`."
  use Sidewinder.Op,
    reference: Sidewinder.Reference.HdsConstruct,
    gradient_of: Sidewinder.Block.HdsConstruct
end
