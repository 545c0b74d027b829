defmodule Sidewinder.Archive do
  @moduledoc """
  Archives of the precompiled native library: which one is for this machine, where it is, and whether it is intact.

  Their names, their content and the checksum file are those of `rustler_precompiled`, and downloads are kept in its
  cache. That package itself is no dependency: it needs Hex, cannot read archives from a folder, and its loader
  fails where Sidewinder goes on with pure Nx.
  """

  # OTP 24 and later have it.
  @nif {2, 16}
  @tries 3
  @client :sidewinder
  @connect_ms 15_000
  # For a whole archive of about 10 MB.
  @timeout_ms 300_000

  @doc "The file with the checksums of all archives of a version, in a package."
  def checksums, do: "checksum-Elixir.Sidewinder.Native.exs"

  @doc "The archive of a version for a target of Rust."
  def name(version, target) do
    {prefix, extension} = if target =~ "windows", do: {"", "dll"}, else: {"lib", "so"}
    {major, minor} = @nif
    "#{prefix}sidewinder_nif-v#{version}-nif-#{major}.#{minor}-#{target}.#{extension}.tar.gz"
  end

  @doc """
  The target of Rust that this machine is, or the one that `TARGET_ARCH`, `TARGET_OS` and `TARGET_ABI` name, as Nerves
  sets them.
  """
  def target(os \\ :os.type(), system \\ system(), env \\ System.get_env())

  def target({:win32, _}, _system, _env), do: "x86_64-pc-windows-msvc"

  def target({:unix, family}, system, env) do
    [cpu | rest] = String.split(system, "-")
    cpu = cpu(env["TARGET_ARCH"] || cpu)

    case env["TARGET_OS"] || Atom.to_string(family) do
      "darwin" -> "#{cpu}-apple-darwin"
      "linux" -> "#{cpu}-unknown-linux-#{env["TARGET_ABI"] || List.last(rest)}"
      other -> "#{cpu}-unknown-#{other}"
    end
  end

  defp system, do: List.to_string(:erlang.system_info(:system_architecture))

  defp cpu("amd64"), do: "x86_64"
  defp cpu(arm) when arm in ~w(arm arm64), do: "aarch64"
  defp cpu(other), do: other

  @doc """
  The library in the archive `name`, whose checksum is one of those in the file `checksums`.

  `base` is the folder or the URL with the archives. Answers with `{:error, why}` where the archive is not there, cannot
  be fetched, or is not the one that the checksum is of. An answer that is not complete after `:timeout` milliseconds is
  given up.
  """
  def library(name, checksums, base, options \\ []) do
    with :ok <- check_nif(:erlang.system_info(:nif_version)),
         {:ok, sum} <- checksum(name, checksums),
         {:ok, archive} <- read(base, name, sum, options[:timeout] || @timeout_ms),
         do: unpack(name, archive)
  end

  defp check_nif(version) do
    [major, minor] =
      version |> List.to_string() |> String.split(".") |> Enum.map(&String.to_integer/1)

    if major == elem(@nif, 0) and minor >= elem(@nif, 1),
      do: :ok,
      else: {:error, "Erlang's NIF version is #{version}, and archives are for #{inspect(@nif)}"}
  end

  defp checksum(name, file) do
    with {:ok, all} <- checksums(file) do
      case all do
        %{^name => "sha256:" <> sum} -> {:ok, sum}
        _ -> {:error, "there is no archive #{name}; there are #{listed(Map.keys(all))}"}
      end
    end
  end

  defp checksums(file) do
    if File.regular?(file),
      do: {:ok, file |> Code.eval_file() |> elem(0)},
      else: {:error, "these sources bring no checksums of archives (#{Path.basename(file)})"}
  end

  defp listed([]), do: "none"
  defp listed(names), do: names |> Enum.sort() |> Enum.join(", ")

  defp read(base, name, sum, timeout) do
    if base =~ ~r"^https?://",
      do: cached(base, name, sum, timeout),
      else: from_folder(base, name, sum)
  end

  defp from_folder(folder, name, sum) do
    path = Path.join(folder, name)

    case File.read(path) do
      {:ok, archive} -> intact(archive, sum, path)
      {:error, reason} -> {:error, "#{path}: #{:file.format_error(reason)}"}
    end
  end

  defp cached(base, name, sum, timeout) do
    path = Path.join(cache(), name)
    url = String.trim_trailing(base, "/") <> "/" <> name

    with {:error, _} <- from_folder(cache(), name, sum),
         {:ok, archive} <- download(url, timeout),
         {:ok, archive} <- intact(archive, sum, url) do
      keep(path, archive)
      {:ok, archive}
    end
  end

  # A cache that cannot be written costs another download, and no build.
  defp keep(path, archive) do
    unfinished = "#{path}.#{System.pid()}"

    with :ok <- File.mkdir_p(Path.dirname(path)),
         :ok <- File.write(unfinished, archive),
         do: File.rename(unfinished, path)
  end

  defp cache do
    options = if System.get_env("MIX_XDG"), do: %{os: :linux}, else: %{}

    System.get_env("RUSTLER_PRECOMPILED_GLOBAL_CACHE_PATH") ||
      :filename.basedir(:user_cache, "rustler_precompiled/precompiled_nifs", options)
  end

  defp intact(archive, sum, from) do
    case sha256(archive) do
      ^sum -> {:ok, archive}
      other -> {:error, "#{from} is damaged or another one: its SHA-256 is #{other}, not #{sum}"}
    end
  end

  @doc "The SHA-256 of `binary` in hexadecimal digits."
  def sha256(binary) do
    ensure(:crypto)
    Base.encode16(:crypto.hash(:sha256, binary), case: :lower)
  end

  defp unpack(name, archive) do
    case :erl_tar.extract({:binary, archive}, [:memory, :compressed]) do
      {:ok, [{_name, library}]} -> {:ok, library}
      other -> {:error, "#{name} holds more or less than a library: #{inspect(other, limit: 5)}"}
    end
  end

  # A client of its own: Mix's may have other options.
  defp download(url, timeout) do
    Mix.shell().info("sidewinder: downloading #{url}")
    Enum.each([:inets, :ssl], &ensure/1)
    {:ok, client} = :inets.start(:httpc, profile: @client)

    try do
      with {:ok, options} <- http_options(URI.parse(url).scheme),
           do: get(url, [timeout: timeout] ++ options, @tries)
    after
      :inets.stop(:httpc, client)
    end
  end

  defp get(url, options, tries) do
    request = {String.to_charlist(url), [{~c"user-agent", ~c"sidewinder"}]}

    case :httpc.request(:get, request, options, [body_format: :binary], @client) do
      {:ok, {{_, 200, _}, _headers, archive}} -> {:ok, archive}
      {:ok, {{_, status, text}, _, _}} -> {:error, "#{url}: status #{status} #{text}"}
      {:error, why} when why != :timeout and tries > 1 -> get(url, options, tries - 1)
      {:error, why} -> {:error, "#{url} cannot be reached: #{inspect(why)}"}
    end
  end

  @doc "Starts an application. Mix takes from the code path what a project does not declare."
  def ensure(app) do
    if function_exported?(Mix, :ensure_application!, 1),
      do: apply(Mix, :ensure_application!, [app])

    {:ok, _} = Application.ensure_all_started(app)
  end

  defp http_options(scheme) do
    with {:ok, tls} <- tls(scheme),
         do: {:ok, [connect_timeout: @connect_ms, ssl: tls] ++ proxy(scheme)}
  end

  # https://erlef.github.io/security-wg/secure_coding_and_deployment_hardening/inets
  defp tls("http"), do: {:ok, []}

  defp tls("https") do
    match = :public_key.pkix_verify_hostname_match_fun(:https)

    with {:ok, authorities} <- authorities(System.get_env("HEX_CACERTS_PATH")) do
      check = [match_fun: match]
      {:ok, [verify: :verify_peer, depth: 4, customize_hostname_check: check] ++ authorities}
    end
  end

  defp authorities(nil) do
    case :public_key.cacerts_load() do
      :ok ->
        {:ok, [cacerts: :public_key.cacerts_get()]}

      {:error, _} ->
        {:error, "no CA certificates are installed: set HEX_CACERTS_PATH to a file of them"}
    end
  end

  defp authorities(path), do: {:ok, [cacertfile: String.to_charlist(path)]}

  defp proxy(scheme) do
    upper = String.upcase(scheme) <> "_PROXY"
    address = System.get_env(upper) || System.get_env(String.downcase(upper)) || ""

    case URI.parse(address) do
      %{host: host, port: port, userinfo: user} when is_binary(host) and is_integer(port) ->
        kind = if scheme == "https", do: :https_proxy, else: :proxy
        :httpc.set_options([{kind, {{String.to_charlist(host), port}, not_proxied()}}], @client)
        proxy_auth(user)

      _ ->
        []
    end
  end

  defp not_proxied do
    names = System.get_env("NO_PROXY") || System.get_env("no_proxy") || ""
    for name <- String.split(names, ",", trim: true), do: name |> String.trim() |> wildcard()
  end

  # `httpc` writes a whole domain as `*.example.org`.
  defp wildcard("." <> domain), do: ~c"*." ++ String.to_charlist(domain)
  defp wildcard(name), do: String.to_charlist(name)

  defp proxy_auth(nil), do: []

  defp proxy_auth(user) do
    [name | password] = String.split(user, ":", parts: 2)

    [
      proxy_auth:
        {URI.decode(name) |> String.to_charlist(),
         password |> Enum.join() |> URI.decode() |> String.to_charlist()}
    ]
  end
end
