//! Rows of token ids for one step, as plain numbers, and how they are filled with documents.

use crate::documents::{DOCUMENTS, Documents, MadeSides, POSITIONS, VALID_TOKENS};
use crate::settings::preference::{ROLES, SEQUENCES, Sequence};
use crate::side::SideTensor;
use crate::storage::examples::RowPart;

/// Rows for one step: the inputs of the model and their targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    /// Token ids of shape `[rows, seq_len]`, row by row.
    pub inputs: Vec<i32>,
    /// The successor of each input, of the same shape; of chats and completions
    /// [`IGNORED_TARGET`](crate::IGNORED_TARGET) where it does not count in the loss.
    pub targets: Vec<i32>,
    /// The number of rows.
    pub rows: usize,
    /// Tokens per row.
    pub seq_len: usize,
    /// The side inputs of the rows.
    pub side: Vec<SideTensor>,
}

/// The target of a token that does not count in the loss, as in PyTorch.
pub const IGNORED_TARGET: i32 = -100;

/// The rows of a batch. Every row has all side inputs that one of them has.
#[derive(Debug)]
pub(crate) struct Filling {
    seq_len: usize,
    sides: MadeSides,
    inputs: Vec<i32>,
    targets: Vec<i32>,
    documents: Vec<i32>,
    positions: Vec<i32>,
    valid: Vec<i32>,
    roles: Vec<i32>,
    sequences: Vec<i32>,
}

impl Filling {
    /// Begins a batch of `rows` rows.
    pub(crate) fn new(rows: usize, seq_len: usize, sides: MadeSides) -> Self {
        let room = |is_needed: bool| Vec::with_capacity(if is_needed { rows * seq_len } else { 0 });
        Self {
            seq_len,
            sides,
            inputs: room(true),
            targets: room(true),
            documents: room(sides.documents),
            positions: room(sides.positions),
            valid: Vec::new(),
            roles: room(sides.roles),
            sequences: room(sides.roles),
        }
    }

    /// Appends a row of `seq_len + 1` ids. All of them count as targets. Without `documents` they are one
    /// document.
    pub(crate) fn push_ids(&mut self, ids: &[i32], documents: Option<&Documents>) {
        let (inputs, targets) = (&ids[..self.seq_len], &ids[1..]);
        self.inputs.extend(inputs);
        self.targets.extend(targets);
        self.valid.push(self.seq_len as i32);
        if !self.sides.documents && !self.sides.positions {
            // No side input has a number per token.
            return;
        }
        let (mut document, mut position) = (0, 0);
        let (sides, restarts) = (self.sides, documents.is_some_and(|documents| documents.restart_positions));
        for id in inputs {
            if documents.is_some_and(|documents| documents.begins(*id)) {
                document += 1;
                position = if restarts { 0 } else { position };
            }
            self.documents.extend(sides.documents.then_some(document));
            self.positions.extend(sides.positions.then_some(position));
            position += 1;
        }
    }

    /// Appends a row of examples, and fills its rest with the id 0 and targets that do not count.
    pub(crate) fn push_examples<E>(
        &mut self,
        examples: impl IntoIterator<Item = Result<(RowPart, Option<Sequence>), E>>,
    ) -> Result<(), E> {
        let (start, mut document) = (self.inputs.len(), 0);
        for example in examples {
            let (RowPart { ids, counts }, sequence) = example?;
            let places = ids.len() - 1;
            // Ids are below a vocabulary size that fits a signed index.
            self.inputs.extend(ids[..places].iter().map(|id| *id as i32));
            let is_whole = sequence.is_some_and(|sequence| sequence.is_whole);
            let target =
                |(id, counts): (&u32, &bool)| if *counts || is_whole { *id as i32 } else { IGNORED_TARGET };
            self.targets.extend(ids[1..].iter().zip(&counts[1..]).map(target));
            self.push_document(document, places);
            if let Some(Sequence { role, number, .. }) = sequence {
                let role = role as i32;
                self.roles.extend(counts[1..].iter().map(|counts| if *counts { role } else { -role }));
                self.sequences.extend(std::iter::repeat_n(number as i32, places));
            }
            document += 1;
        }
        let used = self.inputs.len() - start;
        self.valid.push(used as i32);
        self.inputs.resize(start + self.seq_len, 0);
        self.targets.resize(start + self.seq_len, IGNORED_TARGET);
        self.push_document(document, self.seq_len - used);
        if self.sides.roles {
            self.roles.resize(start + self.seq_len, 0);
            self.sequences.resize(start + self.seq_len, 0);
        }
        Ok(())
    }

