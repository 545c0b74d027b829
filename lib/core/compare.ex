defmodule Sidewinder.Compare do
  @moduledoc """
  Compares the levels that this machine has on one call of an op, and its gradient: whether each
  gives what the plain reference in f64 gives, and how long it takes.

      inputs = Sidewinder.RandomInputs.make(:selective_scan, shape: "B=1,L=2048,D=1536")
      result = Sidewinder.Compare.levels(:selective_scan, inputs)
      result.ok?
      IO.puts(Sidewinder.Compare.table(result))

  A level is an implementation of the op over the same inputs:

    * `"reference"` - the formula in f64, value by value
    * `"scalar"`, `"avx2"`, `"avx512"`, `"amx"`, `"neon"` - the CPU's levels, on one thread
    * `"threads"` - the best of them on all threads
    * `"cuda"`, `"cuda_resident"` - CUDA device 0, from host memory and on tensors that are there
    * other code, in the option `:others`

  ## What is equal

  An element passes if `|got - reference| <= atol + rtol * |reference|`; two that are not numbers pass
  if they are the same. A level with an element that does not pass is `:wrong`, however fast it is.

  | type of the inputs | `rtol` | `atol`, times the largest `abs(reference)` of its tensor |
  | --- | --- | --- |
  | f64 | 1e-10 | 1e-12 sqrt(n) |
  | f32 | 1e-5 | 1e-6 sqrt(n) |
  | bf16 | 2^-8 | 2^-6 |
  | f16 | 2^-11 | 2^-9 |

  `n` is the number of terms summed for an element. It is estimated: the largest axis of any input or, if that is
  more, the elements of the largest input divided by those of the output. In 16 bits, rounding between the steps of
  an op exceeds that of sums, which are in f32: four times the type's own precision is allowed.
  """

  alias Sidewinder.Compare.{Chart, Difference, Table}
  alias Sidewinder.{Device, Error, JSON, Kernel, Ops, RandomInputs, Tensor, Timing}

  @cpu ~w(scalar avx2 avx512 amx neon)
  @all @cpu ++ ~w(threads cuda cuda_resident)

  @defaults [
    options: %{},
    gradient: true,
    cotangents: :random,
    seed: 1,
    iterations: 50,
    warmup: 10,
    max_ms: 2_000,
    limit_ms: :infinity,
    threads: nil,
    rtol: nil,
    atol: nil,
    terms: nil,
    levels: @all,
    others: [],
    gradient_others: [],
    progress: nil
  ]

  @typedoc """
  How far a tensor is from the reference. `max_rel_err` is the largest difference of an element divided by that element of
  the reference, or by a thousandth of its tensor's largest if that is more. Where one of two is not a number, both are
  infinite.
  """
  @type difference :: %{
          max_abs_err: float | :infinity,
          max_rel_err: float | :infinity,
          within_tolerance: boolean
        }

  @typedoc "The times of the runs that were counted, in milliseconds."
  @type time :: %{
          mean: float,
          median: float,
          std: float,
          min: float,
          iterations: pos_integer
        }

  @typedoc """
  What one level did. Errors and `time` are nil where it failed before them; `time` is in milliseconds.
  `speedup` is by the medians, against the first level after the reference that is `:ok`, and nil unless
  this one is.
  """
  @type row :: %{
          level: String.t(),
          label: String.t(),
          status: :ok | :wrong | {:error, Exception.t()} | {:unavailable, String.t()},
          outputs: %{String.t() => difference},
          max_abs_err: float | :infinity | nil,
          max_rel_err: float | :infinity | nil,
          within_tolerance: boolean,
          time: time | nil,
          speedup: float | nil
        }

  @typedoc "The reference's row comes first. `gradient` is empty where there is none."
  @type result :: %{
          op: String.t(),
          inputs: [{String.t(), String.t()}],
          ok?: boolean,
          forward: [row],
          gradient: [row]
        }

  @doc """
  Runs `op`, and its gradient where it has one, at every level.

  `inputs` are tensors by name, such as `Sidewinder.RandomInputs.make/2` gives. Cotangents, such as
  `dy`, may be among them. The gradient takes all inputs, those outputs of the op that it needs, as the
  reference gives them, rounded to their types, and a cotangent for each output.

    * `:options` - the op's options, a map
    * `:gradient` - false leaves the gradient out
    * `:cotangents` - `:random`, or `:ones`, where they are not given; `:seed` makes other random ones
    * `:iterations` (50), `:warmup` (10) - how often each level runs; `:max_ms` (2000) ends slow levels
      after that time, with fewer
    * `:rtol`, `:atol` - in place of the tolerances above, for all elements; `:terms` - the `n` there
    * `:threads` - how many threads the level `"threads"` has
    * `:levels` - names of those to run; without it all
    * `:others` - a list of `{name, fun}`, where `fun` takes a map of tensors by name and returns a map
      of outputs by name, all or some of the op's. What runs on a device must have ended by then.
      `:gradient_others` - the same for the gradient, which gives `dx` for `x`
    * `:limit_ms` - others that take longer for all their runs are stopped
    * `:progress` - a function that gets each level's label before the level runs

  Levels that this machine does not have are `:unavailable`. One that raises has the error as its status, and
  the rest still run. Errors of the reference are raised, as `Sidewinder.Error`: then the call itself is
  wrong. So are unknown ops, inputs and options.

      iex> inputs = for name <- ["a", "b"], do: {name, Sidewinder.Tensor.from_list([0.5, 2], :f32, {1, 2, 1})}
      iex> result = Sidewinder.Compare.levels(:linear_scan, inputs, max_ms: 1, levels: ["scalar"], cotangents: :ones)
      iex> for row <- result.forward ++ result.gradient, do: {row.level, row.status, row.max_abs_err}
      [{"reference", :ok, 0.0}, {"scalar", :ok, 0.0}, {"reference", :ok, 0.0}, {"scalar", :ok, 0.0}]
  """
  @spec levels(atom | String.t(), Kernel.inputs() | map, keyword) :: result
  def levels(op, inputs, options \\ []) do
    options = options!(options)
    ops = Ops.all()
    op = Ops.find!(ops, op)
    {inputs, cotangents} = inputs!(op, inputs)
    {forward, outputs} = compare(op, inputs, options[:others], options)
    backward = if options[:gradient], do: Ops.backward(ops, op)
    gradient = gradient(backward, inputs ++ cotangents, outputs, options)

    %{
      op: op.name,
      inputs: for({name, tensor} <- inputs, do: {name, Tensor.describe(tensor)}),
      ok?: Enum.all?(forward ++ gradient, &fine?/1),
      forward: forward,
      gradient: gradient
    }
  end

  defp fine?(%{status: :ok}), do: true
  defp fine?(%{status: {:unavailable, _}}), do: true
  defp fine?(_), do: false

  defp options!(options) do
    for {key, _} <- options, not Keyword.has_key?(@defaults, key), do: unknown_option(key)
    options = Keyword.merge(@defaults, options)
    for level <- options[:levels], level not in @all, do: unknown_level(level)
    for {key, value} <- options, not valid?(key, value), do: wrong_value(key, value)
    options
  end

  defp valid?(key, value) when key in [:threads, :rtol, :atol, :terms] and value == nil, do: true
  defp valid?(:iterations, value), do: is_integer(value) and value > 0
  defp valid?(:threads, value), do: value in 1..1024
  defp valid?(:warmup, value), do: is_integer(value) and value >= 0
  defp valid?(key, value) when key in [:max_ms, :rtol, :atol, :terms], do: number?(value)
  defp valid?(_key, _value), do: true

  defp number?(value), do: is_number(value) and value >= 0

  defp wrong_value(key, value) do
    whole = %{iterations: "1 or more", threads: "a number from 1 to 1024"}
    expected = Map.get(whole, key, "a number, 0 or more")
    raise Error.new(:option, to_string(key), expected: expected, got: Error.show(value))
  end

  defp unknown_option(key) do
    raise Error.new(:option, to_string(key),
            expected: "an option out of #{Enum.join(Keyword.keys(@defaults), ", ")}",
            got: to_string(key)
          )
  end

  defp unknown_level(level) do
    raise Error.new(:option, "levels",
            expected: "names out of #{Enum.join(@all, ", ")}",
            got: Error.show(level)
          )
  end

  # The inputs and the cotangents, in the op's order.
  defp inputs!(op, inputs) do
    given = for {name, t} <- inputs, into: %{}, do: {to_string(name), tensor!(op, name, t)}
    names = for slot <- op.inputs, do: slot.name
    for {name, _} <- given, name not in (names ++ op.cotangents), do: unknown_input(op, name)
    take = fn names -> for name <- names, tensor = given[name], do: {name, tensor} end
    inputs = take.(names)
    types!(op, given, inputs)
    {inputs, take.(op.cotangents -- names)}
  end

  defp tensor!(_op, _name, %Tensor{} = tensor), do: Tensor.to_host(tensor)

  defp tensor!(op, name, other) do
    got = Error.show(other)
    raise Error.new(:argument, to_string(name), op: op.name, expected: "a tensor", got: got)
  end

  # The reference gets all floats in f64, so it would not refuse a wrong type.
  defp types!(op, given, [{_, %{type: storage}} | _]) do
    for slot <- op.inputs,
        %{type: type} <- [given[slot.name]],
        type != Ops.type(slot, storage),
        do: wrong_type(op, slot, type, storage)
  end

  defp types!(_op, _given, []), do: :ok

  defp wrong_type(op, slot, type, storage) do
    raise Error.new(:dtype, slot.name,
            op: op.name,
            expected: to_string(Ops.type(slot, storage)),
            got: to_string(type),
            hint: "`#{hd(op.inputs).name}` is #{storage}; convert one of them"
          )
  end

  defp unknown_input(op, name) do
    known = for(slot <- op.inputs, do: slot.name) ++ op.cotangents

    raise Error.new(:argument, name,
            op: op.name,
            expected: "an input out of #{Enum.join(known, ", ")}",
            got: name
          )
  end

  defp gradient(nil, _given, _outputs, _options), do: []

  defp gradient(backward, [{_, %{type: storage}} | _] = given, outputs, options) do
    inputs =
      for {name, tensor} <- gradient_inputs(backward, Map.new(given), outputs, options) do
        slot = Enum.find(backward.inputs, &(&1.name == name))
        {name, Tensor.cast(tensor, Ops.type(slot, storage))}
      end

    {rows, _gradients} = compare(backward, inputs, options[:gradient_others], options)
    rows
  end

  defp gradient_inputs(backward, given, outputs, options) do
    Ops.gradient_inputs(backward, given, outputs, fn slot, %{shape: shape} ->
      range = if options[:cotangents] == :ones, do: {1, 1}, else: {-1, 1}
      RandomInputs.tensor(shape, :f64, range, {options[:seed], slot.name})
    end)
  end

  ## One op

  # All rows, and the reference's outputs.
  defp compare(op, inputs, others, options) do
    call = %{op: String.to_atom(op.name), inputs: inputs, options: options[:options]}
    tell(options, "f64 reference")
    {outputs, time} = Timing.once(fn -> reference(op, inputs, options[:options]) end)
    truth = Difference.truths(outputs, inputs, options)
    first = %{level: "reference", label: "f64 reference"}
    levels = all_levels(call, options) ++ Enum.map(others, &other(&1, call, options))
    rows = for level <- levels, do: row(level, truth, options)
    {speedups([judged(first, Difference.all(outputs, truth), time) | rows]), outputs}
  end

  defp tell(options, label), do: if(options[:progress], do: options[:progress].(label))

  defp reference(op, inputs, options) do
    wide = Ops.wide_inputs(op, inputs)
    Kernel.run(String.to_atom(op.name), wide, options, backend: :cpu, level: "reference")
  end

  ## The levels

  # Each with `start`, which prepares and returns the function to measure, or with the reason that it is unavailable.
  defp all_levels(call, options) do
    %{cpu: cpu, cuda: cuda} = Device.info()
    threads = options[:threads] || cpu.threads
    one = for level <- @cpu, do: cpu_level(level, call, cpu)
    all = [threads_level(call, cpu.best, threads)]
    levels = one ++ all ++ cuda_levels(call, cuda.why_not)
    Enum.filter(levels, &(&1.level in options[:levels]))
  end

  defp cpu_level(level, call, cpu) do
    absent = if level not in cpu.levels, do: "this CPU has no such instructions"
    level(level, "#{level}, 1 thread", absent, run(call, level: level, threads: 1))
  end

  defp threads_level(call, best, threads) do
    absent = if threads == 1, do: "one thread is all there is"
    run = run(call, level: best, threads: threads)
    level("threads", "#{best}, #{threads} threads", absent, run)
  end

  defp cuda_levels(call, absent) do
    [
      level("cuda", "CUDA from host memory", absent, run(call, backend: {:cuda, 0})),
      level("cuda_resident", "CUDA resident", absent, fn ->
        resident = for {name, t} <- call.inputs, do: {name, Tensor.to_device(t, {:cuda, 0})}
        run(%{call | inputs: resident}, backend: {:cuda, 0}).()
      end)
    ]
  end

  defp level(level, label, absent, start) do
    %{level: level, label: label, absent: absent, start: start, limit: :infinity}
  end

  defp run(%{op: op, inputs: inputs, options: options}, where) do
    where = Keyword.put_new(where, :backend, :cpu)
    fn -> fn -> Kernel.run(op, inputs, options, where) end end
  end

  defp other({name, fun}, call, options) do
    {name, inputs} = {to_string(name), Map.new(call.inputs)}
    start = fn -> fn -> fun.(inputs) end end
    %{level(name, name, nil, start) | limit: options[:limit_ms]}
  end

  ## Rows

  defp row(%{absent: nil} = level, truth, options) do
    tell(options, level.label)
    measure = fn -> Timing.measure(level.start.(), options) end

    with {:ok, {outputs, time}} <- attempt(measure, level.limit),
         {:ok, differences} <- attempt(fn -> Difference.all(outputs, truth) end, :infinity) do
      judged(level, differences, time)
    else
      error -> blank(level, error)
    end
  end

  defp row(%{absent: why} = level, _truth, _options), do: blank(level, {:unavailable, why})

  defp blank(level, status) do
    %{
      level: level.level,
      label: level.label,
      status: status,
      outputs: %{},
      max_abs_err: nil,
      max_rel_err: nil,
      within_tolerance: false,
      time: nil,
      speedup: nil
    }
  end

  defp judged(level, differences, time) do
    within = Enum.all?(differences, fn {_, d} -> d.within_tolerance end)
    # Every atom is greater than every number, `:infinity` too.
    most = fn key -> differences |> Enum.map(fn {_, d} -> d[key] end) |> Enum.max() end

    %{
      blank(level, if(within, do: :ok, else: :wrong))
      | outputs: differences,
        max_abs_err: most.(:max_abs_err),
        max_rel_err: most.(:max_rel_err),
        within_tolerance: within,
        time: time
    }
  end

  defp speedups([reference | levels] = rows) do
    base = Enum.find(levels, reference, &(&1.status == :ok)).time.median
    for row <- rows, do: %{row | speedup: if(row.status == :ok, do: base / row.time.median)}
  end

  # A level that fails does not stop the others.
  defp attempt(work, :infinity) do
    {:ok, work.()}
  rescue
    error -> {:error, error}
  catch
    kind, reason -> {:error, %RuntimeError{message: Exception.format_banner(kind, reason)}}
  end

  defp attempt(work, limit) do
    task = Task.async(fn -> attempt(work, :infinity) end)

    case Task.yield(task, limit) || Task.shutdown(task, :brutal_kill) do
      {:ok, result} -> result
      nil -> {:error, %RuntimeError{message: "stopped after #{limit} ms"}}
    end
  end

  @doc """
  How far `got` is from `expected`, which has the same shape; each element may be off by
  `atol + rtol * abs(expected)`.

      iex> [a, b] = for v <- [2.5, 4], do: Sidewinder.Tensor.from_list([1, v], :f32, {2})
      iex> Sidewinder.Compare.difference(a, b, rtol: 0, atol: 1)
      %{max_abs_err: 1.5, max_rel_err: 0.375, within_tolerance: false}
  """
  @spec difference(Tensor.t(), Tensor.t(), keyword(number)) :: difference
  defdelegate difference(got, expected, tolerance), to: Difference, as: :of

  @doc """
  A result as a table to print: milliseconds are the median of the runs that were counted.

      iex> [x, w] = for _ <- 1..2, do: Sidewinder.Tensor.from_list([1], :f32, {1, 1})
      iex> result = Sidewinder.Compare.levels(:linear, [x: x, w: w], max_ms: 1, levels: ["scalar"])
      iex> Sidewinder.Compare.table(result) =~ "linear: x f32 (1, 1), w f32 (1, 1)"
      true
  """
  @spec table(result) :: String.t()
  defdelegate table(result), to: Table, as: :text

  @doc """
  A result as a text of JSON: the fields of `t:result/0`, where `status` is `"ok"`, `"wrong"`, `"error"` or
  `"unavailable"`, with the reason in `why`, and `inputs` is an object.

      iex> [x, w] = for _ <- 1..2, do: Sidewinder.Tensor.from_list([1], :f32, {1, 1})
      iex> result = Sidewinder.Compare.levels(:linear, [x: x, w: w], gradient: false, levels: [])
      iex> Sidewinder.Compare.json(result) =~ ~S|"inputs": {"w": "f32 (1, 1)", "x": "f32 (1, 1)"}, "ok?": true|
      true
  """
  @spec json(result) :: String.t()
  def json(%{inputs: inputs, forward: forward, gradient: gradient} = result) do
    rows = %{forward: Enum.map(forward, &plain/1), gradient: Enum.map(gradient, &plain/1)}
    JSON.text(Map.merge(result, Map.put(rows, :inputs, Map.new(inputs))))
  end

  defp plain(%{status: status} = row) do
    {status, why} =
      case status do
        {:error, error} -> {"error", Exception.message(error)}
        {status, why} -> {status, why}
        status -> {status, nil}
      end

    Map.merge(row, %{status: status, why: why})
  end

  @doc """
  A result as an SVG picture, with a bar for the time of each level.

      iex> [x, w] = for _ <- 1..2, do: Sidewinder.Tensor.from_list([1], :f32, {1, 1})
      iex> result = Sidewinder.Compare.levels(:linear, [x: x, w: w], max_ms: 1, levels: ["scalar"])
      iex> "<svg " <> _ = Sidewinder.Compare.svg(result)
      iex> Sidewinder.Compare.svg(result) =~ "scalar, 1 thread"
      true
  """
  @spec svg(result) :: String.t()
  defdelegate svg(result), to: Chart
end
