defmodule Sidewinder.ArchiveTest do
  # Which archive a machine needs, and that only the right one is taken, from folders and over HTTP. The environment
  # says where the cache is, so no other test runs beside.
  use ExUnit.Case, async: false

  alias Sidewinder.Archive

  @moduletag :tmp_dir
  # Mix adds them to the code path when they are needed.
  @compile {:no_warn_undefined, [:public_key, :ssl]}
  @library "the bytes of a library"
  @name "libsidewinder_nif-v1.2.3-nif-2.16-x86_64-unknown-linux-gnu.so.tar.gz"

  setup %{tmp_dir: folder} do
    shell = Mix.shell()
    Mix.shell(Mix.Shell.Process)
    on_exit(fn -> Mix.shell(shell) end)
    archive = tar(folder, [{~c"libsidewinder_nif.so", @library}])
    File.write!(Path.join(folder, @name), archive)
    %{archive: archive, sums: sums(folder, %{@name => "sha256:" <> Archive.sha256(archive)})}
  end

  defp tar(folder, files) do
    path = Path.join(folder, "some.tar.gz")
    :ok = :erl_tar.create(path, files, [:compressed])
    File.read!(path)
  end

  defp sums(folder, sums) do
    path = Path.join(folder, Archive.checksums())
    File.write!(path, inspect(sums, limit: :infinity))
    path
  end

  test "targets are named as Rust names them" do
    for {os, system, target} <- [
          {{:unix, :linux}, "x86_64-pc-linux-gnu", "x86_64-unknown-linux-gnu"},
          {{:unix, :linux}, "amd64-redhat-linux-gnu", "x86_64-unknown-linux-gnu"},
          {{:unix, :linux}, "x86_64-alpine-linux-musl", "x86_64-unknown-linux-musl"},
          {{:unix, :linux}, "aarch64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"},
          {{:unix, :linux}, "riscv64-unknown-linux-gnu", "riscv64-unknown-linux-gnu"},
          {{:unix, :darwin}, "aarch64-apple-darwin23.1.0", "aarch64-apple-darwin"},
          {{:unix, :darwin}, "arm-apple-darwin20.6.0", "aarch64-apple-darwin"},
          {{:unix, :darwin}, "x86_64-apple-darwin21.6.0", "x86_64-apple-darwin"},
          {{:unix, :freebsd}, "amd64-portbld-freebsd14.1", "x86_64-unknown-freebsd"},
          {{:win32, :nt}, "win32", "x86_64-pc-windows-msvc"}
        ],
        do: assert({system, Archive.target(os, system, %{})} == {system, target})

    nerves = %{"TARGET_ARCH" => "aarch64", "TARGET_OS" => "linux", "TARGET_ABI" => "gnu"}
    host = "x86_64-apple-darwin23.1.0"
    assert Archive.target({:unix, :darwin}, host, nerves) == "aarch64-unknown-linux-gnu"
  end

  test "archives are named as rustler_precompiled names them" do
    assert Archive.name("1.2.3", "x86_64-unknown-linux-gnu") == @name

    assert Archive.name("1.2.3", "x86_64-pc-windows-msvc") ==
             "sidewinder_nif-v1.2.3-nif-2.16-x86_64-pc-windows-msvc.dll.tar.gz"
  end

  test "a folder's archive is taken if it is the right one", %{tmp_dir: folder} = context do
    assert Archive.library(@name, context.sums, folder) == {:ok, @library}

    damaged = context.archive <> "."
    File.write!(Path.join(folder, @name), damaged)
    {:error, why} = Archive.library(@name, context.sums, folder)
    assert why =~ Path.join(folder, @name)
    for bytes <- [damaged, context.archive], do: assert(why =~ Archive.sha256(bytes))

    File.rm!(Path.join(folder, @name))
    assert {:error, why} = Archive.library(@name, context.sums, folder)
    assert why =~ "no such file"
  end

  test "an archive without a checksum is not taken", %{tmp_dir: folder} do
    sums = sums(folder, %{"other.so.tar.gz" => "sha256:00", "one.so.tar.gz" => "sha256:00"})
    {:error, why} = Archive.library(@name, sums, folder)
    assert why == "there is no archive #{@name}; there are one.so.tar.gz, other.so.tar.gz"

    {:error, why} = Archive.library(@name, Path.join(folder, "nothing.exs"), folder)
    assert why =~ "no checksums of archives (nothing.exs)"
  end

  test "an archive with other files than a library is not taken", %{tmp_dir: folder} do
    archive = tar(folder, [{~c"one.so", "1"}, {~c"two.so", "2"}])
    File.write!(Path.join(folder, @name), archive)
    sums = sums(folder, %{@name => "sha256:" <> Archive.sha256(archive)})
    assert {:error, why} = Archive.library(@name, sums, folder)
    assert why =~ "holds more or less than a library"
  end

  # Serves answers, one a connection, and tells this process the requests.
  defp serve(answers) do
    {:ok, listener} = :gen_tcp.listen(0, [:binary, active: false, ip: {127, 0, 0, 1}])
    {:ok, port} = :inet.port(listener)
    test = self()
    spawn_link(fn -> Enum.each(answers, &answer(listener, &1, test)) end)
    "http://127.0.0.1:#{port}"
  end

  defp answer(listener, {status, body}, test) do
    {:ok, socket} = :gen_tcp.accept(listener)
    {:ok, request} = :gen_tcp.recv(socket, 0)
    send(test, {:request, request |> String.split("\r\n") |> hd()})
    head = "HTTP/1.1 #{status}\r\nconnection: close\r\ncontent-length: #{byte_size(body)}\r\n\r\n"
    :ok = :gen_tcp.send(socket, head <> body)
    :gen_tcp.close(socket)
  end

  defp with_env(changes) do
    old = Map.new(changes, fn {name, _} -> {name, System.get_env(name)} end)
    System.put_env(changes)
    on_exit(fn -> System.put_env(old) end)
  end

  test "what is fetched is kept, and only fetched once", %{tmp_dir: folder} = context do
    with_env(%{"RUSTLER_PRECOMPILED_GLOBAL_CACHE_PATH" => Path.join(folder, "cache")})
    url = serve([{"200 OK", context.archive}])
    # A damaged file in the cache is fetched anew.
    File.mkdir_p!(Path.join(folder, "cache"))
    File.write!(Path.join([folder, "cache", @name]), "damaged")

    for _ <- 1..2,
        do: assert(Archive.library(@name, context.sums, url <> "/mirror/") == {:ok, @library})

    assert_received {:request, "GET /mirror/#{@name} HTTP/1.1"}
    refute_received {:request, _}
    told = "sidewinder: downloading #{url}/mirror/#{@name}"
    assert_received {:mix_shell, :info, [^told]}
    refute_received {:mix_shell, _, _}
    assert File.ls!(Path.join(folder, "cache")) == [@name]
  end

  test "what is fetched must be the right archive", %{tmp_dir: folder} = context do
    with_env(%{"RUSTLER_PRECOMPILED_GLOBAL_CACHE_PATH" => Path.join(folder, "cache")})
    url = serve([{"200 OK", "a page of a portal"}, {"404 Not Found", ""}])

    for why <- [
          "#{url}/#{@name} is damaged or another one",
          "#{url}/#{@name}: status 404 Not Found"
        ] do
      {:error, text} = Archive.library(@name, context.sums, url)
      assert text =~ why
      refute File.exists?(Path.join(folder, "cache"))
    end
  end

  test "without a network, the address and the reason are told", %{tmp_dir: folder} = context do
    with_env(%{"RUSTLER_PRECOMPILED_GLOBAL_CACHE_PATH" => Path.join(folder, "cache")})
    {:error, why} = Archive.library(@name, context.sums, "http://127.0.0.1:1")
    assert why =~ "http://127.0.0.1:1/#{@name} cannot be reached: "
    assert why =~ "econnrefused"
  end

  @tag timeout: 10_000
  test "a server that never answers is given up", %{tmp_dir: folder} = context do
    with_env(%{"RUSTLER_PRECOMPILED_GLOBAL_CACHE_PATH" => Path.join(folder, "cache")})
    # Connections wait in its queue.
    {:ok, listener} = :gen_tcp.listen(0, ip: {127, 0, 0, 1})
    {:ok, port} = :inet.port(listener)
    url = "http://127.0.0.1:#{port}"

    assert {:error, why} = Archive.library(@name, context.sums, url, timeout: 100)
    assert why == "#{url}/#{@name} cannot be reached: :timeout"
    assert {:ok, _} = :gen_tcp.accept(listener, 0)
    assert {:error, :timeout} = :gen_tcp.accept(listener, 0)
  end

  test "proxies of the environment are used, with their passwords",
       %{tmp_dir: folder} = context do
    proxy = serve([{"200 OK", context.archive}])

    with_env(%{
      "RUSTLER_PRECOMPILED_GLOBAL_CACHE_PATH" => Path.join(folder, "cache"),
      "HTTP_PROXY" => String.replace(proxy, "http://", "http://me:secret@"),
      "NO_PROXY" => "localhost, .example.org"
    })

    base = "http://archives.invalid"
    assert Archive.library(@name, context.sums, base) == {:ok, @library}
    assert_received {:request, "GET http://archives.invalid/#{@name} HTTP/1.1"}
  end

  # A server with a certificate for `localhost`, and the authority that signed it.
  defp serve_tls(folder, archive) do
    Archive.ensure(:ssl)
    name = [{:Extension, {2, 5, 29, 17}, false, [dNSName: ~c"localhost"]}]
    made = [digest: :sha256, key: {:namedCurve, :secp256r1}]
    peer = %{root: made, intermediates: [], peer: made}
    chain = %{peer | peer: [extensions: name] ++ made}

    %{server_config: server, client_config: client} =
      :public_key.pkix_test_data(%{server_chain: chain, client_chain: peer})

    authority = Path.join(folder, "authority.pem")
    pem = for der <- client[:cacerts], do: {:Certificate, der, :not_encrypted}
    File.write!(authority, :public_key.pem_encode(pem))
    {:ok, listener} = :ssl.listen(0, [:binary, active: false, ip: {127, 0, 0, 1}] ++ server)
    {:ok, {_, port}} = :ssl.sockname(listener)
    spawn_link(fn -> answer_tls(listener, archive) end)
    {"https://localhost:#{port}", authority}
  end

  defp answer_tls(listener, archive) do
    {:ok, socket} = :ssl.transport_accept(listener)

    with {:ok, socket} <- :ssl.handshake(socket), {:ok, _request} <- :ssl.recv(socket, 0) do
      head = "HTTP/1.1 200 OK\r\ncontent-length: #{byte_size(archive)}\r\n\r\n"
      :ok = :ssl.send(socket, head <> archive)
    end

    answer_tls(listener, archive)
  end

  @tag :capture_log
  test "certificates are checked, by the system's authorities or those of a file", context do
    {url, authority} = serve_tls(context.tmp_dir, context.archive)
    cache = %{"RUSTLER_PRECOMPILED_GLOBAL_CACHE_PATH" => Path.join(context.tmp_dir, "cache")}
    with_env(Map.put(cache, "HEX_CACERTS_PATH", nil))
    {:error, why} = Archive.library(@name, context.sums, url)
    assert why =~ ~r/unknown.ca|no CA certificates/i

    with_env(%{"HEX_CACERTS_PATH" => authority})
    by_address = String.replace(url, "localhost", "127.0.0.1")
    {:error, why} = Archive.library(@name, context.sums, by_address)
    assert why =~ "hostname_check_failed"
    assert Archive.library(@name, context.sums, url) == {:ok, @library}
  end
end
