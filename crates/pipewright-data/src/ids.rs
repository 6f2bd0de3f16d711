//! Token ids in as few bytes as the vocabulary allows, so that the ids of a text take no more memory than the
//! text.

/// Token ids in one, two or four bytes each.
#[derive(Clone, Debug)]
pub(crate) enum Ids {
    /// Up to 256 different ids.
    One(Vec<u8>),
    /// Up to 65,536 different ids.
    Two(Vec<u16>),
    /// More different ids.
    Four(Vec<u32>),
}

impl Ids {
    /// Makes an empty list with room for ids below `vocab_size`.
    pub(crate) fn new(vocab_size: usize) -> Self {
        match vocab_size {
            0..=0x100 => Self::One(Vec::new()),
            0x101..=0x1_0000 => Self::Two(Vec::new()),
            _ => Self::Four(Vec::new()),
        }
    }

    /// Appends an id, which must be below the vocabulary size.
    pub(crate) fn push(&mut self, id: u32) {
        match self {
            Self::One(ids) => ids.push(id as u8),
            Self::Two(ids) => ids.push(id as u16),
            Self::Four(ids) => ids.push(id),
        }
    }

    /// Appends a document with `bos` before it.
    pub(crate) fn push_document(&mut self, bos: Option<u32>, document: impl IntoIterator<Item = u32>) {
        bos.into_iter().chain(document).for_each(|id| self.push(id));
    }

    /// Takes the ids from `at` on out of the list.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        match self {
            Self::One(ids) => Self::One(ids.split_off(at)),
            Self::Two(ids) => Self::Two(ids.split_off(at)),
            Self::Four(ids) => Self::Four(ids.split_off(at)),
        }
    }

    /// Returns the number of bytes per id.
    pub(crate) fn width(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Two(_) => 2,
            Self::Four(_) => 4,
        }
    }

    /// Returns the number of ids.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::One(ids) => ids.len(),
            Self::Two(ids) => ids.len(),
            Self::Four(ids) => ids.len(),
        }
    }

    /// Returns the BLAKE3 hash of all ids, in hexadecimal. The same ids in another width have another hash.
    pub(crate) fn hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        match self {
            Self::One(ids) => hash_pieces(&mut hasher, ids, |id| [id]),
            Self::Two(ids) => hash_pieces(&mut hasher, ids, u16::to_le_bytes),
            Self::Four(ids) => hash_pieces(&mut hasher, ids, u32::to_le_bytes),
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Returns the number of occurrences of each id that occurs, in the order of the ids.
    pub(crate) fn counts(&self) -> Vec<u64> {
        match self {
            Self::One(ids) => counts(ids.iter().map(|id| u32::from(*id))),
            Self::Two(ids) => counts(ids.iter().map(|id| u32::from(*id))),
            Self::Four(ids) => counts(ids.iter().copied()),
        }
    }

    /// Appends `count` ids from `start` on to `into`.
    pub(crate) fn copy(&self, start: usize, count: usize, into: &mut Vec<i32>) {
        let range = start..start + count;
        match self {
            Self::One(ids) => into.extend(ids[range].iter().copied().map(i32::from)),
            Self::Two(ids) => into.extend(ids[range].iter().copied().map(i32::from)),
            // Ids are below a vocabulary size that fits a signed index, which every reader checks.
            Self::Four(ids) => into.extend(ids[range].iter().map(|id| *id as i32)),
        }
    }
}

/// Returns the number of occurrences of each id that occurs, in the order of the ids.
pub(crate) fn counts(ids: impl Iterator<Item = u32>) -> Vec<u64> {
    let mut counts: Vec<u64> = Vec::new();
    for id in ids {
        let id = id as usize;
        if id >= counts.len() {
            counts.resize(id + 1, 0);
        }
        counts[id] += 1;
    }
    counts.retain(|count| *count > 0);
    counts
}

/// Hashes little-endian ids in pieces, because hashing is fast only on long pieces.
fn hash_pieces<T: Copy, const N: usize>(hasher: &mut blake3::Hasher, ids: &[T], bytes: fn(T) -> [u8; N]) {
    for piece in ids.chunks(1 << 16) {
        hasher.update(&piece.iter().copied().flat_map(bytes).collect::<Vec<u8>>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(vocab_size: usize, bytes: usize) {
        let mut ids = Ids::new(vocab_size);
        let last = u32::try_from(vocab_size - 1).expect("a small vocabulary");
        [0, last, 1].into_iter().for_each(|id| ids.push(id));
        let mut copied = Vec::new();
        ids.copy(1, 2, &mut copied);
        assert_eq!((copied.as_slice(), ids.len()), (&[last as i32, 1][..], 3));
        assert_eq!(ids.width(), bytes);
    }

    #[test]
    fn ids_keep_their_value() {
        check(256, 1);
        check(257, 2);
        check(65_536, 2);
        check(65_537, 4);
        check(i32::MAX as usize, 4);
    }
}
