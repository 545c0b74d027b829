defmodule Sidewinder.Kernel.SequenceParallel do
  @moduledoc """
  One long sequence in parts on several devices, for ops over sequences that start from a state, and for their gradients:
  `:selective_scan`, `:ssd`, `:gated_delta_rule`, `:linear_attention`, `:linear_scan` and `:causal_conv1d`.

  Each part starts from the state in which the part before it ends. On GPUs the scans compute first what each part makes of
  a state of zeros, on all devices at once; then states pass from device to device, and then the outputs follow, again on
  all devices at once. `:gated_delta_rule`, `:linear_attention` and the gradient of `:ssd` do so with 16-bit tensors of the
  sizes that tensor cores take, and the gradient of `:selective_scan` where time is cut into chunks, as it is where few
  channels have long sequences. In other calls, and on the CPU, a part begins when the part before it is done.

      iex> alias Sidewinder.Kernel.SequenceParallel
      iex> a = Sidewinder.Tensor.from_list([1, 1, 2, 1], :f32, {1, 4, 1})
      iex> b = Sidewinder.Tensor.from_list([1, 2, 3, 4], :f32, {1, 4, 1})
      iex> parts = SequenceParallel.split(:linear_scan, %{a: a, b: b}, [:host, :host])
      iex> results = SequenceParallel.run(:linear_scan, parts)
      iex> Enum.map(results, & &1["h"])
      [Sidewinder.Tensor.from_list([1, 3], :f32, {1, 2, 1}), Sidewinder.Tensor.from_list([9, 13], :f32, {1, 2, 1})]
      iex> SequenceParallel.join(:linear_scan, results)["h"]
      Sidewinder.Tensor.from_list([1, 3, 9, 13], :f32, {1, 4, 1})

  A gradient takes the state that each part started from, which the call of the op gives (`:linear_attention` with
  `normalize` also gives `initial_z`). With `dys`, the cotangents of each part's `y` on its device:

      parts = SequenceParallel.split(:selective_scan, inputs, [{:cuda, 0}, {:cuda, 1}])
      results = SequenceParallel.run(:selective_scan, parts, %{dt_softplus: true})

      of_gradient =
        for {part, result, dy} <- Enum.zip([parts, results, dys]) do
          part |> Map.merge(Map.take(result, ["initial_state", "initial_z"])) |> Map.put("dy", dy)
        end

      gradients = SequenceParallel.run(:selective_scan_backward, of_gradient, %{dt_softplus: true})
  """

  alias Sidewinder.{Error, Held, Kernel, Ops, Options, Shapes, Tensor}

  @typedoc "The inputs or the outputs of a part, by name."
  @type part :: %{String.t() => Tensor.t()}

  @doc """
  Cuts inputs along the axis of steps into as many parts as there are devices, as equal as possible, and copies each to its
  device. A device is `:host` or `{:cuda, ordinal}`, and may be given several times.

  Tensors without steps are copied to every device, but for states (`initial_state`), which only the first part takes, and
  cotangents of states (`dlast_state`), which only the last one takes. `inputs` are those of `op` by name, on the host.

  Raises `Sidewinder.Error` of kind `:argument` for an op without steps or unknown inputs, of kind `:option` for devices
  that are no such list, and of kind `:unavailable` for a device that is not there.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3], :f32, {1, 3, 1})
      iex> parts = Sidewinder.Kernel.SequenceParallel.split(:linear_scan, [a: x, b: x], [:host, :host])
      iex> for part <- parts, do: part["b"].shape
      [{1, 1, 1}, {1, 2, 1}]
  """
  @spec split(atom, Kernel.inputs() | map, [Tensor.device()]) :: [part]
  def split(op, inputs, devices) do
    fit = Options.list?(devices) and devices != []
    Options.check!(devices, fit, "devices", "a list of devices")
    Enum.each(devices, &Held.ordinal!/1)
    declared = Ops.find!(Ops.all(), op)
    inputs = Kernel.named!(op, inputs)
    axes = for {name, tensor} <- inputs, into: %{}, do: {name, axis(declared, name, tensor)}
    steps = steps!(op, inputs, axes)
    count = length(devices)

    for {device, at} <- Enum.with_index(devices) do
      range = {div(steps * at, count), div(steps * (at + 1), count)}

      for {name, tensor} <- inputs, takes?(name, at, count), into: %{} do
        {name, tensor |> slice(axes[name], range) |> Tensor.to_device(device)}
      end
    end
  end

  defp takes?("initial_" <> _state, at, _count), do: at == 0
  defp takes?("dlast_" <> _state, at, count), do: at == count - 1
  defp takes?(_name, _at, _count), do: true

  # The axis of steps, or nil.
  defp axis(%{inputs: slots} = op, name, %Tensor{shape: shape}) do
    case Enum.find(slots, &(&1.name == name)) do
      nil -> raise Error.new(:argument, name, op: op.name, expected: known(slots), got: name)
      slot -> Shapes.axis(slot.shape, tuple_size(shape), "L")
    end
  end

  defp known(slots), do: "one of " <> Enum.map_join(slots, ", ", & &1.name)

  defp steps!(op, inputs, axes) do
    case for(
           {name, %{shape: shape}} <- inputs,
           axis = axes[name],
           uniq: true,
           do: elem(shape, axis)
         ) do
      [steps] ->
        steps

      [] ->
        raise Error.new(:argument, "op", expected: "an op over sequences", got: to_string(op))

      several ->
        raise Error.new(:shape, "inputs",
                op: to_string(op),
                expected: "tensors of as many steps",
                got: Enum.join(several, ", ")
              )
    end
  end

  defp slice(tensor, nil, _range), do: tensor

  defp slice(tensor, axis, {first, last}) do
    %Tensor{type: type, shape: shape, data: data} = Tensor.to_host(tensor)
    {before, [steps | rest]} = shape |> Tuple.to_list() |> Enum.split(axis)
    step = Enum.product(rest) * Tensor.element_bytes(type)

    blocks =
      for block <- 0..(Enum.product(before) - 1)//1,
          do: binary_part(data, (block * steps + first) * step, (last - first) * step)

    Tensor.new(IO.iodata_to_binary(blocks), type, put_elem(shape, axis, last - first))
  end

  @doc """
  Runs an op over one sequence in parts, in the order of time, and returns the outputs of each by name, where its inputs are.

  The tensors of a part are on one device, and all parts are on GPUs or all on the host. `options` are the op's own; last
  states are always returned. The first part may have an initial state, and in a gradient the last one a `dlast_state`.
  Each part but the first also returns the `initial_state` that it started from, which its gradient takes. A gradient
  returns the part's share of the gradients of weights; `join/2` adds them up.

  `where` are the options of `Sidewinder.Kernel`. `:level` and `:threads` count for parts on the host. Parts run where they
  are, so a `:backend` other than `:auto` must be the device of all of them. `:allow_tf32` changes nothing, as these ops
  have no matrix products of the kind that it concerns.

  Raises `Sidewinder.Error` as `Sidewinder.Kernel.run/4` does, with the part's number after the name of the argument.

      iex> x = Sidewinder.Tensor.from_list([1], :f32, {1, 1, 1})
      iex> state = Sidewinder.Tensor.from_list([5], :f32, {1, 1})
      iex> parts = [%{a: x, b: x, initial_state: state}, %{a: x, b: x}]
      iex> [_first, second] = Sidewinder.Kernel.SequenceParallel.run(:linear_scan, parts)
      iex> {second["initial_state"], second["last_state"]}
      {Sidewinder.Tensor.from_list([6], :f32, {1, 1}), Sidewinder.Tensor.from_list([7], :f32, {1, 1})}
  """
  @spec run(atom, [Kernel.inputs() | map], map, keyword) :: [part]
  def run(op, parts, options \\ %{}, where \\ []) do
    fit = is_map(options) and not is_struct(options)
    Options.check!(options, fit, "options", "a map of the op's own options")
    Kernel.run_parts(op, parts, Map.merge(options, states(options)), where)
  end

  # Asks for all states that pass between parts; the divisor of attention is one of them where it is used.
  defp states(%{normalize: true}), do: %{return_state: true, return_z: true}
  defp states(_options), do: %{return_state: true}

  @doc """
  The outputs of the whole sequence from those of its parts, on the host: steps one after the other, the last part's last
  state, the gradient of the first part's initial state, and the sums of gradients of weights.

      iex> results =
      ...>   for {da, dx} <- [{1, [1, 2]}, {2, [3]}] do
      ...>     dx = Sidewinder.Tensor.from_list(dx, :f32, {1, length(dx), 1})
      ...>     %{"dA" => Sidewinder.Tensor.from_list([da], :f32, {1, 1}), "dx" => dx}
      ...>   end
      iex> whole = Sidewinder.Kernel.SequenceParallel.join(:selective_scan_backward, results)
      iex> {whole["dA"], whole["dx"]}
      {Sidewinder.Tensor.from_list([3], :f32, {1, 1}), Sidewinder.Tensor.from_list([1, 2, 3], :f32, {1, 3, 1})}
  """
  @spec join(atom, [part]) :: part
  def join(op, results) do
    fit = Options.list?(results) and results != [] and Enum.all?(results, &is_map/1)

    unless fit,
      do: Options.wrong_argument!("results", "a list of maps of outputs", results, op: "#{op}")

    results = for part <- results, do: Map.new(Kernel.named!(op, part))
    shapes = shapes(Ops.find!(Ops.all(), op))

    for {name, words} <- shapes, tensors = given(name, results), tensors != [], into: %{} do
      {name, joined(words, Enum.map(tensors, &Tensor.to_host/1))}
    end
  end

  # The shapes of outputs in words: of a gradient those of the op's inputs.
  defp shapes(%{backward_of: nil, outputs: outputs}),
    do: for(one <- outputs, do: {one.name, one.shape})

  defp shapes(%{backward_of: op}),
    do: for(slot <- Ops.find!(Ops.all(), op).inputs, do: {"d" <> slot.name, slot.shape})

  defp given(name, results), do: for(%{^name => tensor} <- those_with(name, results), do: tensor)

  defp those_with("last_" <> _state, results), do: [List.last(results)]
  defp those_with("dinitial_" <> _state, results), do: [hd(results)]
  defp those_with(_name, results), do: results

  defp joined(_words, [tensor]), do: tensor

  defp joined(words, [%Tensor{type: type, shape: shape} | _] = tensors) do
    case Shapes.axis(words, tuple_size(shape), "L") do
      nil -> sum(tensors)
      axis -> concatenated(tensors, axis, type, shape)
    end
  end

  defp concatenated(tensors, axis, type, shape) do
    blocks = shape |> Tuple.to_list() |> Enum.take(axis) |> Enum.product()
    steps = Enum.sum(for tensor <- tensors, do: elem(tensor.shape, axis))

    data =
      for block <- 0..(blocks - 1)//1, %{data: data} <- tensors do
        bytes = div(byte_size(data), blocks)
        binary_part(data, block * bytes, bytes)
      end

    Tensor.new(IO.iodata_to_binary(data), type, put_elem(shape, axis, steps))
  end

  # In f64, so that a sum is rounded once: a row of ones by the matrix whose rows are the tensors.
  defp sum([%Tensor{type: type, shape: shape} | _] = tensors) do
    {count, width} = {length(tensors), Tensor.elements(shape)}
    rows = for tensor <- tensors, do: Tensor.cast(tensor, :f64).data
    rows = Tensor.new(IO.iodata_to_binary(rows), :f64, {count, width})
    ones = Tensor.from_list(List.duplicate(1, count), :f64, {1, count})
    %{"c" => sum} = Kernel.run(:matmul, [a: ones, b: rows], %{}, backend: :cpu)
    sum |> Tensor.cast(type) |> Tensor.reshape(shape)
  end
end
