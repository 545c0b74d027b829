defmodule Sidewinder.MambaSavingTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Mamba, Quantized, Safetensors, Tensor, Tokenizer}
  alias Sidewinder.Mamba.Trainer

  @golden Path.expand("../golden/mamba", __DIR__)
  @chat Path.expand("../golden/scripted/chat_eos", __DIR__)
  @tokens [[1, 2, 3, 4, 5]]
  @formats [:q8_0, :q4_0, :ternary]

  defp load(path, options \\ []), do: Mamba.load(path, [backend: :cpu] ++ options)
  defp logits(model), do: Mamba.forward(model, @tokens)

  # A folder with the files of others.
  defp copied(folder, from) do
    File.mkdir_p!(folder)
    for name <- File.ls!(from), do: File.cp!(Path.join(from, name), Path.join(folder, name))
    folder
  end

  defp config(folder), do: File.read!(Path.join(folder, "config.json"))

  # The golden configuration with these words of JSON in front.
  defp golden(folder, words) do
    copied(folder, @golden)
    File.rm!(Path.join(folder, "expected.safetensors"))
    "{" <> rest = config(@golden)
    File.write!(Path.join(folder, "config.json"), "{#{words}, " <> rest)
    folder
  end

  defp says!(folder, words) do
    config = config(folder)
    for word <- words, do: assert(config =~ word, "#{inspect(word)} in #{config}")
  end

  defp refused(call, kind, parts) do
    assert %Error{kind: ^kind} = error = catch_error(call.())
    for part <- parts, do: assert(Exception.message(error) =~ part)
  end

  @tag :tmp_dir
  test "a saved model says what other readers ask for", %{tmp_dir: folder} do
    Mamba.save(load(@golden), folder)
    metadata = Safetensors.metadata(Path.join(folder, "model.safetensors"))
    assert metadata == %{"format" => "pt"}

    says!(folder, [
      ~r/"architectures": \[\s*"MambaForCausalLM"\s*\]/,
      ~s("model_type": "mamba"),
      ~s("hidden_size": 20),
      ~s("expand": 2),
      ~s("torch_dtype": "float32"),
      ~s("tie_word_embeddings": true)
    ])

    Mamba.save(load(@golden, backbone: true, type: :bf16), folder)

    says!(folder, [
      ~r/"architectures": \[\s*"MambaModel"\s*\]/,
      ~s("vocab_size": 0),
      ~s("torch_dtype": "bfloat16")
    ])
  end

  @tag :tmp_dir
  test "what the loaded configuration says beside is kept, and the sizes are said once", %{
    tmp_dir: folder
  } do
    from =
      golden(
        Path.join(folder, "from"),
        ~s("eos_token_id": [3, 7], "bos_token_id": 1, "pad_token_id": null, "x": {"y": [1.5, "ü\\n"]}, ) <>
          ~s("time_step_limit": [0.0, Infinity], "d_model": 20, "n_layer": 3.0, "dt_rank": 3, "norm_epsilon": 1e-05, ) <>
          ~s("ssm_cfg": {"d_state": 5, "expand": 2}, "dtype": "float32", "pad_vocab_size_multiple": 8, ) <>
          ~s("tie_embeddings": true, "expand_factor": 3)
      )

    to = Path.join(folder, "to")
    model = load(from, type: :bf16)
    Mamba.save(model, to)

    says!(to, [
      ~r/"eos_token_id": \[\s*3,\s*7\s*\]/,
      ~s("bos_token_id": 1),
      ~s("pad_token_id": null),
      ~r/"y": \[\s*1.5,\s*"ü\\n"\s*\]/,
      ~r/0.0,\s*Infinity\s*\]/,
      ~s("d_model": 20),
      ~s("dtype": "bfloat16"),
      ~s("torch_dtype": "bfloat16"),
      ~s("expand_factor": 2)
    ])

    again = load(to)
    assert {again.config, again.type, again.ends} == {model.config, :bf16, [3, 7]}
    assert logits(again) == logits(model)
    before = config(to)
    Mamba.save(again, to)
    assert config(to) == before
  end

  @tag :tmp_dir
  test "the originals' configuration gets the names of the form that is written", %{
    tmp_dir: folder
  } do
    from = copied(Path.join(folder, "from"), @golden)

    File.write!(
      Path.join(from, "config.json"),
      ~s({"d_model": 20, "n_layer": 3, "vocab_size": 37, "pad_vocab_size_multiple": 1, "d_inner": 40, ) <>
        ~s("ssm_cfg": {"d_state": 5, "dt_rank": 3}, "rms_norm": true, "fused_add_norm": true})
    )

    to = Path.join(folder, "to")
    Mamba.save(load(from), to)
    says!(to, [~s("hidden_size": 20), ~s("num_hidden_layers": 3), ~s("fused_add_norm": true)])
    assert load(to).config == load(from).config
  end

  @tag :tmp_dir
  test "the tokenizer's files and the ends of texts go along", %{tmp_dir: folder} do
    from = copied(Path.join(folder, "from"), @chat)

    for name <- ~w(special_tokens_map.json added_tokens.json vocab.json merges.txt tokenizer.model
          chat_template.jinja LICENSE),
        do: File.write!(Path.join(from, name), "{}")

    for name <- ~w(pytorch_model.bin optimizer.pt trainer_state.json other.json),
        do: File.write!(Path.join(from, name), name)

    to = Path.join(folder, "to")
    model = load(from)
    Mamba.save(model, to)
    left = ~w(pytorch_model.bin optimizer.pt trainer_state.json other.json)
    assert Enum.sort(File.ls!(to)) == Enum.sort(File.ls!(from) -- left)

    for name <- File.ls!(to),
        name not in ["config.json", "model.safetensors"],
        do: assert(File.read!(Path.join(to, name)) == File.read!(Path.join(from, name)))

    again = load(to)
    assert again.ends == model.ends
    text = &(&1 |> Mamba.generate("Hello") |> Enum.join())
    assert text.(again) == text.(model)

    # A file alone is as well.
    Mamba.save(load(Path.join(from, "model.safetensors")), Path.join(folder, "of_file"))
    assert File.ls!(Path.join(folder, "of_file")) -- File.ls!(to) == []
    assert text.(load(Path.join(folder, "of_file"))) == text.(model)
  end

  @tag :tmp_dir
  test "a model may be saved where it was loaded from", %{tmp_dir: folder} do
    copied(folder, @chat)
    before = Enum.sort(File.ls!(folder))
    tokenizer = File.read!(Path.join(folder, "tokenizer.json"))
    model = load(folder)
    logits = logits(model)

    for options <- [[], [copy: true], [type: :bf16]] do
      loaded = load(folder, options)
      assert Mamba.save(loaded, folder) == :ok
      assert Enum.sort(File.ls!(folder)) == before
      assert File.read!(Path.join(folder, "tokenizer.json")) == tokenizer
      assert logits(load(folder)) == logits(loaded)
      assert logits(model) == logits
    end
  end

  @tag :tmp_dir
  test "parts with an index become one file where they were loaded from", %{tmp_dir: folder} do
    copied(folder, @golden)
    model = Path.join(folder, "model.safetensors")
    {first, second} = model |> Safetensors.read() |> Enum.split(7)
    File.rm!(model)
    part = &"model-0000#{&1}-of-00002.safetensors"

    for {tensors, i} <- [{first, 1}, {second, 2}],
        do: Safetensors.write(Path.join(folder, part.(i)), tensors)

    names =
      for {tensors, i} <- [{first, 1}, {second, 2}],
          {name, _} <- tensors,
          do: ~s("#{name}": "#{part.(i)}")

    index = Path.join(folder, "model.safetensors.index.json")
    File.write!(index, ~s({"weight_map": {#{Enum.join(names, ", ")}}}))
    loaded = load(folder)
    other = Path.join(folder, "other")
    File.mkdir!(other)
    File.cp!(index, Path.join(other, "model.safetensors.index.json"))
    refused(fn -> Mamba.save(loaded, other) end, :file, ["an index of files"])
    refute File.exists?(Path.join(other, "model.safetensors"))
    Mamba.save(loaded, folder)
    refute File.exists?(index)
    assert logits(load(folder)) == logits(load(@golden))
  end

  @tag :tmp_dir
  test "a tokenizer from elsewhere is the one that is written", %{tmp_dir: folder} do
    from = copied(Path.join(folder, "from"), @chat)
    file = Path.join(folder, "mine.json")
    File.write!(file, File.read!(Path.join(@chat, "tokenizer.json")) <> "\n")
    to = Path.join(folder, "to")
    Mamba.save(load(from, tokenizer: Tokenizer.open(file)), to)
    assert File.read!(Path.join(to, "tokenizer.json")) == File.read!(file)
    refute File.exists?(Path.join(to, "tokenizer_config.json"))
    assert File.exists?(Path.join(to, "generation_config.json"))
    File.rm!(file)
    gone = load(from, tokenizer: Tokenizer.open(Path.join(from, "tokenizer.json")))
    File.rm!(Path.join(from, "tokenizer.json"))
    refused(fn -> Mamba.save(gone, to) end, :file, ["tokenizer.json", "no such file"])
    assert Enum.filter(File.ls!(to), &String.starts_with?(&1, ".")) == []
  end

  @tag :tmp_dir
  test "ends that were given are those of the saved model", %{tmp_dir: folder} do
    from = copied(Path.join(folder, "from"), @chat)

    for {model, ends} <- [
          {load(from, ends: [5]), [5]},
          {load(from, ends: [5, 6]), [5, 6]},
          {load(@golden, ends: [9]), [9]},
          {Mamba.random(layers: 1, width: 16, vocabulary: 11, ends: [4], backend: :cpu), [4]},
          {Mamba.new(
             %{
               hidden_size: 24,
               num_hidden_layers: 1,
               vocab_size: 400,
               intermediate_size: 24,
               state_size: 1,
               time_step_rank: 1,
               eos_token_id: 7
             },
             Mamba.tensors(load(from)),
             backend: :cpu
           ), [7]}
        ] do
      to = Path.join(folder, "to")
      Mamba.save(model, to)
      assert load(to).ends == ends
      File.rm_rf!(to)
    end

    # The tokenizer's, where no configuration tells any.
    File.rm!(Path.join(from, "generation_config.json"))
    File.write!(Path.join(from, "config.json"), String.replace(config(from), "eos_token_id", "x"))
    to = Path.join(folder, "to")
    Mamba.save(load(from), to)
    says!(to, [~s("eos_token_id": 393)])
  end

  @tag :tmp_dir
  test "what is trained or made from a model is saved as that is", %{tmp_dir: folder} do
    from = copied(Path.join(folder, "from"), @chat)
    model = load(from)
    trainer = Trainer.new(model)
    Trainer.step(trainer, [[1, 2, 3, 4]], learning_rate: 0.01)
    learnt = Trainer.model(trainer)
    made = Mamba.new(nil, Mamba.tensors(learnt), like: model, backend: :cpu)

    sizes = %{
      d_model: 24,
      n_layer: 1,
      vocab_size: 400,
      d_inner: 24,
      d_state: 1,
      dt_rank: 1,
      x: "mine"
    }

    said = Mamba.new(sizes, Mamba.tensors(learnt), like: model, backend: :cpu)
    assert made.tokenizer == model.tokenizer and made.ends == model.ends

    for {saved, i} <- Enum.with_index([learnt, made, said]) do
      to = Path.join(folder, "#{i}")
      Mamba.save(saved, to)
      assert Enum.sort(File.ls!(to)) == Enum.sort(File.ls!(from))
      says!(to, [~s("residual_in_fp32": true), ~s("eos_token_id": 393), ~s("hidden_size": 24)])
      assert logits(load(to)) == logits(learnt)
      assert load(to).ends == model.ends
    end

    says!(Path.join(folder, "2"), [~s("x": "mine")])
    refused(fn -> Mamba.new(nil, Mamba.tensors(model), like: from) end, :option, ["like"])
    refused(fn -> Mamba.save(:model, folder) end, :argument, ["model"])
  end

  # Rows of whole blocks, a head that is the embedding, and none of its own.
  defp sized(options \\ []),
    do: Mamba.random([layers: 2, width: 64, vocabulary: 50, seed: 3, backend: :cpu] ++ options)

  @tag :tmp_dir
  test "a quantized model is saved and loaded bit by bit", %{tmp_dir: folder} do
    plain = Path.join(folder, "plain")
    Mamba.save(sized(), plain)

    for format <- @formats, type <- [:f32, :bf16] do
      model = load(plain, quantize: format, type: type)
      to = Path.join(folder, "#{format}-#{type}")
      assert Mamba.save(model, to) == :ok
      says!(to, [~s("quant_method": "sidewinder"), ~r/"formats": \[\s*"#{format}"\s*\]/])
      file = Path.join(to, "model.safetensors")

      assert Safetensors.metadata(file) == %{
               "format" => "pt",
               "sidewinder.quantized" => "#{format}"
             }

      matrix = Quantized.load!(file)["backbone.layers.1.mixer.out_proj.weight"]
      assert %Quantized{format: ^format, shape: {64, 128}} = matrix

      for {path, options} <- [
            {to, []},
            {file, []},
            {to, [quantize: format]},
            {to, [copy: true]}
          ] do
        again = load(path, options)
        assert {again.config, again.type} == {model.config, type}
        assert logits(again) == logits(model)
      end

      # In place of the files that it has mapped, and without the configuration.
      again = load(to)
      Mamba.save(again, to)
      assert logits(load(to)) == logits(again)
      File.rm!(Path.join(to, "config.json"))
      assert logits(load(to)) == logits(model)
    end
  end

  @tag :tmp_dir
  test "a quantized model refuses what it cannot do, and what contradicts it", %{tmp_dir: folder} do
    Mamba.save(sized(), folder)
    model = load(folder, quantize: :q8_0)
    Mamba.save(model, folder)
    loaded = load(folder)
    refused(fn -> Trainer.new(loaded) end, :argument, ["quantized"])
    refused(fn -> Mamba.tensors(loaded) end, :argument, ["quantized"])
    refused(fn -> load(folder, quantize: :q4_0) end, :option, ["quantize", "q8_0", "q4_0"])
    refused(fn -> load(folder, type: :f64) end, :option, ["type"])

    config = config(folder)
    change = &File.write!(Path.join(folder, "config.json"), &1)
    change.(String.replace(config, ~s("q8_0"), ~s("q4_0")))
    refused(fn -> load(folder) end, :file, ["q4_0", "q8_0"])
    change.(String.replace(config, "sidewinder", "bitsandbytes"))
    refused(fn -> load(folder) end, :file, ["bitsandbytes", "quantize"])
    change.(config)

    file = Path.join(folder, "model.safetensors")
    tensors = Safetensors.read(file)
    name = "backbone.layers.0.mixer.x_proj.weight"
    Safetensors.write(file, Map.put(tensors, name, Tensor.from_list([1], :f32, {1})))
    refused(fn -> load(folder) end, :file, [name, "as floats and in q8_0"])
    Safetensors.write(file, Map.delete(tensors, name <> ".q8_0"))
    refused(fn -> load(folder) end, :file, ["no `#{name}`"])
    Safetensors.write(file, tensors, metadata: %{"sidewinder.quantized" => "ternary"})
    refused(fn -> load(folder) end, :file, ["model.safetensors", "ternary", "q8_0"])
    Safetensors.write(file, tensors)
    assert logits(load(folder)) == logits(model)
  end

  test "metadata are texts by their names" do
    for wrong <- [[format: "pt"], %{format: "pt"}, %{"a" => 1}, %{"a" => <<255>>}, "pt"],
        do:
          refused(fn -> Safetensors.write("/nowhere/at/all", %{}, metadata: wrong) end, :option, [
            "metadata"
          ])
  end
end
