defmodule Sidewinder.Kernel do
  @moduledoc """
  Runs ops by name; what `Sidewinder.Kernel.Scan` and its like are made of.

  Every op takes these options:

    * `:backend` - `:auto`, `:cpu` or `{:cuda, ordinal}`, also as texts such as `"cuda:0"`. The
      default is that of `Sidewinder.Device.config/0`. `:auto` runs where the tensors are, and
      large work on host tensors on CUDA device 0 if that can be used.
    * `:level` - forces a CPU level, such as `"scalar"`; `Sidewinder.Device.info/0` lists them.
    * `:threads` - how many CPU threads share the work.
    * `:allow_tf32` - whether matrix products of f32 on CUDA may round their factors to TF32, with 10 bits of
      mantissa in place of 23, which tensor cores multiply several times faster. The default is that of
      `Sidewinder.Device.config/0`, false if nobody says otherwise.

  An option that is `nil` counts as absent. Results are where the inputs are.
  """

  alias Sidewinder.{Device, Error, Native, Options, Tensor}

  # State updates, or products: below the first a call is too short to be worth the way to a dirty scheduler,
  # from the second on a GPU wins although the data has to be brought there.
  @quick 131_072
  @large 4_194_304

  @where [:backend, :level, :threads, :allow_tf32]

  @typedoc "Inputs by name, the one that sets the storage type first."
  @type inputs :: [{String.t() | atom, Tensor.t()}]

  @typedoc "A scheduler's sort, and what the native library is told."
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
  def run(op, inputs, options, where \\ []) do
    {scheduler, target} = plan(inputs, where)
    tensors = for {name, tensor} <- inputs, do: {text(name), to_native(op, name, tensor)}

    case call(scheduler, op, tensors, options, target) do
      {:ok, outputs} -> :maps.map(fn _name, output -> from_native(output) end, outputs)
      {:error, fields} -> failed(fields)
    end
  end

  defp call(:quick, op, inputs, options, target) do
    Native.run_quick(op, inputs, options, target)
  end

  defp call(:cpu, op, inputs, options, target), do: Native.run_cpu(op, inputs, options, target)
  defp call(:io, op, inputs, options, target), do: Native.run_io(op, inputs, options, target)

  defp text(name) when is_binary(name), do: name
  defp text(name) when is_atom(name), do: Atom.to_string(name)

  defp to_native(_op, _name, %Tensor{} = tensor), do: Tensor.to_native(tensor)

  defp to_native(op, name, other) do
    raise Error.new(:argument, text(name),
            op: to_string(op),
            expected: "a Sidewinder.Tensor",
            got: Error.show(other)
          )
  end

  defp from_native({type, shape, data}), do: %Tensor{type: type, shape: shape, data: data}

  defp failed(fields) do
    if fields.kind == :device_lost, do: Device.forget_cuda()
    raise struct!(Error, fields)
  end

  @doc """
  Where a call would run: the scheduler's sort, and the CUDA device (nil is the CPU), CPU level and
  threads (nil is the default).
  """
  @spec plan(inputs, keyword) :: plan
  def plan(inputs, where \\ []) do
    config = Device.config()
    {level, threads} = {level!(where[:level]), threads!(where[:threads])}
    size = size(inputs)
    allow_tf32 = Device.boolean!("allow_tf32", Keyword.get(where, :allow_tf32, config.allow_tf32))
    backend = if where[:backend], do: Device.parse!(where[:backend]), else: config.backend

    cond do
      device = device(backend, inputs, size == :large and level == nil and threads == nil) ->
        {:io, %{device: device, level: nil, threads: nil, allow_tf32: allow_tf32}}

      size == :small and level == nil and threads in [nil, 1] ->
        {:quick, %{device: nil, level: nil, threads: 1}}

      true ->
        {:cpu, %{device: nil, level: level, threads: threads || config.threads}}
    end
  end

  @doc """
  Where something that stays, such as a model, would live: with the backend `:auto` on CUDA device 0 if that can be
  used and nothing is said of CPU levels or threads. The options are those of `plan/2`.
  """
  @spec residence(keyword) :: plan
  def residence(where \\ []) do
    config = Device.config()
    {level, threads} = {level!(where[:level]), threads!(where[:threads])}
    allow_tf32 = Device.boolean!("allow_tf32", Keyword.get(where, :allow_tf32, config.allow_tf32))
    backend = if where[:backend], do: Device.parse!(where[:backend]), else: config.backend

    case device(backend, [], level == nil and threads == nil) do
      nil -> {:cpu, %{device: nil, level: level, threads: threads || config.threads}}
      device -> {:io, %{device: device, level: nil, threads: nil, allow_tf32: allow_tf32}}
    end
  end

  defp level!(level) when is_nil(level) or is_binary(level), do: level
  defp level!(other), do: Options.wrong!("level", "the name of a level, a text", other)

  # Which of them there can be is known to the native library.
  defp threads!(nil), do: nil
  defp threads!(threads) when is_integer(threads) and threads in 0..0xFFFF, do: threads
  defp threads!(other), do: Options.wrong!("threads", "a number from 1 to 1024", other)

  defp size([{_name, %Tensor{type: type, shape: shape}} | inputs]) do
    each = each(inputs, shape)
    updates = Tensor.elements(shape) * each * passes(inputs)

    cond do
      # What does little with each element is done sooner than it can be brought to a GPU and back.
      updates >= @large and each > 1 -> :large
      # On the CPU, f64 is computed one value at a time.
      updates < @quick and type != :f64 -> :small
      true -> :middling
    end
  end

  # Refused anyway.
  defp size(_inputs), do: :small

  # The work for each element of the first input: the states of its channel, its products with
  # weights, and with keys and values.
  defp each(inputs, shape) when tuple_size(shape) > 0 do
    width = max(elem(shape, tuple_size(shape) - 1), 1)
    max(Enum.sum(for {name, tensor} <- inputs, do: cost(text(name), tensor, width)), 1)
  end

  defp each(_inputs, _shape), do: 1

  @weights ~w(w plane0 w1_plane0 b in_proj wqkv wo wg wu wd Wg Wm wgate wm wq wk wv wz wg1 wg2 wc1 wc2 waq wao wf1 wf2)

  defp cost("A", %Tensor{shape: {_channels, states}}, _width), do: states

  defp cost(name, %Tensor{shape: {_, _} = weight}, width) when name in @weights,
    do: div(Tensor.elements(weight), width)

  # Heads are fewer than keys, whichever comes first.
  defp cost(name, %Tensor{shape: {_, m, n, _}}, _width) when name in ["k", "v", "keys", "values"],
    do: max(m, n)

  defp cost(_name, _tensor, _width), do: 0

  # A gradient computes its op again and goes back through it.
  defp passes(inputs) do
    if Enum.any?(inputs, fn {name, _} -> text(name) in ["dy", "dh", "dc", "dh_new", "dgamma"] end),
      do: 4,
      else: 1
  end

  defp device(:cpu, _inputs, _large), do: nil
  defp device({:cuda, ordinal}, _inputs, _large), do: ordinal

  defp device(:auto, inputs, large) do
    case Enum.find(inputs, &match?({_name, %Tensor{data: data}} when is_reference(data), &1)) do
      {_name, tensor} -> ordinal(Tensor.device(tensor))
      nil -> if large and Device.cuda?(), do: 0
    end
  end

  defp device(:nx, _inputs, _large) do
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
  Sorts the options of a call of `op`: into those that are optional inputs (`tensors` gives their
  names as inputs), the op's own (`names`), and where to run.

  Raises `Sidewinder.Error` of kind `:option` for any other.

      iex> Sidewinder.Kernel.sort_options!(:op, [threads: 2, flag: true, d: nil], [d: "D"], [:flag])
      {[], %{flag: true}, [threads: 2]}
      iex> Sidewinder.Kernel.sort_options!(:op, [flog: true], [d: "D"], [:flag])
      ** (Sidewinder.Error) op: flog: expected an option out of d, flag, backend, level, threads, allow_tf32, got flog
  """
  @spec sort_options!(atom, keyword, keyword(String.t()), [atom]) :: {inputs, map, keyword}
  def sort_options!(op, options, tensors, names)
  def sort_options!(_op, [], _tensors, _names), do: {[], %{}, []}

  def sort_options!(op, [{key, value} | rest], tensors, names) when is_atom(key) do
    {inputs, own, where} = sorted = sort_options!(op, rest, tensors, names)
    name = tensors[key]

    cond do
      name == nil and key not in names and key not in @where -> unknown(op, key, tensors, names)
      value == nil -> sorted
      name != nil -> {[{name, value} | inputs], own, where}
      key in names -> {inputs, Map.put(own, key, value), where}
      true -> {inputs, own, [{key, value} | where]}
    end
  end

  def sort_options!(op, other, _tensors, _names) do
    raise Error.new(:option, "options",
            op: to_string(op),
            expected: "a keyword list",
            got: Error.show(other)
          )
  end

  @doc false
  # What a gradient op gives, by atoms: there are few names.
  def gradients(op, inputs, own, where) do
    for {name, tensor} <- run(op, inputs, own, where),
        into: %{},
        do: {String.to_atom(name), tensor}
  end

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

  defp unknown(op, key, tensors, names) do
    known = Enum.join(Keyword.keys(tensors) ++ names ++ @where, ", ")
    got = Atom.to_string(key)

    raise Error.new(:option, got,
            op: to_string(op),
            expected: "an option out of #{known}",
            got: got
          )
  end
end
