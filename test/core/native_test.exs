defmodule Sidewinder.NativeTest do
  use ExUnit.Case, async: false

  import Bitwise
  import Sidewinder.Calls, only: [inputs: 1, pick: 1]
  alias Sidewinder.{Error, Native, Safetensors, Tensor}

  test "a panic becomes an error with its text and its place" do
    assert {:error, %{kind: :panic, got: got}} = Native.debug_panic("the sky falls")
    assert got =~ "the sky falls" and got =~ ".rs:"

    assert_raise Error, ~r/native library: a panic: the sky falls/, fn ->
      Error.unwrap!(Native.debug_panic("the sky falls"))
    end
  end

  test "a panic while the answer is encoded becomes an error" do
    assert {:error, %{kind: :panic, got: got}} = Native.debug_panic_in_encode()
    assert got =~ "in encode"
  end

  test "panics do not print, and later calls work" do
    assert ExUnit.CaptureIO.capture_io(:stderr, fn -> Native.debug_panic("quiet") end) == ""
    assert {:ok, %{levels: [_ | _]}} = Native.cpu_info()
  end

  test "tokens are whole numbers of 32 bits, as many as the shape says" do
    model = Sidewinder.Mamba.load("examples/models/novels", backend: :cpu)

    for tokens <- [<<1::32, 2>>, <<1::32>>, <<1::32, 2::32, 3::32>>] do
      assert {:error, %{kind: :size, argument: "tokens", got: got}} =
               Native.mamba_forward_cpu(model.ref, {tokens, [1, 2]}, {nil, nil, []})

      assert got == "#{byte_size(tokens)} bytes"
    end
  end

  test "every op says what it takes" do
    ops = Sidewinder.Ops.all()
    assert ["selective_scan", "selective_state_update"] -- Enum.map(ops, & &1.name) == []

    for op <- ops do
      assert op.about != "" and op.inputs != []
      for option <- op.options, do: assert(option.takes in ~w(flag pair integer float text))
    end
  end

  # {function, arguments that are right}; garbage is thrown at all but the hooks that do harm.
  defp functions do
    tensor = {:f32, {2}, <<0::64>>}
    inputs = for {name, t} <- inputs({1, 2, 3, 4}), do: {name, Tensor.to_native(t)}
    target = %{device: nil, level: nil, threads: 1}
    run = [:selective_scan, inputs, %{dt_softplus: true}, target]
    watch = {self(), :tag, []}
    loading = %{dtype: nil, backbone: false, copied: false, quantize: nil}

    [
      {:run_quick, run},
      {:run_cpu, run},
      {:run_io, run},
      {:run_watched_cpu, run ++ [watch]},
      {:buffer_from_host, [tensor, 0]},
      {:buffer_to_host, [tensor]},
      {:buffer_device, [tensor]},
      {:tensor_cast, [tensor, :f64]},
      {:safetensors_index, ["none"]},
      {:safetensors_read, ["none", ["x"], watch]},
      {:safetensors_metadata, ["none"]},
      {:safetensors_write, ["none/none", [{"x", tensor}], [{"format", "pt"}], watch]},
      {:safetensors_create, ["none/none", [{"x", :f32, {2}}], [{"format", "pt"}]]},
      {:json_merged, [["{}", "{}"]]},
      {:mamba_quantized_config, ["{}", ["w.q8_0"]]},
      {:mamba_files, ["none"]},
      {:mamba_load, ["none", loading, target, watch]},
      {:cancellation_new, [self()]},
      {:cancellation_cancel, [make_ref()]},
      {:mamba_told, [["w.q8_0"]]},
      {:safetensors_put, [make_ref(), "x", tensor]},
      {:tensor_difference, [tensor, tensor]},
      {:gguf_index, ["none"]},
      {:gguf_metadata, ["none"]},
      {:gguf_read, ["none", "x", watch]},
      {:debug_panic, ["text"]}
    ]
  end

  test "garbage in place of any argument or any part of one gives errors" do
    :rand.seed(:exsss, 7)

    for {function, arguments} <- functions(), _ <- 1..400 do
      assert_survives(function, for(_ <- arguments, do: garbage(3)))
      assert_survives(function, spoil(arguments))
    end
  end

  defp assert_survives(function, arguments) do
    case apply(Native, function, arguments) do
      {:ok, _} -> :ok
      {:error, fields} -> assert is_binary(Exception.message(struct!(Error, fields)))
    end
  rescue
    ArgumentError -> :ok
  end

  # Puts garbage in place of one random part of a term.
  defp spoil(term) when is_list(term) and term != [],
    do: List.update_at(term, at(length(term)), &spoil_or_go_on/1)

  defp spoil(term) when is_tuple(term) and term != {} do
    term |> Tuple.to_list() |> spoil() |> List.to_tuple()
  end

  defp spoil(%{} = map) when map_size(map) > 0 do
    key = map |> Map.keys() |> pick()

    if :rand.uniform() < 0.2,
      do: Map.put(map, garbage(0), 1),
      else: Map.update!(map, key, &spoil_or_go_on/1)
  end

  defp spoil(_), do: garbage(2)

  defp spoil_or_go_on(term), do: if(:rand.uniform() < 0.3, do: garbage(2), else: spoil(term))

  defp at(size), do: :rand.uniform(size) - 1

  defp garbage(depth) when depth > 0 do
    case :rand.uniform(8) do
      1 -> for _ <- 1..:rand.uniform(4), do: garbage(depth - 1)
      2 -> List.to_tuple(for _ <- 1..:rand.uniform(4), do: garbage(depth - 1))
      3 -> %{garbage(0) => garbage(depth - 1)}
      4 -> [1 | garbage(depth - 1)]
      _ -> garbage(0)
    end
  end

  defp garbage(0) do
    pick([
      nil,
      true,
      :x,
      :f32,
      :selective_scan,
      0,
      1,
      -1,
      3,
      1 <<< 31,
      1 <<< 62,
      1 <<< 63,
      1 <<< 64,
      -(1 <<< 63),
      1 <<< 200,
      0.0,
      -1.5e300,
      "",
      "none/x",
      "none/\0",
      <<0xFF, 0xFE>>,
      <<1::7>>,
      :binary.copy(<<0>>, 4097),
      [],
      {},
      %{},
      self(),
      make_ref(),
      &Function.identity/1
    ])
  end

  test "what is no tensor is refused, not left out of a file" do
    x = Tensor.from_list([1, 2], :f32, {2})

    for tensors <- [%{"x" => x, "y" => 3}, [{"x", x}, :y], [x: x], [{"x", x} | :y], x, 7],
        call <- [&Safetensors.encode/1, &Safetensors.write("never", &1)] do
      assert %Error{kind: :argument, argument: "tensors"} = catch_error(call.(tensors))
    end

    refute File.exists?("never")
  end

  test "random bytes and damaged files are refused" do
    path = Path.join(System.tmp_dir!(), "sidewinder-damaged-#{System.pid()}.safetensors")
    Safetensors.write(path, inputs({1, 2, 3, 4}))
    whole = File.read!(path)
    :rand.seed(:exsss, 3)

    for _ <- 1..300 do
      File.write!(path, damage(whole, :rand.uniform(3)))

      try do
        Safetensors.read(path)
      rescue
        error in Error -> assert error.kind in [:file, :dtype, :shape, :size]
      end
    end

    File.rm!(path)
  end

  defp damage(bytes, 1), do: binary_part(bytes, 0, at(byte_size(bytes)))
  defp damage(bytes, 2), do: :rand.bytes(at(byte_size(bytes)))

  defp damage(bytes, 3) do
    # The header is at the beginning.
    place = at(min(byte_size(bytes), 400))
    <<before::binary-size(place), _, rest::binary>> = bytes
    <<before::binary, :rand.uniform(256) - 1, rest::binary>>
  end
end
