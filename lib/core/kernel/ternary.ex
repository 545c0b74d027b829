defmodule Sidewinder.Kernel.Ternary do
  @moduledoc """
  Ternary weights: cells of -1, 0 and 1 in two bits, and products with them.

  A cell is `bit0 - bit1`. Both bits set are no value but a *sentinel*: products read it as 0, `verify/2` finds it, and
  `convert/4` refuses it unless an option says otherwise. Weights are kept as planes, a tuple of two `:u8` tensors
  `{out, ceil(in / 8)}`, one for each bit: cell i is in byte i / 8, the least significant bit first. Other layouts are
  named explicitly:

      :values       -1, 0 and 1                         an :i8 tensor {..., n}
      :planes       a bit of a cell in each             two :u8 tensors {..., ceil(n / 8)}
      :packed2      code 2 bit0 + bit1, 4 in a byte     a :u8 tensor {..., ceil(n / 4)}
      :offset_rows  code value + 1, 4 rows in a byte    a :u8 tensor {ceil(rows / 4), n}: public BitNet checkpoints
      :byte_planes  a byte of 0 or 1 for each bit       two :u8 tensors {..., n}

  Activations are `:f32`, `:bf16` or `:f16`; the arithmetic is `:f32`, results have the type of the activations. Sums of
  integers are exact and the same everywhere.

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as
  `Sidewinder.Kernel.Scan` tells.
  """

  require Logger

  alias Sidewinder.{Error, Kernel, Options, Safetensors, Tensor}

  @typedoc "Two planes of bits."
  @type planes :: {Tensor.t(), Tensor.t()}

  @typedoc "A layout."
  @type layout :: :values | :planes | :packed2 | :offset_rows | :byte_planes

  @tensors [
    values: ["values"],
    planes: ["plane0", "plane1"],
    packed2: ["packed2"],
    offset_rows: ["offset_rows"],
    byte_planes: ["byte0", "byte1"]
  ]

  # Inputs are no options.
  @absent for {_layout, names} <- @tensors, name <- names, do: name

  ## Layouts

  @doc """
  The planes of -1, 0 and 1; any other value is an error.

    * `values` - `{..., n}` of type `:i8`

      iex> values = Sidewinder.Tensor.from_list([1, -1, 0, 1, 0, 0, 0, 0, -1], :i8, {9})
      iex> Sidewinder.Kernel.Ternary.encode(values)
      {Sidewinder.Tensor.from_list([0x09, 0], :u8, {2}), Sidewinder.Tensor.from_list([0x02, 1], :u8, {2})}
      iex> Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list([0, 2], :i8, {2}))
      ** (Sidewinder.Error) convert_ternary: values: expected cells of -1, 0 or 1, got 1 that are none, the first in row 0 at 1. Quantize first, or say on_sentinel: "zero" to read them as 0
  """
  @spec encode(Tensor.t(), keyword) :: planes
  def encode(values, options \\ []), do: convert(values, :values, :planes, options)

  @doc """
  The values of planes, `{..., n}` of type `:i8`; sentinels are 0, as products read them.

  Takes the option `:n`, the cells of a row; by default every bit of the planes is a cell.

      iex> planes = Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list([1, -1, 0], :i8, {3}))
      iex> Sidewinder.Tensor.to_list(Sidewinder.Kernel.Ternary.decode(planes, n: 3))
      [1, -1, 0]
  """
  @spec decode(planes, keyword) :: Tensor.t()
  def decode(planes, options \\ []) do
    convert(planes, :planes, :values, Keyword.put_new(options, :on_sentinel, :zero))
  end

  @doc """
  Converts cells from one layout to another.

  Options besides those of `Sidewinder.Kernel`:

    * `:n` - cells of a row, of `:planes` and `:packed2`; by default all cells of its bytes
    * `:rows` - rows, of `:offset_rows`; by default 4 for each row of bytes, where padding rows read as -1
    * `:on_sentinel` - for cells that are no value: `:error` (default), `:zero`, or `:warn`, which is `:zero` with a
      warning in the log

      iex> bytes = Sidewinder.Tensor.from_list([0xA1, 0x18, 0x90, 0x0A], :u8, {2, 2})
      iex> values = Sidewinder.Kernel.Ternary.convert(bytes, :offset_rows, :values, rows: 8)
      iex> Sidewinder.Tensor.to_list(values)
      [0, -1, -1, 1, -1, 1, -1, 1, 1, 0, 0, -1, 1, -1, 1, -1]
      iex> values = Sidewinder.Tensor.from_list([1, -1, 0, 1], :i8, {4})
      iex> Sidewinder.Kernel.Ternary.convert(values, :values, :packed2)
      #Sidewinder.Tensor<u8 (1) [134]>
  """
  @spec convert(Tensor.t() | planes, layout, layout, keyword) :: Tensor.t() | planes
  def convert(tensors, from, to, options \\ []) do
    {[], own, where} = Kernel.sort_call!(:convert_ternary, @absent, options, %{to: to})
    given = inputs!(from, tensors)
    wanted = names!("to", to)
    outputs = Kernel.run(:convert_ternary, given, own, where)
    if own[:on_sentinel] == :warn, do: warn(from, outputs)
    of(for name <- wanted, do: outputs[name])
  end

  defp warn(from, outputs) do
    [count, first] = for name <- ["sentinels", "first"], do: hd(Tensor.to_list(outputs[name]))

    if count > 0 do
      Logger.warning(
        "#{count} cells of #{from} are no value and read as 0, the first is number #{first}"
      )
    end
  end

  defp names!(option, layout) do
    @tensors[layout] ||
      Options.wrong!(option, "one of #{Enum.join(Keyword.keys(@tensors), ", ")}", layout)
  end

  defp inputs!(layout, tensors) do
    case {names!("from", layout), tensors} do
      {[name], %Tensor{} = tensor} ->
        [{name, tensor}]

      {[first, second], {%Tensor{} = a, %Tensor{} = b}} ->
        [{first, a}, {second, b}]

      {[name], other} ->
        Options.wrong_argument!(name, "a Sidewinder.Tensor", other)

      {[name, _], other} ->
        Options.wrong_argument!(name, "a tuple of two Sidewinder.Tensor", other)
    end
  end

  defp of([tensor]), do: tensor
  defp of([first, second]), do: {first, second}

  @doc """
  The counts of -1, 0, 1 and sentinels, the index of the first sentinel, row by row, and the share of 0.

    * `tensors` - of the layout that the option `:layout` names, `:planes` by default

  Options are also `:n` and `:rows`, as in `convert/4`.

      iex> bytes = Sidewinder.Tensor.from_list([0x9C], :u8, {1})
      iex> Sidewinder.Kernel.Ternary.stats(bytes, layout: :packed2)
      %{minus: 1, zero: 1, plus: 1, sentinels: 1, first_sentinel: 1, sparsity: 0.25}
  """
  @spec stats(Tensor.t() | planes, keyword) :: %{
          minus: non_neg_integer,
          zero: non_neg_integer,
          plus: non_neg_integer,
          sentinels: non_neg_integer,
          first_sentinel: non_neg_integer | nil,
          sparsity: float
        }
  def stats(tensors, options \\ []) do
    {[], own, where} = Kernel.sort_call!(:stats_ternary, @absent, options, %{}, [:layout])
    {layout, own} = Map.pop(own, :layout, :planes)
    outputs = Kernel.run(:stats_ternary, inputs!(layout, tensors), own, where)
    [minus, zero, plus, sentinels] = counts = Tensor.to_list(outputs["counts"])
    [first] = Tensor.to_list(outputs["first"])

    %{
      minus: minus,
      zero: zero,
      plus: plus,
      sentinels: sentinels,
      first_sentinel: if(first >= 0, do: first),
      sparsity: zero / max(Enum.sum(counts), 1)
    }
  end

  @doc """
  `:ok`, or the count of sentinels and the index of the first, row by row. Options are those of `stats/2`.

      iex> bytes = Sidewinder.Tensor.from_list([0x9C], :u8, {1})
      iex> Sidewinder.Kernel.Ternary.verify(bytes, layout: :packed2)
      {:sentinels, 1, 1}
      iex> Sidewinder.Kernel.Ternary.verify(bytes, layout: :packed2, n: 3)
      {:sentinels, 1, 1}
      iex> Sidewinder.Kernel.Ternary.verify(Sidewinder.Tensor.from_list([0x86], :u8, {1}), layout: :packed2)
      :ok
  """
  @spec verify(Tensor.t() | planes, keyword) :: :ok | {:sentinels, pos_integer, non_neg_integer}
  def verify(tensors, options \\ []) do
    case stats(tensors, options) do
      %{sentinels: 0} -> :ok
      %{sentinels: count, first_sentinel: first} -> {:sentinels, count, first}
    end
  end

  @doc """
  Swaps the planes, which negates the values.

      iex> planes = Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list([1, -1, 0], :i8, {3}))
      iex> planes |> Sidewinder.Kernel.Ternary.negate() |> Sidewinder.Kernel.Ternary.decode(n: 3)
      #Sidewinder.Tensor<i8 (3) [-1, 1, 0]>
  """
  @spec negate(planes) :: planes
  def negate({plane0, plane1}), do: {plane1, plane0}

  @doc """
  The weights of a linear layer of a BitNet checkpoint: planes, and a scale to multiply by.

  Reads `NAME.weight`, in `:offset_rows`, and `NAME.weight_scale` from a safetensors file.

    * `:scale_mode` - `:multiply` if results are to be multiplied by the stored scale, `:divide` if divided. There are
      checkpoints of both kinds, and the file does not say which.
    * `:rows` - the number of rows, if that is not a multiple of 4
    * `:on_sentinel` - as in `convert/4`

  The scale is what `matmul_i8/3` takes as `:w_scale`.
  """
  @spec from_bitnet(Path.t(), String.t(), keyword) :: {planes, Tensor.t()}
  def from_bitnet(path, name, options) do
    known = [:scale_mode, :rows, :on_sentinel | Kernel.where()]
    Options.known!(options, known, op: "from_bitnet")
    {mode, options} = Keyword.pop(options, :scale_mode)
    names = [weight, scale] = [name <> ".weight", name <> ".weight_scale"]
    tensors = Safetensors.read(path, names)
    planes = convert(tensors[weight], :offset_rows, :planes, options)
    {planes, scale(tensors[scale], mode)}
  end

  defp scale(stored, :multiply), do: Tensor.cast(stored, :f32)

  defp scale(stored, :divide) do
    of = Enum.map(Tensor.to_list(stored), &inverse!/1)
    Tensor.from_list(of, :f32, stored.shape)
  end

  defp scale(_stored, other), do: Options.wrong!("scale_mode", ":multiply or :divide", other)

  defp inverse!(scale) when is_number(scale) and scale != 0, do: 1 / scale

  defp inverse!(scale),
    do: Options.wrong!("scale_mode", "scales other than 0 to divide by", scale)

  ## Quantization

  @doc """
  Quantizes floats: `w` is about `scale` by the planes' values.

    * `w` - `{..., n}`, rows of weights

  Options besides those of `Sidewinder.Kernel`, for the threshold t of magnitudes and the scale s:

    * `:rule` - `:absmean` (default): s is the mean magnitude, at least 1.0e-5, and t is s / 2; `:twn`: t is 0.7 of the
      mean magnitude, s the mean of the magnitudes above t; `:threshold`: t is given, s is 1
    * `:threshold` - t of the rule `:threshold`
    * `:per_row` - whether each row has its own t and s; by default the tensor has one
    * `:progress`, `:cancel` - to follow and to end the call: see `Sidewinder.Progress`

  Returns `{planes, scale}`, the second of type `:f32`, `{1}` or with one number for each row.

      iex> w = Sidewinder.Tensor.from_list([0.9, -0.1, 0.4, -0.6], :f32, {1, 4})
      iex> {planes, scale} = Sidewinder.Kernel.Ternary.quantize(w)
      iex> {Sidewinder.Tensor.to_list(Sidewinder.Kernel.Ternary.decode(planes, n: 4)), Sidewinder.Tensor.to_list(scale)}
      {[1, 0, 1, -1], [0.5]}
  """
  @spec quantize(Tensor.t(), keyword) :: {planes, Tensor.t()}
  def quantize(w, options \\ []) do
    outputs = Kernel.call_watched(:quantize_ternary, [{"w", w}], options)
    {{outputs["plane0"], outputs["plane1"]}, outputs["scale"]}
  end

  @doc """
  Dequantized weights of type `:f32`: the inverse of `quantize/2`.

    * `planes` - the weights, whose sentinels are 0
    * `scale` - `{1}`, or one number for each row

  Takes the option `:n`, as `decode/2` does, and `:progress` and `:cancel`, as `quantize/2` does.

      iex> planes = Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list([1, -1, 0, 1], :i8, {2, 2}))
      iex> scale = Sidewinder.Tensor.from_list([0.5, 2], :f32, {2})
      iex> Sidewinder.Kernel.Ternary.dequantize(planes, scale, n: 2)
      #Sidewinder.Tensor<f32 (2, 2) [0.5, -0.5, 0.0, 2.0]>
  """
  @spec dequantize(planes, Tensor.t(), keyword) :: Tensor.t()
  def dequantize(planes, scale, options \\ []) do
    given = inputs!(:planes, planes) ++ [{"scale", scale}]
    Kernel.call_watched(:dequantize_ternary, given, options)["w"]
  end

  @doc """
  Activations of 8 bits, each row with its own scale.

    * `x` - `{..., n}`, finite
    * `:amax_floor` - the lower bound of a row's largest magnitude, 1.0e-5 by default

  Returns `{q, scale}`, of types `:i8` and `:f32`; x is about `q scale`.

      iex> x = Sidewinder.Tensor.from_list([1, -2, 0.5], :f32, {1, 3})
      iex> {q, _scale} = Sidewinder.Kernel.Ternary.activation_i8(x)
      iex> Sidewinder.Tensor.to_list(q)
      [64, -127, 32]
  """
  @spec activation_i8(Tensor.t(), keyword) :: {Tensor.t(), Tensor.t()}
  def activation_i8(x, options \\ []) do
    Kernel.outputs(:activation_i8, [{"x", x}], options)
  end

  ## Products

  @doc """
  Sums of products of rows of ternary numbers, of type `:i32`; exact.

      iex> [a, b] = for list <- [[1, -1, 0, 1, -1], [1, 1, 1, -1, -1]],
      ...>   do: Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list(list, :i8, {1, 5}))
      iex> Sidewinder.Kernel.Ternary.dot(a, b)
      #Sidewinder.Tensor<i32 (1) [0]>
  """
  @spec dot(planes, planes, keyword) :: Tensor.t()
  def dot({a0, a1}, {b0, b1}, options \\ []) do
    given = [{"a0", a0}, {"a1", a1}, {"b0", b0}, {"b1", b1}]
    Kernel.outputs(:dot_ternary, given, options)
  end

  @doc """
  Signs of activations, or planes, by weights: sums of integers, `{..., out}` of type `:i32`.

    * `x` - `{..., in}`, whose signs are taken, or planes
    * `planes` - the weights

  With `:w_scale`, `:bias` or `:activation`, as in `matmul_i8/3`, the result is that of the activations' type.

      iex> w = Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list([1, -1, 0], :i8, {1, 3}))
      iex> x = Sidewinder.Tensor.from_list([0.5, -3, 7], :f32, {1, 3})
      iex> Sidewinder.Kernel.Ternary.matmul_ternary(x, w)
      #Sidewinder.Tensor<i32 (1, 1) [2]>
  """
  @spec matmul_ternary(Tensor.t() | planes, planes, keyword) :: Tensor.t()
  def matmul_ternary(x, planes, options \\ []),
    do: multiply(:matmul_ternary, signs(x), planes, options)

  defp signs({plane0, plane1}), do: ["x", {"x_plane0", plane0}, {"x_plane1", plane1}]
  defp signs(x), do: [{"x", x}, "x_plane0", "x_plane1"]

  @doc """
  Activations of 8 bits by weights: `activation(acc x_scale w_scale + bias)`, where `acc` is exact.

    * `x` - `{..., in}`, finite; on CUDA, a row that is not gives NaN
    * `planes` - the weights

  Options besides those of `Sidewinder.Kernel`:

    * `:w_scale` - `{1}` or `{out}`, of type `:f32`
    * `:bias` - `{out}`, of type `:f32`
    * `:activation` - a function of `Sidewinder.Kernel.NN`, such as `:relu`
    * `:return_sums` - returns `%{y: y, acc: acc, xq: xq, x_scale: x_scale}`, what `verify_sums/4` takes

      iex> w = Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list([1, -1, 0], :i8, {1, 3}))
      iex> x = Sidewinder.Tensor.from_list([1, -2, 0.5], :f32, {1, 3})
      iex> scale = Sidewinder.Tensor.from_list([0.5], :f32, {1})
      iex> [y] = Sidewinder.Tensor.to_list(Sidewinder.Kernel.Ternary.matmul_i8(x, w, w_scale: scale))
      iex> Float.round(y, 6)
      1.503937
  """
  @spec matmul_i8(Tensor.t(), planes, keyword) :: Tensor.t() | %{atom => Tensor.t()}
  def matmul_i8(x, planes, options \\ []),
    do: multiply(:matmul_i8_ternary, [{"x", x}], planes, options, %{})

  @doc """
  Unquantized activations by weights. Options are those of `matmul_i8/3` without `:return_sums`.

      iex> w = Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list([1, -1, 0], :i8, {1, 3}))
      iex> x = Sidewinder.Tensor.from_list([1, -2, 0.5], :f32, {1, 3})
      iex> Sidewinder.Kernel.Ternary.matmul_f32(x, w)
      #Sidewinder.Tensor<f32 (1, 1) [3.0]>
  """
  @spec matmul_f32(Tensor.t(), planes, keyword) :: Tensor.t()
  def matmul_f32(x, planes, options \\ []),
    do: multiply(:matmul_f32_ternary, [{"x", x}], planes, options)

  # Only the product of bytes returns sums with its result.
  defp multiply(op, x, planes, options, set \\ %{return_sums: false}) do
    case Kernel.call(op, x ++ inputs!(:planes, planes), options, set) do
      %{"xq" => xq, "x_scale" => x_scale, "acc" => acc, "y" => y} ->
        %{y: y, acc: acc, xq: xq, x_scale: x_scale}

      %{"y" => y} ->
        y

      %{"acc" => acc} ->
        acc
    end
  end

  @doc """
  The dense layer of float weights, which are quantized to ternary by a rule.

    * `x` - `{..., in}`
    * `w` - `{out, in}`

  Options besides those of `Sidewinder.Kernel`: `:rule`, `:threshold` and `:per_row`, as in `quantize/2`; `:activations` -
  the format of x in the product, `:i8` (default), `:ternary` or `:f32`; `:bias` and `:activation`, as in `matmul_i8/3`.

      iex> w = Sidewinder.Tensor.from_list([0.9, -0.1, 0.4, -0.6], :f32, {1, 4})
      iex> x = Sidewinder.Tensor.from_list([1, 1, 1, -1], :f32, {1, 4})
      iex> Sidewinder.Kernel.Ternary.linear(x, w, activations: :f32)
      #Sidewinder.Tensor<f32 (1, 1) [1.5]>
  """
  @spec linear(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def linear(x, w, options \\ []),
    do: Kernel.outputs(:ternary_linear, [{"x", x}, {"w", w}], options)

  @doc """
  A network of two layers: `h = max(w1 sign(x) + b1, 0)`, `logits = w2 sign(h) + b2`, and the class with the largest.

    * `layers` - two maps with `:planes`, `:bias` and, with the option `:scales`, `:scale`
    * `:scales` - whether sums are multiplied by the scales; `false` by default

  Returns `{logits, class}`, the second of type `:i32`.

      iex> layer = fn values, bias ->
      ...>   planes = Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list(List.flatten(values), :i8, {2, length(hd(values))}))
      ...>   %{planes: planes, bias: Sidewinder.Tensor.from_list(bias, :f32, {2})}
      ...> end
      iex> layers = [layer.([[1, -1, 1], [-1, 0, 1]], [0.5, 0.25]), layer.([[1, 1], [0, -1]], [0, 1])]
      iex> x = Sidewinder.Tensor.from_list([0.2, -0.7, 0], :f32, {1, 3})
      iex> {logits, class} = Sidewinder.Kernel.Ternary.simple_rotor_net(x, layers)
      iex> {Sidewinder.Tensor.to_list(logits), Sidewinder.Tensor.to_list(class)}
      {[1.0, 1.0], [0]}
  """
  @spec simple_rotor_net(Tensor.t(), [map], keyword) :: {Tensor.t(), Tensor.t()}
  def simple_rotor_net(x, layers, options \\ []) do
    # Scales and sizes come from the layers.
    given = [{"x", x}, "w1_scale", "w2_scale" | layers!(layers)]
    set = %{in: nil, hidden: nil, out: nil}
    outputs = Kernel.call(:simple_rotor_net, given, options, set)
    {outputs["logits"], outputs["class"]}
  end

  defp layers!([%{planes: {_, _}}, %{planes: {_, _}}] = layers) do
    for {layer, i} <- Enum.with_index(layers, 1),
        {name, tensor} <- layer_inputs(layer, i),
        tensor != nil do
      {name, tensor}
    end
  end

  defp layers!(other) do
    expected = "two maps with planes, bias and maybe scale"

    raise Error.new(:argument, "layers",
            op: "simple_rotor_net",
            expected: expected,
            got: Error.show(other)
          )
  end

  defp layer_inputs(%{planes: {plane0, plane1}} = layer, i) do
    [
      {"w#{i}_plane0", plane0},
      {"w#{i}_plane1", plane1},
      {"b#{i}", layer[:bias]},
      {"w#{i}_scale", layer[:scale]}
    ]
  end

  @doc """
  The index of the largest number of each row, the first on ties.

      iex> Sidewinder.Kernel.Ternary.argmax(Sidewinder.Tensor.from_list([1, 3, 3], :f32, {1, 3}))
      #Sidewinder.Tensor<i32 (1) [1]>
  """
  @spec argmax(Tensor.t(), keyword) :: Tensor.t()
  def argmax(x, options \\ []), do: Kernel.outputs(:argmax, [{"x", x}], options)

  ## Check sums

  @doc """
  Sums of the columns of weights, of type `:i32`, for `verify_sums/4`. Takes `:n`, the cells of a row.

      iex> w = Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list([1, -1, 1, 0], :i8, {2, 2}))
      iex> Sidewinder.Kernel.Ternary.column_sums(w, n: 2)
      #Sidewinder.Tensor<i32 (2) [2, -1]>
  """
  @spec column_sums(planes, keyword) :: Tensor.t()
  def column_sums(planes, options \\ []),
    do: Kernel.call(:column_sums_ternary, inputs!(:planes, planes), options)["column_sums"]

  @doc """
  Checks the sums of a product: in every row their total equals the product of the column sums and the activations.
  Raises an error of kind `:argument` that names the first row where it does not.

    * `acc`, `xq` - of `matmul_i8/3` with `:return_sums`
    * `column_sums` - those of the undamaged weights

      iex> w = Sidewinder.Kernel.Ternary.encode(Sidewinder.Tensor.from_list([1, -1, 1, 0], :i8, {2, 2}))
      iex> sums = Sidewinder.Kernel.Ternary.column_sums(w, n: 2)
      iex> x = Sidewinder.Tensor.from_list([1, -2], :f32, {1, 2})
      iex> %{acc: acc, xq: xq} = Sidewinder.Kernel.Ternary.matmul_i8(x, w, return_sums: true)
      iex> Sidewinder.Kernel.Ternary.verify_sums(acc, sums, xq)
      :ok
      iex> wrong = Sidewinder.Tensor.from_list([0, 0], :i32, {1, 2})
      iex> Sidewinder.Kernel.Ternary.verify_sums(wrong, sums, xq)
      ** (Sidewinder.Error) verify_sums_ternary: acc: expected sums that are those of the columns by x, got a difference of -255 in row 0. The weights, the column sums or the result are damaged, or are not of each other
  """
  @spec verify_sums(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: :ok
  def verify_sums(acc, column_sums, xq, options \\ []) do
    given = [{"acc", acc}, {"column_sums", column_sums}, {"xq", xq}]
    %{"difference" => _} = Kernel.call(:verify_sums_ternary, given, options)
    :ok
  end
end
