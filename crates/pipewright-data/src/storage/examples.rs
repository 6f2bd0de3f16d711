//! Chats and completions as token ids, each with whether it counts as a target. In memory and in a file, an
//! example is its ids and then a bit for each of them.

use std::ops::Range;

use super::bytes::{BLOCK, Bytes};
use super::ids::Width;
use crate::error::{DataError, DataPlace};

/// The ids of an example or of a document in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPart {
    /// Its token ids. The last one is a target only.
    pub ids: Vec<u32>,
    /// Whether each of them counts as a target; the first one of a row is not a target.
    pub counts: Vec<bool>,
}

impl RowPart {
    /// Returns the example in these bytes.
    pub(crate) fn of_bytes(bytes: &[u8], width: Width) -> Self {
        let count = ids_in(bytes.len(), width);
        let (id_bytes, bits) = bytes.split_at(count * width.bytes());
        let mut ids = Vec::with_capacity(count);
        width.each(id_bytes, |id| ids.push(id));
        let counts = (0..count).map(|id| bits[id / 8] >> (id % 8) & 1 == 1).collect();
        Self { ids, counts }
    }

    /// Returns the targets that count. No token predicts the first id.
    pub(crate) fn targets(&self) -> impl Iterator<Item = u32> {
        let targets = self.ids.iter().zip(&self.counts).skip(1);
        targets.filter(|(_, counts)| **counts).map(|(id, _)| *id)
    }

    /// Returns the number of ids before the first one that counts as a target.
    pub(crate) fn completion(&self) -> usize {
        self.counts.iter().skip(1).take_while(|counts| !**counts).count() + 1
    }

    /// Stores a label in the place of the first id, which is not a target.
    pub(crate) fn set_label(&mut self, label: bool) {
        self.counts.iter_mut().take(1).for_each(|counts| *counts = label);
    }

    /// Returns the label, and removes it.
    pub(crate) fn take_label(&mut self) -> bool {
        self.counts.first_mut().is_some_and(std::mem::take)
    }

    /// Appends an id behind the last token of a sequence.
    pub(crate) fn push(&mut self, id: u32, counts: bool) {
        self.ids.push(id);
        self.counts.push(counts);
    }

    /// Leaves only the first `count` ids and the last `kept` ones.
    pub(crate) fn cut(&mut self, count: usize, kept: usize) {
        let end = self.ids.len().saturating_sub(kept);
        if count < end {
            self.ids.drain(count..end);
            self.counts.drain(count..end);
        }
    }

    /// Leaves only the first `count` ids.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.ids.truncate(count);
        self.counts.truncate(count);
    }
}

/// The bytes that the place of an example takes.
const SIZE_OF_START: u64 = size_of::<u64>() as u64;

/// Examples in memory, to which others are appended.
#[derive(Debug)]
pub(crate) struct ExampleBuffer {
    width: Width,
    bytes: Vec<u8>,
    /// The number of bytes of each example.
    sizes: Vec<u64>,
}

impl ExampleBuffer {
    /// Makes an empty list of examples whose ids are below `vocab_size`.
    pub(crate) fn new(vocab_size: usize) -> Self {
        Self::of_width(Width::of(vocab_size))
    }

    fn of_width(width: Width) -> Self {
        Self { width, bytes: Vec::new(), sizes: Vec::new() }
    }

    /// Appends an example. Returns the number of bytes that it takes.
    pub(crate) fn push(&mut self, RowPart { ids, counts }: &RowPart) -> u64 {
        let start = self.bytes.len();
        ids.iter().for_each(|id| self.width.push(*id, &mut self.bytes));
        self.bytes.extend(counts.chunks(8).map(|counts| {
            counts.iter().enumerate().fold(0, |bits, (bit, counts)| bits | u8::from(*counts) << bit)
        }));
        let size = (self.bytes.len() - start) as u64;
        self.sizes.push(size);
        size + SIZE_OF_START
    }

    /// Returns the bytes of memory that the examples take.
    pub(crate) fn memory(&self) -> u64 {
        self.bytes.len() as u64 + SIZE_OF_START * self.sizes.len() as u64
    }

    /// Takes the examples out: their bytes, and the number of bytes of each.
    pub(crate) fn take(&mut self) -> (Vec<u8>, Vec<u64>) {
        (std::mem::take(&mut self.bytes), std::mem::take(&mut self.sizes))
    }
}

impl From<ExampleBuffer> for Examples {
    fn from(ExampleBuffer { width, bytes, sizes }: ExampleBuffer) -> Self {
        Self::new(width, Bytes::Memory(bytes), sizes, width)
    }
}

