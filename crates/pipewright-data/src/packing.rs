//! How data files are compressed: by what their names end with, which their content must begin with.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;

use serde::Serialize;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// It is not.
    Plain,
    /// gzip, with a name that ends in `.gz`.
    Gzip,
    /// zstd, with a name that ends in `.zst`.
    Zstd,
}

impl Packing {
    /// Returns the packing that a name ends with.
    pub(crate) fn of_name(path: &Path) -> Self {
        match path.extension().and_then(OsStr::to_str) {
            Some("gz") => Self::Gzip,
            Some("zst") => Self::Zstd,
            _ => Self::Plain,
        }
    }

    /// Returns whether content that begins with `head` can have the packing.
    pub(crate) fn begins(self, head: &[u8]) -> bool {
        match self {
            Self::Plain => true,
            Self::Gzip => head.starts_with(b"\x1f\x8b"),
            // A frame, or one that decoders skip.
            Self::Zstd => {
                head.starts_with(b"\x28\xb5\x2f\xfd")
                    || (head.get(1..4) == Some(b"\x2a\x4d\x18") && head[0] & 0xf0 == 0x50)
            }
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        })
    }
}
