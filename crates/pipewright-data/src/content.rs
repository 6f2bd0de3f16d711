//! Recognises files that are not text by their content, so that nobody trains on the bytes of an archive.

use std::fmt;
use std::path::Path;

use crate::error::DataError;

/// The kind of a file that is not text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    /// A format that its first bytes name: what it is, and what to do with it.
    Known {
        /// The name of the format, with its article.
        name: &'static str,
        /// The advice, as an imperative.
        advice: &'static str,
    },
    /// Text, in place of token ids.
    Letters,
    /// A byte that no text contains.
    Nul {
        /// Its offset.
        offset: u64,
    },
    /// More control characters than text contains.
    Controls {
        /// Their number.
        count: usize,
        /// The number of bytes that were looked at.
        bytes: usize,
    },
}

impl fmt::Display for Binary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known { name, advice } => write!(f, "the file is {name}, not text: {advice}"),
            Self::Letters => f.write_str(
                "the file is text, not token ids: give its name another ending than `.bin`, such as `.txt`",
            ),
            Self::Nul { offset } => write!(
                f,
                "byte {offset} is 0, which no text contains: convert the file to UTF-8 text; the name of a file with token ids of \
                 16 bits must end in `.bin`"
            ),
            Self::Controls { count, bytes } => write!(
                f,
                "{count} of {bytes} bytes are control characters, so it is not text: remove them, or write binary token ids as a \
                 `.jsonl` file with a list of ids in each line"
            ),
        }
    }
}

const UNPACK: &str = "unpack it, and name the files in it";
const EXPORT: &str = "export its text to `.txt` files, or its token ids to a `.jsonl` file";
const OTHER: &str = "name files with text";
const UTF8: &str = "save it as UTF-8";
const WEIGHTS: &str = "it has weights, which `model.from` reads from their folder";

/// The first bytes of formats, with their names and what to do.
const MAGIC: [(&[u8], &str, &str); 36] = [
    (b"\x1f\x8b", "a gzip archive", "let its name end in `.gz`"),
    (b"PK\x03\x04", "a zip archive", UNPACK),
    (b"PK\x05\x06", "a zip archive", UNPACK),
    (b"BZh", "a bzip2 archive", UNPACK),
    (b"\xfd7zXZ\0", "an xz archive", UNPACK),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", "let its name end in `.zst`"),
    (b"\x04\x22\x4d\x18", "an lz4 archive", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"Rar!\x1a\x07", "a rar archive", UNPACK),
    (b"PAR1", "a Parquet file", "let its name end in `.parquet`"),
    (b"ARROW1", "an Arrow file", EXPORT),
    (b"\xff\xff\xff\xff", "an Arrow stream", EXPORT),
    (b"ORC", "an ORC file", EXPORT),
    (b"Obj\x01", "an Avro file", EXPORT),
    (b"\x93NUMPY", "a NumPy array", EXPORT),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", EXPORT),
    (b"SQLite format 3\0", "an SQLite database", EXPORT),
    (b"\x80\x02", "a Python pickle", EXPORT),
    (b"\x80\x03", "a Python pickle", EXPORT),
    (b"\x80\x04", "a Python pickle", EXPORT),
    (b"\x80\x05", "a Python pickle", EXPORT),
    (
        b"\x89PWTOK\r\n",
        "a file of `pipewright tokenize`",
        "give it to a run alone, with a name that ends in `.pwtok`",
    ),
    (b"GGUF", "a GGUF file", WEIGHTS),
    (b"%PDF-", "a PDF file", EXPORT),
    (b"{\\rtf", "an RTF document", EXPORT),
    (b"\xd0\xcf\x11\xe0", "a document of an office program", EXPORT),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", OTHER),
    (b"\xff\xd8\xff", "a JPEG picture", OTHER),
    (b"GIF8", "a GIF picture", OTHER),
    (b"RIFF", "a RIFF file (sound, video or a WebP picture)", OTHER),
    (b"OggS", "an Ogg file", OTHER),
    (b"ID3", "an MP3 file", OTHER),
    (b"\x7fELF", "a program", OTHER),
    (b"MZ", "a program", OTHER),
    (b"\xff\xfe", "text in UTF-16", UTF8),
    (b"\xfe\xff", "text in UTF-16", UTF8),
];

