//! Chats and completions as rows of token ids, in which some targets do not count.
//!
//! An example of `n` ids takes `n - 1` places of a row: its last id is a target only. A row has one example,
//! or several that are packed, and its rest is filled.

use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;

use crate::documents::MadeSides;
use crate::error::DataError;
use crate::settings::preference::{PreferenceData, Role, Sequence};
use crate::storage::examples::{Examples, RowPart};

/// How much of the rows of chats, completions and labelled texts their tokens fill. The rest is computed too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RowFill {
    /// The tokens that the model receives in all rows, without the filling.
    pub tokens: u64,
    /// The places for tokens in all rows.
    pub places: u64,
    /// The number of rows.
    pub rows: usize,
    /// The number of rows if records share them ([`DataConfig::packs_examples`](crate::DataConfig::packs_examples)).
    pub packed_rows: usize,
}

impl RowFill {
    /// Returns the sum of both.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            places: self.places + other.places,
            rows: self.rows + other.rows,
            packed_rows: self.packed_rows + other.packed_rows,
        }
    }
}

/// Rows of examples. A clone shares them.
#[derive(Clone, Debug)]
pub(crate) struct ExampleRows {
    examples: Arc<Examples>,
    /// The examples of all rows, row by row.
    members: Arc<[u32]>,
    /// The first member of each row, and the number of members.
    starts: Arc<[u32]>,
    /// The rows of the list that these are.
    range: Range<usize>,
    /// The most ids of an example that are used.
    longest: usize,
    /// Whether rows say which tokens belong to which example.
    is_packed: bool,
    /// The form of preference training, whose records are two examples each.
    preference: Option<PreferenceData>,
    /// The number of the first sequence.
    first_number: u32,
}

impl ExampleRows {
    /// Puts each example into a row of its own, or with `is_packed` into the first row with enough free
    /// places. Longer examples than a row takes are cut. The two examples of a record for preference training are in
    /// one row.
    pub(crate) fn new(
        examples: Examples,
        seq_len: usize,
        (is_packed, preference): (bool, Option<PreferenceData>),
    ) -> Self {
        let unit = unit_of(preference) as u32;
        // Examples are numbered with as many bits.
        let count = examples.len() as u32 / unit;
        let (members, starts): (Vec<u32>, Vec<u32>) = if is_packed {
            let of_unit = |record: usize| {
                let parts = (0..unit).map(|part| record as u32 * unit + part);
                parts.map(|example| places_of(&examples, example, seq_len)).sum()
            };
            let rows = first_fit((0..count as usize).map(of_unit), seq_len);
            let mut starts = vec![0];
            starts.extend(rows.iter().scan(0, |end, row| {
                *end += row.len() as u32;
                Some(*end)
            }));
            (rows.into_iter().flatten().collect(), starts)
        } else {
            ((0..count).collect(), (0..=count).collect())
        };
        let members: Vec<u32> =
            members.into_iter().flat_map(|record| (0..unit).map(move |part| record * unit + part)).collect();
        let starts: Vec<u32> = starts.into_iter().map(|start| start * unit).collect();
        let range = 0..starts.len() - 1;
        Self {
            examples: Arc::new(examples),
            members: members.into(),
            starts: starts.into(),
            range,
            longest: seq_len + 1,
            is_packed: is_packed || preference.is_some(),
            preference,
            first_number: 1,
        }
    }

    /// Returns the number of sequences of preference training, with the ones of rows that are split off.
    pub(crate) fn sequences(&self) -> usize {
        if self.preference.is_some() { self.examples.len() } else { 0 }
    }

