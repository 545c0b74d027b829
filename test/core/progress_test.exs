defmodule Sidewinder.ProgressTest do
  use ExUnit.Case, async: true

  alias Sidewinder.{Cancellation, Error, GGUF, Mamba, Progress, Quantized, Safetensors, Tensor}
  alias Sidewinder.Mamba.{Session, Trainer}

  # A prompt takes about a second on one thread, so that a call that goes on after its end is seen.
  @layers 60
  @tokens for i <- 1..4096, do: rem(i * i + 3 * i, 11)

  defp model(options \\ []) do
    [layers: 3, width: 32, vocabulary: 11, backend: :cpu, threads: 1]
    |> Keyword.merge(options)
    |> Mamba.random()
  end

  defp cancelled(work) do
    assert %Error{kind: :cancelled} = error = assert_raise(Error, work)
    error
  end

  # The error of a call that is cancelled while it works. A call that was done before its cancellation is made again.
  defp ended(call, attempts \\ 50) when attempts > 0 do
    cancellation = Cancellation.new()
    call.(cancel: cancellation, progress: fn _ -> Cancellation.cancel(cancellation) end)
    ended(call, attempts - 1)
  rescue
    error in Error ->
      assert %{kind: :cancelled} = error
      error
  end

  # More bytes, and more numbers, than the native library takes at once.
  @rows 3
  @width 6_291_456
  defp large(type, bytes \\ 4) do
    data = :binary.copy(<<1::size(bytes)-unit(8)>>, @rows * @width)
    Tensor.new(data, type, {@rows, @width})
  end

  # A GGUF file of the tensor `w`.
  defp gguf(path, %Tensor{type: :f32, shape: {rows, width}, data: data}) do
    sizes = <<width::little-64, rows::little-64>>
    info = <<1::little-64, "w", 2::little-32, sizes::binary, 0::little-32, 0::little-64>>
    head = <<"GGUF", 3::little-32, 1::little-64, 0::little-64, info::binary>>
    File.write!(path, [head, :binary.copy(<<0>>, 96 - byte_size(head)), data])
  end

  # The reports in the mailbox, by stage in the order of their coming.
  defp reports(tag, reports \\ []) do
    receive do
      {:sidewinder_progress, ^tag, report} -> reports(tag, [report | reports])
    after
      0 -> reports |> Enum.reverse() |> Enum.chunk_by(& &1.stage)
    end
  end

  # They grow to all of the stage.
  defp assert_whole(reports, stage) do
    assert [%{stage: ^stage, done: 0, total: total} | _] = reports
    done = for report <- reports, do: report.done
    assert done == Enum.sort(Enum.uniq(done)) and List.last(done) == total
    assert Enum.all?(reports, &(&1.total == total))
    total
  end

  describe "progress" do
    test "of each call goes from nothing to all, to a process or to a function" do
      model = model()
      trainer = Trainer.new(model)

      for {stage, total, call} <- [
            {:forward, 4, &Mamba.forward(model, [[1, 2], [3, 4]], &1)},
            {:loss, 8, &Mamba.loss(model, Enum.take(@tokens, 1030), &1)},
            {:prefill, 4, &Session.prefill(Session.new(model), [1, 2, 3], &1)},
            {:train, 7, &Trainer.step(trainer, [[1, 2, 3], [4, 5, 6]], &1)}
          ] do
        call.(progress: self())
        assert [reports] = reports(self())
        assert assert_whole(reports, stage) == total
        test = self()

        # In the caller.
        call.(progress: &send(self(), {:sidewinder_progress, {test, :fun}, &1}))
        assert [^reports] = reports({test, :fun})
      end

      refute_received _
    end

    @tag :tmp_dir
    test "of loading has its stages", %{tmp_dir: folder} do
      model = model()
      Mamba.save(model, folder, progress: self())
      assert [write] = reports(self())
      bytes = for {_name, tensor} <- Mamba.tensors(model), do: byte_size(tensor.data)
      assert assert_whole(write, :write) == Enum.sum(bytes)
      Mamba.load(folder, copy: true, quantize: :q8_0, backend: :cpu, progress: self())
      assert [read, convert, quantize] = reports(self())
      bytes = File.stat!(Path.join(folder, "model.safetensors")).size
      assert assert_whole(read, :read) == bytes

      for {reports, stage} <- [{convert, :convert}, {quantize, :quantize}],
          do: assert(assert_whole(reports, stage) == 4)

      trainer = Trainer.new(model())

      for call <- [
            &model/1,
            &Trainer.model(trainer, &1),
            &Mamba.new(nil, Mamba.tensors(model()), [backend: :cpu] ++ &1)
          ] do
        call.(progress: self())
        assert [convert] = reports(self())
        assert_whole(convert, :convert)
      end
    end

    @tag :tmp_dir
    test "of quantized tensors that are read is theirs", %{tmp_dir: folder} do
      path = Path.join(folder, "q.safetensors")
      x = Tensor.from_list(Enum.to_list(-16..15), :f32, {1, 32})

      tensors = %{
        "a" => Quantized.quantize(x, :q8_0),
        "b" => Quantized.quantize(x, :ternary),
        "c" => x
      }

      Quantized.save!(path, tensors)
      assert Quantized.load!(path, :all, progress: self()) == tensors
      assert [reports] = reports(self())
      assert assert_whole(reports, :read) == 3
      Quantized.load!(path, ["a"], progress: &send(self(), {:heard, &1.done}))
      for done <- 0..1, do: assert_received({:heard, ^done})
      assert Quantized.load!(path, [], progress: self()) == %{}
      refute_received _

      cancellation = Cancellation.new()
      stop = &if(&1.done == 1, do: Cancellation.cancel(cancellation))
      load = &Quantized.load!(path, :all, &1)
      error = cancelled(fn -> load.(cancel: cancellation, progress: stop) end)
      assert %{argument: "read", got: "a cancellation after 2 of 3 parts"} = error

      for name <- [:progress, :cancel] do
        error = assert_raise Error, fn -> load.([{name, 1}]) end
        assert %{kind: :option, argument: argument} = error
        assert argument == to_string(name)
      end
    end

    @tag :tmp_dir
    test "of files is that of their bytes", %{tmp_dir: folder} do
      [path, gguf] = for name <- ["x.safetensors", "x.gguf"], do: Path.join(folder, name)
      x = large(:f32)
      small = Tensor.from_list([1, 2], :f32, {2})
      Safetensors.write(path, %{"w" => x, "b" => small}, progress: self())
      assert [reports] = reports(self())
      assert assert_whole(reports, :write) == byte_size(x.data) + 8
      assert length(reports) > 3
      assert Safetensors.read(path, :all, progress: self()) == %{"w" => x, "b" => small}
      assert [reports] = reports(self())
      assert assert_whole(reports, :read) == byte_size(x.data) + 8
      assert length(reports) > 3
      gguf(gguf, x)
      assert GGUF.load!(gguf, "w", progress: self()) == x
      assert [reports] = reports(self())
      assert assert_whole(reports, :read) == byte_size(x.data)
      assert length(reports) > 2
      Quantized.save!(path, %{"b" => small}, progress: &send(self(), {:heard, &1}))
      for done <- [0, 8], do: assert_received({:heard, %{stage: :write, done: ^done, total: 8}})
      refute_received _
    end

    test "of a matrix that is quantized, and back, is that of its numbers" do
      for {format, options, passes} <- [
            {:q8_0, [], 1},
            {:q4_0, [], 1},
            {:ternary, [], 2},
            {:ternary, [rule: :twn], 3},
            {:ternary, [rule: :threshold, threshold: 0], 1},
            {:ternary, [rule: :twn, per_row: true], 2}
          ],
          {x, several?} <- [
            {large(:bf16, 2), true},
            {Tensor.new(<<0::2048>>, :f32, {2, 32}), false}
          ] do
        where = [backend: :cpu]
        expected = Quantized.quantize(x, format, options ++ where)
        assert Quantized.quantize(x, format, [progress: self()] ++ options ++ where) == expected
        assert [reports] = reports(self())
        assert assert_whole(reports, :quantize) == passes * Tensor.elements(x.shape)
        assert length(reports) > if(several?, do: passes + 1, else: 1)
        floats = Quantized.dequantize(expected, where)
        heard = &send(self(), {:sidewinder_progress, :fun, &1})
        assert Quantized.dequantize(expected, [progress: heard] ++ where) == floats
        assert [reports] = reports(:fun)
        assert assert_whole(reports, :dequantize) == Tensor.elements(x.shape)
        assert length(reports) > if(several?, do: 2, else: 1)
      end

      refute_received _
    end

    test "of prompts is that of generating" do
      prompts = [[1, 2], [3]]
      tokens = Enum.to_list(Mamba.generate(model(), prompts, max_tokens: 3, progress: self()))
      assert length(tokens) == 6
      assert [reports] = reports(self())
      for one <- Enum.chunk_every(reports, 5), do: assert_whole(one, :prefill)
    end

    test "the answer is that of a call that nobody follows" do
      model = model()
      expected = Mamba.forward(model, [@tokens])
      cancellation = Cancellation.new()
      assert Mamba.forward(model, [@tokens], progress: self(), cancel: cancellation) == expected
      assert Mamba.forward(model, [@tokens], progress: fn _ -> :ok end) == expected
    end

    test "a function that raises ends the call, and leaves nothing" do
      session = Session.new(model(layers: @layers))
      test = self()

      heard = fn report ->
        send(test, {:heard, report.done})
        if report.done == 2, do: raise("enough")
      end

      assert_raise RuntimeError, "enough", fn ->
        Session.prefill(session, @tokens, progress: heard)
      end

      for done <- 0..2, do: assert_received({:heard, ^done})
      refute_received _
      assert Session.length(session) == 0
      assert catch_throw(Session.prefill(session, [1], progress: &throw(&1.done))) == 0
      refute_received _
    end

    test "errors are those of the call" do
      fun = fn _ -> :ok end
      error = assert_raise Error, fn -> Mamba.forward(model(), [[11]], progress: fun) end
      assert %{kind: :argument, argument: "tokens"} = error
      refute_received _
    end
  end

  describe "a cancellation" do
    test "that was made before ends every call at once" do
      model = model()
      trainer = Trainer.new(model)
      cancellation = Cancellation.new()
      assert Cancellation.cancel(cancellation) == :ok
      options = [cancel: cancellation, progress: self()]

      for call <- [
            fn -> Mamba.forward(model, [[1]], options) end,
            fn -> Mamba.loss(model, [1, 2], options) end,
            fn -> Session.prefill(Session.new(model), [1], options) end,
            fn -> Trainer.step(trainer, [[1, 2]], options) end,
            fn -> Trainer.model(trainer, options) end,
            fn -> Enum.to_list(Mamba.generate(model, [1], options)) end,
            fn -> model(options) end
          ],
          do: cancelled(call)

      refute_received _
      assert cancelled(fn -> Mamba.forward(model, [[1]], options) end).argument == "forward"
    end

    test "ends a long prompt at the layer at work, and the session is as it was" do
      model = model(layers: @layers)
      [session, other] = for _ <- 1..2, do: Session.new(model)
      for session <- [session, other], do: Session.prefill(session, [1, 2, 3])
      cancellation = Cancellation.new()
      options = [cancel: cancellation, progress: self()]
      task = Task.async(fn -> catch_error(Session.prefill(session, @tokens, options)) end)
      assert_receive {:sidewinder_progress, pid, %{done: 1, total: total}}, 60_000
      assert {pid, total} == {task.pid, @layers + 1}
      Cancellation.cancel(cancellation)
      assert %Error{kind: :cancelled, argument: "prefill"} = Task.await(task, 60_000)
      assert [reports] = reports(task.pid)
      assert List.last(reports).done < total

      assert Session.length(session) == 3
      assert Session.dump(session) == Session.dump(other)
      cancelled(fn -> Session.prefill(session, [4], options) end)
      assert Session.step(session, 4) == Session.step(other, 4)
    end

    test "ends a step of training, and the weights are as they were" do
      trainer = Trainer.new(model())
      before = Mamba.tensors(Trainer.model(trainer))
      cancellation = Cancellation.new()

      options = [
        cancel: cancellation,
        progress: &if(&1.done == 3, do: Cancellation.cancel(cancellation))
      ]

      cancelled(fn -> Trainer.step(trainer, [@tokens], options) end)
      assert Mamba.tensors(Trainer.model(trainer)) == before
      assert Trainer.step(trainer, [[1, 2, 3]]).loss > 0
    end

    @tag :tmp_dir
    test "ends reading, writing and quantizing, and leaves no file", %{tmp_dir: folder} do
      [path, gguf, absent] = for name <- ["x", "x.gguf", "y"], do: Path.join(folder, name)
      x = large(:f32)
      Safetensors.write(path, %{"w" => x})
      gguf(gguf, x)
      q = Quantized.quantize(x, :q4_0, backend: :cpu)
      cancelled = Cancellation.new()
      Cancellation.cancel(cancelled)

      for {stage, call} <- [
            {"read", &Safetensors.read(path, :all, &1)},
            {"read", &GGUF.load!(gguf, "w", &1)},
            {"write", &Safetensors.write(absent, %{"w" => x}, &1)},
            {"write", &Quantized.save!(absent, %{"w" => x}, &1)},
            {"quantize", &Quantized.quantize(x, :q8_0, [backend: :cpu] ++ &1)},
            {"quantize", &Quantized.quantize(x, :ternary, [backend: :cpu] ++ &1)},
            {"dequantize", &Quantized.dequantize(q, [backend: :cpu] ++ &1)}
          ] do
        error = cancelled(fn -> call.(cancel: cancelled, progress: self()) end)
        assert error.argument == stage
        assert error.got =~ "a cancellation after 0 of"
        assert ended(fn options -> call.(options) && File.rm(absent) end).argument == stage
        assert Enum.sort(File.ls!(folder)) == ["x", "x.gguf"]
      end

      error =
        cancelled(fn -> Mamba.save(model(), Path.join(folder, "model"), cancel: cancelled) end)

      assert error.argument == "write"
      assert File.ls!(Path.join(folder, "model")) == []
      refute_received _
    end

    test "ends a stream between its tokens" do
      cancellation = Cancellation.new()
      stream = Mamba.generate(model(), [1, 2], max_tokens: 50, cancel: cancellation)

      cancelled(fn ->
        for {token, i} <- Stream.with_index(stream) do
          send(self(), {:token, token})
          if i == 3, do: Cancellation.cancel(cancellation)
        end
      end)

      for _ <- 0..3, do: assert_received({:token, _})
      refute_received _
    end

    test "comes with the end of its owner, for calls of others" do
      owner = spawn(fn -> Process.sleep(:infinity) end)
      cancellation = Cancellation.new(owner)
      session = Session.new(model(layers: @layers))
      options = [cancel: cancellation, progress: self()]
      task = Task.async(fn -> catch_error(Session.prefill(session, @tokens, options)) end)
      assert_receive {:sidewinder_progress, _, %{done: 1}}, 60_000
      refute Cancellation.cancelled?(cancellation)
      Process.exit(owner, :kill)
      assert %Error{kind: :cancelled} = Task.await(task, 60_000)
      assert Cancellation.cancelled?(cancellation)
      assert [reports] = reports(task.pid)
      assert List.last(reports).done < @layers
    end

    test "of an owner that ended before, and of one that never ends" do
      {owner, monitor} = spawn_monitor(fn -> :ok end)
      assert_receive {:DOWN, ^monitor, _, _, _}
      assert Cancellation.cancelled?(Cancellation.new(owner))
      refute Cancellation.cancelled?(Cancellation.new(self()))
    end
  end

  describe "the end of the caller" do
    test "ends its call, whether it is followed by a process or by a function" do
      test = self()
      session = Session.new(model(layers: @layers))

      for progress <- [test, &send(test, {:sidewinder_progress, self(), &1})] do
        {caller, monitor} =
          spawn_monitor(fn -> Session.prefill(session, @tokens, progress: progress) end)

        assert_receive {:sidewinder_progress, ^caller, %{done: 1}}, 60_000
        Process.exit(caller, :kill)
        assert_receive {:DOWN, ^monitor, _, _, :killed}, 60_000
        # Waits for the call.
        assert Session.length(session) == 0
        assert [reports] = reports(caller)
        assert List.last(reports).done < @layers
      end

      assert %Tensor{shape: {11}} = Session.prefill(session, [1, 2], logits: true)
    end
  end

  # The files in a folder, when none is being written.
  defp written(folder) do
    files = File.ls!(folder)
    if Enum.any?(files, &String.starts_with?(&1, ".")), do: written(folder), else: files
  end

  # Attempts, because a file may be written before its caller is gone.
  defp killed(_folder, _x, 0), do: flunk("each file was written to its end")

  defp killed(folder, x, attempts) do
    test = self()
    path = Path.join(folder, "x")
    {pid, monitor} = spawn_monitor(fn -> Safetensors.write(path, %{"w" => x}, progress: test) end)
    assert_receive {:sidewinder_progress, ^pid, %{done: done}} when done > 0, 60_000
    Process.exit(pid, :kill)
    assert_receive {:DOWN, ^monitor, _, _, _}, 60_000

    if written(folder) != [] do
      File.rm!(path)
      killed(folder, x, attempts - 1)
    end
  end

  @tag :tmp_dir
  test "the end of the caller ends the writing of a file, which is not there then", context do
    killed(context.tmp_dir, large(:f32), 50)
  end

  test "other options and cancellations are refused" do
    model = model()

    for {name, value} <- [
          progress: :all,
          progress: fn -> :ok end,
          cancel: true,
          cancel: make_ref()
        ] do
      error = assert_raise Error, fn -> Mamba.forward(model, [[1]], [{name, value}]) end
      assert {error.kind, error.argument} == {:option, Atom.to_string(name)}
    end

    for call <- [
          &Mamba.forward(model, [[1]], &1),
          &Mamba.loss(model, [1, 2], &1),
          &Session.prefill(Session.new(model), [1], &1)
        ],
        do: assert(%Error{kind: :option} = catch_error(call.(cancle: nil)))

    x = Tensor.new(<<0::1024>>, :f32, {1, 32})
    q = Quantized.quantize(x, :q8_0)

    for call <- [
          &Quantized.quantize(x, :q8_0, &1),
          &Quantized.quantize(x, :ternary, &1),
          &Quantized.dequantize(q, &1),
          &Quantized.save!("none/none", %{"x" => x}, &1),
          &Mamba.save(model, "none/none", &1),
          &Safetensors.write("none/none", %{"x" => x}, &1),
          &Safetensors.read("none", ["x"], &1),
          &GGUF.load!("none", "x", &1)
        ],
        {name, value} <- [progress: :all, cancel: make_ref(), cancle: 1] do
      error = assert_raise Error, fn -> call.([{name, value}]) end
      assert {error.kind, error.argument} == {:option, Atom.to_string(name)}
    end

    assert %Error{argument: "owner"} = catch_error(Cancellation.new(:owner))
    assert %Error{argument: "cancellation"} = catch_error(Cancellation.cancel(make_ref()))
    assert Progress.percent(%{stage: :read, done: 0, total: 0}) == 0
  end
end
