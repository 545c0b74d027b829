defmodule Sidewinder.Cancellation do
  @moduledoc """
  Ends long calls before they are done.

      cancellation = Sidewinder.Cancellation.new()
      task = Task.async(fn -> Sidewinder.Mamba.load("falcon-mamba-7b", copy: true, cancel: cancellation) end)
      Sidewinder.Cancellation.cancel(cancellation)

  Calls that take the option `:cancel` (`Sidewinder.Progress`) look at it between their parts, such as the layers of a
  model or chunks of a file, and raise `Sidewinder.Error` of kind `:cancelled`. A session, a trainer or a file is then as it
  was before the call. One cancellation may be given to any number of calls, in any processes of its node; it stays
  cancelled.

  No cancellation is needed for a call whose own process ends, as one that is killed or a `Task` that is shut down: such
  a call ends with its process, after the part at work.

  These functions are in every project. In one with Nx, `Sidewinder.cancellation/1` and `Sidewinder.cancel/1` are the same
  as `new/1` and `cancel/1`.
  """

  alias Sidewinder.{Error, Native, Options}

  @enforce_keys [:ref]
  defstruct [:ref]

  @type t :: %__MODULE__{ref: reference}

  @doc """
  A cancellation for calls that are to be made. With an `owner`, a process of this node, it is also cancelled when the
  owner ends: work that another process does for it is then not needed.

      iex> Sidewinder.Cancellation.cancelled?(Sidewinder.Cancellation.new())
      false
      iex> owner = spawn(fn -> :ok end)
      iex> Process.sleep(50)
      iex> Sidewinder.Cancellation.cancelled?(Sidewinder.Cancellation.new(owner))
      true
  """
  @spec new(pid | nil) :: t
  def new(owner \\ nil) do
    fit = owner == nil or (is_pid(owner) and node(owner) == node())
    unless fit, do: Options.wrong_argument!("owner", "a process of this node", owner)
    %__MODULE__{ref: Error.unwrap!(Native.cancellation_new(owner))}
  end

  @doc """
  Ends the calls that have it, and those that get it later.

      iex> cancellation = Sidewinder.Cancellation.new()
      iex> Sidewinder.Cancellation.cancel(cancellation)
      :ok
      iex> model = Sidewinder.Mamba.random(layers: 1, width: 16, vocabulary: 11, backend: :cpu)
      iex> Sidewinder.Mamba.forward(model, [[1, 2, 3]], cancel: cancellation)
      ** (Sidewinder.Error) forward: a cancellation after 0 of 2 parts. What the call was to change is as it was before
  """
  @spec cancel(t) :: :ok
  def cancel(%__MODULE__{ref: ref}) do
    {} = Error.unwrap!(Native.cancellation_cancel(ref))
    :ok
  end

  def cancel(other),
    do: Options.wrong_argument!("cancellation", "a Sidewinder.Cancellation", other)

  @doc """
  Whether it is cancelled.

      iex> cancellation = Sidewinder.Cancellation.new()
      iex> Sidewinder.Cancellation.cancel(cancellation)
      iex> Sidewinder.Cancellation.cancelled?(cancellation)
      true
  """
  @spec cancelled?(t) :: boolean
  def cancelled?(%__MODULE__{ref: ref}), do: Native.cancellation_cancelled(ref)
end
