//! Turns the texts of documents into token ids.

use std::ops::Range;
use std::path::Path;

use crate::chat::spans::MarkedText;
use crate::config::Tokenizer;
use crate::encoding::tokenizer::{Encoder, MEMORY_OF_A_BYTE, PlacedTokens, encode, not_encoded};
use crate::error::{DataError, DataPlace};
use crate::storage::examples::RowPart;
use crate::storage::ids::{IdBuffer, Width};
use crate::vocabulary;

/// A tokenizer with the id that begins each document.
pub(crate) struct DocumentText<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokenizer of a file, which is read for the first text; `None` for bytes.
    encoder: Option<Encoder>,
    bos: Option<u32>,
    vocab_size: usize,
}

impl<'a> DocumentText<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer, bos: Option<u32>, vocab_size: usize) -> Self {
        Self { tokenizer, encoder: None, bos, vocab_size }
    }

    /// Encodes with a tokenizer whose file is read already.
    pub(crate) fn with_encoder(self, encoder: Option<Encoder>) -> Self {
        Self { encoder, ..self }
    }

    /// Returns the bytes of `ids`, if the bytes of a text are its ids.
    pub(crate) fn bytes_are_ids<'i>(&self, ids: &'i mut IdBuffer) -> Option<&'i mut Vec<u8>> {
        match (self.tokenizer, self.bos, ids.width()) {
            (Tokenizer::Bytes, None, Width::One) => Some(ids.bytes()),
            _ => None,
        }
    }

    /// Reads the tokenizer's file, if it is not read yet. Texts are encoded only afterwards.
    pub(crate) fn prepare(&mut self) -> Result<(), DataError> {
        if self.encoder.is_none() {
            self.encoder = Encoder::of(self.tokenizer)?;
        }
        Ok(())
    }

    /// Returns the bytes of memory that a text of so many bytes takes while it is encoded, for ids of `width`
    /// bytes.
    pub(crate) fn memory_of(&self, bytes: u64, width: usize) -> u64 {
        match self.tokenizer {
            Tokenizer::Bytes => bytes.saturating_mul(1 + width as u64),
            _ => MEMORY_OF_A_BYTE.saturating_mul(bytes),
        }
    }

    /// Returns the ids of a document, in which errors name the file and the record.
    pub(crate) fn encode(
        &self,
        text: &str,
        path: &Path,
        record: Option<DataPlace>,
    ) -> Result<Vec<u32>, DataError> {
        let encoder = self.encoder.as_ref();
        let mut ids = encode(encoder, text, true, self.vocab_size, (path, record))?;
        // A tokenizer may have put the id there already.
        if let Some(bos) = self.bos.filter(|bos| encoder.is_none() || ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Returns whether the text that ends completions is one token, or the tokenizer adds one at the end of
    /// each text.
    pub(crate) fn ends_texts(&self, end: &str) -> bool {
        let Some(encoder) = &self.encoder else { return true };
        let is_token = encoder.encode(end, false).is_ok_and(|ids| ids.len() == 1);
        let is_added = || {
            let encoded = encoder.encode_with_places("a", true);
            encoded.is_ok_and(|tokens| tokens.places.last().is_some_and(|(start, end)| start == end))
        };
        is_token || is_added()
    }

    /// Returns the ids of a text in which some bytes count in the loss, and whether each id does. With
    /// `is_document`, the special tokens of a document are added.
    pub(crate) fn encode_marked(
        &self,
        MarkedText { text, counted }: &MarkedText,
        is_document: bool,
        path: &Path,
        record: DataPlace,
    ) -> Result<RowPart, DataError> {
        let PlacedTokens { mut ids, mut places } = match &self.encoder {
            None => PlacedTokens {
                ids: text.bytes().map(u32::from).collect(),
                places: (0..text.len()).map(|byte| (byte, byte + 1)).collect(),
            },
            Some(encoder) => encoder
                .encode_with_places(text, is_document)
                .map_err(|source| not_encoded(path, Some(record), source))?,
        };
        vocabulary::check(ids.iter().map(|id| u64::from(*id)), self.vocab_size, path, |_| record)?;
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
        Ok(RowPart { ids, counts })
    }

    /// Checks that all bytes of a file are below the vocabulary size.
    pub(crate) fn check_bytes(&self, text: &str, path: &Path) -> Result<(), DataError> {
        vocabulary::check(text.bytes().map(u64::from), self.vocab_size, path, DataPlace::Byte)
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
