# The shipped model of novels on quantized matrices: how many bits a byte each format needs for a book that the model has
# not read, and how large its matrices are.
#
#     mix run examples/quantized.exs [OUT.json]

defmodule Sidewinder.Examples.Quantized do
  alias Sidewinder.{Mamba, Safetensors}

  @model Path.join(__DIR__, "models/novels")
  @unread Path.join(__DIR__, "../priv/samples/alice.txt")
  # The weights that are quantized, by what their names end with; the head is the embedding, of which there is then a copy.
  @matrices ~w(in_proj.weight x_proj.weight out_proj.weight embeddings.weight)
  # Bits of a value with its part of the scale.
  @bits %{f32: 32, bf16: 16, q8_0: 8.5, q4_0: 4.5, ternary: 2}

  def run(out) do
    text = File.read!(@unread)
    values = values()

    rows =
      for {name, options} <- [
            f32: [type: :f32],
            bf16: [type: :bf16],
            q8_0: [type: :f32, quantize: :q8_0],
            q4_0: [type: :f32, quantize: :q4_0],
            ternary: [type: :f32, quantize: :ternary]
          ] do
        loss = @model |> Mamba.load([backend: :cpu] ++ options) |> Mamba.loss(text)

        row = %{
          format: name,
          bits_per_byte: Float.round(loss / :math.log(2), 4),
          mb: megabytes(values, name)
        }

        IO.puts(
          "#{String.pad_trailing("#{name}", 8)} #{row.bits_per_byte} bits a byte, matrices of #{row.mb} MB"
        )

        row
      end

    if out, do: File.write!(out, json(rows))
  end

  defp values do
    index = Safetensors.index(Path.join(@model, "model.safetensors"))

    for %{name: name, shape: shape} <- index, String.ends_with?(name, @matrices), reduce: 0 do
      sum -> sum + Tuple.product(shape)
    end
  end

  defp megabytes(values, format), do: Float.round(values * @bits[format] / 8 / 1_000_000, 2)

  defp json(rows) do
    lines =
      for row <- rows do
        ~s(  {"format": "#{row.format}", "bits_per_byte": #{row.bits_per_byte}, "matrices_mb": #{row.mb}})
      end

    "[\n" <> Enum.join(lines, ",\n") <> "\n]\n"
  end
end

Sidewinder.Examples.Quantized.run(List.first(System.argv()))
