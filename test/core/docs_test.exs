defmodule Sidewinder.DocsTest do
  use ExUnit.Case, async: true

  # Structs of ops for compilers: their fields are the options of the op.
  @structs ~r/^Sidewinder\.Block\./

  # Modules of tests, and implementations of protocols.
  @others ~r/Test\b|NxTest|ExlaTest|^Inspect\./

  Application.load(:sidewinder)

  @modules for module <- Application.spec(:sidewinder, :modules),
               {:docs_v1, _, _, _, doc, _, docs} <- [Code.fetch_docs(module)],
               doc != :hidden,
               not (inspect(module) =~ @others),
               do: {module, doc, docs}

  # {name, arity, doc} of what is documented, as a function or a macro.
  defp public(docs) do
    for {{:function, name, arity}, _, _, doc, meta} <- docs,
        doc != :hidden,
        do: {name, arity, doc, meta}
  end

  test "every module that is shown has a text" do
    assert length(@modules) > 30
    for {module, doc, _} <- @modules, do: assert(%{"en" => _} = doc, inspect(module))
  end

  test "every public function has a doc and a spec" do
    for {module, _, docs} <- @modules, not (inspect(module) =~ @structs) do
      {:ok, specs} = Code.Typespec.fetch_specs(module)
      known = for {{name, arity}, _} <- specs, do: {name, arity}

      for {name, arity, doc, meta} <- public(docs), not generated?(name) do
        call = "#{inspect(module)}.#{name}/#{arity}"
        assert is_map(doc) or is_map_key(meta, :delegate_to), "#{call} has no doc"
        assert {name, arity} in known, "#{call} has no spec"
      end
    end
  end

  # Those of exceptions and of Mix tasks.
  defp generated?(name), do: name in [:exception, :message, :run, :__struct__]

  test "functions of Sidewinder and Sidewinder.Axon belong to a group of the documentation" do
    groups = Mix.Project.config()[:docs].()[:groups_for_docs]

    for {module, _, docs} <- @modules, module in [Sidewinder, Sidewinder.Axon] do
      for {name, arity, _doc, meta} <- public(docs) do
        assert Enum.count(groups, fn {_title, in?} -> in?.(meta) end) == 1,
               "#{inspect(module)}.#{name}/#{arity} is in no group: its @doc has no known :type"
      end
    end
  end

  test "the documentation's extra pages are there" do
    root = Path.expand("../..", __DIR__)
    extras = Mix.Project.config()[:docs].()[:extras]
    for path <- extras, do: assert(File.exists?(Path.join(root, path)), path)
    guides = for path <- Path.wildcard("#{root}/guides/*"), do: Path.relative_to(path, root)
    assert guides -- extras == []
  end
end
