defmodule Sidewinder.RandomInputs do
  @moduledoc """
  Random inputs for any op of the library, of any size: what `mix sidewinder.compare` runs on.

  An op describes the shape of each of its inputs by letters, such as `(B, L, D)`; see
  `mix sidewinder.compare --help`. The letters have sizes here, and all shapes follow.

      iex> inputs = Sidewinder.RandomInputs.make(:causal_conv1d, shape: "B=1,L=2,D=3")
      iex> for {name, tensor} <- inputs, do: {name, tensor.shape}
      [{"x", {1, 2, 3}}, {"w", {3, 4}}]
  """

  alias Sidewinder.{Error, Ops, Shapes, Tensor}

  # The most elements: more would fill the memory of most machines.
  @most 268_435_456

  # An op's own sizes take precedence: a letter may mean something else there.
  @sizes Map.merge(
           %{"..." => [256], "B" => 1, "G" => 1, "H" => 8, "R" => 16, "F" => 1024},
           Map.new(~w(L M D K N I O), &{&1, 256})
         )
  @other_letter 64
  @own_sizes %{
    "selective_scan" => %{"N" => 16},
    "selective_state_update" => %{"N" => 16},
    "causal_conv1d" => %{"W" => 4},
    "causal_conv1d_update" => %{"W" => 4},
    "mamba_block" => %{"N" => 16, "W" => 4},
    "gated_delta_rule" => %{"G" => 8, "K" => 128, "V" => 128},
    "gated_delta_rule_backward" => %{"G" => 8, "K" => 128, "V" => 128},
    "linear_attention" => %{"G" => 8, "K" => 128, "V" => 128},
    "linear_attention_backward" => %{"G" => 8, "K" => 128, "V" => 128},
    "attention" => %{"K" => 8},
    "decode" => %{"K" => 8, "C" => 512},
    "mdi" => %{"I" => 64},
    "mdi_gamma" => %{"I" => 64},
    "mmrec_block" => %{"I" => 64},
    "hds_construct" => %{"M" => 1024, "D" => 512},
    "hds_construct_backward" => %{"M" => 1024, "D" => 512},
    "hds_query_topk" => %{"M" => 1024},
    "write_short" => %{"S" => 1024},
    "write_long" => %{"M" => 1024},
    # Whole blocks of either format.
    "dequantize" => %{"Q" => 612},
    "matmul_ternary" => %{"P" => 32},
    "matmul_i8_ternary" => %{"P" => 32},
    "matmul_f32_ternary" => %{"P" => 32},
    "simple_rotor_net" => %{"I" => 512, "P" => 64, "H" => 256, "Q" => 32, "O" => 10}
  }

  # As inside a trained model: small positive steps, states that fade at different rates.
  @ranges %{
    "A" => {-16, -1},
    "A_log" => {0, 2.7},
    "dt" => {0.001, 0.1},
    "dt_bias" => {0, 0.1},
    "dt_b" => {-4, -2}
  }
  @own_ranges %{
    "gated_delta_rule" => %{"beta" => {0, 1}, "g" => {-0.1, 0}, "k" => {-0.1, 0.1}},
    "linear_attention" => %{"q" => {0, 1}, "k" => {0, 1}, "g" => {-0.1, 0}, "initial_z" => {0, 1}},
    "linear_scan" => %{"a" => {0.5, 1}},
    "mdi_update" => %{"gate" => {0, 1}, "gamma" => {0, 1}},
    "block_recurrence" => %{"gamma" => {0, 0.5}},
    "mmrec_block" => %{"bg2" => {-4, -2}},
    "exp_product_scan" => %{"gamma" => {0.5, 1}},
    "cumprod_scan" => %{"gamma" => {0.5, 1}}
  }

  # Bytes after the scale of a block, and the upper byte of the scale: about 1/256, or 1/16 for nibbles.
  @formats %{"q8_0" => {32, 0x1C}, "q4_0" => {16, 0x2C}}

  @doc """
  The inputs of `op`, in its order. Options:

    * `:shape` - sizes of letters, as in `"B=2,L=100"`, or the shape of the first input, as in
      `"2x100x64"`, or both: `"2x100x64,N=16"`. Letters that are not given have sizes that fit.
    * `:type` - the storage type, `:f32` by default
    * `:with` - names of optional inputs to make as well, none by default
    * `:options` - the op's options, for some change what a shape means (`layout`)
    * `:seed` - the same inputs for the same number, 1 by default

  Raises `Sidewinder.Error` for an unknown op, letter, name or type, and for sizes that are
  impossible.

      iex> [{"x", x}, {"w", w}] = Sidewinder.RandomInputs.make(:rms_norm, shape: "2x3", type: :bf16)
      iex> {x.type, x.shape, w.shape}
      {:bf16, {2, 3}, {3}}
  """
  @spec make(atom | String.t(), keyword) :: [{String.t(), Tensor.t()}]
  def make(op, options \\ []) do
    op = Ops.find!(Ops.all(), op)
    slots = slots!(op, options[:with] || [])
    letters = letters!(op, options[:shape] || "")
    type = options[:type] || :f32

    for slot <- packed(slots) do
      sizes = Shapes.sizes!(slot.name, slot.shape, letters)
      shape = List.to_tuple(by_layout(sizes, slot, options[:options] || %{}))
      seed = {options[:seed] || 1, slot.name}
      format = block_format(slot, options[:options] || %{})
      range = @own_ranges[op.name][slot.name] || range(slot, sizes)

      {slot.name,
       cond do
         format -> blocks(shape, format, seed)
         slot.name == "cu_seqlens" -> ends(letters)
         true -> tensor(shape, Ops.type(slot, type), range, seed)
       end}
    end
  end

  # Of packed sequences states have one for each of them in place of the batch.
  defp packed(slots) do
    if Enum.any?(slots, &(&1.name == "cu_seqlens")),
      do:
        for(
          slot <- slots,
          do: %{slot | shape: slot.shape |> String.replace(~r/^\(B, (?!.*\b[LM]\b)/, "(S, ")}
        ),
      else: slots
  end

  # Sequences of about equal lengths.
  defp ends(%{"L" => length, "S" => count}) do
    Tensor.from_list(for(i <- 0..count, do: div(i * length, max(count, 1))), :i32, {count + 1})
  end

  # Blocks of 32 values have 34 or 18 bytes, which shapes tell as a share of the values. Of Q bytes an option tells.
  defp block_format(%{precision: "u8", shape: words}, options) do
    cond do
      words =~ ~r"17\w/16" -> "q8_0"
      words =~ ~r"9\w/16" -> "q4_0"
      words == "(..., Q)" -> to_string(options[:format] || "q8_0")
      true -> nil
    end
  end

  defp block_format(_slot, _options), do: nil

  # Any bytes, with scales that are finite and of one size.
  defp blocks(shape, format, seed) do
    {size, high} = Map.get(@formats, format, @formats["q8_0"])
    {bytes, _state} = :rand.bytes_s(checked!(Tensor.elements(shape)), state(seed))

    data =
      for <<low, _, values::binary-size(size) <- bytes>>,
        into: <<>>,
        do: <<low, high, values::binary>>

    # The op refuses incomplete blocks.
    rest = binary_part(bytes, byte_size(data), byte_size(bytes) - byte_size(data))
    Tensor.new(data <> rest, :u8, shape)
  end

  @doc """
  A tensor of evenly distributed numbers of a range; of a mask, three in four are true.

      iex> Sidewinder.RandomInputs.tensor({2}, :f32, {1, 1}, 7)
      #Sidewinder.Tensor<f32 (2) [1.0, 1.0]>
  """
  @spec tensor(tuple, Tensor.type(), {number, number}, term) :: Tensor.t()
  def tensor(shape, type, range, seed) do
    count = checked!(Tensor.elements(shape))
    numbers(type, shape, count, state(seed), range)
  end

  @doc """
  A tensor of normally distributed numbers around 0.

      iex> Sidewinder.RandomInputs.normal({2}, :f32, 0, 7)
      #Sidewinder.Tensor<f32 (2) [0.0, 0.0]>
  """
  @spec normal(tuple, Tensor.type(), number, term) :: Tensor.t()
  def normal(shape, type, deviation, seed) do
    number = &<<deviation * &1 + 0.0::float-native-32>>
    count = checked!(Tensor.elements(shape))
    data = fill(count, state(seed), &:rand.normal_s/1, number, <<>>)
    data |> Tensor.new(:f32, shape) |> Tensor.cast(type)
  end

  defp state(seed), do: :rand.seed_s(:exsss, :erlang.phash2(seed))

  defp checked!(count) when count <= @most, do: count

  defp checked!(count) do
    raise Error.new(:size, "shape",
            expected: "at most #{@most} elements in a random tensor",
            got: Integer.to_string(count)
          )
  end

  defp numbers(:u8, shape, count, state, _range) do
    bytes = &if(&1 < 0.75, do: <<1>>, else: <<0>>)
    Tensor.new(fill(count, state, &:rand.uniform_s/1, bytes, <<>>), :u8, shape)
  end

  defp numbers(type, shape, count, state, {lo, hi}) do
    number = &<<lo + (hi - lo) * &1::float-native-32>>
    data = fill(count, state, &:rand.uniform_s/1, number, <<>>)
    data |> Tensor.new(:f32, shape) |> Tensor.cast(type)
  end

  defp fill(0, _state, _draw, _number, data), do: data

  defp fill(count, state, draw, number, data) do
    {value, state} = draw.(state)
    fill(count - 1, state, draw, number, <<data::binary, number.(value)::binary>>)
  end

  defp slots!(op, wanted) do
    optional = for %{optional: true, name: name} <- op.inputs, do: name

    for name <- wanted, name not in optional do
      raise Error.new(:argument, "with",
              op: op.name,
              expected: "optional inputs out of #{Enum.join(optional, ", ")}",
              got: name
            )
    end

    # An op whose inputs are all optional takes all.
    case Enum.filter(op.inputs, &(not &1.optional or &1.name in wanted)) do
      [] -> op.inputs
      slots -> slots
    end
  end

  ## Sizes

  defp letters!(op, text) do
    own = Map.get(@own_sizes, op.name, %{})
    letters = Enum.uniq(Enum.flat_map(op.inputs, &Shapes.letters(&1.shape)))
    defaults = for l <- letters, into: %{}, do: {l, own[l] || Map.get(@sizes, l, @other_letter)}
    given = for part <- String.split(text, ",", trim: true), do: given!(op, letters, part)
    Enum.reduce(given, defaults, &Map.merge(&2, &1))
  end

  defp given!(op, letters, part) do
    case String.split(part, "=") do
      [letter, size] -> letter!(op, letters, String.trim(letter), sizes!(op, size))
      [sizes] -> first_shape!(op, sizes!(op, sizes))
      _ -> wrong_shape(op, part)
    end
  end

  defp letter!(op, letters, letter, sizes) do
    cond do
      letter not in letters -> unknown_letter(op, letters, letter)
      letter == "..." -> %{letter => sizes}
      match?([_], sizes) -> %{letter => hd(sizes)}
      true -> wrong_shape(op, Enum.join(sizes, "x"))
    end
  end

  defp first_shape!(%{inputs: [first | _]} = op, sizes) do
    Shapes.bind(first.shape, sizes) ||
      raise Error.new(:shape, first.name,
              op: op.name,
              expected: "shape #{first.shape}",
              got: Enum.join(sizes, "x")
            )
  end

  defp sizes!(op, text) do
    for size <- String.split(text, "x") do
      case Integer.parse(String.trim(size)) do
        {size, ""} when size >= 0 -> size
        _ -> wrong_shape(op, text)
      end
    end
  end

  defp unknown_letter(op, letters, letter) do
    raise Error.new(:option, "shape",
            op: op.name,
            expected: "letters out of #{Enum.join(letters, ", ")}",
            got: letter
          )
  end

  defp wrong_shape(op, text) do
    raise Error.new(:option, "shape",
            op: op.name,
            expected: "sizes of letters, such as B=2,L=100, or a shape, such as 2x100",
            got: text
          )
  end

  # The words describe heads first, as masks and caches always are.
  defp by_layout([a, b, c, d] = sizes, %{shape: words}, %{layout: "heads_last"}) do
    if words =~ "|1" or words =~ "C", do: sizes, else: [a, c, b, d]
  end

  defp by_layout(sizes, _slot, _options), do: sizes

  ## Ranges

  defp range(%{name: name}, _sizes) when is_map_key(@ranges, name), do: @ranges[name]

  # Products with a weight are summed over its last axis; this bound keeps the sums about as large as the data.
  defp range(%{shape: words}, [_, terms]) do
    if words =~ ~r/B|\.\.\./, do: {-1, 1}, else: {-bound(terms), bound(terms)}
  end

  defp range(_slot, _sizes), do: {-1, 1}

  defp bound(terms), do: :math.sqrt(3 / max(terms, 1))
end
