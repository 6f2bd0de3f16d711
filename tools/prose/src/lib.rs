//! Counts constructions in comments, messages and documents that are not idiomatic English.
//!
//! Many of the project's authors and readers are not native speakers. [`IDIOMS`] are constructions that were
//! translated from another language word by word, and that a reader has to read twice. Some of them are
//! correct in some sentences, so they are counted, per 10,000 words, and the test `prose` keeps the rate low.
//! The sources of ten well-known crates, such as Burn, clap, rayon and serde, have rates from 1 to 7.

mod passages;
mod idioms;

pub use idioms::{IDIOMS, Idiom, Use};
pub use passages::{Kind, Passage, of_markdown, of_rust};

/// Returns the uses of all idioms in a passage.
pub fn uses(passage: &Passage) -> Vec<Use> {
    IDIOMS.iter().flat_map(|idiom| idiom.uses(passage)).collect()
}

/// Returns the number of uses per 10,000 words.
pub fn rate(uses: usize, words: usize) -> f64 {
    1e4 * uses as f64 / words.max(1) as f64
}
