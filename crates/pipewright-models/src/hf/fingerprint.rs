//! A fingerprint of the weights in a model directory, which shows whether an adapter is used with the base
//! that it was trained on.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use super::file::WeightFile;
use super::weights::Weights;
use crate::error::ModelError;

/// The bytes that are read of each end of a tensor: reading all would take as long as loading the model.
const SAMPLE: usize = 4096;
/// The number of hexadecimal digits.
const DIGITS: usize = 32;

/// Returns a hash of the names, element types and shapes of all tensors in `dir`, and of the first and last
/// 4 KiB of each. It does not depend on how the tensors are distributed over files.
///
/// # Errors
/// When a file is missing, cut short or not a safetensors file, or cannot be read.
pub fn fingerprint(dir: &Path) -> Result<String, ModelError> {
    let mut weights = Weights::open(dir)?;
    let mut fingerprint = Fingerprint::default();
    if let Some(form) = weights.described() {
        // It decides what the codes mean.
        fingerprint.0.update(format!("{form:?}").as_bytes());
    }
    let tensors: Vec<String> = weights.tensors().map(str::to_owned).collect();
    for tensor in tensors {
        let file = weights.file_of(&tensor)?;
        fingerprint.add(&tensor, weights.file(file)?)?;
    }
    Ok(fingerprint.text())
}

/// Returns the ranges of bytes, by file, that [`fingerprint`] reads besides the headers of the files.
///
/// # Errors
/// As [`fingerprint`].
pub fn fingerprint_ranges(dir: &Path) -> Result<BTreeMap<String, Vec<Range<u64>>>, ModelError> {
    let mut weights = Weights::open(dir)?;
    let mut ranges: BTreeMap<String, Vec<Range<u64>>> = BTreeMap::new();
    let tensors: Vec<String> = weights.tensors().map(str::to_owned).collect();
    for tensor in tensors {
        let file = weights.file_of(&tensor)?;
        let ends = weights.file(file.clone())?.ends_of(&tensor, SAMPLE)?;
        ranges.entry(file).or_default().extend(ends);
    }
    Ok(ranges)
}

/// A hash of samples of tensors.
#[derive(Default)]
pub(super) struct Fingerprint(blake3::Hasher);

impl Fingerprint {
    /// Adds a tensor.
    pub(super) fn add(&mut self, tensor: &str, file: &mut WeightFile) -> Result<(), ModelError> {
        self.0.update(tensor.as_bytes());
        self.0.update(&file.sample(tensor, SAMPLE)?);
        Ok(())
    }

    /// Returns the hash as text.
    pub(super) fn text(&self) -> String {
        self.0.finalize().to_hex()[..DIGITS].to_owned()
    }
}
