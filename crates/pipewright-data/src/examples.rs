//! Chats and completions as rows of token ids, in which some targets do not count.
//!
//! An example of `n` ids takes `n - 1` places of a row: its last id is a target only. A row has one example,
//! or several that are packed, and its rest is filled with the id 0 and targets that do not count.

use std::sync::Arc;

use crate::documents::{DOCUMENTS, POSITIONS, VALID_TOKENS};
use crate::side::SideTensor;

/// The target of a token that does not count in the loss, as in PyTorch.
pub const IGNORED_TARGET: i32 = -100;

/// The ids of all examples.
#[derive(Clone, Debug, Default)]
pub(crate) struct Examples {
    ids: Vec<u32>,
    /// Whether each id counts as a target.
    counts: Vec<bool>,
    /// The first id of each example.
    starts: Vec<usize>,
}

/// Rows of examples.
#[derive(Clone, Debug)]
pub(crate) struct ExampleRows {
    examples: Arc<Examples>,
    /// The examples of each row.
    rows: Vec<Vec<u32>>,
    /// Whether rows say which tokens belong to which example.
    is_packed: bool,
}

/// A document in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPart {
    /// Its token ids, the last of which is a target only.
    pub ids: Vec<u32>,
    /// Whether each of them counts as a target; the first one of a row is no target.
    pub counts: Vec<bool>,
}

/// The inputs, targets and side inputs of rows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Filled {
    pub(crate) inputs: Vec<i32>,
    pub(crate) targets: Vec<i32>,
    pub(crate) side: Vec<SideTensor>,
}

impl Examples {
    /// The memory of an id and of whether it counts.
    pub(crate) const BYTES_PER_ID: usize = size_of::<u32>() + size_of::<bool>();

    /// Appends an example of ids and whether each of them counts as a target.
    pub(crate) fn push(&mut self, ids: &[u32], counts: &[bool]) {
        self.starts.push(self.ids.len());
        self.ids.extend(ids);
        self.counts.extend(counts);
    }

    /// Returns the number of examples.
    pub(crate) fn len(&self) -> usize {
        self.starts.len()
    }

    fn range(&self, example: u32) -> std::ops::Range<usize> {
        let start = self.starts[example as usize];
        start..self.starts.get(example as usize + 1).copied().unwrap_or(self.ids.len())
    }

    /// Returns the places of a row that an example takes.
    fn places(&self, example: u32) -> usize {
        self.range(example).len() - 1
    }
}

impl ExampleRows {
    /// Puts each example into a row of its own, or with `is_packed` into the first row with enough free
    /// places.
    pub(crate) fn new(examples: Examples, seq_len: usize, is_packed: bool) -> Self {
        let numbers = 0..examples.len() as u32;
        let rows = if is_packed {
            first_fit(numbers.map(|example| examples.places(example)), seq_len)
        } else {
            numbers.map(|example| vec![example]).collect()
        };
        Self { examples: Arc::new(examples), rows, is_packed }
    }

    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Takes the rows from `row` on out of the list.
    pub(crate) fn split_off(&mut self, row: usize) -> Self {
        Self { examples: self.examples.clone(), rows: self.rows.split_off(row), is_packed: self.is_packed }
    }

    /// Returns the examples of a row.
    pub(crate) fn parts(&self, row: usize) -> Vec<RowPart> {
        let part = |example: &u32| {
            let range = self.examples.range(*example);
            RowPart {
                ids: self.examples.ids[range.clone()].to_vec(),
                counts: self.examples.counts[range].to_vec(),
            }
        };
        self.rows[row].iter().map(part).collect()
    }

    /// Returns the examples in the order of the rows.
    fn in_order(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.rows.iter().flatten().map(|example| self.examples.range(*example))
    }

    /// Returns the number of ids, and the number of targets that count.
    pub(crate) fn tokens(&self) -> (usize, usize) {
        let counted = |range: &std::ops::Range<usize>| {
            self.examples.counts[range.clone()][1..].iter().filter(|counts| **counts).count()
        };
        self.in_order().fold((0, 0), |(ids, targets), range| (ids + range.len(), targets + counted(&range)))
    }

    /// Returns the ids that count as targets, in the order of the rows.
    pub(crate) fn targets(&self) -> impl Iterator<Item = u32> {
        let Examples { ids, counts, .. } = &*self.examples;
        // No token predicts the first id of an example.
        let targets = self.in_order().flat_map(|range| range.skip(1));
        targets.filter(|id| counts[*id]).map(|id| ids[id])
    }

