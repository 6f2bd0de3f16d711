//! Reads files of binary token ids: nanoGPT's, llm.c's and Megatron's.
//!
//! - nanoGPT (`data/*/prepare.py`) writes ids of 16 bits without a header.
//! - llm.c (`dev/data/data_common.py`) writes 256 numbers of 32 bits first: a magic number, a version and the
//!   number of ids, which have 16 bits (magic 20240520) or 32 (20240801).
//! - Megatron (`megatron/core/datasets/indexed_dataset.py`) writes an index next to the ids: the magic
//!   `MMIDIDX`, version 1, a code for the type of the ids, the numbers of sequences and of documents, the
//!   lengths of the sequences in 32 bits, and their first bytes in 64.
//!
//! All numbers are little-endian.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::container::data_file::DataFile;
use crate::container::data_file::Packing;
use crate::content;
use crate::error::{DataError, DataPlace};
use crate::formats::format::Format;
use crate::memory_budget::MemoryBudget;
use crate::storage::ids::IdBuffer;
use crate::vocabulary;

/// The magic numbers and versions of llm.c's files, with the type of their ids.
const LLM_C: [(u32, u32, IdType); 2] = [(20_240_520, 1, IdType::U16), (20_240_801, 7, IdType::U32)];
const LLM_C_HEADER: usize = 1024;
const MEGATRON: &[u8] = b"MMIDIDX\0\0";

/// The type of the ids in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdType {
    U8,
    U16,
    I16,
    U32,
    I32,
    I64,
}

impl IdType {
    /// Returns the type with Megatron's code.
    fn of_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::U8),
            3 => Some(Self::I16),
            4 => Some(Self::I32),
            5 => Some(Self::I64),
            8 => Some(Self::U16),
            _ => None,
        }
    }

    /// Returns the number of bytes of an id.
    fn width(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Returns the id in some bytes. A negative number becomes one that no vocabulary has.
    fn id(self, bytes: &[u8]) -> u64 {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let number = u64::from_le_bytes(wide);
        match self {
            Self::I16 if number > i16::MAX as u64 => u64::MAX,
            Self::I32 if number > i32::MAX as u64 => u64::MAX,
            _ => number,
        }
    }
}

/// The ids of a file as they are read.
struct Sink<'a> {
    path: &'a Path,
    ids: &'a mut IdBuffer,
    vocab_size: usize,
    budget: &'a mut MemoryBudget,
    read: u64,
}

impl Sink<'_> {
    /// Appends ids, if all of them are below the vocabulary size.
    fn push(&mut self, bytes: &[u8], kind: IdType) -> Result<(), DataError> {
        self.budget.take(self.path, (bytes.len() / kind.width() * self.ids.width().bytes()) as u64)?;
        let ids = || bytes.chunks_exact(kind.width()).map(|bytes| kind.id(bytes));
        let place = |index| DataPlace::Token(self.read + index);
        vocabulary::check(ids(), self.vocab_size, self.path, place)?;
        // Ids are below the vocabulary size, which fits.
        ids().for_each(|id| self.ids.push(id as u32));
        self.read += (bytes.len() / kind.width()) as u64;
        Ok(())
    }
}

/// Appends the ids of a `.bin` file.
pub(crate) fn read(
    file: &mut DataFile,
    ids: &mut IdBuffer,
    vocab_size: usize,
    budget: &mut MemoryBudget,
) -> Result<Format, DataError> {
    let path = file.path().to_owned();
    let mut sink = Sink { path: &path, ids, vocab_size, budget, read: 0 };
    if let Some(index) = index_of(&path).filter(|index| index.exists()) {
        read_megatron(file, &index, &mut sink)?;
        return Ok(Format::Megatron);
    }
    let head = file.head()?;
    content::refuse_binary(&path, content::other_than_ids(head))?;
    let malformed = |reason| {
        let problem =
            format!("not a file of token ids of llm.c: {reason}; write it again with ids of 16 bits");
        DataError::of(&path, problem)
    };
    if let Some(header) = LlmC::of(head).map_err(malformed)? {
        file.read_exact(&mut [0; LLM_C_HEADER])?;
        let found = read_all(file, header.kind, &mut sink)?;
        if found != header.count {
            let problem = format!(
                "the header says {} token ids, and the file has {found}; copy or download it again",
                header.count
            );
            return Err(DataError::of(&path, problem));
        }
        return Ok(Format::LlmC);
    }
    if looks_wide(head, vocab_size) {
        return Err(DataError::of(
            &path,
            "the file looks like token ids of 32 bits without a header, and a `.bin` file without a header has ids of 16 bits; \
             write it with llm.c's header, or put Megatron's `.idx` next to it",
        ));
    }
    read_all(file, IdType::U16, &mut sink).map(|_| Format::Ids16)
}

/// A header of llm.c.
struct LlmC {
    kind: IdType,
    /// The number of ids.
    count: u64,
}

impl LlmC {
    /// Returns the header that the first bytes of a file are; `None` if they do not begin with a magic number.
    fn of(head: &[u8]) -> Result<Option<Self>, String> {
        let numbers = head.as_chunks().0;
        let number = |index: usize| numbers.get(index).copied().map(u32::from_le_bytes);
        let Some(&(_, known, kind)) = LLM_C.iter().find(|(magic, ..)| number(0) == Some(*magic)) else {
            return Ok(None);
        };
        match (number(1), number(2)) {
            (Some(version), _) if version != known => {
                Err(format!("its version is {version}, and only {known} is known for its magic number"))
            }
            (Some(_), Some(count)) if head.len() >= LLM_C_HEADER => {
                Ok(Some(Self { kind, count: count.into() }))
            }
            _ => Err(format!("it has {} bytes, and a header has {LLM_C_HEADER}", head.len())),
        }
    }
}

