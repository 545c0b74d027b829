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

  # These read files of other programs, change what the whole VM does, or take every weight of a large block; the tests call
  # them. Servings are shown in a guide.
  @without_example [
    {Sidewinder.GGUF, :index, 1},
    {Sidewinder.GGUF, :metadata, 1},
    {Sidewinder.GGUF, :load!, 3},
    {Sidewinder.Tokenizer, :open, 1},
    {Sidewinder.Quantized, :from_bitnet, 3},
    {Sidewinder.Kernel.Ternary, :from_bitnet, 3},
    {Sidewinder.Device, :configure, 1},
    {Sidewinder.Kernel.MMRec, :mmrec_block_backward, 5},
    {Sidewinder.Kernel.MMRec, :multi_memory_attention_backward, 6},
    {Sidewinder.Mamba, :serving, 2},
    {Sidewinder.Reference, :demo_levels, 0}
  ]

  test "every public function is called in an example that runs, in its doc or in another of its module" do
    lacking =
      for {module, doc, docs} <- @modules,
          not (inspect(module) =~ ~r/^Sidewinder\.Block\.|^Mix/) do
        texts = [doc | for({_, _, doc, _} <- public(docs), do: doc)]

        examples =
          for %{"en" => text} <- texts,
              [line] <- Regex.scan(~r/^ *(?:iex|\.\.\.)>.*/m, text),
              do: line

        for {name, arity, _, _} <- public(docs), not generated?(name) do
          call = ~r/\b#{Regex.escape(Atom.to_string(name))}(?:\(|\/\d)/
          unless Enum.any?(examples, &(&1 =~ call)), do: {module, name, arity}
        end
      end

    lacking = lacking |> Enum.concat() |> Enum.reject(&is_nil/1)
    assert lacking -- @without_example == []
    loaded = for {module, _, _} <- @modules, do: module

    assert for({module, _, _} = known <- @without_example -- lacking, module in loaded, do: known) ==
             []
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
