defmodule Sidewinder.TrainerTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Mamba, PPM, Tensor}
  alias Sidewinder.Mamba.Trainer

  @batch [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9]]

  defp model(options \\ []) do
    Mamba.random([layers: 1, width: 16, vocabulary: 11, backend: :cpu] ++ options)
  end

  defp refused(work), do: assert_raise(Error, work)

  describe "loss/2" do
    test "is that of the logits" do
      model = model(type: :f64)
      tokens = Enum.map(0..40, &rem(&1 * &1 + 3, 11))
      rows = model |> Mamba.forward([tokens]) |> Tensor.to_list() |> Enum.chunk_every(11)
      losses = Enum.zip_with(rows, tl(tokens), &entropy/2)
      mean = Enum.sum(losses) / length(losses)
      assert_in_delta Mamba.loss(model, tokens), mean, 1.0e-12
    end

    defp entropy(logits, token) do
      sum = logits |> Enum.map(&:math.exp/1) |> Enum.sum()
      :math.log(sum) - Enum.at(logits, token)
    end

    test "refuses what cannot be predicted" do
      assert refused(fn -> Mamba.loss(model(), [1]) end).argument == "tokens"
      assert refused(fn -> Mamba.loss(model(), [1, 11]) end).argument == "tokens"
      assert refused(fn -> Mamba.loss(model(), "text") end).argument == "tokens"
      assert refused(fn -> Mamba.loss(model(), :text) end).argument == "tokens"
      assert refused(fn -> Mamba.loss(model(), [[1, 2], [3, 4]]) end).argument == "tokens"
      backbone = Mamba.random(layers: 1, width: 16, backend: :cpu)
      assert refused(fn -> Mamba.loss(backbone, [1, 2]) end).kind == :argument
    end
  end

  describe "step/3" do
    test "tells the loss before it, and its gradient's norm" do
      model = model()
      trainer = Trainer.new(model)
      %{loss: loss, norm: norm} = Trainer.step(trainer, @batch)
      mean = Enum.sum(Enum.map(@batch, &Mamba.loss(model, &1))) / 2
      assert_in_delta loss, mean, 1.0e-5
      assert norm > 0
      assert Trainer.step(trainer, @batch).loss < loss
    end

    test "is the same on several devices" do
      model = model()
      [one, two] = [Trainer.new(model), Trainer.new(model, devices: [:cpu, :cpu], threads: 1)]

      for _ <- 1..5 do
        [one, two] = for trainer <- [one, two], do: Trainer.step(trainer, @batch)
        assert_in_delta one.loss, two.loss, 1.0e-4
        assert_in_delta one.norm, two.norm, 1.0e-3
      end

      assert Mamba.loss(Trainer.model(two), hd(@batch)) < Mamba.loss(model, hd(@batch))
    end

    test "refuses devices that cannot share a batch" do
      model = model()
      assert refused(fn -> Trainer.new(model, devices: []) end).argument == "devices"
      assert refused(fn -> Trainer.new(model, devices: :cpu) end).argument == "devices"
      assert refused(fn -> Trainer.new(model, devices: [:gpu]) end).argument == "backend"
      assert refused(fn -> Trainer.new(model, device: 0) end).kind == :option
      many = Trainer.new(model, devices: [:cpu, :cpu, :cpu])
      assert refused(fn -> Trainer.step(many, @batch) end).argument == "tokens"
    end

    test "changes nothing without a rate" do
      model = model()
      trainer = Trainer.new(model)
      Trainer.step(trainer, @batch, learning_rate: 0)
      assert Mamba.tensors(Trainer.model(trainer)) == Mamba.tensors(model)
    end

    test "refuses what are no sequences or no options" do
      trainer = Trainer.new(model())

      for batch <- [[], [[]], [[1]], [[1, 2], [1]], [[1, 11]], [[-1, 2]], :tokens, nil] do
        assert refused(fn -> Trainer.step(trainer, batch) end).argument == "tokens"
      end

      features = Tensor.from_list(List.duplicate(0, 32), :f32, {1, 2, 16})
      assert refused(fn -> Trainer.step(trainer, features) end).argument == "input"

      for {name, value} <- [
            learning_rate: :fast,
            beta1: 1,
            eps: -1,
            clip: "1",
            weight_decay: -0.1
          ] do
        assert refused(fn -> Trainer.step(trainer, @batch, [{name, value}]) end).argument ==
                 "#{name}"
      end

      assert refused(fn -> Trainer.step(trainer, @batch, rate: 1) end).kind == :option
      assert refused(fn -> Trainer.step(trainer, @batch, [:clip]) end).kind == :option
      huge = Integer.pow(10, 400)
      assert refused(fn -> Trainer.step(trainer, @batch, clip: huge) end).argument == "clip"
    end

    test "is taken by one process at a time, and outlives killed ones" do
      trainer = Trainer.new(model())
      killed = spawn(fn -> for _ <- 1..1000, do: Trainer.step(trainer, @batch) end)

      losses =
        1..8
        |> Task.async_stream(fn _ -> Trainer.step(trainer, @batch).loss end)
        |> Enum.to_list()

      assert Enum.all?(losses, &match?({:ok, loss} when is_float(loss), &1))
      Process.exit(killed, :kill)
      assert Trainer.step(trainer, @batch).loss > 0
    end
  end

  test "a backbone has no loss to learn from" do
    backbone = Mamba.random(layers: 1, width: 16, backend: :cpu)
    assert refused(fn -> Trainer.new(backbone) end).argument == "model"
  end

  test "model/2 gives the model where and as it is wanted, with its tokenizer" do
    trainer = Trainer.new(Mamba.random(layers: 1, width: 16, vocabulary: 256, backend: :cpu))
    assert %{type: :f32, scheduler: :cpu, tokenizer: %{}} = Trainer.model(trainer)
    assert %{type: :bf16} = Trainer.model(trainer, type: :bf16, backend: :cpu, threads: 1)
    assert refused(fn -> Trainer.model(trainer, typ: :bf16) end).kind == :option
  end

  describe "PPM" do
    test "predicts as its formula says" do
      # One of 256; then in the context of nothing one of one kind, or an escape.
      assert_in_delta PPM.bits_per_byte("aa"), (8 + 1) / 2, 1.0e-12
      assert_in_delta PPM.bits_per_byte("aaa"), (8 + 1 + 1) / 3, 1.0e-12
      # An escape, 1 bit, and one of the 255 others.
      assert_in_delta PPM.bits_per_byte("ab"), (8 + 1 + :math.log2(255)) / 2, 1.0e-12
    end

    test "knows what it has read" do
      text = "It was the best of times, it was the worst of times"
      assert PPM.bits_per_byte(text, text) < 0.5 * PPM.bits_per_byte(text)
    end
  end
end