/// Returns what a file with these bytes is if it is not text; `None` if it may be text in UTF-8, or in
/// another encoding.
///
/// Text may begin with the letters of a format, so the first bytes count only in a file that text cannot be.
pub(crate) fn binary(bytes: &[u8]) -> Option<Binary> {
    let nul = bytes.iter().position(|byte| *byte == 0);
    let is_document = [&b"%PDF-"[..], b"{\\rtf"].iter().any(|magic| bytes.starts_with(magic));
    let controls = controls(bytes);
    if is_pickle_of_text(bytes) {
        return Some(Binary::Known { name: "a Python pickle", advice: EXPORT });
    }
    if nul.is_none() && controls.is_none() && !is_document && std::str::from_utf8(bytes).is_ok() {
        return None;
    }
    known(bytes).or_else(|| nul.map(|offset| Binary::Nul { offset: offset as u64 })).or(controls)
}

/// Returns the control characters if there are more than text contains: more than one in a hundred, and not
/// only a few. Tabs, ends of lines and of pages, and the character that begins a colour of a terminal do not
/// count.
fn controls(bytes: &[u8]) -> Option<Binary> {
    const FEW: usize = 3;
    let is_control =
        |byte: &&u8| byte.is_ascii_control() && !matches!(byte, b'\t' | b'\n' | b'\r' | b'\x0c' | b'\x1b');
    let count = bytes.iter().filter(is_control).count();
    (count > FEW && count > bytes.len() / 100).then_some(Binary::Controls { count, bytes: bytes.len() })
}

/// Returns whether a file is a Python pickle in the oldest protocol, which consists of lines of text: it
/// begins with a list, a table, or the module and the name of a function, and ends with a full stop.
fn is_pickle_of_text(bytes: &[u8]) -> bool {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let mut next = || lines.next().unwrap_or_default();
    let (first, _name, third) = (next(), next(), next());
    let begins = matches!(first, b"(lp0" | b"(dp0") || (first.starts_with(b"c") && third == b"p0");
    begins && bytes.ends_with(b".")
}

fn known(bytes: &[u8]) -> Option<Binary> {
    let magic = MAGIC.iter().find(|(magic, ..)| bytes.starts_with(magic));
    if let Some(&(_, name, advice)) = magic {
        return Some(Binary::Known { name, advice });
    }
    // The name of the format follows the header of the first file.
    if bytes.get(257..262) == Some(b"ustar") {
        return Some(Binary::Known { name: "a tar archive", advice: UNPACK });
    }
    // A safetensors file begins with the length of its header, which is JSON.
    let is_tensors =
        bytes.get(4..10).is_some_and(|start| start.starts_with(&[0; 4]) && start.ends_with(b"{\""));
    is_tensors.then_some(Binary::Known { name: "a safetensors file", advice: WEIGHTS })
}

/// Returns what a file that begins with these bytes is if it is not a list of binary token ids. Shorter
/// beginnings of formats may be ids.
pub(crate) fn other_than_ids(head: &[u8]) -> Option<Binary> {
    const ARROW_STREAM: &[u8] = b"\xff\xff\xff\xff";
    let magic = MAGIC
        .iter()
        .find(|(magic, ..)| magic.len() >= 4 && *magic != ARROW_STREAM && head.starts_with(magic));
    let known = magic.map(|&(_, name, advice)| Binary::Known { name, advice });
    // The head may end inside a character.
    let is_utf8 = std::str::from_utf8(head).map_or_else(|error| error.error_len().is_none(), |_| true);
    known.or_else(|| (is_utf8 && head.len() >= 64 && binary(head).is_none()).then_some(Binary::Letters))
}

/// Refuses the pointer to a file that Git LFS has not downloaded.
pub(crate) fn refuse_lfs_pointer(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    if !bytes.starts_with(pipewright_system::bounded_file::LFS_POINTER) {
        return Ok(());
    }
    let problem = "this is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or download the file";
    Err(DataError::of(path, problem))
}

