//! The content of all files of a data source, before it is divided into rows.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::bad_records::BadRecords;
use crate::chat::special_tokens::MissingEnd;
use crate::error::DataError;
use crate::formats::format::DataSource;
use crate::settings::train_on::LongRecordCount;
use crate::storage::examples::Examples;
use crate::storage::ids::Ids;

/// The content of the files of a data source.
pub(crate) struct Collected {
    pub(crate) content: CollectedContent,
    pub(crate) sources: Vec<DataSource>,
    pub(crate) long_records: LongRecordCount,
    pub(crate) bad_records: Option<BadRecords>,
    /// Set if no token ends the completions.
    pub(crate) missing_end: Option<MissingEnd>,
    pub(crate) known: Known,
}

/// The token ids of a data source.
pub(crate) enum CollectedContent {
    Ids(Ids, Stride),
    Examples(Examples),
}

/// How rows are cut from the stream of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stride {
    /// No two rows share an id.
    Disjoint,
    /// The last id of a row is the first id of the next row.
    Overlapping,
}

impl Stride {
    /// Returns the number of ids from the start of one row to the start of the next.
    pub(crate) fn length(self, seq_len: usize) -> usize {
        match self {
            Self::Disjoint => seq_len + 1,
            Self::Overlapping => seq_len,
        }
    }

    /// Returns the number of whole rows in `ids` ids.
    pub(crate) fn rows(self, ids: usize, seq_len: usize) -> Result<u32, DataError> {
        let rows = match self {
            Self::Disjoint => ids / (seq_len + 1),
            Self::Overlapping => ids.saturating_sub(1) / seq_len.max(1),
        };
        checked_rows(rows)
    }
}

/// Returns a number of rows, if an epoch can number them.
pub(crate) fn checked_rows(rows: usize) -> Result<u32, DataError> {
    u32::try_from(rows).map_err(|_| {
        let most = u32::MAX;
        DataError::new(format!(
            "the data has {rows} rows, and at most {most} can be put in order; use a longer seq_len"
        ))
    })
}

/// Figures of the content that need no further reading: the file has them, or they were computed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    /// The hash of the ids or examples.
    pub(crate) hash: OnceLock<blake3::Hash>,
    pub(crate) totals: OnceLock<Totals>,
}

/// Figures of all targets that count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Totals {
    /// The number of targets that count; of a stream, all ids.
    pub(crate) targets: usize,
    /// The entropy of their frequencies, in nats.
    pub(crate) frequency_entropy: f64,
}

/// The number of occurrences of each id.
#[derive(Clone, Debug, Default)]
pub(crate) struct Frequencies {
    /// The numbers of the ids from 0 on.
    dense: Vec<u64>,
    /// The numbers of larger ids, which may be far apart.
    sparse: BTreeMap<u32, u64>,
}

impl Frequencies {
    /// The ids below this have a place of their own, which no tokenizer in use exceeds.
    const DENSE: u32 = 1 << 20;

    /// Counts an id.
    pub(crate) fn count(&mut self, id: u32) {
        if id >= Self::DENSE {
            *self.sparse.entry(id).or_default() += 1;
            return;
        }
        let id = id as usize;
        if id >= self.dense.len() {
            self.dense.resize(id + 1, 0);
        }
        self.dense[id] += 1;
    }

    /// Returns the figures of all ids that were counted. The terms of the entropy are added in the order of
    /// the ids.
    pub(crate) fn totals(&self) -> Totals {
        let counts = || self.dense.iter().chain(self.sparse.values()).copied().filter(|count| *count > 0);
        let all = counts().sum::<u64>();
        let part = |count: u64| {
            let share = count as f64 / all as f64;
            -share * libm::log(share)
        };
        Totals { targets: all as usize, frequency_entropy: counts().map(part).sum() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_id_takes_no_memory_for_the_ids_below_it() {
        let mut frequencies = Frequencies::default();
        [7, u32::MAX, 7, u32::MAX].into_iter().for_each(|id| frequencies.count(id));
        let Totals { targets, frequency_entropy } = frequencies.totals();
        assert_eq!((targets, frequency_entropy), (4, 2f64.ln()));
        assert_eq!(frequencies.dense.len(), 8);
    }
}
