defmodule Sidewinder.Composed do
  @moduledoc false
  # What has golden values and is no op: compositions of the functions of kernels, by the names of the values.

  alias Sidewinder.{Kernel, Tensor}
  alias Sidewinder.Kernel.{MMRec, Quant, Scan, Ternary}

  @doc "The names."
  def names do
    ~w(memory_state f16_convert block_quantize block_dequantize block_matmul)a ++
      ~w(ternary_encode ternary_layouts ternary_sentinel ternary_quantize ternary_matmul)a
  end

  @doc """
  The outputs of a case: `inputs` by name, the case's attributes, and `where` to compute. `place` brings other tensors to
  where the inputs are.
  """
  def outputs(name, inputs, attrs, where, place)

  def outputs(:memory_state, i, %{cursor0: cursor, ema_decay: decay}, where, place) do
    summaries = i["summaries"] |> rows() |> Enum.map(place) |> Enum.with_index(cursor)

    long = fn policy ->
      Enum.reduce(summaries, i["long_k"], fn {summary, cursor}, bank ->
        options = [policy: policy, cursor: cursor, decay: decay]
        MMRec.write_long(bank, summary, options ++ where)
      end)
    end

    %{
      "short_ring" => MMRec.write_short(i["short"], i["h"], [start: cursor] ++ where),
      "long_ring" => long.(:ring),
      "long_ema" => long.(:ema),
      "long_broadcast" => long.(:broadcast)
    }
  end

  # Steps of recurrences in f16, whose states are f32. To add -0 leaves every number as it is.
  def outputs(:f16_convert, %{"x" => x}, _attrs, where, place) do
    count = Tensor.elements(x.shape)
    filled = &place.(Tensor.from_list(List.duplicate(&1, count), &2, &3))
    of = &filled.(&1, :f16, {1, 1, count})
    step = &Scan.linear_scan(&1, &2, [initial_state: &3, return_state: true] ++ where)

    {h, _} = step.(of.(1.0), of.(-0.0), place.(seen_as(x, :f32, {1, count})))
    {_, back} = step.(of.(0.0), h, filled.(-0.0, :f32, {1, count}))
    %{"bits" => seen_as(h, :i16, x.shape), "back" => seen_as(back, :f32, x.shape)}
  end

  def outputs(:block_quantize, %{"x" => x}, attrs, where, place) do
    bytes =
      for format <- [:q8_0, :q4_0], into: %{}, do: {"#{format}", Quant.quantize(x, format, where)}

    Map.merge(bytes, outputs(:block_dequantize, bytes, attrs, where, place))
  end

  def outputs(:block_dequantize, %{"q8_0" => q8, "q4_0" => q4}, _attrs, where, _place) do
    %{
      "deq8" => Quant.dequantize(q8, :q8_0, where),
      "deq4" => Quant.dequantize(q4, :q4_0, where)
    }
  end

  def outputs(:block_matmul, %{"x" => x, "w_q8_0" => q8, "w_q4_0" => q4}, _attrs, where, _place) do
    %{
      "x_q8_0" => Quant.quantize(x, :q8_0, where),
      "y_q8_q8" => Quant.matmul_q8_q8(x, q8, where),
      "y_q8_q4" => Quant.matmul_q8_q4(x, q4, where),
      "y_f32_q8" => Quant.matmul_f32_q8(x, q8, where),
      "y_f32_q4" => Quant.matmul_f32_q4(x, q4, where)
    }
  end

  def outputs(:ternary_encode, %{"v" => v, "w" => w}, _attrs, where, _place) do
    planes = {plane0, plane1} = Ternary.encode(v, where)
    {negated0, negated1} = Ternary.negate(planes)
    dot = Ternary.dot(planes, Ternary.encode(w, where), where)

    %{
      "plane0" => plane0,
      "plane1" => plane1,
      "negated0" => negated0,
      "negated1" => negated1,
      "packed2" => Ternary.convert(v, :values, :packed2, where),
      "dot_with_w" => seen_as(dot, :i32, {1})
    }
  end

  def outputs(:ternary_layouts, %{"w" => w}, _attrs, where, _place) do
    {plane0, plane1} = Ternary.encode(w, where)

    %{
      "plane0" => plane0,
      "plane1" => plane1,
      "packed2" => Ternary.convert(w, :values, :packed2, where),
      "offset_rows" => Ternary.convert(w, :values, :offset_rows, where)
    }
  end

  def outputs(:ternary_sentinel, inputs, %{n: n}, where, _place) do
    options = %{to: :values, n: n, on_sentinel: :zero}
    got = Kernel.run(:convert_ternary, Map.to_list(inputs), options, where)
    %{"values_zeroed" => got["values"], "sentinels" => got["sentinels"]}
  end

  def outputs(:ternary_quantize, %{"w" => w}, _attrs, where, _place) do
    n = elem(w.shape, tuple_size(w.shape) - 1)

    for {name, options} <- [
          t0: [rule: :threshold, threshold: 0],
          t03: [rule: :threshold, threshold: 0.3],
          absmean_tensor: [rule: :absmean],
          absmean_row: [rule: :absmean, per_row: true],
          twn: [rule: :twn]
        ],
        {planes, scale} = Ternary.quantize(w, options ++ where),
        {output, tensor} <- [q: Ternary.decode(planes, [n: n] ++ where), scale: scale],
        into: %{},
        do: {"#{output}_#{name}", tensor}
  end

  def outputs(:ternary_matmul, %{"x" => x, "w_scale" => scale} = i, _attrs, where, _place) do
    planes = {i["plane0"], i["plane1"]}
    scaled = [w_scale: scale] ++ where
    bytes = Ternary.matmul_i8(x, planes, [return_sums: true] ++ scaled)

    %{
      "xq" => bytes.xq,
      "x_scale" => bytes.x_scale,
      "acc_i8" => bytes.acc,
      "y_i8" => bytes.y,
      "acc_ternary" => Ternary.matmul_ternary(x, planes, where),
      "y_f32" => Ternary.matmul_f32(x, planes, scaled)
    }
  end

  # The bytes of a tensor, on the host, as those of another.
  defp seen_as(tensor, type, shape), do: Tensor.new(Tensor.to_host(tensor).data, type, shape)

  # The parts of a tensor along its first axis.
  defp rows(tensor) do
    %{data: data, shape: shape, type: type} = Tensor.to_host(tensor)
    [count | dims] = Tuple.to_list(shape)
    size = div(byte_size(data), count)
    for <<row::binary-size(size) <- data>>, do: Tensor.new(row, type, List.to_tuple(dims))
  end
end
