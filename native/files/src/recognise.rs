//! Recognises files of other formats than their reader expects by their first bytes, and suggests a remedy.

use sidewinder_kernels::error::Error;

/// Number of bytes that [`recognise`] looks at.
pub const FIRST: usize = 1024;

/// The format of a file, by its first bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// The name of the format, such as [`SAFETENSORS`].
    pub what: String,
    /// The remedy.
    pub hint: &'static str,
}

/// [`Look::what`] of a safetensors file.
pub const SAFETENSORS: &str = "a safetensors file";
/// [`Look::what`] of a GGUF file.
pub const GGUF: &str = "a GGUF file";
/// [`Look::what`] of JSON.
pub const JSON: &str = "JSON";
const TEXT: &str = "a text that begins with";
const EMPTY: &str = "an empty file";

const FETCH: &str =
    "Fetch the file itself: run `git lfs pull` in its folder, or download it from its repository's page";
const LOG_IN: &str = "Log in, or accept the model's licence, and download the file itself in place of a page about it";
/// The hint for a truncated file.
pub const AGAIN: &str = "It was not written to its end: download it again";
const UNPACK: &str = "Unpack it first";
/// The hint for a model in another format.
pub const CONVERT: &str = "Write the model as safetensors first, as `save_pretrained` of transformers does";
/// The hint for a model that PyTorch has written.
pub const PICKLE: &str = "Write the model as safetensors first: with `save_pretrained` of transformers, or in Python by \
    `safetensors.torch.save_file(torch.load(path, weights_only=True), \"model.safetensors\")`";
/// The hint for a GGUF file.
pub const OTHER_READER: &str = "Sidewinder.GGUF reads the metadata and tensors of GGUF files; Sidewinder.Mamba.load and \
    `mix sidewinder.generate --model` run a folder with config.json and safetensors files";
const OF_TENSORS: &str = "Sidewinder.Safetensors reads it, and Sidewinder.Mamba.load if it is a Mamba model";
const FOLDER: &str = "Name the folder of the model, or its safetensors file";

/// Magic bytes, the format that they identify, and a hint.
const MAGIC: [(&[u8], &str, &str); 22] = [
    (b"GGUF", GGUF, OTHER_READER),
    (b"FUGG", "a GGUF file of the other byte order", "Convert it with gguf_convert_endian.py of gguf-py"),
    (b"lmgg", "a file of ggml from before GGUF", CONVERT),
    (b"fmgg", "a file of ggml from before GGUF", CONVERT),
    (b"tjgg", "a file of ggml from before GGUF", CONVERT),
    (b"PK\x03\x04", "a zip archive", PICKLE),
    (b"\x80\x02", "a Python pickle, as PyTorch writes", PICKLE),
    (b"\x80\x03", "a Python pickle", PICKLE),
    (b"\x80\x04", "a Python pickle", PICKLE),
    (b"\x80\x05", "a Python pickle", PICKLE),
    (b"\x1f\x8b", "a gzip archive", UNPACK),
    (b"\xfd7zXZ\0", "an xz archive", UNPACK),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", UNPACK),
    (b"BZh", "a bzip2 archive", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"Rar!", "a rar archive", UNPACK),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes", CONVERT),
    (b"\x93NUMPY", "a numpy array", CONVERT),
    (b"%PDF", "a PDF", LOG_IN),
    (b"\x89PNG", "an image", LOG_IN),
    (b"\xff\xfe", "a text in UTF-16", "Save it as UTF-8"),
    (b"\xfe\xff", "a text in UTF-16", "Save it as UTF-8"),
];

/// The format that begins with these bytes, or `None`.
pub fn recognise(bytes: &[u8]) -> Option<Look> {
    let bytes = &bytes[..bytes.len().min(FIRST)];
    let look = |what: &str, hint| Some(Look { what: what.to_string(), hint });
    match bytes {
        [] => return look(EMPTY, AGAIN),
        _ if bytes.len() >= 8 && bytes.iter().all(|&byte| byte == 0) => return look("nothing but zeros", AGAIN),
        // The length of the header, then its JSON.
        [_, _, _, _, _, 0, 0, 0, b'{', ..] => return look(SAFETENSORS, OF_TENSORS),
        // Fields 1 and 2 of a protobuf message: the version of the format, and the name of its producer.
        [8, 1..=20, 0x12, ..] => return look("an ONNX model", CONVERT),
        [b'\n', ..] if has(&bytes[..bytes.len().min(64)], b"<unk>") => {
            return look(
                "a SentencePiece model",
                "Have transformers write the tokenizer: `save_pretrained` makes a tokenizer.json",
            );
        }
        _ => {}
    }
    if bytes.get(257..262) == Some(b"ustar") {
        return look("a tar archive", UNPACK);
    }
    match MAGIC.iter().find(|(magic, ..)| bytes.starts_with(magic)) {
        Some((b"PK\x03\x04", ..)) if has(bytes, b"data.pkl") => look("a PyTorch checkpoint (a zip archive)", PICKLE),
        Some((_, what, hint)) => look(what, hint),
        None => text(bytes),
    }
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// The format of a text file.
fn text(bytes: &[u8]) -> Option<Look> {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        // The last character may be incomplete.
        Err(e) if e.error_len().is_none() => std::str::from_utf8(&bytes[..e.valid_up_to()]).ok()?,
        Err(_) => return None,
    };
    let text = text.trim_start_matches('\u{feff}').trim_start();
    let starts = |with: &str| text.get(..with.len()).is_some_and(|start| start.eq_ignore_ascii_case(with));
    let look = |what: String, hint| Some(Look { what, hint });
    if starts("version https://git-lfs.github.com/spec/") {
        let size = text.lines().find_map(|line| line.strip_prefix("size ")).unwrap_or("?");
        look(format!("a pointer of git-lfs to a file of {size} bytes that is not here"), FETCH)
    } else if ["<!doctype html", "<html", "<head", "<!--", "<body"].into_iter().any(starts) {
        look("an HTML page".to_string(), LOG_IN)
    } else if starts("<?xml") || starts("<error") {
        look("an XML page, as servers answer errors with".to_string(), LOG_IN)
    } else if starts("{") || starts("[") {
        look(JSON.to_string(), FOLDER)
    } else if text.is_empty() {
        look("nothing but blanks".to_string(), AGAIN)
    } else {
        let line: String = text.chars().take_while(|c| !c.is_control()).take(60).collect();
        (line.len() >= 4).then(|| Look { what: format!("{TEXT} `{line}`"), hint: "" })
    }
}

