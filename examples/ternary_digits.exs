# A network with weights of -1, 0 and 1 learns to read handwritten digits, and then runs on two bits a weight. From a
# clone, where Nx and Axon are there:
#
#     mix run examples/ternary_digits.exs
#
# It trains on the CPU with Nx.BinaryBackend and Nx.Defn.Evaluator, straight through the rounding. The result is written to
# examples/results/ternary_digits.json.

defmodule TernaryDigits do
  alias Sidewinder.Kernel.Ternary
  alias Sidewinder.Tensor

  @data Path.join(__DIR__, "data/digits.csv.gz")
  @results Path.join(__DIR__, "results/ternary_digits.json")

  @epochs 8
  @batch_size 32
  @hidden 64

  def run do
    Process.flag(:min_heap_size, 4_000_000)
    {held_out, train} = split(images())
    IO.puts("#{length(train)} digits to learn from, #{length(held_out)} held out")

    state =
      model()
      |> Axon.Loop.trainer(
        :categorical_cross_entropy,
        Polaris.Optimizers.adam(learning_rate: 0.005),
        seed: 1,
        log: 15
      )
      |> Axon.Loop.run(batches(train), Axon.ModelState.empty(), epochs: @epochs)

    {pixels, labels} = tensors(held_out)
    trained = classes(Axon.predict(model(), state, pixels))
    {quantized, bytes} = quantized(state, pixels)

    right =
      Enum.count(Enum.zip(Nx.to_flat_list(Nx.argmax(labels, axis: 1)), quantized), fn {a, b} ->
        a == b
      end)

    accuracy = Float.round(100 * right / length(held_out), 2)
    same = Enum.count(Enum.zip(trained, quantized), fn {a, b} -> a == b end)

    IO.puts("""
    On two bits a weight, #{bytes} bytes of weights: #{accuracy}% of those held out read correctly,
    #{same} of #{length(held_out)} as while training
    """)

    write(accuracy, same, length(held_out), bytes)
  end

  defp model do
    Axon.input("pixels", shape: {nil, 64})
    |> Sidewinder.Axon.ternary_dense(@hidden, name: "hidden")
    |> Axon.relu()
    |> Sidewinder.Axon.ternary_dense(10, name: "digit")
    |> Axon.softmax()
  end

  # What was trained, with planes in place of floats.
  defp quantized(state, pixels) do
    x = tensor(pixels)
    {hidden, bytes} = layer(state.data["hidden"])
    {digit, more} = layer(state.data["digit"])

    h =
      Ternary.matmul_f32(x, hidden.planes,
        w_scale: hidden.scale,
        bias: hidden.bias,
        activation: :relu
      )

    logits = Ternary.matmul_f32(h, digit.planes, w_scale: digit.scale, bias: digit.bias)
    {Tensor.to_list(Ternary.argmax(logits)), bytes + more}
  end

  defp layer(%{"kernel" => kernel, "bias" => bias}) do
    {{plane0, plane1} = planes, scale} = Ternary.quantize(tensor(kernel))

    {%{planes: planes, scale: scale, bias: tensor(bias)},
     byte_size(plane0.data) + byte_size(plane1.data)}
  end

  defp tensor(t), do: Tensor.new(Nx.to_binary(t), :f32, Nx.shape(t))

  defp classes(probabilities), do: probabilities |> Nx.argmax(axis: 1) |> Nx.to_flat_list()

  defp write(accuracy, same, count, bytes) do
    File.write!(@results, """
    {
      "held_out": #{count},
      "accuracy_percent": #{accuracy},
      "same_class_as_in_training": #{same},
      "bytes_of_weights": #{bytes},
      "network": "64-#{@hidden}-10, absmean",
      "epochs": #{@epochs},
      "batch": #{@batch_size}
    }
    """)
  end

  ## Data

  defp images do
    for line <- @data |> File.read!() |> :zlib.gunzip() |> String.split("\n", trim: true) do
      line |> String.split(",") |> Enum.map(&String.to_integer/1) |> Enum.split(64)
    end
  end

  # Every fifth is held out.
  defp split(images) do
    {images |> Enum.drop(4) |> Enum.take_every(5),
     images |> Enum.chunk_every(5) |> Enum.flat_map(&Enum.take(&1, 4))}
  end

  # In another order each time.
  defp batches(images) do
    :rand.seed(:exsss, 1)

    [images]
    |> Stream.flat_map(&Enum.shuffle/1)
    |> Stream.chunk_every(@batch_size, @batch_size, :discard)
    |> Stream.map(&tensors/1)
  end

  defp tensors(images) do
    {pixels, labels} = Enum.unzip(images)
    pixels = pixels |> Nx.tensor(type: :f32) |> Nx.divide(8) |> Nx.subtract(1)
    {pixels, Nx.equal(Nx.tensor(labels), Nx.iota({1, 10}))}
  end
end

TernaryDigits.run()
