//! Documents in rows of tokens: where they begin, and the side inputs that keep them apart.

use serde::{Deserialize, Serialize};

use crate::side::SideTensor;

/// The side input with the document of each token.
pub const DOCUMENTS: &str = "doc_ids";
/// The side input with the position of each token.
pub const POSITIONS: &str = "position_ids";

/// The side input with the number of tokens of each row that do not only fill it.
pub const VALID_TOKENS: &str = "row_valid_token_counts";

/// Documents in rows of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Documents {
    /// The token id that begins a document. It is put before the text of each file. A `.jsonl` file of token
    /// ids contains it already.
    pub bos_id: u32,
    /// Whether a token sees nothing of the other documents in its row. Batches then have the side input
    /// [`DOCUMENTS`].
    pub packed: bool,
    /// Whether positions begin again at 0 in each document, if tokens see nothing of the others. Batches then
    /// have the side input [`POSITIONS`].
    pub restart_positions: bool,
}

impl Documents {
    /// Returns the side inputs of some rows of ids. The id that begins a document belongs to it.
    pub(crate) fn side_inputs(&self, ids: &[i32], seq_len: usize) -> Vec<SideTensor> {
        let (mut documents, mut positions) = (Vec::new(), Vec::new());
        for row in ids.chunks(seq_len.max(1)) {
            let (mut document, mut position) = (0, 0);
            for &id in row {
                if u32::try_from(id) == Ok(self.bos_id) {
                    (document, position) = (document + 1, 0);
                }
                documents.push(document);
                positions.push(position);
                position += 1;
            }
        }
        let shape = vec![ids.len() / seq_len.max(1), seq_len];
        let tensor = |name: &str, values| SideTensor { name: name.to_owned(), shape: shape.clone(), values };
        let documents = self.packed.then(|| tensor(DOCUMENTS, documents));
        let positions = (self.packed && self.restart_positions).then(|| tensor(POSITIONS, positions));
        documents.into_iter().chain(positions).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beginning_belongs_to_its_document_and_restarts_the_positions() {
        let both = Documents { bos_id: 7, packed: true, restart_positions: true };
        let found = both.side_inputs(&[1, 7, 2, 7, 7, 3, 4, 5], 4);
        let values: Vec<(&str, &[usize], &[i32])> = found
            .iter()
            .map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice(), tensor.values.as_slice()))
            .collect();
        let documents: &[i32] = &[0, 1, 1, 2, 1, 1, 1, 1];
        let positions: &[i32] = &[0, 0, 1, 0, 0, 1, 2, 3];
        assert_eq!(values, [("doc_ids", &[2, 4][..], documents), ("position_ids", &[2, 4], positions)]);
        assert!(Documents { packed: false, ..both }.side_inputs(&[7], 1).is_empty());
    }
}
