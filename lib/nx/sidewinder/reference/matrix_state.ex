defmodule Sidewinder.Reference.MatrixState do
  @moduledoc false
  # What the recurrences share whose state is a matrix of K rows and V columns for each head. Sequences are [L, B, H, ...]
  # here: keys [.., K, 1], values [.., 1, V], and numbers of a step [.., 1, 1]; states are [L or 1, B, H, K, V].

  import Nx.Defn
  import Sidewinder.Reference.Numbers, only: [constant: 2, wide: 1]
  import Sidewinder.Reference.Recurrence, only: [swap: 1]

  @doc "The factor of q, in the type of the arithmetic."
  def scale(op, %{shape: {_, _, _, keys}} = k),
    do: constant(op.scale || 1 / :math.sqrt(max(keys, 1)), wide(k))

  @doc "[B, L, G, K], each group repeated for its heads."
  def keys(t, heads) do
    {batch, length, groups, keys} = t.shape

    t
    |> Nx.reshape({batch, length, groups, 1, keys})
    |> Nx.broadcast({batch, length, groups, div(heads, groups), keys})
    |> Nx.reshape({batch, length, heads, keys, 1})
    |> swap()
  end

  @doc "[B, L, H, V]."
  def values(t), do: t |> wide() |> Nx.new_axis(3) |> swap()

  @doc "[B, L, H]."
  def numbers(t), do: t |> wide() |> Nx.new_axis(-1) |> Nx.new_axis(-1) |> swap()

  @doc "Values as [B, L, H, V], of the type of `like`."
  def sequence(values, like) do
    {length, batch, heads, 1, width} = values.shape
    values |> Nx.reshape({length, batch, heads, width}) |> swap() |> Nx.as_type(like.type)
  end

  @doc "A state as that of all steps."
  def first(nil), do: nil
  def first(t), do: Nx.new_axis(t, 0)

  @doc "The shape of the states of all steps."
  def all_states(v, k) do
    {length, batch, heads, 1, width} = v.shape
    {length, batch, heads, Nx.axis_size(k, 3), width}
  end

  @doc "S^T k."
  deftransform by_key(states, k) do
    Nx.sum(Nx.multiply(states, k), axes: [-2], keep_axes: true)
  end

  @doc "S v."
  def by_value(states, v), do: Nx.sum(Nx.multiply(states, v), axes: [-1])

  @doc "The gradient of a key of each head, [L, B, H, K], summed over the heads of a group: that of `x`, [B, L, G, K]."
  def of_groups(gradient, %{shape: {batch, length, groups, keys}}) do
    heads = Nx.axis_size(gradient, 2)

    gradient
    |> Nx.reshape({length, batch, groups, div(heads, groups), keys})
    |> Nx.sum(axes: [3])
    |> swap()
  end

  @doc "The gradients of inputs that are given, each of its input's type."
  def cast(inputs, gradients) do
    for {name, t} <- gradients,
        input = inputs[String.replace_prefix(Atom.to_string(name), "d", "")],
        do: {name, Nx.as_type(t, input.type)}
  end
end
