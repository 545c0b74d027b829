defmodule Sidewinder.MambaRefusalsTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Mamba, Tensor, Tokenizer}
  alias Sidewinder.Mamba.Session

  @golden Path.expand("../golden/mamba", __DIR__)
  @huge Integer.pow(10, 400)

  defp model(options \\ []), do: Mamba.load(@golden, [backend: :cpu] ++ options)

  # Each call raises an error of this kind about this argument, with what was expected and what came.
  defp refused(calls) do
    for {kind, argument, call} <- calls do
      error = catch_error(call.())

      assert %Error{kind: ^kind, argument: ^argument, expected: expected, got: got} = error,
             "#{inspect(error)} in place of #{argument}"

      assert expected != "" and got != ""
      assert String.length(Exception.message(error)) < 1000
    end
  end

  test "what is no path, and options of wrong types, when a model is loaded" do
    load = fn options -> fn -> model(options) end end
    unreadable = fn path -> fn -> Mamba.load(path, backend: :cpu) end end

    refused([
      {:argument, "path", unreadable.(:here)},
      {:argument, "path", unreadable.(7)},
      {:argument, "path", unreadable.("")},
      {:argument, "path", unreadable.(<<255>>)},
      {:argument, "path", unreadable.([?a | ?b])},
      {:argument, "path", unreadable.([-1])},
      {:file, "a\0b", unreadable.("a\0b")},
      {:option, "options", fn -> Mamba.load(@golden, :cpu) end},
      {:option, "options", fn -> Mamba.load(@golden, [:cpu]) end},
      {:option, "options", fn -> Mamba.load(@golden, [{:backend, :cpu} | :cpu]) end},
      {:option, "options", fn -> Mamba.load(@golden, %{backend: :cpu}) end},
      {:option, "layers", load.(layers: 3)},
      {:option, "type", load.(type: "f32")},
      {:option, "type", load.(type: :f8)},
      {:option, "type", load.(type: :u8)},
      {:option, "type", load.(type: true)},
      {:option, "backbone", load.(backbone: 1)},
      {:option, "copy", load.(copy: :yes)},
      {:option, "tokenizer", load.(tokenizer: "tokenizer.json")},
      {:option, "backend", fn -> Mamba.load(@golden, backend: 3) end},
      {:option, "threads", load.(threads: 0)},
      {:option, "threads", load.(threads: -1)},
      {:option, "threads", load.(threads: @huge)},
      {:option, "threads", load.(threads: "2")},
      {:option, "level", load.(level: :avx3)},
      {:option, "level", load.(level: 3)},
      {:option, "allow_tf32", load.(allow_tf32: 1)}
    ])
  end

  @tag :tmp_dir
  test "a config.json that is there but cannot be read, or claims what cannot be", %{tmp_dir: dir} do
    File.cp!(Path.join(@golden, "model.safetensors"), Path.join(dir, "model.safetensors"))
    config = Path.join(dir, "config.json")
    load = fn -> Mamba.load(dir, backend: :cpu) end
    assert %Mamba{} = load.()
    File.mkdir!(config)
    refused([{:file, config, load}])
    File.rmdir!(config)
    plain = File.read!(Path.join(@golden, "config.json"))

    for {name, size, kind} <- [
          {"hidden_size", Integer.pow(2, 40), :file},
          {"state_size", Integer.pow(2, 60), :file},
          {"intermediate_size", Integer.pow(2, 31) - 1, :file},
          {"vocab_size", Integer.pow(2, 64), :file},
          {"num_hidden_layers", Integer.pow(2, 31) - 1, :file}
        ] do
      File.write!(config, String.replace(plain, ~r/"#{name}": *\d+/, ~s("#{name}": #{size})))
      error = catch_error(load.())
      assert %Error{kind: ^kind} = error
      assert String.length(Exception.message(error)) < 20_000
    end

    assert_raise Error, ~r/no `backbone.layers.3` to `backbone.layers.2147483646`/, load
  end

  test "tensors and configurations that are none" do
    tensor = Tensor.from_list([1], :f32, {1})
    new = fn config, tensors -> fn -> Mamba.new(config, tensors, backend: :cpu) end end
    wrong = fn config -> {:argument, "config", new.(config, %{})} end

    refused([
      {:argument, "tensors", new.(nil, [{"a", tensor}])},
      {:argument, "tensors", new.(nil, %{"a" => [1.0]})},
      {:argument, "tensors", new.(nil, %{a: tensor})},
      {:argument, "tensors", new.(nil, %{<<255>> => tensor})},
      {:argument, "tensors", new.(nil, tensor)},
      {:file, "tensors", new.(nil, %{})},
      wrong.([]),
      wrong.("config.json"),
      wrong.(tensor),
      wrong.(%{1 => 2}),
      wrong.(%{hidden_size: self()}),
      wrong.(%{hidden_size: {1}}),
      wrong.(%{hidden_size: [1 | 2]}),
      wrong.(%{model_type: <<255>>}),
      {:file, "config", new.(%{hidden_size: @huge, num_hidden_layers: 1}, %{})},
      {:file, "config", new.(%{model_type: "\"}\n\\"}, %{})}
    ])
  end

  test "configurations with texts, lists and nothing in them are understood" do
    %{config: config} = random = Mamba.random(layers: 1, width: 16, backend: :cpu)
    assert config.state == 16 and random.type == :f32

    words = %{
      "architectures" => ["A\"\\\n\u{1}é"],
      "hidden_act" => nil,
      "bos" => %{x: [1, 2.5]},
      model_type: :mamba,
      rms_norm: true,
      hidden_size: 16,
      num_hidden_layers: 0
    }

    # All was read up to the sizes.
    refused([{:file, "config", fn -> Mamba.new(words, %{}, backend: :cpu) end}])
    assert_raise Error, ~r/width: 16, layers: 0/, fn -> Mamba.new(words, %{}, backend: :cpu) end
  end

  test "sizes of random models that are none, or too large" do
    sizes = [layers: 1, width: 16, backend: :cpu]
    random = fn changed -> fn -> Mamba.random(Keyword.merge(sizes, changed)) end end

    for {name, value} <- [
          layers: 0,
          layers: @huge,
          layers: nil,
          width: -1,
          width: 1.0e6,
          width: Integer.pow(10, 9),
          vocabulary: -1,
          vocabulary: Integer.pow(10, 12),
          expand: "2",
          expand: Integer.pow(2, 40),
          state: 0,
          state: Integer.pow(2, 31),
          rank: [],
          rank: Integer.pow(2, 31),
          conv: 0,
          conv: Integer.pow(2, 31)
        ] do
      # The product of widths is told of the width.
      told = if name == :expand and is_integer(value), do: "width", else: to_string(name)
      refused([{:option, told, random.([{name, value}])}])
    end

    second = fn changed -> random.([mixer: :mamba2] ++ changed) end

    refused([
      {:option, "mixer", random.(mixer: :mamba3)},
      {:option, "heads", random.(heads: 2)},
      {:option, "groups", random.(groups: 1)},
      {:option, "rank", second.(rank: 1)},
      {:option, "heads", second.(heads: 5)},
      {:option, "heads", second.(heads: 0)},
      {:option, "groups", second.(heads: 4, groups: 3)},
      {:option, "state", second.(state: Integer.pow(2, 31))},
      {:option, "copy", random.(copy: true)},
      {:option, "options", fn -> Mamba.random(%{layers: 1, width: 16}) end}
    ])
  end

  test "what is no model, no token and no features" do
    model = model()
    backbone = model(backbone: true)
    forward = fn model, input -> fn -> Mamba.forward(model, input) end end
    tokens = fn input -> {:argument, "tokens", forward.(model, input)} end
    features = &Tensor.from_list(List.duplicate(0, &1), :f32, &2)

    refused([
      {:argument, "model", forward.(nil, [[1]])},
      {:argument, "model", forward.(Session.new(model), [[1]])},
      tokens.("text"),
      tokens.(1),
      tokens.(%{}),
      tokens.([[1] | [2]]),
      tokens.([1 | 2]),
      tokens.([[1 | 2]]),
      tokens.([[1], [2 | 3]]),
      tokens.([[1], 2]),
      tokens.([1, [2]]),
      tokens.([[1], [2, 3]]),
      tokens.([[1.0]]),
      tokens.([[-1]]),
      tokens.([[37]]),
      tokens.([[@huge]]),
      tokens.([[[1]]]),
      {:argument, "input", forward.(model, features.(20, {1, 1, 20}))},
      {:argument, "input", forward.(backbone, [[1]])},
      {:shape, "features", forward.(backbone, features.(19, {1, 1, 19}))},
      {:shape, "features", forward.(backbone, Tensor.from_list([1], :f64, {1, 1, 1}))},
      {:shape, "input", forward.(backbone, features.(20, {20}))},
      {:shape, "input", forward.(backbone, features.(20, {1, 1, 1, 20}))}
    ])

    for empty <- [[], [[]], [[], []]], do: assert(Mamba.forward(model, empty).data == "")
    assert Mamba.forward(backbone, features.(0, {2, 0, 20})).shape == {2, 0, 20}
  end

  test "sessions that are none, of other models, and what they cannot take" do
    model = model()
    session = Session.new(model)
    Session.prefill(session, [1, 2])
    before = Session.dump(session)
    fresh = fn -> Session.new(model) end
    tokens = &{:argument, "tokens", &1}
    sessions = &{:argument, "sessions", &1}

    refused([
      {:argument, "model", fn -> Session.new(:model) end},
      {:argument, "model", fn -> Session.restore(session, before) end},
      sessions.(fn -> Session.prefill(model, [1]) end),
      sessions.(fn -> Session.step(model, 1) end),
      sessions.(fn -> Session.step([], []) end),
      sessions.(fn -> Session.step([session, :other], [1]) end),
      sessions.(fn -> Session.step([session | fresh.()], [1]) end),
      sessions.(fn -> Session.step([session, session], [1, 1]) end),
      sessions.(fn -> Session.step([session, Session.new(model())], [1, 1]) end),
      sessions.(fn -> Session.next([session, nil], [1]) end),
      sessions.(fn -> Session.next({session}, 1) end),
      sessions.(fn -> Session.next([session, session], [1, 1]) end),
      sessions.(fn -> Session.length(nil) end),
      sessions.(fn -> Session.fork([session]) end),
      sessions.(fn -> Session.reset(model) end),
      sessions.(fn -> Session.dump("dump") end),
      tokens.(fn -> Session.prefill(session, [[1, 2], [3, 4]]) end),
      tokens.(fn -> Session.prefill(session, 1) end),
      tokens.(fn -> Session.prefill(session, [1 | 2]) end),
      tokens.(fn -> Session.prefill(session, [1, @huge]) end),
      tokens.(fn -> Session.step(session, [1]) end),
      tokens.(fn -> Session.step(session, nil) end),
      tokens.(fn -> Session.step([session], [[1]]) end),
      tokens.(fn -> Session.step([session], 1) end),
      tokens.(fn -> Session.next(session, "a") end),
      {:argument, "input", fn -> Session.prefill(session, [], logits: true) end},
      {:argument, "input", fn -> Session.step([session], [1, 2]) end},
      {:argument, "input", fn -> Session.step([session, fresh.()], []) end},
      {:option, "options", fn -> Session.prefill(session, [1], :logits) end},
      {:option, "logit", fn -> Session.prefill(session, [1], logit: true) end},
      {:option, "logits", fn -> Session.prefill(session, [1], logits: 1) end},
      {:option, "options", fn -> Session.next(session, 1, [[], []]) end},
      {:option, "options", fn -> Session.next(session, 1, [{:seed, 1} | 2]) end},
      {:option, "options", fn -> Session.next(session, 1, :warm) end},
      {:argument, "dump", fn -> Session.restore(model, :dump) end},
      {:argument, "dump", fn -> Session.restore(model, "") end},
      {:argument, "dump", fn -> Session.restore(model, before <> "x") end},
      {:argument, "dump", fn -> Session.restore(model(type: :bf16), before) end},
      {:argument, "dump",
       fn -> Session.restore(Mamba.random(layers: 1, width: 20, backend: :cpu), before) end}
    ])

    assert Session.dump(session) == before
  end

  test "features that are no numbers do not spoil a session" do
    backbone = Mamba.random(layers: 1, width: 4, backend: :cpu)
    session = Session.new(backbone)
    row = fn bits -> Tensor.new(<<0::96, bits::native-32>>, :f32, {4}) end
    Session.step(session, row.(0x3F800000))
    before = Session.dump(session)
    features = fn bits -> {:argument, "features", fn -> Session.step(session, row.(bits)) end} end
    two = %{row.(0x7FC00000) | shape: {1, 4}}
    zeros = %{row.(0) | shape: {1, 4}}

    refused([
      features.(0x7FC00000),
      features.(0x7F800000),
      features.(0xFF800000),
      {:argument, "features", fn -> Session.prefill(session, two) end},
      {:shape, "features", fn -> Session.prefill(session, %{two | shape: {1, 1, 4}}) end},
      {:argument, "input", fn -> Session.step([session, Session.new(backbone)], zeros) end}
    ])

    assert Session.dump(session) == before
  end

  test "options of a stream that mean nothing, when it is made" do
    model = model()
    bytes = Mamba.random(layers: 1, width: 16, vocabulary: 256, backend: :cpu)
    generate = fn options -> fn -> Mamba.generate(model, [1], options) end end
    after_text = fn options -> fn -> Mamba.generate(bytes, "Hi", options) end end
    prompt = fn prompt -> {:argument, "prompt", fn -> Mamba.generate(model, prompt) end} end

    refused([
      {:argument, "model", fn -> Mamba.generate(nil, [1]) end},
      {:argument, "model", fn -> Mamba.generate(model(backbone: true), [1]) end},
      prompt.([]),
      prompt.(nil),
      prompt.([1 | 2]),
      prompt.([37]),
      prompt.([-1]),
      prompt.([[1], 2]),
      prompt.([[1], [37]]),
      prompt.([[1], []]),
      prompt.("text"),
      {:argument, "prompt", fn -> Mamba.generate(bytes, "") end},
      {:option, "options", generate.(:greedy)},
      {:option, "options", generate.([1])},
      {:option, "max_tokens", generate.(max_tokens: -1)},
      {:option, "max_tokens", generate.(max_tokens: "5")},
      {:option, "max_tokens", generate.(max_tokens: 1.5)},
      {:option, "temperature", generate.(temperature: -1)},
      {:option, "stop", generate.(stop: ["text"])},
      {:option, "stop", generate.(stop: [1 | 2])},
      {:option, "stop", generate.(stop: :end)},
      {:option, "stop", after_text.(stop: ["a", :b])},
      {:option, "stop", after_text.(stop: [-1])},
      {:option, "top_k", generate.(top_k: 0)},
      {:option, "top_p", generate.(top_p: 0)},
      {:option, "heat", generate.(heat: 1)}
    ])

    for {name, value} <- [
          temperature: "hot",
          temperature: :nan,
          temperature: @huge,
          top_k: -1,
          top_k: 1.5,
          top_k: @huge,
          top_p: "all",
          top_p: @huge,
          seed: -1,
          seed: @huge,
          seed: "seed"
        ] do
      for call <- [
            generate.([{name, value}]),
            fn -> Session.next(Session.new(model), 1, [{name, value}]) end
          ] do
        assert %Error{kind: :option} = error = catch_error(call.())
        assert Exception.message(error) =~ to_string(name)
      end
    end

    assert model |> Mamba.generate([1], max_tokens: 0) |> Enum.to_list() == []
    assert bytes |> Mamba.generate("Hi", max_tokens: 2, stop: "no") |> Enum.to_list() |> is_list()
  end

  test "a session goes on when nobody holds its model any more" do
    session = Session.new(model())
    :erlang.garbage_collect()
    assert %Tensor{shape: {37}} = Session.step(session, 1)
    restored = Session.restore(model(), Session.dump(session))
    assert Session.length(restored) == 1
  end

  test "tokenizers take texts and tokens" do
    bytes = Tokenizer.bytes()
    assert Tokenizer.token(bytes, <<200>>) == 200
    assert Tokenizer.token(bytes, "ab") == nil

    refused([
      {:argument, "path", fn -> Tokenizer.open(:file) end},
      {:argument, "path", fn -> Tokenizer.open("") end},
      {:argument, "path", fn -> Tokenizer.open(<<255>>) end},
      {:file, "/nowhere", fn -> Tokenizer.open("/nowhere") end},
      {:argument, "text", fn -> Tokenizer.encode(bytes, ~c"text") end},
      {:argument, "text", fn -> Tokenizer.encode(bytes, nil) end},
      {:argument, "text", fn -> Tokenizer.token(bytes, :eos) end},
      {:argument, "tokens", fn -> Tokenizer.decode(bytes, 1..3) end},
      {:argument, "tokens", fn -> Tokenizer.decode(bytes, [1 | 2]) end},
      {:argument, "tokens", fn -> Tokenizer.decode(bytes, [256]) end},
      {:argument, "tokens", fn -> Tokenizer.decode(bytes, [@huge]) end},
      {:argument, "tokens", fn -> Tokenizer.decode(bytes, "text") end},
      {:argument, "tokens", fn -> [1.5] |> Tokenizer.decode_stream(bytes) |> Enum.to_list() end},
      {:argument, "tokenizer", fn -> Tokenizer.encode(nil, "text") end},
      {:argument, "tokenizer", fn -> Tokenizer.decode(:bytes, [1]) end},
      {:argument, "tokenizer", fn -> Tokenizer.token(%{}, "a") end},
      {:argument, "tokenizer", fn -> Tokenizer.decode_stream([1], nil) end}
    ])
  end
end