    /// Returns the BLAKE3 hash of the rows, in hexadecimal.
    pub(crate) fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for row in &self.rows {
            hasher.update(&(row.len() as u32).to_le_bytes());
            for example in row {
                let range = self.examples.range(*example);
                hasher.update(&(range.len() as u64).to_le_bytes());
                let ids = self.examples.ids[range.clone()].iter().flat_map(|id| id.to_le_bytes());
                hasher.update(&ids.collect::<Vec<u8>>());
                let counts = self.examples.counts[range].iter().map(|counts| u8::from(*counts));
                hasher.update(&counts.collect::<Vec<u8>>());
            }
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Returns the inputs and targets of some rows of `seq_len` tokens, each of them filled up.
    pub(crate) fn filled(&self, rows: &[usize], seq_len: usize) -> Filled {
        let mut filled = Filled::default();
        let (mut documents, mut positions, mut valid) = (Vec::new(), Vec::new(), Vec::new());
        for (number, &row) in rows.iter().enumerate() {
            for (document, &example) in (0..).zip(&self.rows[row]) {
                let range = self.examples.range(example);
                let (ids, counts) = (&self.examples.ids[range.clone()], &self.examples.counts[range]);
                let places = ids.len() - 1;
                // Ids are below a vocabulary size that fits a signed index.
                filled.inputs.extend(ids[..places].iter().map(|id| *id as i32));
                let target = |(id, counts): (&u32, &bool)| if *counts { *id as i32 } else { IGNORED_TARGET };
                filled.targets.extend(ids[1..].iter().zip(&counts[1..]).map(target));
                documents.extend(std::iter::repeat_n(document, places));
                positions.extend(0..places as i32);
            }
            let end = (number + 1) * seq_len;
            let rest = end - filled.inputs.len();
            valid.push((seq_len - rest) as i32);
            filled.inputs.resize(end, 0);
            filled.targets.resize(end, IGNORED_TARGET);
            documents.resize(end, self.rows[row].len() as i32);
            positions.extend(0..rest as i32);
        }
        filled.side.push(SideTensor {
            name: VALID_TOKENS.to_owned(),
            shape: vec![rows.len()],
            values: valid,
        });
        if self.is_packed {
            let shape = vec![rows.len(), seq_len];
            let tensor =
                |name: &str, values| SideTensor { name: name.to_owned(), shape: shape.clone(), values };
            filled.side.extend([tensor(DOCUMENTS, documents), tensor(POSITIONS, positions)]);
        }
        filled
    }
}

/// Puts examples of these sizes into rows, each into the first one with enough free places. A tree of the
/// most free places in a row finds it in logarithmic time.
fn first_fit(sizes: impl ExactSizeIterator<Item = usize>, seq_len: usize) -> Vec<Vec<u32>> {
    let leaves = sizes.len().next_power_of_two();
    // The node `n` has the children `2 n` and `2 n + 1`; the leaves are the rows.
    let mut free = vec![seq_len; 2 * leaves];
    let mut rows: Vec<Vec<u32>> = Vec::new();
    for (example, size) in (0..).zip(sizes) {
        let mut node = 1;
        while node < leaves {
            node = if free[2 * node] >= size { 2 * node } else { 2 * node + 1 };
        }
        let row = node - leaves;
        if row == rows.len() {
            rows.push(Vec::new());
        }
        rows[row].push(example);
        free[node] -= size;
        while node > 1 {
            node /= 2;
            free[node] = free[2 * node].max(free[2 * node + 1]);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_example_goes_into_the_first_row_with_room() {
        let check = |sizes: &[usize], expected: &[&[u32]]| {
            assert_eq!(first_fit(sizes.iter().copied(), 10), expected, "{sizes:?}");
        };
        check(&[], &[]);
        check(&[10], &[&[0]]);
        check(&[6, 5, 4, 5, 3], &[&[0, 2], &[1, 3], &[4]]);
        check(&[9, 9, 1, 1, 1], &[&[0, 2], &[1, 3], &[4]]);
    }

    fn rows(is_packed: bool) -> ExampleRows {
        let mut examples = Examples::default();
        examples.push(&[1, 2, 3], &[true, false, true]);
        examples.push(&[4, 5, 6, 7], &[false, true, true, true]);
        examples.push(&[8, 9], &[false, true]);
        ExampleRows::new(examples, 4, is_packed)
    }

    #[test]
    fn a_row_is_filled_with_targets_that_do_not_count() {
        let found = rows(false).filled(&[2, 0], 4);
        assert_eq!(found.inputs, [8, 0, 0, 0, 1, 2, 0, 0]);
        assert_eq!(found.targets, [9, -100, -100, -100, -100, 3, -100, -100]);
        assert_eq!((found.side.len(), found.side[0].values.as_slice()), (1, &[1, 2][..]));
        assert_eq!(rows(false).tokens(), (9, 5));
    }

    #[test]
    fn packed_examples_are_told_apart() {
        let rows = rows(true);
        assert_eq!(rows.len(), 2);
        let found = rows.filled(&[0, 1], 4);
        assert_eq!(found.inputs, [1, 2, 8, 0, 4, 5, 6, 0]);
        assert_eq!(found.targets, [-100, 3, 9, -100, 5, 6, 7, -100]);
        let side = found.side.iter().map(|side| (side.name.as_str(), side.values.as_slice()));
        let expected: [(&str, &[i32]); 3] = [
            (VALID_TOKENS, &[3, 3]),
            (DOCUMENTS, &[0, 0, 1, 2, 0, 0, 0, 1]),
            (POSITIONS, &[0, 1, 0, 0, 0, 1, 2, 0]),
        ];
        assert!(side.eq(expected), "{:?}", found.side);
    }

    #[test]
    fn rows_that_differ_have_other_hashes() {
        let (mut packed, alone) = (rows(true), rows(false));
        let whole = packed.hash();
        assert_ne!(whole, alone.hash());
        let last = packed.split_off(1);
        assert!(packed.hash() != whole && last.hash() != packed.hash());
        assert_eq!((packed.tokens(), last.tokens()), ((5, 2), (4, 3)));
    }
}
