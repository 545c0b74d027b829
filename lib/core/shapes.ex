defmodule Sidewinder.Shapes do
  @moduledoc false
  # The shapes in words by which ops describe their inputs: letters, sums and multiples of them, "..." for
  # any leading axes, as in "(B, W-1, D)", "(R+2N, D)", "(..., I)", "(B, L, N) | (D, N)", "(B|1, M|1)".

  alias Sidewinder.Error

  @rows "..."

  @typedoc "An axis: \"...\", or a sum of multiples of letters (nil is 1), divided by a number."
  @type axis :: String.t() | {[{integer, String.t() | nil}], pos_integer}

  @doc """
  The shapes that the words allow. Of an axis that may be 1 as well, the larger form counts.

      iex> Sidewinder.Shapes.parse!("(2D, W-1) | (..., B|1)")
      [[{[{2, "D"}], 1}, {[{1, "W"}, {-1, nil}], 1}], ["...", {[{1, "B"}], 1}]]
      iex> Sidewinder.Shapes.parse!("any")
      ** (Sidewinder.Error) shape: expected axes in words, such as (B, W-1, 2D), got "any"
  """
  @spec parse!(String.t()) :: [[axis]]
  def parse!(words) do
    case Regex.run(~r/^\((.*)\)$/, words) do
      [_, inner] -> for form <- String.split(inner, ~r/\)\s*\|\s*\(/), do: form!(form, words)
      nil -> wrong_words(words)
    end
  end

  defp form!(form, words) do
    for axis <- String.split(form, ",", trim: true), do: axis!(String.trim(axis), words)
  end

  defp axis!(@rows, _words), do: @rows

  defp axis!(axis, words) do
    [largest | _] = String.split(axis, "|")
    {sum, divisor} = divisor(String.split(largest, "/"), words)

    if sum =~ ~r/^([+-]?(\d+|\d*[A-Za-z][a-z_\d]*))+$/,
      do: {terms(sum), divisor},
      else: wrong_words(words)
  end

  defp divisor([sum], _words), do: {sum, 1}

  defp divisor([sum, divisor], words) do
    case Integer.parse(divisor) do
      {divisor, ""} when divisor > 0 -> {sum, divisor}
      _ -> wrong_words(words)
    end
  end

  defp divisor(_, words), do: wrong_words(words)

  defp terms(sum) do
    for [_, sign, count, letter] <- Regex.scan(~r/([+-]?)(\d*)([A-Za-z][a-z_\d]*|)/, sum),
        count <> letter != "",
        do: {signed(sign, count), if(letter != "", do: letter)}
  end

  defp signed("-", count), do: -signed("", count)
  defp signed(_plus, ""), do: 1
  defp signed(_plus, count), do: String.to_integer(count)

  defp wrong_words(words) do
    raise Error.new(:argument, "shape",
            expected: "axes in words, such as (B, W-1, 2D)",
            got: inspect(words)
          )
  end

  @doc """
  All letters in some words, with "...".

      iex> Sidewinder.Shapes.letters("(..., R+2N) | (D, N)")
      ["...", "R", "N", "D"]
  """
  @spec letters(String.t()) :: [String.t()]
  def letters(words) do
    Enum.uniq(for form <- parse!(words), axis <- form, letter <- letters_of(axis), do: letter)
  end

  defp letters_of(@rows), do: [@rows]
  defp letters_of({terms, _}), do: for({_, letter} <- terms, letter, do: letter)

  @doc """
  The letters' values for which a tensor has these sizes, or nil if there are none.

      iex> Sidewinder.Shapes.bind("(..., 2D)", [4, 7, 6])
      %{"..." => [4, 7], "D" => 3}
      iex> Sidewinder.Shapes.bind("(B, D)", [4])
      nil
  """
  @spec bind(String.t(), [non_neg_integer]) :: map | nil
  def bind(words, sizes), do: Enum.find_value(parse!(words), &bind_form(&1, sizes, %{}))

  defp bind_form([@rows | axes], sizes, letters) when length(sizes) >= length(axes) do
    {rows, sizes} = Enum.split(sizes, length(sizes) - length(axes))
    bind_form(axes, sizes, Map.put(letters, @rows, rows))
  end

  defp bind_form([{[{count, letter}], over} | axes], [size | sizes], letters)
       when letter != nil and count > 0 and rem(size * over, count) == 0 do
    value = div(size * over, count)

    if Map.get(letters, letter, value) == value,
      do: bind_form(axes, sizes, Map.put(letters, letter, value))
  end

  defp bind_form([], [], letters), do: letters
  defp bind_form(_axes, _sizes, _letters), do: nil

  @doc """
  The axis of a letter in the shape that tensors of this rank have, or nil.

      iex> Sidewinder.Shapes.axis("(B, L, G, N) | (D, N)", 4, "L")
      1
      iex> Sidewinder.Shapes.axis("(B, L, G, N) | (D, N)", 2, "L")
      nil
  """
  @spec axis(String.t(), non_neg_integer, String.t()) :: non_neg_integer | nil
  def axis(words, rank, letter) do
    form = Enum.find(parse!(words), [], &(length(&1) == rank))
    Enum.find_index(form, &(&1 == {[{1, letter}], 1}))
  end

  @doc """
  The sizes of the tensor `name` whose shape has these words: of the first form that they allow.

  Raises `Sidewinder.Error` of kind `:shape` where a size is negative or no whole number.

      iex> Sidewinder.Shapes.sizes!("x", "(..., R+2N, W-1)", %{"..." => [2], "R" => 1, "N" => 4, "W" => 4})
      [2, 9, 3]
      iex> Sidewinder.Shapes.sizes!("state", "(B, W-1)", %{"B" => 2, "W" => 0})
      ** (Sidewinder.Error) state: expected a size of 0 or more for each axis of (B, W-1), got -1 with W = 0
  """
  @spec sizes!(String.t(), String.t(), map) :: [non_neg_integer]
  def sizes!(name, words, letters) do
    for axis <- hd(parse!(words)), size <- size(axis, letters) do
      if is_integer(size) and size >= 0, do: size, else: wrong_size(name, words, axis, letters)
    end
  end

  defp size(@rows, letters), do: Map.fetch!(letters, @rows)

  defp size({terms, over}, letters) do
    sum = Enum.sum(for {count, letter} <- terms, do: count * Map.get(letters, letter, 1))
    [if(rem(sum, over) == 0, do: div(sum, over), else: sum / over)]
  end

  defp wrong_size(name, words, axis, letters) do
    [got] = size(axis, letters)
    given = Enum.map_join(letters_of(axis), ", ", &"#{&1} = #{letters[&1]}")

    raise Error.new(:shape, name,
            expected: "a size of 0 or more for each axis of #{words}",
            got: "#{got} with #{given}"
          )
  end
end
