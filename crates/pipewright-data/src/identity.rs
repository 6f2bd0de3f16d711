//! The properties of training data that a resumed run must find again.

use serde::Serialize;

use crate::documents::Documents;
use crate::settings::mix::MixWeight;

/// The identity of a data source. Two sources with the same identity return the same rows in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DataIdentity {
    /// The number of token ids.
    pub tokens: usize,
    /// The number of rows per epoch.
    pub rows: usize,
    /// Tokens per row.
    pub seq_len: usize,
    /// The seed of the order; `None` without shuffling.
    pub shuffle_seed: Option<u64>,
    /// The BLAKE3 hash of the token ids, in hexadecimal; of a mixture, of the hashes of its sources.
    pub hash: String,
    /// Where documents begin, and whether a token sees other documents in its row; left out without
    /// documents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents: Option<Documents>,
    /// The sources of a mixture; left out without one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<SourceIdentity>,
}

/// The identity of a source of a mixture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceIdentity {
    /// The weight of the source.
    pub weight: MixWeight,
    /// The number of its token ids.
    pub tokens: usize,
    /// The number of its rows.
    pub rows: usize,
    /// The BLAKE3 hash of its token ids, in hexadecimal.
    pub hash: String,
}