/// Refuses a file that is not text.
pub(crate) fn refuse_binary(path: &Path, binary: Option<Binary>) -> Result<(), DataError> {
    binary.map_or(Ok(()), |binary| Err(DataError::of(path, binary.to_string())))
}

/// Returns the text in a file's bytes. A file that is not text is refused with what it is.
pub(crate) fn utf8<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str, DataError> {
    refuse_binary(path, binary(bytes))?;
    refuse_lfs_pointer(path, bytes)?;
    std::str::from_utf8(bytes).map_err(|error| {
        let name = path.file_name().unwrap_or_default().display();
        let byte = error.valid_up_to();
        let advice = format!("convert the file, or leave it out with a pattern such as \"!**/{name}\"");
        DataError::of(path, format!("byte {byte} is not valid UTF-8; {advice}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bytes: &[u8], begins: &str) {
        let found = binary(bytes).map(|binary| binary.to_string()).unwrap_or_default();
        assert!(found.starts_with(begins) && found.is_empty() == begins.is_empty(), "{bytes:?}: {found}");
    }

    #[test]
    fn formats_are_named() {
        check(b"\x1f\x8b\x08\0\0", "the file is a gzip archive, not text: let its name end in `.gz`");
        check(b"PK\x03\x04\x14\0\0", "the file is a zip archive");
        check(
            b"PAR1\x15\x04\x15\0\0\0PAR1",
            "the file is a Parquet file, not text: let its name end in `.parquet`",
        );
        check(b"\x93NUMPY\x01\0v\0{'descr'", "the file is a NumPy array");
        check(b"\x58\0\0\0\0\0\0\0{\"a\":1}", "the file is a safetensors file");
        check(b"\x89PNG\r\n\x1a\n\0\0", "the file is a PNG picture");
        check(b"SQLite format 3\0", "the file is an SQLite database");
        check(b"\x80\x04\x95\x0f", "the file is a Python pickle");
        check(b"\xff\xfeh\0i\0", "the file is text in UTF-16, not text: save it as UTF-8");
        check(&[b"a".repeat(257), b"ustar\0".to_vec()].concat(), "the file is a tar archive");
        check(b"{\\rtf1\\ansi text}", "the file is an RTF document");
        check(b"(lp0\nI1\naI2\na.", "the file is a Python pickle");
        check(b"(dp0\nVa\np1\nI1\ns.", "the file is a Python pickle");
        check(
            b"ccopy_reg\n_reconstructor\np0\n(c__main__\nA\np1\ntp2\nRp3\n.",
            "the file is a Python pickle",
        );
        check(b"%PDF-1.7\nall of it is ASCII", "the file is a PDF file");
    }

    #[test]
    fn ids_of_two_bytes_are_not_text() {
        let ids: Vec<u8> = (20..60u16).flat_map(u16::to_le_bytes).collect();
        check(&ids, "byte 1 is 0, which no text contains");
    }

    #[test]
    fn ids_of_one_byte_are_not_text() {
        let ids: Vec<u8> = (1..60).collect();
        check(&ids, "26 of 59 bytes are control characters");
        let rare = [vec![1; 5], vec![b'a'; 495]].concat();
        check(&rare, "");
        check(&[rare, vec![1]].concat(), "6 of 501 bytes are control characters");
    }

    #[test]
    fn text_is_text_whatever_it_begins_with() {
        for text in [
            "",
            "PAR1 is a golf term",
            "GIF8 BZh MZ",
            "ORC and ID3",
            "{\\rt} and (lp0\nI1.",
            "\u{1b}[31mred\u{1b}[0m\tand\r\nthe next page\u{c}",
            "Привет, 世界 🦀",
            "\u{feff}a",
            "\u{1}\u{1b}[0m",
        ] {
            check(text.as_bytes(), "");
        }
        // Other encodings are reported with the first byte that is not UTF-8.
        check(b"na\xefve", "");
    }
}
