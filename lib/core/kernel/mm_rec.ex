defmodule Sidewinder.Kernel.MMRec do
  @moduledoc """
  The parts of MM-Rec: memory banks, the hierarchy over them, attention over memories, and their gradients.

  In the shapes B is the batch, L the length, D the width, M the slots of a bank and S those of any memory. `B|1` says
  that one memory may serve the whole batch. Weights are stored `{out, in}`.

  The first tensor decides the storage type: `:f32`, `:bf16`, `:f16`, or `:f64`; all others have it too. Sums are
  `:f32` (`:f64` for `:f64`).

  All functions take the options of `Sidewinder.Kernel` and raise `Sidewinder.Error`, as `Sidewinder.Kernel.Scan`
  tells.
  """

  alias Sidewinder.{Kernel, Options, Tensor}

  @hds [:levels, :ratio, :cursor]

  @doc """
  The hierarchy over a memory bank: levels of fewer and fewer slots, each the adaptive average of the one below.

    * `k`, `v` - `{B, M, D}`, level 0

  Level i has `max(1, div(M, ratio^i))` slots. From S slots to T, slot `j` is the mean of those from `j S / T`, rounded
  down, to before `(j + 1) S / T`, rounded up.

  Options beside those of `Sidewinder.Kernel`:

    * `:levels` - how many there are with the bank, 2 to 16; 3 by default
    * `:ratio` - 2 or more; 4 by default
    * `:cursor` - how many writes a bank that is a ring has had: it is pooled from its oldest slot on. 0 by default

  Returns a list of `{k, v}`, from level 1 on.

      iex> bank = Sidewinder.Tensor.from_list(Enum.to_list(1..16), :f32, {1, 16, 1})
      iex> for {k, _v} <- Sidewinder.Kernel.MMRec.hds_construct(bank, bank), do: Sidewinder.Tensor.to_list(k)
      [[2.5, 6.5, 10.5, 14.5], [8.5]]
  """
  @spec hds_construct(Tensor.t(), Tensor.t(), keyword) :: [{Tensor.t(), Tensor.t()}]
  def hds_construct(k, v, options \\ []) do
    {[], own, where} = Kernel.sort_options!(:hds_construct, options, [], @hds)
    levels = Kernel.run(:hds_construct, [{"k", k}, {"v", v}], own, where)
    for level <- 1..div(map_size(levels), 2), do: {levels["k#{level}"], levels["v#{level}"]}
  end

  @doc """
  The gradient of `hds_construct/3`, with its options: a map of `:dk` and `:dv`.

  `cotangents` are a list of `{dk, dv}`, from level 1 on; what is nil or missing at the end is zero.

      iex> bank = Sidewinder.Tensor.from_list([1, 2, 3, 4], :f32, {1, 4, 1})
      iex> dk = Sidewinder.Tensor.from_list([2], :f32, {1, 1, 1})
      iex> Sidewinder.Kernel.MMRec.hds_construct_backward(bank, bank, [{dk, nil}], levels: 2).dk
      #Sidewinder.Tensor<f32 (1, 4, 1) [0.5, 0.5, 0.5, 0.5]>
  """
  @spec hds_construct_backward(
          Tensor.t(),
          Tensor.t(),
          [{Tensor.t() | nil, Tensor.t() | nil}],
          keyword
        ) :: %{dk: Tensor.t(), dv: Tensor.t()}
  def hds_construct_backward(k, v, cotangents, options \\ []) do
    op = :hds_construct_backward
    {[], own, where} = Kernel.sort_options!(op, options, [], @hds)
    Kernel.gradients(op, [{"k", k}, {"v", v} | cotangents!(op, cotangents)], own, where)
  end

  defp cotangents!(op, cotangents) do
    unless Options.list?(cotangents) and Enum.all?(cotangents, &match?({_, _}, &1)),
      do: Options.wrong_argument!("cotangents", "a list of {dk, dv}", cotangents, op: "#{op}")

    for {{dk, dv}, level} <- Enum.with_index(cotangents, 1),
        {name, t} <- [{"dk#{level}", dk}, {"dv#{level}", dv}],
        t != nil,
        do: {name, t}
  end

  @doc """
  Attention over the slots that a walk down the hierarchy of a memory finds for each query: at each level above the bank
  the `:top_k` best candidates go on as their `:ratio` children. Of equal scores the lower slot counts more, and one that
  is NaN less than any other.

    * `q` - `{B, L, D}`, `k`, `v` - `{B|1, M, D}`, where M is a multiple of `ratio^(levels - 1)`

  Options beside those of `Sidewinder.Kernel`: `:levels` - 3 by default, `:ratio` - 4 by default, `:top_k` - 4 by default.

  Returns `{context, slots}`: `{B, L, D}`, and the slots in order, `{B, L, C}` of `:i32`. It has no gradient.

      iex> bank = Sidewinder.Tensor.from_list(Enum.to_list(0..15), :f32, {1, 16, 1})
      iex> q = Sidewinder.Tensor.from_list([1], :f32, {1, 1, 1})
      iex> {_context, slots} = Sidewinder.Kernel.MMRec.hds_query_topk(q, bank, bank, top_k: 1)
      iex> slots
      #Sidewinder.Tensor<i32 (1, 1, 4) [12, 13, 14, 15]>
  """
  @spec hds_query_topk(Tensor.t(), Tensor.t(), Tensor.t(), keyword) :: {Tensor.t(), Tensor.t()}
  def hds_query_topk(q, k, v, options \\ []) do
    op = :hds_query_topk
    {[], own, where} = Kernel.sort_options!(op, options, [], [:levels, :ratio, :top_k])
    inputs = [{"q", q}, {"k", k}, {"v", v}]
    %{"context" => context, "slots" => slots} = Kernel.run(op, inputs, own, where)
    {context, slots}
  end

  @doc """
  Attention of a sequence over a memory that is not part of it:

      q = h waq' + baq + q_in / 2          y = attention(q, k_mem, v_mem) wao' + bao

    * `h` - `{B, L, D}`, `k_mem`, `v_mem` - `{B|1, S, D}`
    * `weights` - a map of `:waq` and `:wao`, `{D, D}`, and maybe `:baq` and `:bao`, `{D}`

  Options beside those of `Sidewinder.Kernel`:

    * `:heads` - how many there are, a divisor H of D; 1 by default
    * `:q_in` - `{B, L, D}`
    * `:return_lse` - returns `{y, lse}`, the second `{B, H, L}`

  Returns `y`, `{B, L, D}`.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> eye = from_list([1, 0, 0, 1], :f32, {2, 2})
      iex> [h, q_in] = for list <- [[1, 0], [0, 2]], do: from_list(list, :f32, {1, 1, 2})
      iex> [k, v] = for list <- [[1, 0, 0, 1], [10, 0, 0, 20]], do: from_list(list, :f32, {1, 2, 2})
      iex> y = Sidewinder.Kernel.MMRec.multi_memory_attention(h, k, v, %{waq: eye, wao: eye}, q_in: q_in)
      iex> Enum.map(Sidewinder.Tensor.to_list(y), &Float.round(&1, 4))
      [5.0, 10.0]
  """
  @spec multi_memory_attention(Tensor.t(), Tensor.t(), Tensor.t(), Kernel.weights(), keyword) ::
          Tensor.t() | {Tensor.t(), Tensor.t()}
  def multi_memory_attention(h, k_mem, v_mem, weights, options \\ []) do
    op = :multi_memory_attention
    names = [:heads, :return_lse]
    {q_in, own, where} = Kernel.sort_options!(op, options, [q_in: "q_in"], names)
    {return_lse, own} = Map.pop(own, :return_lse, false)
    inputs = memory_inputs(op, h, k_mem, v_mem, weights) ++ q_in
    %{"y" => y, "lse" => lse} = Kernel.run(op, inputs, own, where)
    if return_lse, do: {y, lse}, else: y
  end

  @doc """
  The gradient of `multi_memory_attention/5`: a map of `:dh`, `:dk_mem`, `:dv_mem` and those of the weights, and `:dq_in`
  where that is given. `dy` is `{B, L, D}`. Options are `:heads` and `:q_in` as there, and `:dlse`, the cotangent of `lse`.
  """
  @spec multi_memory_attention_backward(
          Tensor.t(),
          Tensor.t(),
          Tensor.t(),
          Kernel.weights(),
          Tensor.t(),
          keyword
        ) :: %{atom => Tensor.t()}
  def multi_memory_attention_backward(h, k_mem, v_mem, weights, dy, options \\ []) do
    op = :multi_memory_attention_backward
    tensors = [q_in: "q_in", dlse: "dlse"]
    {more, own, where} = Kernel.sort_options!(op, options, tensors, [:heads])
    inputs = memory_inputs(op, h, k_mem, v_mem, weights) ++ [{"dy", dy} | more]
    Kernel.gradients(op, inputs, own, where)
  end

  defp memory_inputs(op, h, k_mem, v_mem, weights),
    do: [{"h", h}, {"k_mem", k_mem}, {"v_mem", v_mem} | Kernel.weights!(op, weights)]

  @doc """
  Rows into a bank: slot `start + i` gets row `i`.

    * `bank` - `{B, S, D}`, `rows` - `{B, N, D}`

  Options beside those of `Sidewinder.Kernel`: `:start` - 0 by default, and `:mode` - `:ring`, the default, where slots are
  counted round and round, or `:strict`, where rows past the last slot raise.

  Returns the bank with them. `Sidewinder.MMRec.Memory` has banks that are written in place.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> bank = from_list([0, 0, 0], :f32, {1, 3, 1})
      iex> Sidewinder.Kernel.MMRec.write_short(bank, from_list([1, 2], :f32, {1, 2, 1}), start: 2)
      #Sidewinder.Tensor<f32 (1, 3, 1) [2.0, 0.0, 1.0]>
  """
  @spec write_short(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def write_short(bank, rows, options \\ []) do
    {[], own, where} = Kernel.sort_options!(:write_short, options, [], [:start, :mode])
    Kernel.run(:write_short, [{"bank", bank}, {"rows", rows}], own, where)["bank"]
  end

  @doc """
  A summary into a bank.

    * `bank` - `{B, M, D}`, `summary` - `{B, D}`

  Options beside those of `Sidewinder.Kernel`:

    * `:policy` - `:ring`, the default: into the slot at the `:cursor`, counted round and round and 0 by default;
      `:ema`: each slot becomes `decay slot + (1 - decay) summary`; or `:broadcast`: into all slots, which makes
      attention over them the same for all queries
    * `:decay` - 0.99 by default

  Returns the bank with it.

      iex> import Sidewinder.Tensor, only: [from_list: 3]
      iex> bank = from_list([1, 2], :f32, {1, 2, 1})
      iex> Sidewinder.Kernel.MMRec.write_long(bank, from_list([3], :f32, {1, 1}), policy: :ema, decay: 0.5)
      #Sidewinder.Tensor<f32 (1, 2, 1) [2.0, 2.5]>
  """
  @spec write_long(Tensor.t(), Tensor.t(), keyword) :: Tensor.t()
  def write_long(bank, summary, options \\ []) do
    names = [:policy, :cursor, :decay]
    {[], own, where} = Kernel.sort_options!(:write_long, options, [], names)
    Kernel.run(:write_long, [{"bank", bank}, {"summary", summary}], own, where)["bank"]
  end
end
