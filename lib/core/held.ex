defmodule Sidewinder.Held do
  @moduledoc false
  # Values whose rows lie in memory that calls write in place. A value is the rows from `first` to `length`. A call
  # claims the rows after `length` before it writes them, in any process. The first call that extends a value writes
  # into the same memory, which changes no row of the value. A second call that extends that value copies its rows, as
  # does a call that needs more room than the memory has.

  alias Sidewinder.{Error, Native, Tensor}

  @enforce_keys [:tensors, :first, :length, :written]
  defstruct [:tensors, :first, :length, :written]

  @typedoc "Tensors with equal numbers of rows, which are the axis before the last."
  @type t :: %__MODULE__{
          tensors: [Tensor.t()],
          first: non_neg_integer,
          length: non_neg_integer,
          written: :atomics.atomics_ref()
        }

  @doc "Memory for tensors of these shapes, lists of sizes, of which no row is claimed."
  @spec new(Tensor.type(), [[non_neg_integer]], nil | non_neg_integer) :: t
  def new(type, shapes, ordinal) do
    tensors =
      for shape <- shapes, do: Tensor.from_native(Native.held_new(type, shape, ordinal))

    %__MODULE__{tensors: tensors, first: 0, length: 0, written: written(0)}
  end

  # The number of rows of the memory that have been claimed.
  defp written(length) do
    written = :atomics.new(1, signed: false)
    :atomics.put(written, 1, length)
    written
  end

  @doc "How many rows there is room for."
  @spec capacity(t) :: non_neg_integer
  def capacity(%{tensors: [%{shape: shape} | _]}), do: elem(shape, tuple_size(shape) - 2)

  @doc """
  The value with `new` rows claimed after its own. Only the last `keep` of all rows are needed: a copy may leave out
  the rows before them.
  """
  @spec claim(t, non_neg_integer, pos_integer | :infinity) :: t
  def claim(%__MODULE__{length: length} = held, new, keep \\ :infinity) do
    total = length + new
    capacity = capacity(held)

    cond do
      total > capacity -> copy(held, new, keep, 2 * capacity)
      :atomics.compare_exchange(held.written, 1, length, total) == :ok -> held
      true -> copy(held, new, keep, capacity)
    end
  end

  defp copy(%{length: length} = held, new, keep, room) do
    first = min(first(held, new, keep), length)
    rows = length - first

    # Twice the rows that are kept, so that a row is copied at most once for each write, on average.
    room = max(rows + new, min(room, twice(keep)))

    grown =
      for tensor <- held.tensors,
          do: Tensor.from_native(Native.held_grow(Tensor.to_native(tensor), first, rows, room))

    %{held | tensors: grown, first: 0, length: rows, written: written(rows + new)}
  end

  defp first(held, _new, :infinity), do: held.first
  defp first(held, new, keep), do: max(held.first, held.length + new - keep)

  # Any number is less than an atom.
  defp twice(:infinity), do: :infinity
  defp twice(keep), do: 2 * keep

  @doc "The rows with the `new` ones, claimed and written; of all rows the last `keep`."
  @spec extended(t, non_neg_integer, pos_integer | :infinity) :: t
  def extended(%__MODULE__{} = held, new, keep),
    do: %{held | first: first(held, new, keep), length: held.length + new}

  @doc "`count` rows from `first` on, as tensors of their own."
  @spec rows(t, non_neg_integer, non_neg_integer) :: [Tensor.t()]
  def rows(%__MODULE__{tensors: tensors}, first, count) do
    for tensor <- tensors,
        do: Tensor.from_native(Native.held_rows(Tensor.to_native(tensor), first, count))
  end

  @doc "The ordinal of a device, nil for the host."
  @spec ordinal!(term) :: nil | non_neg_integer
  def ordinal!(:host), do: nil
  def ordinal!({:cuda, ordinal}) when is_integer(ordinal) and ordinal >= 0, do: ordinal

  def ordinal!(other) do
    raise Error.new(:option, "device", expected: "host or {:cuda, N}", got: Error.show(other))
  end
end
