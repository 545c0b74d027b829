defmodule Sidewinder.Tokenizers do
  @moduledoc false
  # Small `tokenizer.json` files, of a decoder and the names of tokens alone: with each decoder that there is.

  @special ["<unk>", "<s>", "</s>"]

  @replace ~s({"type": "Replace", "pattern": {"String": "▁"}, "content": " "})
  @byte_level ~s({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
  @fuse ~s({"type": "Fuse"})
  @bytes ~s({"type": "ByteFallback"})

  @doc "Decoders and the kinds of names that their tokens have."
  def kinds do
    %{
      metaspace_first: {metaspace("first"), :words},
      metaspace_always: {metaspace("always"), :words},
      metaspace_never: {metaspace("never"), :words},
      metaspace_of_bytes: {sequence([@bytes, metaspace("always")]), :bytes},
      llama: {sequence([@replace, @bytes, @fuse, strip(1, 0)]), :bytes},
      llama_of_two_spaces: {sequence([@replace, @bytes, @fuse, strip(2, 0)]), :bytes},
      gemma: {sequence([@replace, @bytes, @fuse]), :bytes},
      strip_each: {sequence([@replace, strip(1, 0)]), :words},
      strip_ends: {sequence([@replace, @fuse, strip(1, 1)]), :words},
      only_fused: {@fuse, :words},
      byte_level: {@byte_level, :byte_level},
      byte_level_replaced: {sequence([@byte_level, replace("ba", "X")]), :byte_level},
      word_piece: {word_piece(true), :pieces},
      word_piece_as_it_is: {word_piece(false), :pieces},
      word_piece_fused: {sequence([@fuse, word_piece(true)]), :pieces},
      ctc:
        {~s({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}),
         :ctc},
      bpe: {~s({"type": "BPEDecoder", "suffix": "</w>"}), :suffixed},
      replaced_after_fusing: {sequence([@fuse, @replace, replace("ab", "ba")]), :words},
      pattern_after_fusing:
        {sequence([
           @fuse,
           ~s({"type": "Replace", "pattern": {"Regex": "[ab]+|▁{2,}"}, "content": "-"})
         ]), :words},
      none: {"null", :words}
    }
  end

  @doc "Writes one into a folder, and gives how many tokens it has."
  def write(folder, {decoder, names}, post_processor \\ "null") do
    names = @special ++ names(names)
    vocabulary = for {name, i} <- Enum.with_index(names), do: "#{inspect(name)}: #{i}"
    added = for {name, i} <- Enum.with_index(@special), do: added(i, name, true)
    added = added ++ [added(length(names), " added▁", false)]

    File.write!(Path.join(folder, "tokenizer.json"), """
    {"version": "1.0", "added_tokens": [#{Enum.join(added, ", ")}], "decoder": #{decoder},
     "post_processor": #{post_processor}, "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {#{Enum.join(vocabulary, ", ")}}}}
    """)

    length(names) + 1
  end

  defp added(id, name, special) do
    ~s({"id": #{id}, "content": #{inspect(name)}, "single_word": false, "lstrip": false, "rstrip": false, ) <>
      ~s("normalized": false, "special": #{special}})
  end

  defp names(:words),
    do: ["▁", "▁▁", "a", "b", "▁a", "▁the", "a▁", "ab", "é", "猫", "🐈", "\uFFFD", ",", "▁,"]

  # Bytes of letters, of characters in two to four of them, and such that are in none.
  defp names(:bytes) do
    bytes = [0x20, 0x61, 0xC3, 0xA9, 0xE7, 0x8C, 0xAB, 0xF0, 0x9F, 0x90, 0x88, 0xFF]
    names(:words) ++ for byte <- bytes, do: "<0x#{Integer.to_string(byte, 16)}>"
  end

  # Ġ is a space, Ã © are é, ç Į « are 猫, ð Ł Ĳ Ī are 🐈, ï ¿ ½ are U+FFFD, and ÿ is in no character.
  defp names(:byte_level),
    do: ~w(Ġ a b Ġthe Ã © Ã© ç Į « Į« ð ŁĲ Ī Ł Ĳ ÿ «Ã ©ç ï¿½ ï ¿½ 猫)

  defp names(:pieces), do: ~w(a the ##ing ##s , . ? ! ' n't 's do not ##n't don 've ##### é 猫)
  defp names(:ctc), do: ~w(<pad> | a b c é , do not)
  defp names(:suffixed), do: ~w(a a</w> b the</w> , é</w> </w> 猫)

  defp metaspace(scheme),
    do:
      ~s({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "#{scheme}", "split": true})

  defp strip(start, stop),
    do: ~s({"type": "Strip", "content": " ", "start": #{start}, "stop": #{stop}})

  defp word_piece(cleanup),
    do: ~s({"type": "WordPiece", "prefix": "##", "cleanup": #{cleanup}})

  defp replace(from, to),
    do: ~s({"type": "Replace", "pattern": {"String": "#{from}"}, "content": "#{to}"})

  defp sequence(decoders),
    do: ~s({"type": "Sequence", "decoders": [#{Enum.join(decoders, ", ")}]})
end