/// Returns whether the first bytes of a file without a header look like ids of 32 or 64 bits. As ids of 16
/// bits, every second one is then the upper half of an id below the vocabulary size, while the others vary.
fn looks_wide(head: &[u8], vocab_size: usize) -> bool {
    /// Fewer ids may look so by chance.
    const FEWEST: usize = 4;
    let pairs: &[[u8; 4]] = head.as_chunks().0;
    let halves = |pair: &[u8; 4]| {
        let [a, b, c, d] = *pair;
        (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
    };
    let largest = vocab_size.saturating_sub(1) >> 16;
    let is_upper = |pair: &[u8; 4]| usize::from(halves(pair).1) <= largest;
    let varies = pairs.windows(2).any(|two| halves(&two[0]).0 != halves(&two[1]).0);
    pairs.len() >= FEWEST && varies && pairs.iter().all(is_upper)
}

/// Reads ids up to the end of the file. Returns their number.
fn read_all(file: &mut DataFile, kind: IdType, sink: &mut Sink<'_>) -> Result<u64, DataError> {
    let mut piece = Vec::new();
    loop {
        let read = file.read_up_to(1 << 16, &mut piece)?;
        if read % kind.width() != 0 {
            let problem = format!(
                "the file ends inside a token id of {} bytes; copy or download it again",
                kind.width()
            );
            return Err(DataError::of(file.path(), problem));
        }
        if read == 0 {
            return Ok(sink.read);
        }
        sink.push(&piece, kind)?;
    }
}

/// Returns the path of the index of a file with ids: the same name with `.idx` instead of `.bin`.
fn index_of(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let (stem, packing) = match Packing::of_name(path) {
        Packing::Plain => (name, ""),
        Packing::Gzip => (name.strip_suffix(".gz")?, ".gz"),
        Packing::Zstd => (name.strip_suffix(".zst")?, ".zst"),
    };
    let stem = Path::new(stem);
    (stem.extension() == Some(OsStr::new("bin")))
        .then(|| path.with_file_name(format!("{}{packing}", stem.with_extension("idx").display())))
}

/// Reads the sequences that an index lists, in its order.
fn read_megatron(file: &mut DataFile, index: &Path, sink: &mut Sink<'_>) -> Result<(), DataError> {
    let mut bytes = Vec::new();
    DataFile::open(index)?.append(&mut bytes, sink.budget)?;
    let malformed = |reason| {
        let problem = format!("not an index of Megatron's token ids: {reason}; write it again, or remove it");
        DataError::of(index, problem)
    };
    let Index { kind, sequences } = Index::parse(&bytes).map_err(malformed)?;
    let mut content = Vec::new();
    file.append(&mut content, sink.budget)?;
    // They are in memory next to the ids that are read from them.
    let held = (content.len() + bytes.len() + size_of_val(sequences.as_slice())) as u64;
    sink.budget.take(file.path(), held)?;
    for (number, (start, length)) in sequences.into_iter().enumerate() {
        let end = start.checked_add(length.saturating_mul(kind.width()));
        let Some(sequence) = end.and_then(|end| content.get(start..end)) else {
            let problem = format!(
                "the file ends before sequence {} of {}; copy or download both again",
                number + 1,
                index.display()
            );
            return Err(DataError::of(file.path(), problem));
        };
        sink.push(sequence, kind)?;
    }
    sink.budget.give_back(held);
    Ok(())
}

/// An index of Megatron.
struct Index {
    kind: IdType,
    /// The first byte of each sequence, and the number of its ids.
    sequences: Vec<(usize, usize)>,
}

impl Index {
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let rest = bytes.strip_prefix(MEGATRON).ok_or("it does not begin with MMIDIDX")?;
        let short = || "it ends early".to_owned();
        let number =
            |at: usize| rest.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
        let version = number(0).ok_or_else(short)?;
        if version != 1 {
            return Err(format!("its version is {version}, and only 1 is known"));
        }
        let code = *rest.get(8).ok_or_else(short)?;
        let kind = IdType::of_code(code)
            .ok_or_else(|| format!("the type {code} of its ids is not a type of whole numbers"))?;
        let count = number(9).and_then(|count| usize::try_from(count).ok()).ok_or_else(short)?;
        // Behind the number of documents.
        let lengths = rest.get(25..).ok_or_else(short)?;
        let (lengths, starts) = lengths.split_at_checked(count.saturating_mul(4)).ok_or_else(short)?;
        let starts = starts.get(..count.saturating_mul(8)).ok_or_else(short)?;
        let length = |bytes: &[u8; 4]| {
            usize::try_from(i32::from_le_bytes(*bytes))
                .map_err(|_| "a sequence has a negative length".to_owned())
        };
        let start = |bytes: &[u8; 8]| {
            usize::try_from(i64::from_le_bytes(*bytes))
                .map_err(|_| "a sequence begins at a negative byte".to_owned())
        };
        let sequences = starts.as_chunks().0.iter().zip(lengths.as_chunks().0);
        let sequences =
            sequences.map(|(at, count)| Ok((start(at)?, length(count)?))).collect::<Result<_, String>>()?;
        Ok(Self { kind, sequences })
    }
}
