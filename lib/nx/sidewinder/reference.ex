defmodule Sidewinder.Reference do
  @moduledoc """
  The ops in pure Nx: the fallback without the native library, and the baseline of measurements.

  Three algorithms compute the recurrence `h_t = a_t h_{t-1} + b_t`. The last two combine steps,
  seen as maps `h -> a h + b`, by `(a1, b1) . (a2, b2) = (a1 a2, a2 b1 + b2)`, earlier first:

    * `:sequential` - step by step in a `while`: `L` steps of work.
    * `:hillis_steele` - every element is combined with the element 1, 2, 4, ... before it
      (Hillis and Steele 1986): `L log L` work, `log L` steps.
    * `:blelloch` - up-sweep to sums of pairs, down-sweep to prefixes (Blelloch 1990): `2 L` work,
      `2 log L` steps.

  Functions take Nx tensors, eagerly and inside `defn` on any compiler and backend. Arithmetic is
  f32 for f32, bf16 and f16 tensors, f64 for f64. They have the gradients of the functions of
  `Sidewinder`, in pure Nx too.
  """
  import Nx.Defn

  alias Sidewinder.{Block, Error, Op}

  @algorithms [:sequential, :hillis_steele, :blelloch]

  @doc """
  `Sidewinder.selective_scan/6` in pure Nx, with the same shapes, options and errors, and an
  additional option:

    * `:algorithm` - `:sequential` (default), `:hillis_steele` or `:blelloch`. The last two hold all
      states, `batch * length * channels * state` numbers, at once.

  ## Examples

      iex> x = Nx.tensor([[[1.0], [2.0]]])
      iex> dt = Nx.tensor([[[0.5], [1.0]]])
      iex> a = Nx.tensor([[-1.0]])
      iex> b = Nx.tensor([[[1.0], [0.5]]])
      iex> c = Nx.tensor([[[1.0], [2.0]]])
      iex> y = Sidewinder.Reference.selective_scan(x, dt, a, b, c, algorithm: :blelloch)
      iex> y |> Nx.to_flat_list() |> Enum.map(&Float.round(&1, 5))
      [0.5, 2.36788]
  """
  @spec selective_scan(Nx.t(), Nx.t(), Nx.t(), Nx.t(), Nx.t(), keyword) :: Nx.t() | tuple
  deftransform selective_scan(x, dt, a, b, c, opts \\ []) do
    {algorithm, opts} = algorithm(opts)
    op = %Block.SelectiveScan{algorithm: algorithm, target: [backend: :nx]}
    Block.SelectiveScan.call(op, [x, dt, a, b, c], opts)
  end

  @doc """
  The recurrence `h_t = a_t h_{t-1} + b_t` over axis 1 of `a` and `b`, both `{batch, length, width}`.
  Returns `h` of that shape.

  The options of `Sidewinder.linear_scan/3`, and `:algorithm` as in `selective_scan/6`. Raises `Sidewinder.Error` on shapes and types that do not fit.

  ## Examples

      iex> a = Nx.broadcast(0.5, {1, 4, 1})
      iex> b = Nx.broadcast(1.0, {1, 4, 1})
      iex> Sidewinder.Reference.linear_scan(a, b, algorithm: :hillis_steele) |> Nx.to_flat_list()
      [1.0, 1.5, 1.75, 1.875]
  """
  @spec linear_scan(Nx.t(), Nx.t(), keyword) :: Nx.t() | {Nx.t(), Nx.t()}
  deftransform linear_scan(a, b, opts \\ []) do
    {algorithm, opts} = algorithm(opts)
    op = %Block.LinearScan{algorithm: algorithm, target: [backend: :nx]}
    Block.LinearScan.call(op, [a, b], opts)
  end

  @doc """
  The three algorithms as `{name, function}` for tables of run times. Each function takes the five
  tensors of a plain `selective_scan` as `Sidewinder.Tensor`s and returns `y` as one.
  """
  @spec demo_levels() :: [{String.t(), (... -> Sidewinder.Tensor.t())}]
  def demo_levels do
    for algorithm <- @algorithms do
      {"Nx #{algorithm}", fn x, dt, a, b, c -> on_tensors([x, dt, a, b, c], algorithm) end}
    end
  end

  defp on_tensors(tensors, algorithm) do
    [x, dt, a, b, c] = Enum.map(tensors, &Op.from_kernel/1)
    Op.to_kernel(selective_scan(x, dt, a, b, c, algorithm: algorithm))
  end

  defp algorithm(opts) when not is_list(opts), do: {:sequential, opts}

  defp algorithm(opts) do
    case Keyword.pop(opts, :algorithm, :sequential) do
      {algorithm, opts} when algorithm in @algorithms ->
        {algorithm, opts}

      {other, _} ->
        raise Error.new(:option, "algorithm",
                expected: "one of #{inspect(@algorithms)}",
                got: Error.show(other)
              )
    end
  end
end
