//! Megatron's letters as the stages of a profile's model, and back.
//!
//! A profile has no layer for a predictor of further tokens (`m`): its head has these costs. So `m` is read only in
//! the stage of the head, and skipped.

use crate::emit::model_parts::StageParts;
use crate::emit::read_error::ReadError;
use crate::emit::stage_letters::{StageLetters, print_stage_letters};

/// Returns the layout of stages, without repetitions.
pub(super) fn print_layout(stages: &[StageParts]) -> String {
    let letters = |stage: &StageParts| StageLetters {
        embedding: stage.embedding,
        blocks: stage.blocks.len().try_into().unwrap_or(u32::MAX),
        predictors: 0,
        head: stage.head,
    };
    print_stage_letters(&stages.iter().map(letters).collect::<Vec<_>>())
}

/// Returns the stages of letters, if a profile has all of their layers.
pub(super) fn parts_of(letters: &[StageLetters]) -> Result<Vec<StageParts>, ReadError> {
    let mut next = 0;
    let mut stages = Vec::new();
    for (stage, letters) in letters.iter().enumerate() {
        if letters.predictors > 0 && !letters.head {
            let what = "the layout has an `m` before the last stage, and a profile has the costs of these blocks in its head; \
                        write `m` into the stage of `L`";
            return Err(ReadError::in_stage(stage, what));
        }
        let start = next;
        next += letters.blocks as usize;
        stages.push(StageParts { embedding: letters.embedding, blocks: start..next, head: letters.head });
    }
    Ok(stages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emit::stage_letters::parse_stage_letters;

    fn parse_layout(text: &str) -> Result<Vec<StageParts>, ReadError> {
        parts_of(&parse_stage_letters(text)?)
    }

    fn check(text: &str, expected: &str) {
        let stages = parse_layout(text).expect("a layout");
        assert_eq!(print_layout(&stages), expected, "{text}");
    }

    fn refuse(text: &str, words: &str) {
        let error = parse_layout(text).expect_err("a mistake").to_string();
        assert!(error.contains(words), "{text}: {error}");
    }

    #[test]
    fn repetitions_are_written_out() {
        check("Et|tL", "Et|tL");
        check("Et*3|(tt|)*2,tL", "Ettt|tt|tt|tL");
        check("E(t|)*3tL", "Et|t|t|tL");
        check("E|(t*2|)*2L", "E|tt|tt|L");
        check("Et||tL", "Et||tL");
        check("Et|tm*2L", "Et|tL");
    }

    #[test]
    fn letters_that_a_profile_lacks_are_refused() {
        refuse("Et|tm|L", "stage 1: the layout has an `m` before the last stage");
    }
}
