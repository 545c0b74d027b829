defmodule Sidewinder.MambaKindsTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Mamba, Safetensors, Tensor}
  alias Sidewinder.Mamba.{Session, Trainer}

  @golden Path.expand("../golden", __DIR__)
  @kinds [{"falcon_mamba", :falcon_mamba}, {"mamba2", :mamba2}, {"mamba2_groups", :mamba2}]

  defp path(name), do: Path.join(@golden, name)
  defp load(path, options \\ []), do: Mamba.load(path, [backend: :cpu] ++ options)

  # Two sequences of tokens, and their logits by the independent implementation.
  defp expected(name) do
    expected = Safetensors.read(Path.join(path(name), "expected.safetensors"))
    {expected["tokens"] |> Tensor.to_list() |> Enum.chunk_every(17), expected["logits"]}
  end

  defp close(got, expected, tolerance \\ 1.0e-4) do
    assert tuple_size(got.shape) > 0

    for {a, b} <- Enum.zip(Tensor.to_list(got), Tensor.to_list(expected)),
        do: assert_in_delta(a, b, tolerance)
  end

  # The logits after the last token of the first sequence.
  defp last(%{data: data}), do: Tensor.new(binary_part(data, 8 * 16 * 37, 8 * 37), :f64, {37})

  test "models are what their files say" do
    falcon = load(path("falcon_mamba")).config
    assert %{mixer: :falcon_mamba, inner: 40, state: 5, rank: 3, layers: 2} = falcon
    assert %{mixer: :mamba} = load(path("mamba")).config
    refute is_map_key(falcon, :heads)
    first = load(path("mamba2")).config
    assert %{mixer: :mamba2, state: 6, rank: 0, heads: 5, groups: 1, vocabulary: 37} = first
    assert %{heads: 4, groups: 2, conv: 3} = load(path("mamba2_groups")).config
  end

  test "logits agree with the independent implementation, at once, in steps and in a batch" do
    for {name, _} <- @kinds do
      {[tokens | _] = both, logits} = expected(name)
      model = load(path(name))
      close(Mamba.forward(model, both), logits)
      close(Mamba.forward(load(path(name), type: :f64), both), logits, 1.0e-12)
      [session, other] = for _ <- 1..2, do: Session.new(model)
      {first, [last]} = Enum.split(tokens, 16)
      Session.prefill(session, Enum.take(first, 6))
      for token <- Enum.drop(first, 6), do: Session.step(session, token)
      copy = Session.restore(model, Session.dump(session))
      Session.prefill(other, first)
      stepped = Session.step([session, copy, other], [last, last, last])
      for i <- 0..2, do: close(part(stepped, i), last(logits))
    end
  end

  defp part(%{data: data}, i), do: Tensor.new(binary_part(data, 4 * 37 * i, 4 * 37), :f32, {37})

  test "texts go on alone as among others" do
    for {name, _} <- @kinds do
      model = load(path(name))
      options = [max_tokens: 6, temperature: 0.7, seed: 3]

      alone =
        for prompt <- [[1, 2, 3], [4]], do: Enum.to_list(Mamba.generate(model, prompt, options))

      together =
        Enum.group_by(
          Mamba.generate(model, [[1, 2, 3], [4]], options),
          &elem(&1, 0),
          &elem(&1, 1)
        )

      assert [together[0], together[1]] == alone
      assert Mamba.loss(model, [1, 2, 3, 4]) > 0
    end
  end

  @tag :tmp_dir
  test "a saved model is the one that was loaded, in floats and quantized", %{tmp_dir: folder} do
    tokens = [[1, 2, 3, 4, 5]]

    for {name, kind} <- @kinds,
        options <- [[], [type: :bf16], [quantize: :ternary], [backbone: true]] do
      model = load(path(name), options)
      :ok = Mamba.save(model, folder)
      again = load(folder)
      assert {again.config, again.type} == {model.config, model.type}
      assert again.config.mixer == kind

      if options != [backbone: true],
        do: assert(Mamba.forward(again, tokens) == Mamba.forward(model, tokens))

      assert File.read!(Path.join(folder, "config.json")) =~ ~s("model_type": "#{kind}")
    end

    tensors = Mamba.tensors(load(path("mamba2_groups")))
    config = %{d_model: 20, n_layer: 2, vocab_size: 37, pad_vocab_size_multiple: 1, d_conv: 3}
    ssm = %{layer: "Mamba2", headdim: 10, ngroups: 2, d_state: 3}
    same = Mamba.new(Map.put(config, :ssm_cfg, ssm), tensors, backend: :cpu)
    assert Mamba.forward(same, tokens) == Mamba.forward(load(path("mamba2_groups")), tokens)
  end

  test "all kinds learn a text, from random weights too" do
    random = [mixer: :mamba2, layers: 1, width: 16, vocabulary: 11, heads: 4, groups: 2, state: 5]
    random = Mamba.random([backend: :cpu] ++ random)
    assert %{mixer: :mamba2, inner: 32, heads: 4, groups: 2, state: 5, rank: 0} = random.config

    for model <- [random | for({file, _} <- @kinds, do: load(path(file)))] do
      trainer = Trainer.new(model)
      batch = [[1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8]]
      for _ <- 1..40, do: Trainer.step(trainer, batch, learning_rate: 0.01)
      learnt = Trainer.model(trainer)
      assert learnt.config == model.config
      assert Mamba.loss(learnt, hd(batch)) < 0.5 * Mamba.loss(model, hd(batch))
    end
  end

  test "what a kind cannot is refused by its name" do
    error = catch_error(Mamba.new(nil, Mamba.tensors(load(path("mamba2"))), backend: :cpu))
    assert %Error{kind: :file} = error
    assert Exception.message(error) =~ "Mamba-2, as `backbone.layers.0.mixer."
    assert Exception.message(error) =~ "model_type"
  end
end
