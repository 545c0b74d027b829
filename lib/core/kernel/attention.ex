defmodule Sidewinder.Kernel.Attention do
  @moduledoc """
  Attention, rotary and sinusoidal positions, and the layers and blocks of transformers that are made of them; and their
  gradients.

  In the shapes B is the batch, H the heads of queries, K those of keys and values (a divisor of H: query
  head `h` reads key head `h / (H / K)`), L the queries, M the keys, and W the width of a head. With the
  option `layout: :heads_last` lengths go before heads: `{B, L, H, W}`, as projections leave it.

  `q` or `x` decides the storage type: `:f32`, `:bf16`, `:f16`, or `:f64`. Masks are `:u8`; `bias`, `lse`,
  weights of norms and the arithmetic are `:f32` (`:f64` for `:f64`), and results are rounded once.

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as
  `Sidewinder.Kernel.Scan` tells.
  """

  alias Sidewinder.{Kernel, KVCache, Tensor}

  @doc """
  Softmax attention (Vaswani et al. 2017), in tiles, without the matrix of all scores:

      S[i,j] = scale q[i].k[j] + bias[i,j]            y[i] = sum_j softmax(S[i])[j] v[j]

  over the keys `j` that query `i` attends to.

    * `q` - `{B, H, L, W}`
    * `k` - `{B, K, M, W}`
    * `v` - `{B, K, M, V}`

  Options besides those of `Sidewinder.Kernel`:

    * `:scale` - `1 / sqrt(W)` by default
    * `:causal` - whether query `i` attends only to keys up to `i + q_offset`; `false` by default
    * `:q_offset` - the position of the first query among the keys; `M - L` by default, so that the last
      query attends to all keys
    * `:mask` - of a shape that broadcasts to `{B, H, L, M}`, not 0 where a query attends to a key
    * `:bias` - of a shape that broadcasts to `{B, H, L, M}`
    * `:layout` - `:heads_first`, the default, or `:heads_last`
    * `:cu_seqlens` - the ends of packed sequences, see `Sidewinder.Kernel.Scan`; a query attends only to keys of its own
      sequence. With as many keys as queries, and without `:mask` and `:bias`
    * `:return_lse` - returns `{y, lse}`, the second `{B, H, L}`: `ln sum_j exp(S[i,j])`

  A query with no visible key has a `y` of 0 and an `lse` of minus infinity. Returns `y`, `{B, H, L, V}`,
  unless an option returns more.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> q = from_list([1, 0, 0, 1], :f32, {1, 1, 2, 2})
      iex> v = from_list([1, 2, 3, 4], :f32, {1, 1, 2, 2})
      iex> y = Sidewinder.Kernel.Attention.attention(q, q, v)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 4))
      [1.6605, 2.6605, 2.3395, 3.3395]
      iex> y = Sidewinder.Kernel.Attention.attention(q, q, v, causal: true)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 4))
      [1.0, 2.0, 2.3395, 3.3395]
  """
  @spec attention(Tensor.t(), Tensor.t(), Tensor.t(), keyword) ::
          Tensor.t() | {Tensor.t(), Tensor.t()}
  def attention(q, k, v, options \\ []) do
    given = [{"q", q}, {"k", k}, {"v", v}]
    {lse?, %{"y" => y, "lse" => lse}} = Kernel.call_asked(:attention, given, options, :return_lse)
    if lse?, do: {y, lse}, else: y
  end

  @doc """
  The gradient of `attention/4`.

    * `q`, `k`, `v` - as they were given to it
    * `y`, `lse` - what it returned
    * `dy` - `{B, H, L, V}`, the cotangent of `y`

  Options are those of `attention/4`, and `:dlse` - `{B, H, L}`, the cotangent of `lse`, zero by default.
  Returns a map of `:dq`, `:dk`, `:dv`, and `:dbias` if there is a bias.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> q = from_list([1, 0, 0, 1], :f32, {1, 1, 2, 2})
      iex> v = from_list([1, 2, 3, 4], :f32, {1, 1, 2, 2})
      iex> dy = from_list([1, 0, 1, 0], :f32, {1, 1, 2, 2})
      iex> {y, lse} = Sidewinder.Kernel.Attention.attention(q, q, v, return_lse: true)
      iex> gradients = Sidewinder.Kernel.Attention.attention_backward(q, q, v, y, lse, dy)
      iex> Enum.map(Sidewinder.Tensor.to_list(gradients.dq), &Float.round(&1, 4))
      [-0.3128, 0.3128, -0.3128, 0.3128]
  """
  @spec attention_backward(
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          keyword
        ) :: %{atom => Tensor.t()}
  def attention_backward(q, k, v, y, lse, dy, options \\ []) do
    given = [{"q", q}, {"k", k}, {"v", v}, {"y", y}, {"lse", lse}, {"dy", dy}]
    Kernel.gradients(:attention_backward, given, options)
  end

  # These come from a cache only.
  @held ["keys", "values"]
  @cached %{cached: 0}

  @doc """
  Attention of new tokens over those of a cache and themselves; their keys and values are appended to the cache.

    * `q` - `{B, H, L, W}`
    * `k` - `{B, K, L, W}`, rotated if the model does that
    * `v` - `{B, K, L, V}`
    * `cache` - a `Sidewinder.KVCache` of the type, batch, heads and widths of `k` and `v`, on their device

  Options besides those of `Sidewinder.Kernel`: `:scale` and `:layout` as in `attention/4`, `:mask` and `:bias`
  for the keys of the cache and then the new ones, and `:causal` - whether a token attends only to itself and earlier tokens, `true`
  by default.

  Returns `{y, cache}`, the latter with the new rows. Rows of `y`, `{B, H, L, V}`, are those of one causal
  pass of `attention/4` over all tokens, for any number of tokens at a time.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> cache = Sidewinder.KVCache.new(:f32, {1, 1, 2})
      iex> rows = [{[1, 0], [1, 2]}, {[0, 1], [3, 4]}]
      iex> {ys, _cache} =
      ...>   Enum.map_reduce(rows, cache, fn {q, v}, cache ->
      ...>     [q, v] = for row <- [q, v], do: from_list(row, :f32, {1, 1, 1, 2})
      ...>     Sidewinder.Kernel.Attention.decode(q, q, v, cache)
      ...>   end)
      iex> for y <- ys, do: Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 4))
      [[1.0, 2.0], [2.3395, 3.3395]]
  """
  @spec decode(Tensor.t(), Tensor.t(), Tensor.t(), KVCache.t(), keyword) ::
          {Tensor.t(), KVCache.t()}
  def decode(q, k, v, cache, options \\ []) do
    given = [{"q", q}, {"k", k}, {"v", v} | @held]
    {inputs, own, where} = Kernel.sort_call!(:decode, given, options, @cached)
    axis = if to_string(own[:layout]) == "heads_last", do: 1, else: 2

    KVCache.extend(cache, size(q, 4, axis), fn held, cached ->
      Kernel.run(:decode, inputs ++ held, Map.merge(own, cached), where)["y"]
    end)
  end

  # 0 for other arguments, which the kernel then refuses.
  defp size(%Tensor{shape: shape}, rank, axis) when tuple_size(shape) == rank do
    Tensor.elements(shape)
    elem(shape, axis)
  end

  defp size(_other, _rank, _axis), do: 0

  @doc """
  Rotary position embedding (Su et al. 2021): rotates pairs of elements by `p theta^(-2i/W)`, for pair `i` of a
  row at position `p`.

    * `x` - `{B, H, L, W}`, W even

  Options besides those of `Sidewinder.Kernel`:

    * `:pairing` - `:half`, the default: pair `i` is `x[i]` and `x[i+W/2]`; or `:interleaved`: `x[2i]` and
      `x[2i+1]`
    * `:theta` - `10000.0` by default
    * `:first_position` - that of the first row, 0 by default
    * `:layout` - `:heads_first`, the default, or `:heads_last`
    * `:scaling_factor` - Llama 3's scaling for contexts longer by this factor, none by default, with
      `:low_freq_factor` (1.0), `:high_freq_factor` (4.0) and `:original_length` (8192.0)

  Returns `y`, shaped like `x`.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3, 4], :f32, {1, 1, 1, 4})
      iex> y = Sidewinder.Kernel.Attention.rope(x, first_position: 1)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 4))
      [-1.9841, 1.9599, 2.4624, 4.0198]
  """
  @spec rope(Tensor.t(), keyword) :: Tensor.t()
  def rope(x, options \\ []), do: Kernel.call(:rope, [{"x", x}], options)["y"]

  @doc """
  The gradient of `rope/2`, with its options: a map of `:dx`. `x` may be any tensor of the right shape, such
  as `dy`.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3, 4], :f32, {1, 1, 1, 4})
      iex> y = Sidewinder.Kernel.Attention.rope(x, first_position: 1)
      iex> %{dx: dx} = Sidewinder.Kernel.Attention.rope_backward(x, y, first_position: 1)
      iex> Enum.map(Sidewinder.Tensor.to_list(dx), &Float.round(&1, 4))
      [1.0, 2.0, 3.0, 4.0]
  """
  @spec rope_backward(Tensor.t(), Tensor.t(), keyword) :: %{dx: Tensor.t()}
  def rope_backward(x, dy, options \\ []),
    do: Kernel.gradients(:rope_backward, [{"x", x}, {"dy", dy}], options)

  @doc """
  Adds sinusoidal positions to embeddings (Vaswani et al. 2017, section 3.5): to element `2i` of a row at
  position `p` the sine of `p theta^(-2i/D)`, and to element `2i + 1` the cosine.

    * `x` - `{B, L, D}`; the last cosine of an odd D is dropped

  Options besides those of `Sidewinder.Kernel`:

    * `:theta` - `10000.0` by default
    * `:first_position` - that of the first row, 0 by default

  Returns `y`, shaped like `x`.

      iex> x = Sidewinder.Tensor.from_list([1, 2, 3, 4], :f32, {1, 1, 4})
      iex> y = Sidewinder.Kernel.Attention.sinusoidal_positions(x, first_position: 1)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 3))
      [1.841, 2.54, 3.01, 5.0]
  """
  @spec sinusoidal_positions(Tensor.t(), keyword) :: Tensor.t()
  def sinusoidal_positions(x, options \\ []),
    do: Kernel.call(:sinusoidal_positions, [{"x", x}], options)["y"]

  @doc """
  The gradient of `sinusoidal_positions/2`, with its options: a map of `:dx`, which is `dy`. `x` may be any
  tensor of the right shape, such as `dy`.

      iex> dy = Sidewinder.Tensor.from_list([1, 2], :f32, {1, 1, 2})
      iex> Sidewinder.Kernel.Attention.sinusoidal_positions_backward(dy, dy).dx == dy
      true
  """
  @spec sinusoidal_positions_backward(Tensor.t(), Tensor.t(), keyword) :: %{dx: Tensor.t()}
  def sinusoidal_positions_backward(x, dy, options \\ []),
    do: Kernel.gradients(:sinusoidal_positions_backward, [{"x", x}, {"dy", dy}], options)

  @doc """
  Multi-head self-attention with its projections (Vaswani et al. 2017, section 3.2.2).

    * `x` - `{B, L, D}`
    * `weights` - a map of `:wqkv`, `{3 D, D}`, whose rows give queries, keys and values, each head after
      head; `:wo`, `{D, D}`, and maybe `:bo`, `{D}`

  Options besides those of `Sidewinder.Kernel`:

    * `:heads` - 1 by default
    * `:causal` - whether a token attends only to itself and earlier tokens; `false` by default
    * `:rope_theta` - rotates queries and keys as `rope/2`, with its `:pairing`; no rotation by default
    * `:mask` - of a shape that broadcasts to `{B, H, L, L}`
    * `:cache` - a `Sidewinder.KVCache` of `{B, H, D / H}`. Tokens attend to those in it before their own, are
      rotated by positions that follow them, and are appended to it. The last axis of a mask then has the tokens of
      the cache first

  Returns `y`, `{B, L, D}`, or with a cache `{y, cache}`, the latter with the new rows.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> weights = %{wqkv: from_list([0, 0, 2], :f32, {3, 1}), wo: from_list([1], :f32, {1, 1})}
      iex> x = from_list([1, 3], :f32, {1, 2, 1})
      iex> Sidewinder.Kernel.Attention.mha(x, weights, causal: true)
      #Sidewinder.Tensor<f32 (1, 2, 1) [2.0, 4.0]>
  """
  @spec mha(Tensor.t(), Kernel.weights(), keyword) :: Tensor.t() | {Tensor.t(), KVCache.t()}
  def mha(x, weights, options \\ []), do: layer(:mha, x, weights, options)

  @doc """
  The gradient of `mha/3`, with its options: a map of `:dx`, `:dwqkv`, `:dwo` and maybe `:dbo`.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> weights = %{wqkv: from_list([0, 0, 2], :f32, {3, 1}), wo: from_list([1], :f32, {1, 1})}
      iex> [x, dy] = for v <- [[1, 3], [1, 0]], do: from_list(v, :f32, {1, 2, 1})
      iex> Sidewinder.Kernel.Attention.mha_backward(x, weights, dy, causal: true).dx
      #Sidewinder.Tensor<f32 (1, 2, 1) [2.0, 0.0]>
  """
  @spec mha_backward(Tensor.t(), Kernel.weights(), Tensor.t(), keyword) :: %{atom => Tensor.t()}
  def mha_backward(x, weights, dy, options \\ []),
    do: layer_backward(:mha_backward, x, weights, dy, options)

  @doc """
  A transformer block with the norms before its layers (pre-LN, Xiong et al. 2020):

      h = x + mha(layer_norm(x))              y = h + swiglu_mlp(layer_norm(h))

    * `x` - `{B, L, D}`
    * `weights` - a map of those of `mha/3`, of `Sidewinder.Kernel.NN.swiglu_mlp/3`, and `:ln1_w`, `:ln1_b`,
      `:ln2_w` and `:ln2_b`, `{D}`

  Options are those of `mha/3`, and `:eps` of the norms, `1.0e-5` by default. Returns `y`, `{B, L, D}`, or
  with a cache `{y, cache}`.

      iex> [block] = Sidewinder.Transformer.random(layers: 1, width: 8, heads: 2, vocabulary: 11).blocks
      iex> x = Sidewinder.RandomInputs.normal({1, 3, 8}, :f32, 1, :x)
      iex> Sidewinder.Kernel.Attention.transformer_block(x, block, heads: 2, causal: true).shape
      {1, 3, 8}
  """
  @spec transformer_block(Tensor.t(), Kernel.weights(), keyword) ::
          Tensor.t() | {Tensor.t(), KVCache.t()}
  def transformer_block(x, weights, options \\ []),
    do: layer(:transformer_block, x, weights, options)

  @doc """
  The gradient of `transformer_block/3`, with its options: a map of `:dx` and the gradients of all weights.

      iex> [block] = Sidewinder.Transformer.random(layers: 1, width: 8, heads: 2, vocabulary: 11).blocks
      iex> [x, dy] = for name <- [:x, :dy], do: Sidewinder.RandomInputs.normal({1, 3, 8}, :f32, 1, name)
      iex> gradients = Sidewinder.Kernel.Attention.transformer_block_backward(x, block, dy, heads: 2)
      iex> {gradients.dx.shape, gradients.dwqkv.shape}
      {{1, 3, 8}, {24, 8}}
  """
  @spec transformer_block_backward(Tensor.t(), Kernel.weights(), Tensor.t(), keyword) :: %{
          atom => Tensor.t()
        }
  def transformer_block_backward(x, weights, dy, options \\ []),
    do: layer_backward(:transformer_block_backward, x, weights, dy, options)

  defp layer(op, x, weights, options) do
    given = Kernel.with_weights(op, [{"x", x} | @held], weights)
    {inputs, own, where} = Kernel.sort_call!(op, given, options, @cached, [:cache])
    {cache, own} = Map.pop(own, :cache)
    run = &Kernel.run(op, inputs ++ &1, Map.merge(own, &2), where)["y"]
    if cache, do: KVCache.extend(cache, size(x, 3, 1), run), else: run.([], %{})
  end

  defp layer_backward(op, x, weights, dy, options) do
    given = Kernel.with_weights(op, [{"x", x}, {"dy", dy}], weights)
    Kernel.gradients(op, given, options, @cached)
  end
end
