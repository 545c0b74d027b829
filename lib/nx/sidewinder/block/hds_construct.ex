defmodule Sidewinder.Block.HdsConstruct do
  @moduledoc """
  `Sidewinder.hds_construct/3` in the graph of a compiler; see `Sidewinder.Block.SelectiveScan`.
  """
  use Sidewinder.Op,
    reference: Sidewinder.Reference.HdsConstruct,
    gradient: Sidewinder.Block.HdsConstructBackward

  alias Sidewinder.Reference.HdsConstruct

  # A level is there if there are more than its number.
  outputs =
    for level <- 1..15, name <- [:k, :v] do
      slots = {:by, {HdsConstruct, :slots, [level]}}
      {:"#{name}#{level}", :storage, [:b, slots, :d], {:more, :levels, level}}
    end

  declare(:hds_construct,
    options: [levels: :size, ratio: :size],
    outputs: outputs,
    hint: "A bank is {batch, slots, width}, and k and v are alike"
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