/// Examples that are read.
#[derive(Debug)]
pub(crate) struct Examples {
    width: Width,
    bytes: Bytes,
    /// The first byte of each example, and the end of the last.
    starts: Vec<u64>,
    /// The examples that are used; `None` for all of them.
    chosen: Option<Vec<u32>>,
    /// The width in which ids are hashed.
    hashed_as: Width,
    /// The margins of pairs of examples; empty if there are none.
    pub(crate) margins: Vec<f32>,
}

impl Examples {
    /// `sizes` has the number of bytes of each example. A hash of them is that of the same examples with the
    /// width `hashed_as`.
    pub(crate) fn new(
        width: Width,
        bytes: Bytes,
        sizes: impl IntoIterator<Item = u64>,
        hashed_as: Width,
    ) -> Self {
        let mut end = 0;
        let ends = sizes.into_iter().map(|size| {
            end += size;
            end
        });
        let starts = std::iter::once(0).chain(ends).collect();
        Self { width, bytes, starts, chosen: None, hashed_as, margins: Vec::new() }
    }

    /// Leaves only these of all examples, which are then counted from 0.
    pub(crate) fn choose(&mut self, chosen: Vec<u32>) {
        self.chosen = Some(chosen);
    }

    /// Returns the number of examples that are used.
    pub(crate) fn len(&self) -> usize {
        self.chosen.as_ref().map_or(self.starts.len() - 1, Vec::len)
    }

    /// Returns the number of an example among all of them.
    fn number(&self, example: u32) -> usize {
        self.chosen.as_ref().map_or(example, |chosen| chosen[example as usize]) as usize
    }

    fn places(&self, example: u32) -> Range<usize> {
        let number = self.number(example);
        self.starts[number] as usize..self.starts[number + 1] as usize
    }

    /// Returns an empty list of such examples.
    pub(crate) fn empty_like(&self) -> ExampleBuffer {
        ExampleBuffer::of_width(self.width)
    }

    /// Returns the number of ids of an example.
    pub(crate) fn ids(&self, example: u32) -> usize {
        ids_in(self.places(example).len(), self.width)
    }

    /// Returns an example.
    ///
    /// # Errors
    /// When it cannot be read, or an id is larger than its file states.
    pub(crate) fn read(&self, example: u32) -> Result<RowPart, DataError> {
        let part = self.bytes.with(self.places(example), |bytes| RowPart::of_bytes(bytes, self.width))?;
        let record = |_| DataPlace::Record(self.number(example) as u64 + 1);
        self.bytes.check_ids(part.ids.iter().copied(), record)?;
        Ok(part)
    }

    /// Returns the BLAKE3 hash of the examples that are used, each cut to `longest` ids. It does not depend
    /// on where they are stored.
    ///
    /// # Errors
    /// As [`Examples::read`].
    pub(crate) fn hash(&self, longest: usize) -> Result<blake3::Hash, DataError> {
        let (mut hasher, mut buffer) = (blake3::Hasher::new(), ExampleBuffer::of_width(self.hashed_as));
        for example in 0..self.len() as u32 {
            let mut part = self.read(example)?;
            part.truncate(longest);
            buffer.push(&part);
            if buffer.bytes.len() >= BLOCK {
                hasher.update(&buffer.take().0);
            }
        }
        hasher.update(&buffer.bytes);
        for margin in &self.margins {
            hasher.update(&margin.to_le_bytes());
        }
        Ok(hasher.finalize())
    }
}

/// Returns the number of ids of an example of `bytes` bytes. `n` ids of `w` bytes take `n w + ceil(n / 8)`
/// bytes, and `8 / (8 w + 1)` of a byte is less than one id, so the rounded quotient is exact.
pub(crate) fn ids_in(bytes: usize, width: Width) -> usize {
    8 * bytes / (8 * width.bytes() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_read_as_they_were_written() {
        for vocab_size in [256, 300, 70_000] {
            let mut buffer = ExampleBuffer::new(vocab_size);
            let part = |count: usize| RowPart {
                ids: (0..count as u32).map(|id| id * 7 % vocab_size as u32).collect(),
                counts: (0..count).map(|id| id % 3 == 1).collect(),
            };
            let parts: Vec<RowPart> = (0..40).map(part).collect();
            for part in &parts {
                buffer.push(part);
            }
            let examples = Examples::from(buffer);
            assert_eq!(examples.len(), 40);
            for (number, part) in (0..).zip(&parts) {
                assert_eq!(examples.ids(number), part.ids.len());
                assert_eq!(&examples.read(number).expect("it is in memory"), part);
            }
        }
    }
}
