//! A text that a later request may continue, and the logits of a text that several ranks compute together.

/// A text whose rows the ranks keep.
#[derive(Debug)]
pub(super) struct KeptText {
    /// Its number.
    pub(super) text: usize,
    /// The tokens that the ranks have computed.
    pub(super) tokens: Vec<u32>,
}

/// Returns the number of tokens at the beginning of a text that are also at the beginning of a prompt. The last
/// token of the prompt does not count, because the logits after it are not kept.
pub(super) fn common_tokens(tokens: &[u32], prompt: &[u32]) -> usize {
    let before_last = &prompt[..prompt.len().saturating_sub(1)];
    tokens.iter().zip(before_last).take_while(|(kept, wanted)| kept == wanted).count()
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_a_prompt_is_not_common() {
        assert_eq!(common_tokens(&[1, 2, 3], &[1, 2, 3, 4]), 3);
        assert_eq!(common_tokens(&[1, 2, 3], &[1, 2, 3]), 2);
        assert_eq!(common_tokens(&[1, 2, 3], &[1, 5, 3, 4]), 1);
        assert_eq!(common_tokens(&[1, 2, 3], &[1]), 0);
        assert_eq!(common_tokens(&[], &[1, 2]), 0);
    }
}
