defmodule Sidewinder.Kernel do
  @moduledoc """
  Runs ops by name. `Sidewinder.Kernel.Scan` and the other modules of `Sidewinder.Kernel` call it.

  Every op takes these options:

    * `:backend` - `:auto`, `:cpu` or `{:cuda, ordinal}`, also as texts such as `"cuda:0"`. The
      default is that of `Sidewinder.Device.config/0`. `:auto` runs where the tensors are, and
      large work on host tensors on CUDA device 0 if that can be used.
    * `:level` - forces a CPU level, such as `"scalar"`; `Sidewinder.Device.info/0` lists them.
    * `:threads` - how many CPU threads share the work.
    * `:allow_tf32` - whether matrix products of f32 on CUDA may round their factors to TF32, with 10 bits of
      mantissa in place of 23, which tensor cores multiply several times faster. The default is that of
      `Sidewinder.Device.config/0`, which is false unless it is configured.

  An option that is `nil` counts as absent. Results are where the inputs are.
  """

  alias Sidewinder.{Device, Error, Native, Ops, Options, Progress, Telemetry, Tensor}

  # Products or updates of a state, as the op itself counts them. Below the first a call is too short to be worth the
  # switch to a dirty scheduler. From the second on a GPU is faster even with the copy of the data.
  @quick 131_072
  @large 4_194_304

  @where [:backend, :level, :threads, :allow_tf32]

  @doc false
  # The options above, which every op takes.
  def where, do: @where

  @typedoc "Inputs by name, the one that sets the storage type first."
  @type inputs :: [{String.t() | atom, Tensor.t()}]

  @typedoc "The kind of scheduler, and where the native library shall run the call."
  @type plan ::
          {:quick | :cpu | :io,
           %{
             required(:device) => nil | non_neg_integer,
             required(:level) => nil | String.t(),
             required(:threads) => nil | pos_integer,
             optional(:allow_tf32) => boolean
           }}

  @doc """
  Runs `op` and returns its outputs by name.

  `options` are the op's own, `where` are the options above. Raises `Sidewinder.Error`.

      iex> inputs = for {name, shape} <- [x: {1, 1, 1}, dt: {1, 1, 1}, A: {1, 1}, B: {1, 1, 1}, C: {1, 1, 1}],
      ...>   do: {name, Sidewinder.Tensor.from_list([2], :f32, shape)}
      iex> Sidewinder.Kernel.run(:selective_scan, inputs, %{dt_clamp: {0, 1}})
      %{"y" => Sidewinder.Tensor.from_list([8], :f32, {1, 1, 1})}
  """
  @spec run(atom, inputs, map, keyword) :: %{String.t() => Tensor.t()}
  def run(op, inputs, options, where \\ [])
  def run(op, inputs, options, where) when is_atom(op), do: run(op, inputs, options, where, nil)
  def run(op, _, _, _), do: Options.wrong_argument!("op", "the name of an op, an atom", op)

  # `watched` are options of `Sidewinder.Progress`, or nil for an op that runs as a whole.
  defp run(op, inputs, options, where, watched) do
    tensors = natives(op, inputs)
    plan = placed(inputs, where)

    case Telemetry.call(op, tensors, fn -> start(plan, op, tensors, options, watched) end) do
      {_target, {:ok, outputs}} -> named(outputs)
      {_target, {:error, fields}} -> failed(fields)
    end
  end

  @doc false
  # `run/4` for one sequence in parts: see `Sidewinder.Kernel.SequenceParallel`.
  def run_parts(op, parts, options, where) do
    Options.check!(parts, Options.list?(parts), "parts", "a list of inputs")
    natives = for inputs <- parts, do: natives(op, inputs)
    {_backend, cpu, _gpu} = asked(where)
    places = for inputs <- parts, do: device(:auto, inputs)
    if where[:backend], do: stay!(op, Device.parse!(where[:backend]), places)
    target = %{cpu | device: Enum.find(places, & &1)}

    work = fn ->
      run = if target.device, do: &Native.run_parts_io/4, else: &Native.run_parts_cpu/4
      {target, run.(op, natives, options, cpu)}
    end

    case Telemetry.call(op, Enum.concat(natives), work) do
      {_target, {:ok, outputs}} -> for part <- outputs, do: named(part)
      {_target, {:error, fields}} -> failed(fields)
    end
  end

  # Parts run where they are. A backend can only say the same.
  defp stay!(_op, :auto, _places), do: :ok

  defp stay!(op, backend, places) do
    unless Enum.all?(places, &(&1 == device(backend, []))) do
      raise Error.new(:option, "backend",
              op: to_string(op),
              expected: "auto, or the one device that all parts are on",
              got: Device.name(backend),
              hint:
                "Parts run where they are: Sidewinder.Kernel.SequenceParallel.split/3 places them"
            )
    end
  end

  defp named(outputs), do: :maps.map(fn _name, output -> from_native(output) end, outputs)

  @alone %{device: nil, level: nil, threads: 1}

  # The target that was chosen, and the native library's answer. Where the amount of work decides, the call is first tried
  # on this scheduler: above the limit the library returns the work instead of results.
  defp start({:by_work, free}, op, tensors, options, watched) do
    # A call that is followed is not run here, however short.
    limit = if watched in [nil, %{}], do: @quick, else: 0

    case quickly(op, tensors, options, limit) do
      {:ok, work} when is_integer(work) ->
        start(by_work(work, tensors, free), op, tensors, options, watched)

      answer ->
        {@alone, answer}
    end
  end

  defp start({scheduler, target}, op, tensors, options, watched),
    do: {target, native(scheduler, op, tensors, options, target, watched)}

  defp quickly(op, tensors, options, below),
    do: Native.run_quick(op, tensors, options, Map.put(@alone, :below, below))

  defp native(:cpu, op, inputs, options, target, nil),
    do: Native.run_cpu(op, inputs, options, target)

  defp native(:io, op, inputs, options, target, nil),
    do: Native.run_io(op, inputs, options, target)

  defp native(scheduler, op, inputs, options, target, watched) do
    run = if scheduler == :io, do: &Native.run_watched_io/5, else: &Native.run_watched_cpu/5
    Progress.follow(watched, &run.(op, inputs, options, target, &1))
  end

  defp natives(op, inputs),
    do: for({name, tensor} <- named!(op, inputs), do: {name, Tensor.to_native(tensor)})

  @doc false
  # Inputs with their names as texts.
  def named!(op, inputs) when is_map(inputs) and not is_struct(inputs),
    do: named!(op, Map.to_list(inputs))

  def named!(op, [input | rest]), do: [named_one!(op, input) | named!(op, rest)]
  def named!(_op, []), do: []
  def named!(op, other), do: no_inputs(op, other)

  defp named_one!(op, {name, tensor}) when is_atom(name) or is_binary(name) do
    name = text(name)
    fit = is_struct(tensor, Tensor)
    unless fit, do: Options.wrong_argument!(name, "a Sidewinder.Tensor", tensor, op: "#{op}")
    {name, tensor}
  end

  defp named_one!(op, other), do: no_inputs(op, other)

  defp no_inputs(op, got),
    do: Options.wrong_argument!("inputs", "pairs of a name and a tensor", got, op: "#{op}")

  defp text(name) when is_binary(name), do: name
  defp text(name) when is_atom(name), do: Atom.to_string(name)

  defp from_native({type, shape, data}), do: %Tensor{type: type, shape: shape, data: data}

  defp failed(fields) do
    if fields.kind == :device_lost, do: Device.forget_cuda()
    raise struct!(Error, fields)
  end

  @doc """
  Where a call of `op` would run: the kind of scheduler, and the CUDA device (nil is the CPU), CPU level and
  threads (nil is the default).

  Where `where` leaves a choice, the op's own count of its work decides: products or updates of a state. Raises
  `Sidewinder.Error` as `run/4` does.

      iex> tensor = fn shape -> Sidewinder.Tensor.from_list(List.duplicate(0, Tuple.product(shape)), :f32, shape) end
      iex> inputs = [q: tensor.({1, 1, 16}), k: tensor.({1, 10_000, 16}), v: tensor.({1, 10_000, 16})]
      iex> {scheduler, _target} = Sidewinder.Kernel.plan(:hds_query_topk, inputs, %{}, backend: :cpu)
      iex> scheduler
      :cpu
  """
  @spec plan(atom, inputs, map, keyword) :: plan
  def plan(op, inputs, options \\ %{}, where \\ []) do
    tensors = natives(op, inputs)

    case placed(inputs, where) do
      {:by_work, free} ->
        by_work(work!(quickly(op, tensors, options, 0)), tensors, free)

      plan ->
        plan
    end
  end

  defp work!({:ok, work}), do: work
  defp work!({:error, fields}), do: failed(fields)

  # The plan, or the targets that the amount of work decides between.
  defp placed(inputs, where) do
    {backend, cpu, gpu} = asked(where)

    cond do
      device = device(backend, inputs) -> {:io, %{gpu | device: device}}
      cpu.level != nil or where[:threads] not in [nil, 1] -> {:cpu, cpu}
      true -> {:by_work, {cpu, if(free?(backend, where), do: gpu)}}
    end
  end

  # The backend, and the targets on the CPU and on CUDA device 0, by `where` and the configuration.
  defp asked(where) do
    Options.known!(where, @where)
    config = Device.config()
    {level, threads} = {level!(where[:level]), threads!(where[:threads])}
    said = with nil <- where[:allow_tf32], do: config.allow_tf32
    allow_tf32 = Device.boolean!("allow_tf32", said)
    backend = if where[:backend], do: Device.parse!(where[:backend]), else: config.backend
    cpu = %{device: nil, level: level, threads: threads || config.threads}
    {backend, cpu, %{device: 0, level: nil, threads: nil, allow_tf32: allow_tf32}}
  end

  defp free?(backend, where),
    do: backend == :auto and where[:level] == nil and where[:threads] == nil

  defp by_work(work, tensors, {cpu, gpu}) do
    cond do
      gpu != nil and worth_moving?(work, tensors) and Device.cuda?() -> {:io, gpu}
      work < @quick -> {:quick, %{cpu | threads: 1}}
      true -> {:cpu, cpu}
    end
  end

  # With little work for each element, the copy to a GPU and back takes longer than the op.
  defp worth_moving?(work, tensors) do
    elements = for {_name, {_type, shape, _data}} <- tensors, do: Tensor.elements(shape)
    work >= @large and work >= 2 * Enum.sum(elements)
  end

  @doc """
  Where a long-lived value, such as a model, would be placed: with the backend `:auto` on CUDA device 0 if that can be
  used and no CPU level or number of threads is given. The options are those of `plan/4`.

      iex> {:cpu, target} = Sidewinder.Kernel.residence(backend: :cpu, threads: 2)
      iex> {target.device, target.threads}
      {nil, 2}
  """
  @spec residence(keyword) :: plan
  def residence(where \\ []) do
    {backend, cpu, gpu} = asked(where)

    cond do
      device = device(backend, []) -> {:io, %{gpu | device: device}}
      free?(backend, where) and Device.cuda?() -> {:io, gpu}
      true -> {:cpu, cpu}
    end
  end

  defp level!(level) when is_nil(level) or is_binary(level), do: level
  defp level!(other), do: Options.wrong!("level", "the name of a level, a text", other)

  defp threads!(nil), do: nil
  defp threads!(threads) when is_integer(threads) and threads in 1..1024, do: threads
  defp threads!(other), do: Options.wrong!("threads", "a number from 1 to 1024", other)

  # The CUDA device that is named, or that the inputs are on.
  defp device(:cpu, _inputs), do: nil
  defp device({:cuda, ordinal}, _inputs), do: ordinal

  defp device(:auto, inputs) do
    case Enum.find(inputs, &match?({_name, %Tensor{data: data}} when is_reference(data), &1)) do
      {_name, tensor} -> ordinal(Tensor.device(tensor))
      nil -> nil
    end
  end

  defp device(:nx, _inputs) do
    raise Error.new(:option, "backend",
            expected: "auto, cpu or cuda:N",
            got: "nx",
            hint: "The pure Nx functions take Nx tensors: see Sidewinder and Sidewinder.Reference"
          )
  end

  defp ordinal({:cuda, ordinal}), do: ordinal
  # A cache on the host.
  defp ordinal(:host), do: nil

  @doc """
  Sorts the options of a call of `op`: into those that are optional inputs (`tensors`, where an input that has
  another name than its option is a pair of the two), the op's own (`names`), and where to run.

  Raises `Sidewinder.Error` of kind `:option` for any other.

      iex> Sidewinder.Kernel.sort_options!(:op, [threads: 2, flag: true, d: nil], [d: "D"], [:flag])
      {[], %{flag: true}, [threads: 2]}
      iex> Sidewinder.Kernel.sort_options!(:op, [flog: true], [d: "D"], [:flag])
      ** (Sidewinder.Error) op: flog: expected an option out of d, flag, backend, level, threads, allow_tf32, got flog
  """
  @spec sort_options!(atom, keyword, [atom | {atom, String.t()}], [atom]) ::
          {inputs, map, keyword}
  def sort_options!(op, options, tensors, names),
    do: sort!(op, options, &kind(&1, tensors, names), fn -> {tensors, names} end)

  # `kind` says what an option is: `:own`, `:where`, the name of an input, or nil. `known` makes what an error lists.
  defp sort!(_op, [], _kind, _known), do: {[], %{}, []}

  defp sort!(op, [{key, value} | rest], kind, known) when is_atom(key) do
    {inputs, own, where} = sorted = sort!(op, rest, kind, known)

    case kind.(key) do
      nil -> unknown(op, key, known.())
      _ when value == nil -> sorted
      :own -> {inputs, Map.put(own, key, value), where}
      :where -> {inputs, own, [{key, value} | where]}
      name -> {[{name, value} | inputs], own, where}
    end
  end

  defp sort!(op, other, _kind, _known) do
    raise Error.new(:option, "options",
            op: to_string(op),
            expected: "a keyword list",
            got: Error.show(other)
          )
  end

  defp kind(key, tensors, names) do
    cond do
      name = input(tensors, key) -> name
      key in names -> :own
      true -> where(key)
    end
  end

  defp where(key), do: if(key in @where, do: :where)

  # The name of the input that an option is, or nil.
  defp input(tensors, key) do
    Enum.find_value(tensors, fn
      ^key -> text(key)
      {^key, name} -> name
      _other -> nil
    end)
  end

  @called Map.new(Ops.all(), &{String.to_atom(&1.name), Ops.called(&1)})
  defp called(op), do: Map.fetch!(@called, op)

  @doc false
  # The inputs of a call of `op`, its options, and where to run. `given` are the inputs that the calling function has as
  # arguments, where a name alone stands for an absent input, and `set` the options that it sets. All other optional
  # inputs and options of the op, and `more`, are allowed in `options`.
  def sort_call!(op, given, options, set \\ %{}, more \\ []) do
    called = called(op)
    kind = &kind(&1, called.kinds, given, set, more)
    {inputs, own, where} = sort!(op, options, kind, fn -> known(called, given, set, more) end)
    tensors = for {_name, _tensor} = input <- given, do: input
    {tensors ++ inputs, Map.merge(own, set), where}
  end

  defp kind(key, kinds, given, set, more) do
    case kinds do
      %{^key => :own} when not is_map_key(set, key) -> :own
      %{^key => name} when is_binary(name) -> unless given?(given, name), do: name
      _ -> if key in more, do: :own, else: where(key)
    end
  end

  defp given?(given, name), do: name in given or List.keymember?(given, name, 0)

  defp known(called, given, set, more) do
    optional = for {name, option} <- called.optional, not given?(given, name), do: option
    {optional, more ++ Enum.reject(called.options, &is_map_key(set, &1))}
  end

  @doc false
  # Runs `op` as `sort_call!/5` sorts its arguments.
  def call(op, given, options, set \\ %{}) do
    {inputs, own, where} = sort_call!(op, given, options, set)
    run(op, inputs, own, where)
  end

  @doc false
  # Like `call/4`, for an op that runs in chunks, with the options of `Sidewinder.Progress`. Without them the call still
  # ends with its process.
  def call_watched(op, given, options, set \\ %{}) do
    {inputs, own, where} = sort_call!(op, given, options, set, Progress.options())
    {watched, own} = Map.split(own, Progress.options())
    run(op, inputs, own, where, watched)
  end

  @doc false
  # Runs an op that always gives all its outputs; also returns the caller's option `flag`, which asks for them.
  def call_asked(op, given, options, flag) do
    {inputs, own, where} = sort_call!(op, given, options, %{}, [flag])
    {asked?, own} = Map.pop(own, flag, false)
    {asked?, run(op, inputs, own, where)}
  end

  @doc false
  # An op's outputs in the order of its declaration: its only output, or a tuple.
  def outputs(op, given, options, set \\ %{}) do
    outputs = call(op, given, options, set)

    case for(name <- called(op).outputs, t = outputs[name], do: t) do
      [output] -> output
      several -> List.to_tuple(several)
    end
  end

  @doc false
  # The outputs of a gradient op by atoms.
  def gradients(op, given, options, set \\ %{}), do: atoms(call(op, given, options, set))

  @doc false
  # Outputs by atoms. Ops declare all names, so the number of atoms is bounded.
  def atoms(outputs), do: Map.new(outputs, fn {name, t} -> {String.to_atom(name), t} end)

  @typedoc "Weights by name; those that are nil count as absent."
  @type weights :: %{(atom | String.t()) => Tensor.t() | nil}

  @doc """
  The weights of a layer as inputs. Raises `Sidewinder.Error` of kind `:argument` for what is no map.

      iex> Sidewinder.Kernel.weights!(:mha, %{wo: nil})
      []
  """
  @spec weights!(atom, weights) :: inputs
  def weights!(_op, weights) when is_map(weights) and not is_struct(weights) do
    for {name, weight} <- weights, weight != nil, do: {to_string(name), weight}
  end

  def weights!(op, other) do
    raise Error.new(:argument, "weights",
            op: to_string(op),
            expected: "a map of tensors by name",
            got: Error.show(other)
          )
  end

  @doc false
  # The inputs of a layer: `given` and its weights. The names of all weights are there, so that none is an option.
  def with_weights(op, given, weights),
    do: given ++ called(op).weights ++ weights!(op, weights)

  defp unknown(op, key, {tensors, names}) do
    tensors = for tensor <- tensors, do: with({key, _name} <- tensor, do: key)
    known = Enum.join(tensors ++ names ++ @where, ", ")
    got = Atom.to_string(key)

    raise Error.new(:option, got,
            op: to_string(op),
            expected: "an option out of #{known}",
            got: got
          )
  end
end
