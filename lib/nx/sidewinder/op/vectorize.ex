defmodule Sidewinder.Op.Vectorize do
  @moduledoc false
  # Ops have no vectorized axes. Axes of data alone go into the batch, which costs nothing. Over
  # vectorized axes of a weight (an ensemble of models), each entry is a call of its own.

  @doc """
  Calls `fun` with `[{name, tensor}]` and the factor by which their batch grew. It returns a list of
  tensors whose first axis is that batch; in the result they have all vectorized axes again. Results
  that are `like` an input, not nil, are its gradient: shaped like it, and summed over the
  vectorized axes that it lacks.
  """
  @spec map([{String.t(), Nx.Tensor.t(), :data | :weight}], [nil | String.t()], fun) ::
          [Nx.Tensor.t()]
        when fun: ([{String.t(), Nx.Tensor.t()}], pos_integer -> [Nx.Tensor.t()])
  def map(inputs, like, fun) do
    case axes(for {_, t, _} <- inputs, do: t) do
      [] -> fun.(for({name, t, _} <- inputs, do: {name, t}), 1)
      axes -> map_axes(inputs, axes, Enum.map(like, &List.keyfind(inputs, &1, 0)), fun)
    end
  end

  defp map_axes(inputs, axes, like, fun) do
    weights = axes(for {_, t, :weight} <- inputs, do: t)
    {mapped, folded} = Enum.split_with(axes, fn {name, _} -> Keyword.has_key?(weights, name) end)
    {count, copies} = {size(mapped), size(folded)}

    entries = for {name, t, kind} <- inputs, do: {name, entries(t, kind, mapped, folded)}
    results = for i <- 0..(count - 1), do: fun.(pick(entries, i), copies)

    results
    |> Enum.zip_with(&stack/1)
    |> Enum.zip_with(like, &restore(&1, &2, mapped, folded, axes))
  end

  # All axes in the order of their appearance. Nx lets an axis of size 1 stand for any.
  defp axes(tensors) do
    Enum.reduce(tensors, [], fn t, axes -> Enum.reduce(t.vectorized_axes, axes, &merge/2) end)
  end

  defp merge({name, size}, axes) do
    case axes[name] do
      nil ->
        axes ++ [{name, size}]

      other when size == other or size == 1 or other == 1 ->
        Keyword.replace!(axes, name, max(size, other))

      other ->
        raise Sidewinder.Error.new(:shape, "vectorized axis #{name}",
                expected: "size 1 or #{other}, as another tensor has it",
                got: "#{size}"
              )
    end
  end

  defp size(axes), do: Enum.product(Keyword.values(axes))

  # [count, ...], with the folded axes in the batch of data.
  defp entries(t, :weight, mapped, _folded) do
    merge_first(align(t, mapped), length(mapped), [size(mapped)])
  end

  defp entries(t, :data, mapped, folded) do
    [batch | _] = Tuple.to_list(t.shape)
    all = mapped ++ folded
    merge_first(align(t, all), length(all) + 1, [size(mapped), size(folded) * batch])
  end

  defp merge_first(t, count, sizes) do
    Nx.reshape(t, List.to_tuple(sizes ++ Enum.drop(Tuple.to_list(t.shape), count)))
  end

  # The vectorized axes as plain first axes, in this order. Nx.broadcast_vectors/2 takes tensors
  # that name their axes in another order as if it were the same one.
  defp align(t, axes) do
    own = Keyword.keys(t.vectorized_axes)
    plain = Nx.devectorize(t, keep_names: false)
    inner = Tuple.to_list(t.shape)
    order = for {name, _} <- axes, at = Enum.find_index(own, &(&1 == name)), do: at
    sizes = for {name, _} <- axes, do: Keyword.get(t.vectorized_axes, name, 1)

    plain
    |> transpose(order ++ Enum.drop(Nx.axes(plain), length(own)))
    |> Nx.reshape(List.to_tuple(sizes ++ inner))
    |> Nx.broadcast(List.to_tuple(Keyword.values(axes) ++ inner))
  end

  defp transpose(t, order), do: if(order == Nx.axes(t), do: t, else: Nx.transpose(t, axes: order))

  defp pick(entries, i), do: for({name, t} <- entries, do: {name, entry(t, i)})

  defp entry(t, i) do
    if Nx.axis_size(t, 0) == 1, do: Nx.squeeze(t, axes: [0]), else: t[i]
  end

  # From [count, ...].
  defp restore(t, {_, input, :weight}, mapped, _folded, _axes) do
    [_ | inner] = Tuple.to_list(t.shape)
    t |> unmerge(mapped, inner) |> sum_like(input)
  end

  defp restore(t, like, mapped, folded, axes) do
    [_, batch | inner] = Tuple.to_list(t.shape)
    all = unmerge(t, mapped ++ folded, [div(batch, size(folded)) | inner])

    case like do
      nil -> all |> align(axes) |> Nx.vectorize(Keyword.keys(axes))
      {_, input, :data} -> sum_like(all, input)
    end
  end

  defp unmerge(t, axes, inner) do
    t |> Nx.reshape(List.to_tuple(Keyword.values(axes) ++ inner)) |> vectorize(axes)
  end

  defp sum_like(t, %{vectorized_axes: own}) do
    plain = Nx.devectorize(t, keep_names: false)
    added = for {{name, size}, i} <- Enum.with_index(t.vectorized_axes), size != own[name], do: i
    sum = if added == [], do: plain, else: Nx.sum(plain, axes: added, keep_axes: true)
    kept = for {name, _} <- t.vectorized_axes, size = own[name], do: {name, size}

    sum
    |> Nx.reshape(List.to_tuple(Keyword.values(kept) ++ Tuple.to_list(t.shape)))
    |> vectorize(kept)
    |> align(own)
    |> vectorize(own)
  end

  defp vectorize(t, []), do: t
  defp vectorize(t, axes), do: Nx.vectorize(t, Keyword.keys(axes))

  # [count, ...]
  defp stack([t]), do: Nx.new_axis(t, 0)
  defp stack(results), do: Nx.stack(results)
end