/// Extends a reader's error by what the file is, if its first bytes identify another format than `own`, the one
/// expected.
pub fn explained(error: Error, first: &[u8], own: &str) -> Error {
    match recognise(first).filter(|look| look.what != own) {
        // The format alone says little about a text, so the reader's own finding is kept too.
        Some(look) if look.hint.is_empty() => {
            let got = format!("{} ({})", look.what, error.got);
            error.got(got)
        }
        Some(look) => error.got(look.what).hint(look.hint),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidewinder_kernels::error::Kind;

    fn what(bytes: &[u8]) -> String {
        recognise(bytes).map(|look| look.what).unwrap_or_default()
    }

    #[test]
    fn first_bytes_tell_what_a_file_is() {
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 516567560\n";
        let torch = [b"PK\x03\x04", &[0; 26][..], b"archive/data.pkl"].concat();
        let tar = [&[b'a'; 257][..], b"ustar\x0000", &[0; 250]].concat();
        let safetensors = [&64u64.to_le_bytes()[..], br#"{"a":"#].concat();
        let cases: [(&[u8], &str); 28] = [
            (pointer, "git-lfs to a file of 516567560 bytes"),
            (b"<!DOCTYPE html>\n<html>", "HTML"),
            (b"\xef\xbb\xbf\n  <html lang=en>", "HTML"),
            (b"<?xml version='1.0'?><Error><Code>AccessDenied", "XML"),
            (b"GGUF\x03\0\0\0", "a GGUF file"),
            (b"FUGG\0\0\0\x03", "other byte order"),
            (b"tjgg\x03\0\0\0", "before GGUF"),
            (&torch, "PyTorch checkpoint"),
            (b"PK\x03\x04\x14\0", "zip"),
            (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j", "pickle"),
            (b"\x80\x04\x95\x10", "pickle"),
            (b"\x1f\x8b\x08\0", "gzip"),
            (b"\xfd7zXZ\0\0", "xz"),
            (b"\x28\xb5\x2f\xfd\x24", "zstd"),
            (&tar, "tar"),
            (b"\x89HDF\r\n\x1a\n", "HDF5"),
            (b"\x93NUMPY\x01\0", "numpy"),
            (b"\x08\x07\x12\x07pytorch", "ONNX"),
            (b"\n\x0e\n\x05<unk>\x15\0\0", "SentencePiece"),
            (&safetensors, "a safetensors file"),
            (b"{\"error\": \"Repository not found\"}", "JSON"),
            (b"[]", "JSON"),
            (b"\xff\xfe{\0}\0", "UTF-16"),
            (b"", "an empty file"),
            (b" \n", "nothing but blanks"),
            (&[0; 100], "nothing but zeros"),
            (b"Entry not found", "a text that begins with `Entry not found`"),
            ("Zugriff verweigert für é".as_bytes(), "`Zugriff verweigert für é`"),
        ];
        for (bytes, part) in cases {
            assert!(what(bytes).contains(part), "{part}: {}", what(bytes));
        }
        assert_eq!(what(b"\x01\x02\xff\x03"), "");
        assert!(what(&"é".repeat(FIRST).as_bytes()[1..]).is_empty());
        assert!(what("é".repeat(FIRST).as_bytes()).contains("é"));
    }

    #[test]
    fn errors_say_what_a_file_is_and_keep_what_its_own_reader_said() {
        let error = Error::new(Kind::File, "f").expected(SAFETENSORS).got("a header of 3 bytes");
        let html = explained(error.clone(), b"<html>", SAFETENSORS);
        assert_eq!((&*html.got, &*html.hint), ("an HTML page", LOG_IN));
        let own = [&64u64.to_le_bytes()[..], b"{"].concat();
        assert_eq!(explained(error.clone(), &own, SAFETENSORS), error);
        assert!(explained(error, b"Entry not found", SAFETENSORS).got.ends_with("(a header of 3 bytes)"));
    }
}
