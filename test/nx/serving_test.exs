defmodule Sidewinder.ServingTest do
  # It starts processes by name, and a node.
  use ExUnit.Case, async: false

  alias Sidewinder.{Error, Mamba, NxTest}

  @golden Path.expand("../golden/mamba", __DIR__)
  @scripted Path.expand("../golden/scripted", __DIR__)

  # There is no Sidewinder.Mamba in pure Nx.
  @moduletag skip: NxTest.Scans.no_library()

  @drawn [temperature: 1.5, top_k: 30, top_p: 0.95]

  defp model, do: Mamba.load(@golden, backend: :cpu, threads: 1)
  defp bytes, do: Mamba.random(layers: 1, width: 16, vocabulary: 256, backend: :cpu, threads: 1)

  defp generate(model, prompt, options),
    do: model |> Mamba.generate(prompt, options) |> Enum.to_list()

  defp start(serving, options \\ []) do
    name = :"serving_#{System.unique_integer([:positive])}"
    options = Keyword.merge([serving: serving, name: name, batch_timeout: 20], options)
    start_supervised!({Nx.Serving, options})
    name
  end

  # A message when a batch is done.
  defp told_of_batches do
    event = [:nx, :serving, :execute, :stop]
    :telemetry.attach("batches", event, &__MODULE__.tell/4, self())
    on_exit(fn -> :telemetry.detach("batches") end)
  end

  def tell(_event, _measured, _metadata, pid), do: send(pid, :batch)

  # A message with the model of each step.
  defp told_of_models do
    :telemetry.attach("models", [:sidewinder, :step, :stop], &__MODULE__.tell_model/4, self())
    on_exit(fn -> :telemetry.detach("models") end)
  end

  def tell_model(_event, _measured, metadata, pid), do: send(pid, {:stepped, metadata.model})

  defp models_told(told \\ MapSet.new()) do
    receive do
      {:stepped, model} -> models_told(MapSet.put(told, model))
    after
      0 -> told
    end
  end

  defp ask_all(name, requests) do
    requests
    |> Enum.map(&Task.async(fn -> name |> Nx.Serving.batched_run(&1) |> whole() end))
    |> Task.await_many(60_000)
  end

  defp whole(answer) when is_function(answer), do: Enum.to_list(answer)
  defp whole(%Stream{} = answer), do: Enum.to_list(answer)
  defp whole(answer), do: answer

  test "gives what generate gives, by itself" do
    serving = Mamba.serving(model(), [max_tokens: 12] ++ @drawn)
    options = [max_tokens: 12, seed: 7] ++ @drawn
    expected = generate(model(), [1, 2, 3], options)
    assert Nx.Serving.run(serving, {[1, 2, 3], seed: 7}) == expected

    assert Nx.Serving.run(serving, [{[1, 2, 3], seed: 7}, {[4], seed: 8, max_tokens: 5}]) ==
             [expected, generate(model(), [4], Keyword.merge(options, seed: 8, max_tokens: 5))]

    greedy = Mamba.serving(model(), max_tokens: 6)
    assert Nx.Serving.run(greedy, [5, 6]) == generate(model(), [5, 6], max_tokens: 6)
    # Without a seed each draws by its own.
    [a | _] = all = Nx.Serving.run(serving, List.duplicate([1, 2], 5))
    assert Enum.any?(all, &(&1 != a))
  end

  test "gives what generate gives with models of every kind" do
    for kind <- ~w(mamba2 mamba2_groups falcon_mamba) do
      model = Mamba.load(Path.expand("../golden/#{kind}", __DIR__), backend: :cpu, threads: 1)
      options = [max_tokens: 10] ++ @drawn
      requests = for i <- 1..3, do: {Enum.to_list(1..i), seed: i, max_tokens: 11 - i}
      expected = for {prompt, own} <- requests, do: generate(model, prompt, own ++ options)
      assert Nx.Serving.run(Mamba.serving(model, options), requests) == expected

      name = start(Mamba.serving(model, [stream: true] ++ options), batch_size: 3)
      assert ask_all(name, requests) == expected
    end
  end

  test "several callers are one batch, each with its own prompt and options" do
    model = model()
    told_of_batches()
    serving = Mamba.serving(model, [max_tokens: 20] ++ @drawn)
    name = start(serving, batch_size: 8, batch_timeout: 5000)

    requests =
      for i <- 1..8,
          do: {Enum.to_list(i..(2 * i)), seed: i, temperature: 0.3 * i, max_tokens: 20 - i}

    answers = ask_all(name, requests)

    assert answers ==
             for(
               {prompt, own} <- requests,
               do: generate(model, prompt, Keyword.merge(@drawn, own))
             )

    assert_received :batch
    refute_received :batch
  end

  test "several models share the requests under one name" do
    models = for threads <- [1, 2], do: Mamba.load(@golden, backend: :cpu, threads: threads)

    for stream <- [false, true] do
      serving = Mamba.serving(models, [max_tokens: 12, stream: stream] ++ @drawn)
      name = start(serving, partitions: true, batch_size: 1)
      requests = for i <- 1..16, do: {[i, i + 1], seed: i}

      expected =
        for {prompt, own} <- requests,
            do: generate(hd(models), prompt, [max_tokens: 12] ++ @drawn ++ own)

      told_of_models()
      assert ask_all(name, requests) == expected
      assert MapSet.size(models_told()) == 2
      :telemetry.detach("models")
    end
  end

  test "several models need partitions, and must be copies" do
    Process.flag(:trap_exit, true)
    copies = [model(), model()]

    serving = Mamba.serving(copies)
    assert {:error, reason} = Nx.Serving.start_link(serving: serving, name: :no_partitions)
    assert inspect(reason) =~ "true, where a serving has several models"
    assert %Error{argument: "models"} = catch_error(Mamba.serving([model(), bytes()]))
    assert %Error{argument: "model"} = catch_error(Mamba.serving([]))
    assert %Error{argument: "model"} = catch_error(Mamba.serving(:model))
  end

  test "texts end at stops, of tokens and of texts" do
    model = bytes()
    options = [max_tokens: 60, temperature: 1.0, seed: 3]
    text = model |> generate("Hi", options) |> Enum.join()
    [token | _] = Enum.drop(generate(model, [?H, ?i], options), 20)
    stop = binary_part(text, 30, 2)
    name = start(Mamba.serving(model, options), batch_size: 4)
    requests = for stop <- [nil, [stop], [token], [stop, token]], do: {"Hi", stop: stop}
    answers = ask_all(name, requests)

    assert answers ==
             for(
               {_, own} <- requests,
               do: model |> generate("Hi", Keyword.merge(options, own)) |> Enum.join()
             )

    assert [^text, stopped | _] = answers
    assert byte_size(stopped) <= 30

    assert [{"Hi", options}, {[?H, ?i], options}] |> then(&ask_all(name, [&1])) ==
             [[text, generate(model, [?H, ?i], options)]]
  end

  test "texts of a tokenizer are those that generate gives, up to their ends" do
    requests =
      for own <- [
            [],
            [ignore_eos: true],
            [ignore_eos: true, stop: "<|im_end|>"],
            [ignore_eos: true, stop: "ldTh"],
            [ignore_eos: true, stop: " are"],
            [add_bos: true],
            [add_bos: false]
          ],
          do: {"Hello", own}

    for name <- ["chat_eos", "llama_space"], stream <- [false, true] do
      model = Mamba.load(Path.join(@scripted, name), backend: :cpu, threads: 1)
      serving = Mamba.serving(model, max_tokens: 6, stream: stream)
      texts = for request <- requests, do: serving |> Nx.Serving.run(request) |> joined()

      assert texts ==
               for(
                 {prompt, own} <- requests,
                 do: model |> generate(prompt, [max_tokens: 6] ++ own) |> Enum.join()
               )

      assert String.starts_with?(hd(texts), " world")
    end
  end

  test "stops of a serving that are texts leave lists of tokens alone" do
    stopping = Mamba.serving(model(), max_tokens: 4, stop: ["\n", 36])
    assert Nx.Serving.run(stopping, [1]) == generate(model(), [1], max_tokens: 4, stop: [36])
    assert %Error{kind: :option} = catch_error(Nx.Serving.run(stopping, {[1], stop: ["a"]}))
    assert %Error{kind: :option} = catch_error(Mamba.serving(model(), stop: [37]))
  end

  defp joined(text) when is_binary(text), do: text
  defp joined(pieces), do: Enum.join(pieces)

  test "streams piece by piece, and leaves nothing in the mailbox" do
    model = bytes()
    options = [max_tokens: 40, temperature: 1.0]
    name = start(Mamba.serving(model, [stream: true] ++ options), batch_size: 3)
    text = model |> generate("Hi", [seed: 1] ++ options) |> Enum.join()

    requests = [
      {"Hi", seed: 1},
      {[1, 2], seed: 2},
      {"Hi", seed: 1, stop: binary_part(text, 20, 2)}
    ]

    expected =
      for {prompt, own} <- requests, do: generate(model, prompt, Keyword.merge(options, own))

    assert ask_all(name, requests) == expected
    stream = Nx.Serving.batched_run(name, List.last(requests))
    other = Task.async(fn -> name |> Nx.Serving.batched_run("Hi") |> Enum.join() end)
    assert Enum.join(stream) == Enum.join(List.last(expected))
    Task.await(other, :infinity)
    assert Process.info(self(), :message_queue_len) == {:message_queue_len, 0}
    serving = Mamba.serving(model, [stream: true] ++ options)
    assert serving |> Nx.Serving.run({"Hi", seed: 1}) |> Enum.join() == text
  end

  test "streams before all is done" do
    told_of_batches()
    name = start(Mamba.serving(model(), stream: true, max_tokens: 3000))
    expected = generate(model(), [1, 2], max_tokens: 1)
    test = self()

    caller =
      spawn_link(fn ->
        send(test, {:first, name |> Nx.Serving.batched_run([1, 2]) |> Enum.take(1)})
        Process.sleep(:infinity)
      end)

    assert_receive {:first, ^expected}, 60_000
    refute_received :batch
    assert_receive :batch, 60_000
    end_of(caller)
  end

  defp end_of(process) do
    Process.unlink(process)
    Process.exit(process, :kill)
  end

  test "a request ends with its caller, and those beside it go on" do
    model = model()
    told_of_batches()
    serving = Mamba.serving(model, max_tokens: 1_000_000)
    name = start(serving, batch_size: 2, batch_timeout: 60_000)
    caller = spawn_link(fn -> Nx.Serving.batched_run(name, [1, 2]) end)
    other = Task.async(fn -> Nx.Serving.batched_run(name, {[3], max_tokens: 300}) end)
    refute_receive :batch, 500
    end_of(caller)
    assert Task.await(other, 60_000) == generate(model, [3], max_tokens: 300)
    assert_receive :batch, 60_000
  end

  test "wrong requests are told to who makes them, and hurt nobody else" do
    name = start(Mamba.serving(model(), max_tokens: 5, max_prompt: 10), batch_size: 2)
    other = Task.async(fn -> Nx.Serving.batched_run(name, {[1], seed: 1}) end)

    for {wrong, kind} <- [
          {[], :argument},
          {"text", :argument},
          {:prompt, :argument},
          {[37], :argument},
          {[-1], :argument},
          {Enum.to_list(0..10), :argument},
          {{[1], temperature: -1}, :option},
          {{[1], heat: 1}, :option},
          {{[1], max_tokens: 6}, :option},
          {{[1], max_tokens: 0}, :option},
          {{[1], :seed}, :argument},
          {{[1], stop: List.duplicate(1, 1200)}, :argument},
          {{[1], stop: [37]}, :option}
        ] do
      assert %Error{kind: ^kind} = catch_error(Nx.Serving.batched_run(name, wrong))
    end

    assert Task.await(other, :infinity) == generate(model(), [1], max_tokens: 5, seed: 1)
    assert %Error{kind: :option} = catch_error(Mamba.serving(model(), max_tokens: 0))
    assert %Error{kind: :option} = catch_error(Mamba.serving(model(), heat: 1))
    assert %Error{kind: :option} = catch_error(Mamba.serving(model(), stream: 1))
    backbone = Mamba.load(@golden, backend: :cpu, backbone: true)
    assert %Error{kind: :argument} = catch_error(Mamba.serving(backbone))
    streaming = Mamba.serving(model(), stream: true)
    assert %Error{kind: :argument} = catch_error(Nx.Serving.run(streaming, [[1], [2]]))
  end

  @tag :capture_log
  test "serves the callers on another node" do
    named? = Node.alive?()
    on_exit(fn -> named? || Node.stop() end)
    {peer, node} = NxTest.Served.start_node!()
    options = [max_tokens: 15] ++ @drawn

    NxTest.Served.serve!(node, @golden,
      served_whole: options,
      served_streams: [stream: true] ++ options
    )

    assert Process.whereis(:served_whole) == nil
    model = model()
    requests = for i <- 1..4, do: {[i, i + 1], seed: i}
    expected = for {prompt, own} <- requests, do: generate(model, prompt, own ++ options)
    assert ask_all(:served_whole, requests) == expected
    assert ask_all(:served_streams, requests) == expected

    assert {{%Error{kind: :argument}, _}, _} =
             catch_exit(Nx.Serving.batched_run(:served_whole, [37]))

    Process.flag(:trap_exit, true)
    :peer.stop(peer)
    {reason, _} = catch_exit(Nx.Serving.batched_run(:served_whole, [1]))
    # Whether its end has been told yet.
    assert reason in [:noproc, :noconnection]
  end
end
