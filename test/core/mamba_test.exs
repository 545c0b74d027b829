defmodule Sidewinder.MambaTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Error, Mamba, Safetensors, Tensor, Tokenizer}
  alias Sidewinder.Mamba.Session

  @golden Path.expand("../golden/mamba", __DIR__)
  @model Path.join(@golden, "model.safetensors")

  defp model(options \\ []), do: Mamba.load(@golden, [backend: :cpu] ++ options)

  defp expected do
    %{"tokens" => tokens, "logits" => logits} =
      Safetensors.read(Path.join(@golden, "expected.safetensors"))

    {tokens |> Tensor.to_list() |> Enum.chunk_every(17), logits}
  end

  defp close(got, expected, tolerance) do
    for {a, b} <- Enum.zip(Tensor.to_list(got), Tensor.to_list(expected)),
        do: assert_in_delta(a, b, tolerance)
  end

  # Row `t` of sequence `b` of logits of f64.
  defp row(%{shape: {_batch, length, width}, data: data}, b, t),
    do: Tensor.new(binary_part(data, 8 * (b * length + t) * width, 8 * width), :f64, {width})

  test "loads what the published models' files say" do
    model = model()
    assert inspect(model) == "#Sidewinder.Mamba<3 layers of 20, vocabulary 37, f32>"
    assert %{inner: 40, state: 5, rank: 3, conv: 4, eps: 1.0e-5} = model.config
    assert model(type: :bf16).type == :bf16
    assert Mamba.load(@model, backend: :cpu, copy: true).config == model.config
  end

  test "logits agree with the independent implementation" do
    {tokens, logits} = expected()
    close(Mamba.forward(model(), tokens), logits, 1.0e-4)
    close(Mamba.forward(model(type: :f64), tokens), logits, 1.0e-12)

    for threads <- [1, 2],
        do: close(Mamba.forward(model(threads: threads), tokens), logits, 1.0e-4)
  end

  test "prefill and steps equal one pass, each session by itself or all of them at once" do
    {[first, second], logits} = expected()
    model = model()
    [a, b, c] = for _ <- 1..3, do: Session.new(model)
    close(Session.prefill(a, Enum.take(first, 4), logits: true), row(logits, 0, 3), 1.0e-4)
    assert Session.prefill(b, Enum.take(second, 4)) == :ok

    for t <- 4..16 do
      tokens = [Enum.at(first, t), Enum.at(second, t)]
      both = Session.step([a, b], tokens)
      assert both.shape == {2, 37}

      close(
        both,
        %{both | data: row(logits, 0, t).data <> row(logits, 1, t).data, type: :f64},
        1.0e-4
      )
    end

    for {token, t} <- Enum.with_index(first),
        do: close(Session.step(c, token), row(logits, 0, t), 1.0e-4)

    assert Session.length(a) == 17 and Session.length(c) == 17
  end

  test "a backbone takes features, frame by frame or at once" do
    backbone = Mamba.random(layers: 2, width: 16, backend: :cpu)
    values = for i <- 1..(6 * 16), do: :math.sin(i)
    features = Tensor.from_list(values, :f32, {1, 6, 16})
    whole = Mamba.forward(backbone, features)
    assert whole.shape == {1, 6, 16}
    session = Session.new(backbone)
    frames = for frame <- Enum.chunk_every(values, 16), do: Tensor.from_list(frame, :f32, {16})
    steps = for frame <- frames, do: Session.step(session, frame)
    close(Tensor.new(Enum.map_join(steps, & &1.data), :f32, {6, 16}), whole, 1.0e-5)
    other = Session.new(backbone)
    last = Session.prefill(other, Tensor.from_list(values, :f32, {6, 16}), logits: true)
    close(last, List.last(steps), 1.0e-5)
    assert_raise Error, ~r/backbone/, fn -> Session.step(session, 1) end
  end

  test "forks, dumps and resets" do
    model = model()
    session = Session.new(model)
    fresh = Session.dump(session)
    Session.prefill(session, [1, 2, 3])
    fork = Session.fork(session)
    restored = Session.restore(model(), Session.dump(session))
    logits = Session.step(session, 4)
    assert Session.step(fork, 4) == logits
    assert Session.step(restored, 4) == logits
    assert Session.step(fork, 5) != Session.step(session, 6)
    Session.reset(session)
    assert Session.dump(session) == fresh
    assert %Error{kind: :argument} = catch_error(Session.restore(model, "nothing"))
    assert %Error{kind: :argument} = catch_error(Session.restore(model(type: :f16), fresh))
  end

  test "200 sessions of 200 processes do not disturb each other" do
    {[tokens | _], logits} = expected()
    model = model()

    1..200
    |> Task.async_stream(
      fn i ->
        session = Session.new(model)
        count = rem(i, 17) + 1
        for token <- Enum.take(tokens, count - 1), do: Session.step(session, token)
        {count, Session.step(session, Enum.at(tokens, count - 1))}
      end,
      max_concurrency: 200,
      timeout: 60_000
    )
    |> Enum.each(fn {:ok, {count, last}} -> close(last, row(logits, 0, count - 1), 1.0e-4) end)
  end

  test "sessions stepped from many processes at once count every step" do
    session = Session.new(model())
    tasks = for i <- 1..20, do: Task.async(fn -> for _ <- 1..10, do: Session.step(session, i) end)
    Task.await_many(tasks, 60_000)
    assert Session.length(session) == 200
  end

  test "a session outlives the process that made it, and callers may be killed" do
    model = model()
    session = Task.await(Task.async(fn -> Session.new(model) end), :infinity)

    for _ <- 1..20 do
      pid = spawn(fn -> for _ <- Stream.cycle([1]), do: Session.step(session, 1) end)
      Process.sleep(2)
      Process.exit(pid, :kill)
    end

    length = Session.length(session)
    assert %Tensor{shape: {37}} = Session.step(session, 1)
    assert Session.length(session) > length
  end

  test "next chooses what the logits of a step say, alone or together" do
    model = model()
    session = Session.new(model)
    Session.prefill(session, [1, 2, 3])
    logits = session |> Session.fork() |> Session.step(4) |> Tensor.to_list()
    {_, largest} = logits |> Enum.with_index() |> Enum.max()
    assert session |> Session.fork() |> Session.next(4) == largest
    options = [temperature: 3.0, seed: 9, top_k: 30]
    forks = for _ <- 1..10, do: Session.fork(session)
    [token | _] = tokens = Session.next(forks, List.duplicate(4, 10), options)
    assert tokens == List.duplicate(token, 10)
    seeds = for seed <- 1..10, do: [temperature: 3.0, seed: seed]
    forks = for _ <- 1..10, do: Session.fork(session)
    assert forks |> Session.next(List.duplicate(4, 10), seeds) |> Enum.uniq() |> length() > 2

    for wrong <- [
          fn -> Session.next(session, 4, top_k: 0) end,
          fn -> Session.next(session, 4, heat: 1) end,
          fn -> Session.next([session], [4], [[], []]) end,
          fn -> Session.next([session], [1, 2]) end,
          fn -> Session.next(:none, 4) end
        ],
        do: assert(%Error{} = catch_error(wrong.()))

    assert Session.length(session) == 3
  end

  describe "generate" do
    test "takes the most probable token by default" do
      model = model()
      tokens = model |> Mamba.generate([1, 2, 3], max_tokens: 10) |> Enum.to_list()

      Enum.reduce(tokens, [1, 2, 3], fn token, before ->
        %{shape: {1, length, width}} = logits = Mamba.forward(model, [before])
        last = logits |> Tensor.to_list() |> Enum.drop((length - 1) * width)
        assert Enum.at(last, token) == Enum.max(last)
        before ++ [token]
      end)
    end

    test "draws as the seed says" do
      draw = fn seed ->
        model()
        |> Mamba.generate([1], temperature: 1, seed: seed, max_tokens: 20)
        |> Enum.to_list()
      end

      assert draw.(1) == draw.(1)
      assert draw.(1) != draw.(2)
      assert length(draw.(3)) == 20
    end

    test "is lazy, and stops at tokens" do
      model = model()
      stream = Mamba.generate(model, [1, 2], temperature: 2.0, seed: 5, max_tokens: 40, stop: [])
      [a, b, c | _] = tokens = Enum.to_list(stream)
      assert Enum.take(stream, 2) == [a, b]

      stopped =
        Mamba.generate(model, [1, 2], temperature: 2.0, seed: 5, max_tokens: 40, stop: [c])

      assert Enum.to_list(stopped) == Enum.take_while(tokens, &(&1 != c))
    end

    test "gives texts after texts, whole characters, up to a stop" do
      bytes = Mamba.random(layers: 1, width: 16, vocabulary: 256, backend: :cpu)
      options = [temperature: 1.0, seed: 3, max_tokens: 300]
      pieces = bytes |> Mamba.generate("Hi", options) |> Enum.to_list()
      tokens = bytes |> Mamba.generate([?H, ?i], options) |> Enum.to_list()
      text = Enum.join(pieces)
      assert Enum.all?(pieces, &String.valid?/1)

      whole =
        for c <- String.codepoints(Tokenizer.decode(Tokenizer.bytes(), tokens)),
            String.valid?(c),
            do: c

      assert String.replace(text, "\uFFFD", "") == Enum.join(whole)
      stop = binary_part(text, 100, 3)
      {at, _} = :binary.match(text, stop)
      stopped = bytes |> Mamba.generate("Hi", [stop: [stop]] ++ options) |> Enum.join()
      assert stopped == binary_part(text, 0, at)
    end

    test "refuses what is no prompt and no option at once" do
      model = model()
      wrong = &catch_error(Mamba.generate(model, &1, &2)).kind
      assert wrong.([], []) == :argument
      assert wrong.("text", []) == :argument
      assert wrong.([1], temperature: -1) == :option
      assert wrong.([1], top_k: 0) == :option
      assert wrong.([1], top_p: 2) == :option
      assert wrong.([1], heat: 1) == :option
      assert wrong.([1], backend: :cpu) == :option
    end
  end

  test "wrong calls are errors, and change nothing" do
    model = model()
    session = Session.new(model)
    Session.prefill(session, [1, 2])
    before = Session.dump(session)

    for wrong <- [
          fn -> Session.step(session, 37) end,
          fn -> Session.step(session, -1) end,
          fn -> Session.step(session, "a") end,
          fn -> Session.step([session, session], [1, 2]) end,
          fn -> Session.step([session, Session.new(model)], [1]) end,
          fn -> Session.step([session, Session.new(model())], [1, 2]) end,
          fn -> Session.step([], [1]) end,
          fn -> Session.prefill(session, [1, 99]) end,
          fn ->
            Session.prefill(session, [])
            |> then(fn :ok -> Session.prefill(session, [], logits: true) end)
          end,
          fn -> Mamba.forward(model, [[1, 2], [3]]) end,
          fn -> Mamba.forward(model, Tensor.from_list([1], :f32, {1, 1, 1})) end,
          fn -> Mamba.load(@golden, layers: 3) end,
          fn -> Mamba.load(@golden, type: :u8) end,
          fn -> Mamba.load(@golden, backend: :nx) end
        ] do
      assert %Error{} = catch_error(wrong.())
    end

    assert Session.dump(session) == before
  end

  @tag :tmp_dir
  test "what was saved is loaded bit by bit", %{tmp_dir: folder} do
    head = Tensor.from_list(for(i <- 1..(37 * 20), do: i / 1000), :f32, {37, 20})
    untied = Map.put(Safetensors.read(@model), "lm_head.weight", head)
    config = %{hidden_size: 20, num_hidden_layers: 3, vocab_size: 37, intermediate_size: 40}
    config = Map.merge(config, %{state_size: 5, time_step_rank: 3, layer_norm_epsilon: 0.003})
    assert Mamba.tensors(model()) == Safetensors.read(@model)

    for {model, i} <-
          Enum.with_index([
            model(),
            model(type: :bf16),
            model(backbone: true),
            Mamba.new(config, untied, backend: :cpu)
          ]) do
      path = Path.join([folder, "new", "#{i}"])
      assert Mamba.save(model, path) == :ok
      assert Enum.sort(File.ls!(path)) == ["config.json", "model.safetensors"]
      again = Mamba.load(path, backend: :cpu)
      assert {again.config, again.type} == {model.config, model.type}
      assert Mamba.tensors(again) == Mamba.tensors(model)
      # In place of the files that it has mapped.
      Mamba.save(again, path)
      assert Mamba.tensors(again) == Mamba.tensors(Mamba.load(path, backend: :cpu))
    end

    file = Path.join(folder, "file")
    File.write!(file, "")
    assert %Error{kind: :file} = catch_error(Mamba.save(model(), Path.join(file, "folder")))
    File.write!(Path.join(folder, "model.safetensors.index.json"), "{}")
    assert %Error{kind: :file} = catch_error(Mamba.save(model(), folder))
  end

  @tag :tmp_dir
  test "checkpoints that are no models tell all that is wrong", %{tmp_dir: folder} do
    tensors = Safetensors.read(@model)
    file = Path.join(folder, "model.safetensors")

    wrong =
      tensors
      |> Map.delete("backbone.norm_f.weight")
      |> Map.put("extra", tensors["backbone.norm_f.weight"])

    Safetensors.write(file, wrong)
    File.cp!(Path.join(@golden, "config.json"), Path.join(folder, "config.json"))
    error = catch_error(Mamba.load(folder, backend: :cpu))
    assert %Error{kind: :file} = error
    assert Exception.message(error) =~ "no `backbone.norm_f.weight`"
    assert Exception.message(error) =~ "`extra`, which no Mamba model has"

    whole = File.read!(@model)

    for size <- [0, 5, 100, div(byte_size(whole), 2), byte_size(whole) - 1] do
      File.write!(file, binary_part(whole, 0, size))
      assert %Error{kind: :file} = catch_error(Mamba.load(folder, backend: :cpu))
    end

    assert %Error{kind: :file} = catch_error(Mamba.load(Path.join(folder, "none")))
  end
end
