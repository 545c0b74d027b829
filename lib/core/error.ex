defmodule Sidewinder.Error do
  @moduledoc """
  The one error that Sidewinder raises, with everything that is needed to fix it.

  Match on `kind`:

    * `:shape` - a tensor has the wrong rank or size
    * `:dtype` - a tensor has the wrong element type
    * `:size` - a tensor's bytes do not match its shape, or a size overflows
    * `:argument` - a required tensor is missing, or one is there that the op does not know
    * `:option` - an option is unknown or has a value that is not allowed
    * `:unavailable` - the wanted device, level or library is not on this machine
    * `:device_lost` - the GPU failed before and takes no more work until the VM is started anew
    * `:cuda` - a call to the CUDA driver, to NVRTC or to cuBLASLt failed
    * `:memory` - memory could not be allocated
    * `:file` - a file is missing, damaged or cannot be written
    * `:cancelled` - the call was ended before it was done: see `Sidewinder.Cancellation`
    * `:panic` - a bug in the native library, caught before it could do harm

  The other fields are texts, empty where they do not apply: the `op`, the `argument` that is
  wrong, what was `expected`, what was `got`, and how to fix it (`hint`).

      iex> error = Sidewinder.Error.new(:shape, "x", expected: "shape (2, 3)", got: "(2, 4)")
      iex> Exception.message(error)
      "x: expected shape (2, 3), got (2, 4)"
  """

  defexception kind: :argument, op: "", argument: "", expected: "", got: "", hint: ""

  @typedoc "The kind of failure."
  @type kind ::
          :shape
          | :dtype
          | :size
          | :argument
          | :option
          | :unavailable
          | :device_lost
          | :cuda
          | :memory
          | :file
          | :cancelled
          | :panic

  @type t :: %__MODULE__{
          kind: kind,
          op: String.t(),
          argument: String.t(),
          expected: String.t(),
          got: String.t(),
          hint: String.t()
        }

  @doc """
  An error of `kind` about `argument`; `fields` are the others that apply.

      iex> Sidewinder.Error.new(:option, "eps", expected: "a positive number").expected
      "a positive number"
  """
  @spec new(kind, String.t(), keyword(String.t())) :: t
  def new(kind, argument, fields \\ []) do
    struct!(__MODULE__, [kind: kind, argument: argument] ++ fields)
  end

  @doc """
  The value of `{:ok, value}`; raises the error that the native library describes otherwise.

      iex> Sidewinder.Error.unwrap!({:ok, 1})
      1
      iex> Sidewinder.Error.unwrap!({:error, %{kind: :memory, argument: "output", got: "none"}})
      ** (Sidewinder.Error) output: none
  """
  @spec unwrap!({:ok, value} | {:error, map}) :: value when value: term
  def unwrap!({:ok, value}), do: value
  def unwrap!({:error, fields}), do: raise(struct!(__MODULE__, fields))

  @impl true
  def message(%__MODULE__{} = error) do
    expected = if error.expected != "", do: "expected #{error.expected}", else: ""
    got = if error.got != "" and expected != "", do: "got #{error.got}", else: error.got
    what = Enum.reject([expected, got], &(&1 == "")) |> Enum.join(", ")
    place = Enum.reject([error.op, error.argument, what], &(&1 == "")) |> Enum.join(": ")
    if error.hint == "", do: place, else: "#{place}. #{error.hint}"
  end

  @doc """
  A term as a short text for `got`.

      iex> Sidewinder.Error.show(Enum.to_list(1..1000))
      "[1, 2, 3, 4, 5, 6, 7, 8, ...]"
  """
  @spec show(term) :: String.t()
  def show(term) do
    text = inspect(term, limit: 8, printable_limit: 60)
    if String.length(text) <= 80, do: text, else: String.slice(text, 0, 77) <> "..."
  end
end
