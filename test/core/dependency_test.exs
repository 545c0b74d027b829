defmodule Sidewinder.DependencyTest do
  # What mix.exs does where Sidewinder is a dependency: the real one, in small projects.
  use ExUnit.Case, async: true
  alias Sidewinder.Archive

  @sources Path.expand("../..", __DIR__)
  @library Path.join(:code.priv_dir(:sidewinder), "native/sidewinder_nif.so")
  @has_library File.exists?(@library)
  @has_layers Version.match?(System.version(), ">= 1.17.0")

  # Beside Erlang's own applications, whatever a project declares.
  defp layers_beside_erlang do
    beside? = &(Path.wildcard(Path.join(:code.lib_dir(), &1 <> "{,-*}")) != [])
    layers = for {app, layer} <- [{"exla", "EXLA"}, {"nx", "Nx"}], beside?.(app), do: layer
    if "Nx" in layers, do: layers, else: []
  end

  setup do
    root = Path.join(System.tmp_dir!(), "sidewinder-#{System.unique_integer([:positive])}")
    root = "#{root}-#{System.pid()}"
    on_exit(fn -> File.rm_rf!(root) end)

    source(root, "sidewinder/lib/core/core.ex", "defmodule Sidewinder.Core, do: nil")
    source(root, "sidewinder/lib/nx/nx.ex", layer("Nx"))
    source(root, "sidewinder/lib/exla/exla.ex", layer("EXLA"))
    source(root, "sidewinder/native/Cargo.toml", "")
    source(root, "sidewinder/priv/models/small", "weights")

    for file <- ~w(mix.exs mix),
        do: File.cp_r!(Path.join(@sources, file), Path.join([root, "sidewinder", file]))

    %{root: root}
  end

  # It compiles only where the other module is there.
  defp layer(module), do: "defmodule Sidewinder.Layer.#{module}, do: import(#{module}, only: [])"

  defp source(root, path, text) do
    path = Path.join(root, path)
    File.mkdir_p!(Path.dirname(path))
    File.write!(path, text)
  end

  defp project(root, app, deps, version \\ "0.1.0", also \\ "") do
    module = Macro.camelize(app)
    if File.exists?(Path.join(root, "#{app}/mix.exs")), do: next_second()

    source(root, "#{app}/mix.exs", """
    defmodule #{module}.MixProject do
      use Mix.Project
      def project do
        [app: :#{app}, version: "#{version}", #{also} deps: [#{Enum.map_join(deps, ", ", &dep/1)}]]
      end
    end
    """)

    name = %{"nx" => "Nx", "exla" => "EXLA"}[app] || module

    source(
      root,
      "#{app}/lib/#{app}.ex",
      "defmodule #{name}, do: def(version, do: \"#{version}\")"
    )
  end

  # Mix takes a file for changed where its time, in whole seconds, is later than that of what was built, and resets times
  # in the future.
  defp next_second, do: Process.sleep(1000 - rem(System.os_time(:millisecond), 1000))

  defp dep(app), do: ~s({:#{app}, path: "../#{app}"})

  defp compile(root, project, env) do
    # Not how these tests were started.
    unset =
      for name <- ~w(MIX_BUILD_ROOT MIX_BUILD_PATH MIX_EXS MIX_TARGET CARGO_TARGET_DIR
        CARGO_BUILD_TARGET SIDEWINDER_OFFLINE SIDEWINDER_BUILD SIDEWINDER_ARCHIVES TARGET_ARCH TARGET_OS TARGET_ABI
        ERL_LIBS),
          do: {name, nil}

    System.cmd(System.find_executable("mix"), ["compile"],
      cd: Path.join(root, project),
      env: unset ++ [{"MIX_ENV", "dev"}, {"SIDEWINDER_NATIVE", "none"} | env],
      stderr_to_stdout: true
    )
  end

  defp compile!(root, project, env \\ []) do
    {output, status} = compile(root, project, env)
    assert status == 0, output
    output
  end

  defp built(root, project, path),
    do: Path.join([root, project, "_build/dev/lib/sidewinder", path])

  defp layers(root, project) do
    beams = Path.wildcard(built(root, project, "ebin/Elixir.Sidewinder.Layer.*.beam"))
    for beam <- beams, do: beam |> Path.basename(".beam") |> String.split(".") |> List.last()
  end

  @tag skip: not @has_layers
  test "Nx that comes from a folder is compiled first, whatever the order, with and without Hex",
       %{
         root: root
       } do
    project(root, "nx", [], "0.13.1")

    for {project, deps} <- [{"one", ~w(sidewinder nx)}, {"other", ~w(nx sidewinder)}],
        env <- [[], [{"SIDEWINDER_OFFLINE", "1"}]] do
      project(root, project, deps)
      compile!(root, project, env)
      assert layers(root, project) == ["Nx"]
      File.rm_rf!(Path.join([root, project, "_build"]))
    end
  end

  @tag skip: not @has_layers
  test "layers come, go and change with what they build on", %{root: root} do
    project(root, "nx", [], "0.11.0")
    project(root, "exla", ["nx"], "0.13.0")
    project(root, "app", ["sidewinder"])
    compile!(root, "app")
    assert layers(root, "app") == layers_beside_erlang()

    steps = [
      {"0.11.0", ~w(sidewinder nx), []},
      {"0.13.1", ~w(sidewinder nx), ["Nx"]},
      {"0.13.1", ~w(sidewinder exla nx), ["EXLA", "Nx"]},
      {"0.12.0", ~w(sidewinder nx), ["Nx"]},
      {"0.11.9", ~w(sidewinder exla nx), []}
    ]

    for {version, deps, expected} <- steps do
      project(root, "nx", [], version)
      project(root, "app", deps)
      compile!(root, "app")
      assert {version, deps, layers(root, "app")} == {version, deps, expected}
    end
  end

  @tag skip: not @has_layers
  test "what a dependency of the project or an app of its umbrella declares counts", %{root: root} do
    project(root, "nx", [], "0.13.1")
    project(root, "between", ~w(sidewinder nx))
    project(root, "app", ["between"])
    compile!(root, "app")
    assert layers(root, "app") == ["Nx"]

    File.rename!(Path.join(root, "app/mix.exs"), Path.join(root, "app/mix.exs.old"))
    project(root, "app", [], "0.1.0", ~s(apps_path: "apps",))
    File.rm_rf!(Path.join(root, "app/_build"))
    File.mkdir_p!(Path.join(root, "app/apps/child"))

    source(root, "app/apps/child/mix.exs", """
    defmodule Child.MixProject do
      use Mix.Project
      @up "../../../"
      def project do
        [app: :child, version: "0.1.0", build_path: "../../_build", lockfile: "../../mix.lock",
         deps_path: "../../deps",
         deps: [{:sidewinder, path: @up <> "sidewinder"}, {:nx, path: @up <> "nx"}]]
      end
    end
    """)

    compile!(root, "app")
    assert layers(root, "app") == ["Nx"]
  end

  @tag skip: not @has_library
  test "nothing is written to the sources, and projects that share them share no library", %{
    root: root
  } do
    for project <- ~w(one other), do: project(root, project, ["sidewinder"])
    files = fn -> Path.wildcard(Path.join(root, "sidewinder/**"), match_dot: true) end
    before = files.()
    compile!(root, "one", [{"SIDEWINDER_NATIVE", @library}])
    compile!(root, "other")

    assert files.() == before
    assert File.read!(built(root, "one", "priv/native/sidewinder_nif.so")) == File.read!(@library)
    refute File.exists?(built(root, "other", "priv/native/sidewinder_nif.so"))

    for project <- ~w(one other),
        do: assert(File.read!(built(root, project, "priv/models/small")) == "weights")

    # What is built is kept, and made again where it has gone.
    refute compile!(root, "one", [{"SIDEWINDER_NATIVE", @library}]) =~ "sidewinder: built"
    File.rm!(built(root, "one", "priv/native/sidewinder_nif.so"))
    compile!(root, "one", [{"SIDEWINDER_NATIVE", @library}])
    assert File.exists?(built(root, "one", "priv/native/sidewinder_nif.so"))
    compile!(root, "one")
    refute File.exists?(built(root, "one", "priv/native/sidewinder_nif.so"))
  end

  # One that writes what it is asked for.
  defp cargo(root) do
    source(root, "bin/cargo", """
    #!/bin/sh
    mkdir -p "$CARGO_TARGET_DIR/release"
    for end in so dylib; do echo built > "$CARGO_TARGET_DIR/release/libsidewinder_nif.$end"; done
    """)

    File.chmod!(Path.join(root, "bin/cargo"), 0o755)
    [{"PATH", "#{root}/bin:#{System.get_env("PATH")}"}, {"SIDEWINDER_NATIVE", nil}]
  end

  test "cargo builds below the project's build path or where it is told to", %{root: root} do
    project(root, "app", ["sidewinder"])

    cargo = cargo(root)

    for {env, target} <- [
          {[], "app/_build/native"},
          {[{"CARGO_TARGET_DIR", Path.join(root, "elsewhere")}], "elsewhere"},
          {[{"CARGO_TARGET_DIR", "here"}], "app/here"}
        ] do
      compile!(root, "app", cargo ++ env)
      assert File.dir?(Path.join([root, target, "release"]))
      assert File.read!(built(root, "app", "priv/native/sidewinder_nif.so")) == "built\n"
      File.rm_rf!(Path.join(root, "app/_build"))
    end

    refute File.exists?(Path.join(root, "sidewinder/_build"))

    compile!(root, "app", cargo ++ [{"MIX_BUILD_PATH", Path.join(root, "built")}])
    assert File.dir?(Path.join(root, "built/native/release"))
  end

  @tag skip: not @has_library
  test "a library that is missing, damaged or another is refused with its path and the reason", %{
    root: root
  } do
    project(root, "app", ["sidewinder"])
    library = File.read!(@library)
    source(root, "app/text.so", "no library")
    source(root, "app/half.so", binary_part(library, 0, div(byte_size(library), 2)))
    <<_::binary-size(18), machine, _::binary>> = library
    for_other = :binary.replace(library, <<machine>>, <<255 - machine>>, scope: {18, 1})
    source(root, "app/other.so", for_other)
    crypto = Path.join(:code.priv_dir(:crypto), "lib/crypto.so")

    wrong = [
      {"missing.so", ~r/no such file/},
      {".", ~r/directory|not owner|illegal/},
      {"text.so", ~r/load|invalid ELF header/i},
      {"half.so", ~r/load|crashes/i},
      {"other.so", ~r/another kind of machine|load/},
      {crypto, ~r/module name 'crypto'/}
    ]

    for {path, why} <- wrong do
      {output, status} = compile(root, "app", [{"SIDEWINDER_NATIVE", path}])
      assert status != 0
      assert output =~ "cannot be taken from #{Path.expand(path, Path.join(root, "app"))}: "
      assert output =~ why and output =~ "set SIDEWINDER_NATIVE to the path"
      assert Path.wildcard(built(root, "app", "priv/native/*.so")) == []
    end

    # From the project's folder, by any name.
    File.write!(Path.join(root, "app/ours"), library)
    compile!(root, "app", [{"SIDEWINDER_NATIVE", "ours"}])
    assert File.exists?(built(root, "app", "priv/native/sidewinder_nif.so"))
  end

  # The archive of `library`, and a package with its checksum.
  defp archive(root, library) do
    name = Archive.name(Mix.Project.config()[:version], Archive.target())
    path = Path.join([root, "archives", name])
    File.mkdir_p!(Path.dirname(path))
    :ok = :erl_tar.create(path, [{~c"libsidewinder_nif.so", library}], [:compressed])
    sums = %{name => "sha256:" <> Archive.sha256(File.read!(path))}
    source(root, "sidewinder/#{Archive.checksums()}", inspect(sums))
    path
  end

  @tag skip: not @has_library
  test "a package takes the archive of this machine, from a folder or the cache", %{root: root} do
    project(root, "app", ["sidewinder"])
    archive = archive(root, File.read!(@library))
    folder = Path.dirname(archive)
    installed = built(root, "app", "priv/native/sidewinder_nif.so")
    native = {"SIDEWINDER_NATIVE", nil}

    # Named from the project's folder.
    compile!(root, "app", [native, {"SIDEWINDER_ARCHIVES", "../archives"}])
    assert File.read!(installed) == File.read!(@library)

    # That of the release, and nothing has to be fetched.
    File.rm!(installed)
    compile!(root, "app", [native, {"RUSTLER_PRECOMPILED_GLOBAL_CACHE_PATH", folder}])
    assert File.read!(installed) == File.read!(@library)

    compile!(root, "app", cargo(root) ++ [{"SIDEWINDER_BUILD", "1"}])
    assert File.read!(installed) == "built\n"
  end

  test "an archive that cannot be used is told with the reason and the ways out", %{root: root} do
    project(root, "app", ["sidewinder"])
    archive = archive(root, "no library")

    refused = fn reason ->
      env = [{"SIDEWINDER_NATIVE", nil}, {"SIDEWINDER_ARCHIVES", Path.dirname(archive)}]
      {output, status} = compile(root, "app", env)
      assert status != 0
      assert output =~ "cannot be taken from #{Path.basename(archive)}: #{reason}"
      for name <- ~w(BUILD ARCHIVES NATIVE), do: assert(output =~ "set SIDEWINDER_#{name}")
      assert Path.wildcard(built(root, "app", "priv/native/*.so")) == []
    end

    refused.("")
    File.write!(archive, "damaged")
    refused.("#{archive} is damaged or another one: its SHA-256 is ")
    File.rm!(Path.join([root, "sidewinder", Archive.checksums()]))
    refused.("these sources bring no checksums of archives")
  end
end
