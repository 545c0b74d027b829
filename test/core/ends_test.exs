defmodule Sidewinder.EndsTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Mamba, Tokenizer}
  alias Sidewinder.Mamba.Trainer

  # Models that say one thing after another: " world", then `<|im_end|>`, "The", " cat", and so on.
  @scripted Path.expand("../golden/scripted", __DIR__)
  @chat Path.join(@scripted, "chat_eos")
  @hello [347]
  @world 360
  @im_end 393

  @moduletag :tmp_dir

  defp load(folder, options \\ []), do: Mamba.load(folder, [backend: :cpu, threads: 1] ++ options)

  defp said(model, prompt, options \\ []),
    do: model |> Mamba.generate(prompt, Keyword.merge([max_tokens: 6], options)) |> Enum.to_list()

  # The model with other files; nil takes one away.
  defp chat(folder, files) do
    File.cp_r!(@chat, folder)

    for {name, text} <- files, file = Path.join(folder, name) do
      if text, do: File.write!(file, text), else: File.rm!(file)
    end

    folder
  end

  defp config(member) do
    json = File.read!(Path.join(@chat, "config.json"))
    String.replace(json, ~s("eos_token_id": 393), member || ~s("other": 1))
  end

  test "scripted models say what they should, and end" do
    chat = load(@chat)
    assert chat.ends == [@im_end, 0]
    assert said(chat, "Hello") == [" world"]
    assert said(chat, @hello) == [@world]
    llama = load(Path.join(@scripted, "llama_space"))
    assert said(llama, "Hello", max_tokens: 4) == [" world", " how", " are", " you"]
  end

  test "ends are those of the first file that tells", %{tmp_dir: folder} do
    generation = "generation_config.json"
    tokenizer = "tokenizer_config.json"

    for {files, ends} <- [
          {[{generation, ~s({"eos_token_id": 360})}], [360]},
          {[{generation, ~s(\uFEFF{"eos_token_id": 360.0, "a": -Infinity})}], [360]},
          {[{generation, ~s({"eos_token_id": null})}], [@im_end]},
          {[{generation, ~s({"eos_token_id": []})}], [@im_end]},
          {[{generation, nil}], [@im_end]},
          {[{generation, nil}, {"config.json", config(~s("eos_token_id": [360, 2]))}], [360, 2]},
          {[{generation, "{}"}, {"config.json", config(nil)}], nil},
          {[{generation, nil}, {"config.json", config(~s("eos_token_id": null))}], nil},
          {[{generation, nil}, {"config.json", config(nil)}, {tokenizer, nil}], nil}
        ] do
      model = folder |> chat(files) |> load()
      assert model.ends == ends

      expected =
        cond do
          360 in List.wrap(ends) -> []
          # The tokenizer's is `<|im_end|>` by its configuration, and without one `<|endoftext|>`.
          {tokenizer, nil} in files -> said(model, @hello, ignore_eos: true)
          true -> [@world]
        end

      assert said(model, @hello) == expected

      assert model |> said("Hello") |> Enum.join() == Tokenizer.decode(model.tokenizer, expected)
    end
  end

  test "the file of a checkpoint has the ends of its folder" do
    assert load(Path.join(@chat, "model.safetensors")).ends == [@im_end, 0]
  end

  test "the tokenizer's end counts where only it tells", %{tmp_dir: folder} do
    chat(folder, [{"generation_config.json", nil}, {"config.json", config(nil)}])

    for {files, expected} <- [
          {[{"tokenizer_config.json", ~s({"eos_token": {"content": "<|im_end|>"}})}], [@world]},
          {[
             {"tokenizer_config.json", "{}"},
             {"special_tokens_map.json", ~s({"eos_token": "<|im_end|>"})}
           ], [@world]},
          {[
             {"tokenizer_config.json", ~s({"eos_token": "The"})},
             {"special_tokens_map.json", "{}"}
           ], [@world, @im_end]}
        ] do
      for {name, text} <- files, do: File.write!(Path.join(folder, name), text)
      assert folder |> load() |> said(@hello) == expected
    end

    File.write!(Path.join(folder, "tokenizer_config.json"), ~s({"eos_token": "<|none|>"}))
    assert %Error{kind: :file} = error = catch_error(folder |> load() |> said("Hello"))
    assert Exception.message(error) =~ "<|none|>"
    assert folder |> load() |> said(@hello, ignore_eos: true) |> length() == 6
  end

  test "what is no end is told when a text is generated, not when the model is loaded", %{
    tmp_dir: folder
  } do
    for wrong <- ~w(400 -1 "0" [[0]] [393,400] 0.5 true {} NaN [null]) do
      chat(folder, [{"generation_config.json", ~s({"eos_token_id": #{wrong}})}])
      model = load(folder)
      assert Mamba.forward(model, [@hello]).shape == {1, 1, 400}

      for prompt <- [@hello, "Hello"] do
        assert %Error{kind: :file} = error = catch_error(said(model, prompt))
        assert Exception.message(error) =~ "generation_config.json"
        assert Exception.message(error) =~ "eos_token_id"
      end

      assert length(said(model, @hello, ignore_eos: true)) == 6
      assert folder |> load(ends: [@im_end]) |> said(@hello) == [@world]
    end

    chat(folder, [{"generation_config.json", "{"}])
    assert %Error{kind: :file} = catch_error(folder |> load() |> said(@hello))
    assert load(folder, backbone: true).ends == nil
  end

  test "stops are beside the ends, and ends can be ignored" do
    model = load(@chat)
    all = said(model, @hello, ignore_eos: true)
    assert [@world, @im_end, the, cat | _] = all
    assert said(model, @hello, stop: [cat]) == [@world]
    assert said(model, @hello, stop: []) == [@world]
    assert said(model, @hello, ignore_eos: false) == [@world]
    assert said(model, @hello, stop: [cat], ignore_eos: true) == [@world, @im_end, the]
    assert said(model, @hello, stop: @im_end, ignore_eos: true) == [@world]
    assert said(load(@chat, ends: [the]), @hello) == [@world, @im_end]
    assert length(said(load(@chat, ends: []), @hello)) == 6
  end

  test "the name of a special token stops at that token, another text at its text" do
    model = load(@chat)
    text = &(model |> said("Hello", ignore_eos: true, stop: &1) |> Enum.join())
    assert text.([]) == " worldThe catThe cat"
    assert text.("<|im_end|>") == " world"
    assert text.(["<|im_end|>"]) == " world"
    assert text.(["<|endoftext|>", "cat"]) == " worldThe "
    # Across tokens that have no text, and across pieces.
    assert text.("ldTh") == " wor"
    assert text.("e c") == " worldTh"
    assert text.("<|im_end") == " worldThe catThe cat"
  end

  test "models of one's own have the ends that are given" do
    options = [layers: 1, width: 16, vocabulary: 11, backend: :cpu]
    model = Mamba.random(options)
    assert model.ends == nil
    [first, second | _] = all = said(model, [1], temperature: 3.0, seed: 1)
    ending = Mamba.random([ends: [second]] ++ options)
    assert said(ending, [1], temperature: 3.0, seed: 1) == Enum.take_while(all, &(&1 != second))
    assert Trainer.model(Trainer.new(ending)).ends == [second]
    assert Trainer.model(Trainer.new(ending), ends: [first]).ends == [first]

    config = %{
      hidden_size: 16,
      num_hidden_layers: 1,
      vocab_size: 11,
      state_size: 16,
      time_step_rank: 1,
      eos_token_id: [3, 4]
    }

    tensors = Mamba.tensors(model)
    assert Mamba.new(config, tensors, backend: :cpu).ends == [3, 4]
    assert Mamba.new(config, tensors, backend: :cpu, ends: [5]).ends == [5]

    for {kind, wrong} <- [
          {:file, fn -> Mamba.new(%{config | eos_token_id: 11}, tensors, backend: :cpu) end},
          {:option, fn -> Mamba.random([ends: [11]] ++ options) end},
          {:option, fn -> Mamba.random([ends: ["</s>"]] ++ options) end},
          {:option, fn -> Mamba.random([ends: 3] ++ options) end},
          {:option, fn -> Mamba.random([ends: [1 | 2]] ++ options) end},
          {:option, fn -> said(model, [1], stop: [11]) end},
          {:option, fn -> said(model, [1], ignore_eos: 1) end},
          {:option, fn -> said(model, [1], add_bos: "yes") end}
        ],
        do: assert(%Error{kind: ^kind} = catch_error(wrong.()))
  end

  test "a prompt begins as the tokenizer has it, or as one says" do
    llama = load(Path.join(@scripted, "llama_space"), type: :f32)
    prompt = &Mamba.Generation.prompt!(llama.tokenizer, "Hello", &1)
    assert prompt.([]) == [1, 303]
    assert prompt.(add_bos: true) == [1, 303]
    assert prompt.(add_bos: false) == [303]
    assert Mamba.Generation.prompt!(llama.tokenizer, "", []) == [1]
    chat = load(@chat)
    assert Mamba.Generation.prompt!(chat.tokenizer, "Hello", []) == @hello
    assert Mamba.Generation.prompt!(chat.tokenizer, "Hello", add_bos: true) == [0 | @hello]
    assert Mamba.Generation.prompt!(chat.tokenizer, @hello, add_bos: true) == @hello
  end
end
