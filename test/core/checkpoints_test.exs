defmodule Sidewinder.CheckpointsTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, GGUF, Mamba, Safetensors, Tensor, Tokenizer}

  @golden Path.expand("../golden/mamba", __DIR__)
  @tokens [[1, 2, 3, 4]]

  # A folder with the golden model in it.
  defp golden(folder) do
    for name <- ["config.json", "model.safetensors"],
        do: File.cp!(Path.join(@golden, name), Path.join(folder, name))

    folder
  end

  defp logits(path, options \\ []),
    do: path |> Mamba.load([backend: :cpu] ++ options) |> Mamba.forward(@tokens)

  defp refused(call, parts) do
    assert %Error{kind: :file} = error = catch_error(call.())
    for part <- parts, do: assert(Exception.message(error) =~ part)
    error
  end

  defp refused_load(path, parts), do: refused(fn -> Mamba.load(path, backend: :cpu) end, parts)

  # The golden configuration with these words of JSON in front.
  defp config(folder, words) do
    "{" <> rest = File.read!(Path.join(@golden, "config.json"))
    File.write!(Path.join(folder, "config.json"), "{#{words}, " <> rest)
  end

  @tag :tmp_dir
  test "sizes by all their names, nulls, what Python writes for infinity, and a byte-order mark",
       %{tmp_dir: folder} do
    golden(folder)
    plain = logits(@golden)
    sizes = Mamba.load(@golden, backend: :cpu).config

    for words <- [
          ~s("d_model": #{sizes.width}),
          ~s("d_model": #{sizes.width}.0, "n_layer": #{sizes.layers}, "d_inner": #{sizes.inner}),
          ~s("ssm_cfg": null, "d_state": null, "dt_rank": #{sizes.rank}),
          ~s("ssm_cfg": {"d_state": #{sizes.state}, "d_conv": #{sizes.conv}}),
          ~s("time_step_limit": [0.0, Infinity], "x": NaN, "y": [-Infinity])
        ] do
      config(folder, words)
      assert logits(folder) == plain
    end

    File.write!(
      Path.join(folder, "config.json"),
      "\uFEFF" <> File.read!(Path.join(@golden, "config.json"))
    )

    assert logits(folder) == plain
    config(folder, ~s("d_model": #{sizes.width + 1}))
    refused_load(folder, ["`hidden_size` #{sizes.width}", "`d_model` #{sizes.width + 1}"])
  end

  test "a configuration as a map goes the same way" do
    tensors = Safetensors.read(Path.join(@golden, "model.safetensors"))
    sizes = Mamba.load(@golden, backend: :cpu).config
    rows = tensors["backbone.embeddings.weight"].shape |> elem(0)

    words = %{
      d_model: sizes.width,
      hidden_size: sizes.width,
      n_layer: sizes.layers,
      vocab_size: rows,
      ssm_cfg: %{d_state: sizes.state, dt_rank: sizes.rank, d_conv: sizes.conv},
      d_inner: sizes.inner,
      layer_norm_epsilon: sizes.eps,
      expand: 2.0,
      d_conv: nil
    }

    assert Mamba.new(words, tensors, backend: :cpu).config == sizes
    new = fn more -> fn -> Mamba.new(Map.merge(words, more), tensors, backend: :cpu) end end
    refused(new.(%{architectures: ["Mamba2ForCausalLM"]}), ["Mamba-2"])
    refused(new.(%{model_type: "mamba", mixer_rms_eps: 1.0e-6}), ["FalconMamba"])
    assert new.(%{mixer_rms_eps: 1.0e-6}).().config.mixer == :falcon_mamba
    refused(new.(%{n_layers: sizes.layers + 1}), ["`n_layer`", "`n_layers`"])
  end

  @tag :tmp_dir
  test "a lone file is no Mamba model where its metadata or tensors tell another", %{
    tmp_dir: folder
  } do
    path = Path.join(folder, "lone.safetensors")
    <<size::little-64, rest::binary>> = File.read!(Path.join(@golden, "model.safetensors"))
    <<"{", header::binary-size(size - 1), data::binary>> = rest

    write = fn metadata ->
      header = "{\"__metadata__\": #{metadata}, " <> header
      File.write!(path, [<<byte_size(header)::little-64>>, header, data])
    end

    write.(~s({"format": "pt"}))
    assert logits(path) == logits(@golden)
    write.(~s({"format": "pt", "mixer_rms_eps": "1e-06"}))
    refused_load(path, ["FalconMamba", "lone.safetensors"])

    tensors = Safetensors.read(Path.join(@golden, "model.safetensors"))
    new = fn tensors -> fn -> Mamba.new(nil, tensors, backend: :cpu) end end
    one = Tensor.from_list([1], :f32, {1})
    refused(new.(Map.put(tensors, "backbone.layers.0.mixer.dt_bias", one)), ["Mamba-2"])
    refused(new.(Map.put(tensors, "backbone.layers.0.mixer.A_log", one)), ["Mamba-2"])
    {width} = tensors["backbone.norm_f.weight"].shape
    falcon = Tensor.new(:binary.copy(<<0::32>>, 65024 * width), :f32, {65024, width})
    refused(new.(%{tensors | "backbone.embeddings.weight" => falcon}), ["FalconMamba"])
  end

  @pointer "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 516567560\n"

  @tag :tmp_dir
  test "files that are something else are called so, with what to do", %{tmp_dir: folder} do
    golden(folder)

    for name <- ["model.safetensors", "config.json", "model.safetensors.index.json"],
        {bytes, part} <- [
          {@pointer, ~r/git-lfs.*516567560.*git lfs pull/},
          {"<!DOCTYPE html><html>", ~r/an HTML page.*Log in/},
          {"", ~r/an empty file/},
          {"Entry not found", ~r/Entry not found/},
          {<<"PK", 3, 4, "archive/data.pkl">>, ~r/PyTorch.*safetensors/},
          {<<128, 2, 138, 10, 108>>, ~r/pickle.*safetensors/},
          {<<"GGUF", 3::little-32, 0::128>>, ~r/a GGUF file.*Sidewinder.GGUF/}
        ] do
      path = Path.join(folder, name)
      File.write!(path, bytes)
      refused_load(folder, [path, part])
      File.rm!(path)
      golden(folder)
    end

    path = Path.join(folder, "model.safetensors")
    refused(fn -> GGUF.index(path) end, [~r/expected a GGUF file, got a safetensors file/])
    refused(fn -> Tokenizer.open(path) end, ["a safetensors file"])
    File.write!(path, @pointer)
    refused(fn -> Safetensors.index(path) end, ["git lfs pull"])
    refused(fn -> GGUF.metadata(path) end, ["git lfs pull"])
    refused(fn -> Tokenizer.open(path) end, ["git lfs pull"])
    refused_load(path, ["git lfs pull"])
  end

  @tag :tmp_dir
  test "a folder of several files is told by their names", %{tmp_dir: folder} do
    golden(folder)
    model = Path.join(folder, "model.safetensors")
    adapter = Path.join(folder, "adapter_model.safetensors")

    Safetensors.write(adapter, %{
      "base_model.model.x.lora_A.weight" => Tensor.from_list([1], :f32, {1})
    })

    assert logits(folder) == logits(@golden)
    File.rename!(model, Path.join(folder, "mamba-tiny.safetensors"))
    refused_load(folder, ["adapter_model.safetensors", "mamba-tiny.safetensors"])
    assert logits(Path.join(folder, "mamba-tiny.safetensors")) == logits(@golden)
    refused_load(adapter, ["an adapter"])
    File.rm!(Path.join(folder, "mamba-tiny.safetensors"))
    refused_load(folder, ["an adapter", "merge_and_unload"])
  end

  @tag :tmp_dir
  test "parts of a model are read without an index, and one that is missing is named", %{
    tmp_dir: folder
  } do
    golden(folder)
    model = Path.join(folder, "model.safetensors")
    {first, second} = model |> Safetensors.read() |> Enum.split(7)
    File.rm!(model)
    part = &Path.join(folder, "model-0000#{&1}-of-00002.safetensors")
    Safetensors.write(part.(1), first)
    refused_load(folder, ["no `model-00002-of-00002.safetensors`"])
    Safetensors.write(part.(2), second)
    assert logits(folder) == logits(@golden)
    refused_load(part.(1), ["one of its 2 parts", "folder"])
  end

  @tag :tmp_dir
  test "a tokenizer.json that cannot be read fails when text is used", %{tmp_dir: folder} do
    golden(folder)
    tokenizer = Path.join(folder, "tokenizer.json")

    for {bytes, part} <- [{@pointer, "git lfs pull"}, {"{", "tokenizer.json"}, {"<html>", "HTML"}] do
      File.write!(tokenizer, bytes)
      model = Mamba.load(folder, backend: :cpu)
      assert Mamba.forward(model, @tokens) == logits(@golden)
      assert length(Enum.to_list(Mamba.generate(model, [1, 2], max_tokens: 3))) == 3
      assert Mamba.loss(model, [1, 2, 3]) > 0
      refused(fn -> Mamba.generate(model, "text") end, [tokenizer, part])
      refused(fn -> Mamba.loss(model, "text") end, [tokenizer, part])
      refused(fn -> Tokenizer.decode(model.tokenizer, [1]) end, [tokenizer, part])
      refused(fn -> Tokenizer.token(model.tokenizer, "a") end, [tokenizer, part])
      refused(fn -> Tokenizer.open(folder) end, [tokenizer, part])
    end
  end
end
