//! The tokens that an attention is over: their documents and positions.

use std::sync::Arc;

/// The tokens of a microbatch: rows of `sequence` tokens each.
#[derive(Clone, Debug)]
pub struct TokenScope {
    /// Tokens of a row.
    pub sequence: usize,
    /// The document of each token, row by row. Tokens of one document follow each other, and see only each
    /// other.
    pub documents: Arc<[u32]>,
    /// The position of each token, row by row, ascending in a document.
    pub positions: Arc<[u32]>,
}

impl TokenScope {
    /// Returns the tokens of `rows` whole rows without documents.
    pub fn whole(rows: usize, sequence: usize) -> Self {
        let positions = (0..rows).flat_map(|_| 0..sequence as u32).collect();
        Self { sequence, documents: vec![0; rows * sequence].into(), positions }
    }

    /// Returns the place in its row of the first token that each token sees.
    pub(super) fn starts(&self, window: Option<usize>) -> Vec<u32> {
        let window = window.unwrap_or(usize::MAX);
        let mut starts = Vec::with_capacity(self.documents.len());
        let rows = self.documents.chunks(self.sequence).zip(self.positions.chunks(self.sequence));
        for (documents, positions) in rows {
            let mut start = 0;
            for (index, (document, &position)) in documents.iter().zip(positions).enumerate() {
                let sees = |start: usize| {
                    documents[start] == *document && ((position - positions[start]) as usize) < window
                };
                while start < index && !sees(start) {
                    start += 1;
                }
                starts.push(start as u32);
            }
        }
        starts
    }
}