    /// Counts sequences from this number on.
    pub(crate) fn number_from(&mut self, first: u32) {
        self.first_number = first;
    }

    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }

    /// Takes the rows from `row` on out of the list.
    pub(crate) fn split_off(&mut self, row: usize) -> Self {
        let middle = self.range.start + row;
        let held = Self { range: middle..self.range.end, ..self.clone() };
        self.range.end = middle;
        held
    }

    /// Returns the examples of a row.
    fn members(&self, row: usize) -> &[u32] {
        let row = self.range.start + row;
        &self.members[self.starts[row] as usize..self.starts[row + 1] as usize]
    }

    /// Returns the examples of all rows, in the order of the rows.
    fn all_members(&self) -> &[u32] {
        &self.members[self.starts[self.range.start] as usize..self.starts[self.range.end] as usize]
    }

    /// Returns how much of these rows is filled.
    pub(crate) fn row_fill(&self) -> RowFill {
        let seq_len = self.longest - 1;
        let unit = |members: &[u32]| members.iter().map(|&one| places_of(&self.examples, one, seq_len)).sum();
        let units: Vec<usize> = self.all_members().chunks(unit_of(self.preference)).map(unit).collect();
        RowFill {
            tokens: units.iter().sum::<usize>() as u64,
            places: (self.len() * seq_len) as u64,
            rows: self.len(),
            packed_rows: first_fit(units.into_iter(), seq_len).len(),
        }
    }

    fn read(&self, example: u32) -> Result<RowPart, DataError> {
        let mut part = self.examples.read(example)?;
        part.truncate(self.longest);
        Ok(part)
    }

    /// Returns the side inputs that are made for these rows.
    pub(crate) fn sides(&self) -> MadeSides {
        let (documents, roles) = (self.is_packed, self.preference.is_some());
        MadeSides { valid: true, documents, positions: documents, roles }
    }

    /// Returns the content of a row. In preference training, each sequence has a role.
    pub(crate) fn parts(
        &self,
        row: usize,
    ) -> impl Iterator<Item = Result<(RowPart, Option<Sequence>), DataError>> {
        self.members(row).iter().map(|&example| {
            let mut part = self.read(example)?;
            let Some(preference) = self.preference else { return Ok((part, None)) };
            let (is_first, number) = (example % 2 == 0, self.first_number + example);
            let (role, is_whole) = match preference {
                PreferenceData::Scored if is_first => (Role::Chosen, false),
                PreferenceData::Scored => (Role::Rejected, false),
                PreferenceData::Pairs { whole_chosen } if is_first => (Role::Chosen, whole_chosen),
                PreferenceData::Pairs { .. } => (Role::Rejected, false),
                PreferenceData::Unpaired { .. } => match (part.take_label(), is_first) {
                    (_, false) => (Role::Mismatched, false),
                    (true, true) => (Role::Chosen, false),
                    (false, true) => (Role::Rejected, false),
                },
            };
            let number = if preference == PreferenceData::Scored {
                self.examples.margins.get(example as usize / 2).map_or(0, |margin| margin.to_bits())
            } else {
                number
            };
            Ok((part, Some(Sequence { role, number, is_whole })))
        })
    }

    /// Returns the number of ids.
    pub(crate) fn tokens(&self) -> usize {
        self.all_members().iter().map(|example| self.examples.ids(*example).min(self.longest)).sum()
    }

    /// Passes on the ids that count as targets, in the order of the rows.
    pub(crate) fn each_target(&self, mut target: impl FnMut(u32)) -> Result<(), DataError> {
        for example in self.all_members() {
            self.read(*example)?.targets().for_each(&mut target);
        }
        Ok(())
    }

    /// Returns the BLAKE3 hash of the examples of all rows of the data, also of those that are split off.
    pub(crate) fn content_hash(&self) -> Result<blake3::Hash, DataError> {
        self.examples.hash(self.longest)
    }

    /// Returns the BLAKE3 hash of the rows. `content` is the [`ExampleRows::content_hash`].
    pub(crate) fn hash(&self, content: blake3::Hash) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(content.as_bytes());
        hasher.update(&(self.longest as u64).to_le_bytes());
        for row in 0..self.len() {
            let members = self.members(row);
            hasher.update(&(members.len() as u32).to_le_bytes());
            members.iter().for_each(|member| {
                hasher.update(&member.to_le_bytes());
            });
        }
        hasher.finalize()
    }
}

/// Returns the number of examples of a record.
fn unit_of(preference: Option<PreferenceData>) -> usize {
    if preference.is_some() { 2 } else { 1 }
}

/// Returns the places of a row that an example takes. Its last id is a target only.
fn places_of(examples: &Examples, example: u32, seq_len: usize) -> usize {
    (examples.ids(example) - 1).min(seq_len)
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
    use crate::storage::examples::ExampleBuffer;

    fn rows(is_packed: bool) -> ExampleRows {
        let mut examples = ExampleBuffer::new(256);
        let mut push = |ids: &[u32], counts: &[bool]| {
            examples.push(&RowPart { ids: ids.to_vec(), counts: counts.to_vec() });
        };
        push(&[1, 2, 3], &[true, false, true]);
        push(&[4, 5, 6, 7], &[false, true, true, true]);
        push(&[8, 9], &[false, true]);
        ExampleRows::new(examples.into(), 4, (is_packed, None))
    }

    /// Returns the numbers of ids and of targets that count.
    fn tokens(rows: &ExampleRows) -> (usize, usize) {
        let mut targets = 0;
        rows.each_target(|_| targets += 1).expect("it is in memory");
        (rows.tokens(), targets)
    }

    #[test]
    fn rows_that_differ_have_other_hashes() {
        let (mut packed, alone) = (rows(true), rows(false));
        let hash = |rows: &ExampleRows| rows.hash(rows.content_hash().expect("it is in memory"));
        assert_eq!((packed.len(), alone.len(), tokens(&alone)), (2, 3, (9, 5)));
        // The examples have 2, 3 and 1 tokens.
        let fill = |places, rows| RowFill { tokens: 6, places, rows, packed_rows: 2 };
        assert_eq!((packed.row_fill(), alone.row_fill()), (fill(8, 2), fill(12, 3)));
        let whole = hash(&packed);
        assert_ne!(whole, hash(&alone));
        let last = packed.split_off(1);
        assert!(hash(&packed) != whole && hash(&last) != hash(&packed));
        assert_eq!((tokens(&packed), tokens(&last)), ((5, 2), (4, 3)));
    }

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
}
