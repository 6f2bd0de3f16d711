//! The content of all files of a data source, before it is divided into rows.

use crate::formats::format::DataSource;
use crate::settings::train_on::LongRecordCount;
use crate::storage::examples::Examples;
use crate::storage::ids::Ids;
use crate::stride::Stride;

/// The content of the files of a data source.
pub(crate) struct Collected {
    pub(crate) content: CollectedContent,
    pub(crate) sources: Vec<DataSource>,
    pub(crate) long_records: LongRecordCount,
    pub(crate) known: Known,
}

/// The token ids of a data source.
pub(crate) enum CollectedContent {
    Ids(Ids, Stride),
    /// Examples, and the numbers of the examples that are used.
    Examples(Examples, Vec<u32>),
}

/// Figures of the content that need no further reading.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    /// The hash of all bytes.
    pub(crate) hash: Option<blake3::Hash>,
    pub(crate) totals: Option<Totals>,
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
pub(crate) struct Frequencies(Vec<u64>);

impl Frequencies {
    /// Counts an id.
    pub(crate) fn count(&mut self, id: u32) {
        let id = id as usize;
        if id >= self.0.len() {
            self.0.resize(id + 1, 0);
        }
        self.0[id] += 1;
    }

    /// Returns the figures of all ids that were counted. The terms of the entropy are added in the order of
    /// the ids.
    pub(crate) fn totals(&self) -> Totals {
        let all = self.0.iter().sum::<u64>();
        let part = |count: u64| {
            let share = count as f64 / all as f64;
            -share * share.ln()
        };
        let frequency_entropy = self.0.iter().filter(|count| **count > 0).map(|count| part(*count)).sum();
        Totals { targets: all as usize, frequency_entropy }
    }
}
