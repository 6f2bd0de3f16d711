//! The logits of a text that several ranks compute together.

/// The parts of the logits of a text, one from each rank that has a part of the vocabulary.
#[derive(Clone, Default)]
pub(super) struct PartialLogits(Vec<Option<Vec<f32>>>);

impl PartialLogits {
    /// Adds a part. Returns the whole logits with the last one.
    pub(super) fn add(&mut self, part: usize, parts: usize, logits: Vec<f32>) -> Option<Vec<f32>> {
        self.0.resize(parts, None);
        self.0[part] = Some(logits);
        if self.0.iter().any(Option::is_none) {
            return None;
        }
        Some(std::mem::take(&mut self.0).into_iter().flatten().flatten().collect())
    }
}
