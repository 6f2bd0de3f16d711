//! Turns the texts of documents into token ids.

use std::ops::Range;
use std::path::Path;

use crate::chat::spans::MarkedText;
use crate::config::Tokenizer;
use crate::encoding::tokenizer::{EncodeError, Encoder, MEMORY_OF_A_BYTE, PlacedTokens};
use crate::error::{DataError, TokenPlace, TokenizerError};
use crate::ids::Ids;
use crate::memory_budget::MemoryBudget;
use crate::record_error::RecordPlace;
use crate::vocabulary;

/// A tokenizer with the id that begins each document.
pub(crate) struct DocumentText<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokenizer of a file, which is read for the first text.
    encoder: Option<Encoder>,
    bos: Option<u32>,
    vocab_size: usize,
}

impl<'a> DocumentText<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer, bos: Option<u32>, vocab_size: usize) -> Self {
        Self { tokenizer, encoder: None, bos, vocab_size }
    }

    /// Returns the bytes of `ids`, if the bytes of a text are its ids.
    pub(crate) fn bytes_are_ids<'i>(&self, ids: &'i mut Ids) -> Option<&'i mut Vec<u8>> {
        match (self.tokenizer, self.bos, ids) {
            (Tokenizer::Bytes, None, Ids::One(bytes)) => Some(bytes),
            _ => None,
        }
    }

    /// Appends the ids of a text, in which errors name the file and the record.
    pub(crate) fn push(
        &mut self,
        text: &str,
        ids: &mut Ids,
        budget: &mut MemoryBudget,
        path: &Path,
        record: Option<RecordPlace>,
    ) -> Result<(), DataError> {
        let before = ids.len();
        let bytes = text.len() as u64;
        match self.tokenizer {
            Tokenizer::Bytes => {
                self.check_bytes(text, path, record)?;
                // The text and its ids are in memory at the same time.
                budget.require(path, bytes.saturating_mul(1 + ids.width() as u64))?;
                ids.push_document(self.bos, text.bytes().map(u32::from));
            }
            Tokenizer::File(tokenizer) => {
                budget.require(path, MEMORY_OF_A_BYTE.saturating_mul(bytes))?;
                let encoder = loaded(&mut self.encoder, tokenizer)?;
                let document =
                    encoder.encode(text, true).map_err(|source| not_encoded(path, record, source))?;
                self.check(&document, path, |token| place(record, TokenPlace::Token(token)))?;
                // The tokenizer may have put the id there already.
                let bos = self.bos.filter(|bos| document.first() != Some(bos));
                ids.push_document(bos, document);
            }
        }
        budget.take(path, ((ids.len() - before) * ids.width()) as u64)
    }

    /// Returns the ids of a text in which some bytes count in the loss, and whether each id does. With
    /// `is_document`, the special tokens of a document are added.
    pub(crate) fn encode_marked(
        &mut self,
        MarkedText { text, counted }: &MarkedText,
        is_document: bool,
        budget: &MemoryBudget,
        path: &Path,
        record: RecordPlace,
    ) -> Result<(Vec<u32>, Vec<bool>), DataError> {
        let PlacedTokens { mut ids, mut places } = match self.tokenizer {
            Tokenizer::Bytes => PlacedTokens {
                ids: text.bytes().map(u32::from).collect(),
                places: (0..text.len()).map(|byte| (byte, byte + 1)).collect(),
            },
            Tokenizer::File(tokenizer) => {
                budget.require(path, MEMORY_OF_A_BYTE.saturating_mul(text.len() as u64))?;
                let encoded = loaded(&mut self.encoder, tokenizer)?.encode_with_places(text, is_document);
                encoded.map_err(|source| not_encoded(path, Some(record), source))?
            }
        };
        self.check(&ids, path, |token| place(Some(record), TokenPlace::Token(token)))?;
        // The tokenizer may add the token that ends a text, which the text of a completion has already.
        if let ([.., before, last], Some((start, end))) = (ids.as_slice(), places.last())
            && before == last
            && start == end
        {
            ids.pop();
            places.pop();
        }
        let mut counts = counted_tokens(&places, counted);
        if let Some(bos) = self.bos.filter(|bos| is_document && ids.first() != Some(bos)) {
            ids.insert(0, bos);
            counts.insert(0, false);
        }
        Ok((ids, counts))
    }

    /// Checks that all bytes are below the vocabulary size.
    pub(crate) fn check_bytes(
        &self,
        text: &str,
        path: &Path,
        record: Option<RecordPlace>,
    ) -> Result<(), DataError> {
        let bytes = text.bytes().map(u64::from);
        vocabulary::check(bytes, self.vocab_size, path, |offset| place(record, TokenPlace::Byte(offset)))
    }

    /// Checks that all ids are below the vocabulary size.
    fn check(&self, ids: &[u32], path: &Path, place: impl Fn(u64) -> TokenPlace) -> Result<(), DataError> {
        vocabulary::check(ids.iter().map(|id| u64::from(*id)), self.vocab_size, path, place)
    }
}

/// Returns whether each token is in one of the parts of the text that count, which are in order. A token that
/// the tokenizer has added has no place in the text, and counts if the one before it does.
fn counted_tokens(places: &[(usize, usize)], parts: &[Range<usize>]) -> Vec<bool> {
    let (mut counts, mut parts) = (Vec::with_capacity(places.len() + 1), parts);
    for &(start, end) in places {
        if start == end {
            counts.push(counts.last() == Some(&true));
            continue;
        }
        // Tokens are in the order of the text, but several of one letter have the same place.
        while parts.first().is_some_and(|part| part.end <= start) {
            parts = &parts[1..];
        }
        counts.push(parts.first().is_some_and(|part| end > part.start));
    }
    counts
}

/// Returns the tokenizer of a file, which is read if it was not read before.
fn loaded<'e>(encoder: &'e mut Option<Encoder>, path: &Path) -> Result<&'e Encoder, DataError> {
    match encoder {
        Some(encoder) => Ok(encoder),
        empty => Ok(empty.insert(Encoder::load(path)?)),
    }
}

fn not_encoded(path: &Path, record: Option<RecordPlace>, source: EncodeError) -> DataError {
    DataError::from(TokenizerError::Encode { path: path.to_owned(), record, source })
}

/// Returns the place of a record, or the place in the file if there are no records.
fn place(record: Option<RecordPlace>, in_file: TokenPlace) -> TokenPlace {
    match record {
        None => in_file,
        Some(RecordPlace::Line(line)) => TokenPlace::Line(line),
        Some(RecordPlace::Row(row)) => TokenPlace::Row(row),
    }
}