    /// Appends a document of `places` tokens to the side inputs.
    fn push_document(&mut self, document: i32, places: usize) {
        if self.sides.documents {
            self.documents.extend(std::iter::repeat_n(document, places));
        }
        if self.sides.positions {
            self.positions.extend(0..places as i32);
        }
    }

    /// Returns the batch. Its side inputs follow `side`.
    pub(crate) fn finish(self, mut side: Vec<SideTensor>) -> TokenBatch {
        let Self { seq_len, sides, inputs, targets, documents, positions, valid, roles, sequences } = self;
        let rows = valid.len();
        let tensors = [
            (sides.valid, VALID_TOKENS, vec![rows], valid),
            (sides.documents, DOCUMENTS, vec![rows, seq_len], documents),
            (sides.positions, POSITIONS, vec![rows, seq_len], positions),
            (sides.roles, ROLES, vec![rows, seq_len], roles),
            (sides.roles, SEQUENCES, vec![rows, seq_len], sequences),
        ];
        let tensors = tensors.into_iter().filter(|(is_made, ..)| *is_made);
        side.extend(tensors.map(|(_, name, shape, values)| SideTensor {
            name: name.to_owned(),
            shape,
            values,
        }));
        TokenBatch { inputs, targets, rows, seq_len, side }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names and values of the side inputs.
    fn sides(batch: &TokenBatch) -> Vec<(&str, &[i32])> {
        batch.side.iter().map(|side| (side.name.as_str(), side.values.as_slice())).collect()
    }

    fn examples(parts: &[&[u32]]) -> Vec<Result<(RowPart, Option<Sequence>), ()>> {
        let part = |ids: &&[u32]| RowPart { ids: ids.to_vec(), counts: vec![true; ids.len()] };
        parts.iter().map(|ids| Ok((part(ids), None))).collect()
    }

    #[test]
    fn rows_of_ids_and_of_examples_have_the_same_side_inputs() {
        let sides_of_both = MadeSides { valid: true, documents: true, positions: true, roles: false };
        for restart_positions in [false, true] {
            let mut filling = Filling::new(2, 4, sides_of_both);
            let documents = Documents { bos_id: 7, packed: true, restart_positions };
            filling.push_ids(&[1, 7, 2, 7, 5], Some(&documents));
            filling.push_examples(examples(&[&[1, 2, 3], &[8, 9]])).expect("they are in memory");
            let batch = filling.finish(Vec::new());
            assert_eq!((batch.rows, batch.inputs.as_slice()), (2, &[1, 7, 2, 7, 1, 2, 8, 0][..]));
            assert_eq!(batch.targets, [7, 2, 7, 5, 2, 3, 9, IGNORED_TARGET]);
            let positions = if restart_positions { [0, 0, 1, 0] } else { [0, 1, 2, 3] };
            let positions = [positions, [0, 1, 0, 0]].concat();
            let expected: [(&str, &[i32]); 3] =
                [(VALID_TOKENS, &[4, 3]), (DOCUMENTS, &[0, 1, 1, 2, 0, 0, 1, 2]), (POSITIONS, &positions)];
            assert_eq!(sides(&batch), expected);
        }
    }
}
