//! Rows that another process has: a [`RowsOutline`] has all that a process needs to know of them, and a [`RowReader`]
//! gets their content.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::config::DataConfig;
use crate::documents::Documents;
use crate::error::DataError;
use crate::interleave::Interleave;
use crate::row_place::RowReader;
use crate::rows::TokenRows;
use crate::source_rows::{SourceOutline, SourceRows};

/// Everything about [`TokenRows`] but the token ids and the names of files. It is small.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RowsOutline {
    sources: Vec<SourceOutline>,
    /// The shares of the sources in the rows.
    shares: Vec<u64>,
    is_mixture: bool,
    seq_len: usize,
    documents: Option<Documents>,
}

impl TokenRows {
    /// Returns the outline of these rows for another process. May read all ids.
    ///
    /// # Errors
    /// As [`TokenRows::next_batch`].
    pub fn outline(&self) -> Result<RowsOutline, DataError> {
        Ok(RowsOutline {
            sources: self.sources.iter().map(SourceRows::outline).collect::<Result<_, _>>()?,
            shares: self.draws.shares().collect(),
            is_mixture: !self.mix.is_empty(),
            seq_len: self.seq_len,
            documents: self.documents,
        })
    }

    /// Returns the rows with this outline, whose content `reader` gets. `config` has the names and
    /// weights of a mixture. The position is the first row.
    pub fn remote(outline: RowsOutline, config: &DataConfig, reader: Arc<dyn RowReader>) -> Self {
        let RowsOutline { sources, shares, is_mixture, seq_len, documents } = outline;
        let mix = if is_mixture { config.mix.as_slice() } else { &[] };
        let draws = Interleave::by_share(shares);
        let sources = sources.into_iter().map(|source| SourceRows::remote(source, seq_len)).collect();
        Self {
            sources,
            draws,
            mix: mix.into(),
            seq_len,
            side: None,
            documents,
            files: Arc::from([]),
            reader: Some(reader),
        }
    }
}
