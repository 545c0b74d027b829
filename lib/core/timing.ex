defmodule Sidewinder.Timing do
  @moduledoc false
  # The one way in which run times are measured.

  @type t :: Sidewinder.Compare.time()

  @doc """
  Runs `work` repeatedly; returns its first result, and milliseconds.

  The first run starts threads, loads kernels and touches memory, so the first `:warmup` runs, or at least it, are
  not counted; then `:iterations` are. Slow work ends after `:max_ms` in all with fewer, of which at
  most a third are for warming up; the first run counts where there is time for no other.
  """
  @spec measure((-> result), keyword) :: {result, t} when result: term
  def measure(work, options) do
    {first, result} = :timer.tc(work)
    most = options[:max_ms] * 1000
    {_, warm} = repeat(work, options[:warmup] - 1, first, most / 3)
    {times, _} = repeat(work, options[:iterations], warm, most)
    {result, statistics(if(times == [], do: [first], else: times))}
  end

  @doc "Like `measure/2`, for a single run."
  @spec once((-> result)) :: {result, t} when result: term
  def once(work) do
    {time, result} = :timer.tc(work)
    {result, statistics([time])}
  end

  @doc "A quantile of sorted times."
  @spec at([number, ...], float) :: number
  def at(sorted, share) do
    count = length(sorted)
    Enum.at(sorted, min(trunc(count * share), count - 1))
  end

  # Times of `count` runs, or of fewer once `most` microseconds have passed.
  defp repeat(work, count, passed, most, times \\ [])

  defp repeat(_work, count, passed, most, times) when count <= 0 or passed >= most,
    do: {times, passed}

  defp repeat(work, count, passed, most, times) do
    {time, _} = :timer.tc(work)
    repeat(work, count - 1, passed + time, most, [time | times])
  end

  defp statistics(times) do
    ms = Enum.sort(for time <- times, do: time / 1000)
    count = length(ms)
    mean = Enum.sum(ms) / count
    squares = Enum.sum(for time <- ms, do: (time - mean) * (time - mean))

    %{
      mean: mean,
      median: (Enum.at(ms, div(count - 1, 2)) + Enum.at(ms, div(count, 2))) / 2,
      std: :math.sqrt(squares / max(count - 1, 1)),
      min: hd(ms),
      iterations: count
    }
  end
end
