//! Megatron's letters for the stages of a pipeline, the value of `--pipeline-model-parallel-layout`.
//!
//! ```text
//! Ett|(ttt|)*2tt|tL
//! ```
//!
//! `E` is the embedding, `t` a block, `m` a block that predicts further tokens, `L` the head with the loss; a bar
//! ends a stage. `t*3` repeats a character, `(tt|)*2` a group without groups inside, and neither commas nor blanks
//! matter. Stage `s` is chunk `s / p` of rank `s mod p`
//! (`megatron/core/transformer/pipeline_parallel_layer_layout.py`).
//!
//! ```
//! use pipewright_schedule::emit::parse_stage_letters;
//! let stages = parse_stage_letters("E t*3|(t*4|)*2 t*2 m L")?;
//! assert_eq!(stages.iter().map(|stage| stage.blocks).collect::<Vec<_>>(), [3, 4, 4, 2]);
//! assert!(stages[0].embedding && stages[3].head && stages[3].predictors == 1);
//! # Ok::<(), pipewright_schedule::emit::ReadError>(())
//! ```

use crate::emit::read_error::ReadError;

/// The letters of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct StageLetters {
    /// Whether the stage has the embedding.
    pub embedding: bool,
    /// The number of blocks.
    pub blocks: u32,
    /// The number of blocks that predict further tokens.
    pub predictors: u32,
    /// Whether the stage has the head and the loss.
    pub head: bool,
}

/// Returns the letters of all stages without repetitions, as [`parse_stage_letters`] reads them.
pub fn print_stage_letters(stages: &[StageLetters]) -> String {
    let stage = |stage: &StageLetters| {
        let repeat = |letter: &str, count: u32| letter.repeat(count as usize);
        let (first, last) = (repeat("E", stage.embedding.into()), repeat("L", stage.head.into()));
        first + &repeat("t", stage.blocks) + &repeat("m", stage.predictors) + &last
    };
    stages.iter().map(stage).collect::<Vec<_>>().join("|")
}

/// The largest number of characters of an expanded layout.
const MOST_LETTERS: usize = 20_000;

/// A character of a layout with its place, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Letter {
    letter: char,
    column: usize,
}

/// Reads the letters of each stage. The embedding is the first letter, the loss the last one, and predictors are
/// after all blocks.
///
/// # Errors
/// When a letter is not known, a repetition has a mistake, or the order is another one.
pub fn parse_stage_letters(text: &str) -> Result<Vec<StageLetters>, ReadError> {
    let letters = (1..).zip(text.chars()).map(|(column, letter)| Letter { letter, column });
    let letters: Vec<Letter> =
        letters.filter(|letter| letter.letter != ',' && !letter.letter.is_whitespace()).collect();
    stages(&with_repeats(&with_groups(&letters)?)?)
}

/// Expands the groups in parentheses.
fn with_groups(letters: &[Letter]) -> Result<Vec<Letter>, ReadError> {
    let mut expanded = Vec::new();
    let mut rest = letters;
    while let Some((&first, after)) = rest.split_first() {
        if first.letter != '(' {
            expanded.push(first);
            rest = after;
            continue;
        }
        let mistake = |what| wrong_repeat(first.column, what);
        let end = after.iter().position(|letter| letter.letter == ')');
        let end =
            end.ok_or_else(|| mistake("a parenthesis is not closed; write `)` and a number, such as `)*3`"))?;
        let group = &after[..end];
        if group.is_empty() || group.iter().any(|letter| letter.letter == '(') {
            return Err(mistake("a group is empty, or has a group inside; write it out"));
        }
        let (count, after) = repeat(&after[end + 1..])?;
        let count =
            count.ok_or_else(|| mistake("a group needs a number of repetitions, such as `(tt|)*3`"))?;
        extend(&mut expanded, group, count, first.column)?;
        rest = after;
    }
    Ok(expanded)
}

/// Expands the repetitions of single characters.
fn with_repeats(letters: &[Letter]) -> Result<Vec<Letter>, ReadError> {
    let mut expanded = Vec::new();
    let mut rest = letters;
    while let Some((&first, after)) = rest.split_first() {
        let (count, after) = repeat(after)?;
        extend(&mut expanded, &[first], count.unwrap_or(1), first.column)?;
        rest = after;
    }
    Ok(expanded)
}

fn extend(expanded: &mut Vec<Letter>, unit: &[Letter], count: usize, column: usize) -> Result<(), ReadError> {
    if unit.len().saturating_mul(count).saturating_add(expanded.len()) > MOST_LETTERS {
        return Err(wrong_repeat(column, "there are too many repetitions; use a smaller number"));
    }
    (0..count).for_each(|_| expanded.extend_from_slice(unit));
    Ok(())
}

/// Reads `*3` at the start of some letters. Returns `None` for the number if the letters do not begin with a star.
fn repeat(letters: &[Letter]) -> Result<(Option<usize>, &[Letter]), ReadError> {
    let Some((star, rest)) = letters.split_first().filter(|(first, _)| first.letter == '*') else {
        return Ok((None, letters));
    };
    let digits: String =
        rest.iter().map(|letter| letter.letter).take_while(char::is_ascii_digit).take(10).collect();
    let what = "a `*` needs a number after it, such as `t*3`";
    let count = digits.parse().map_err(|_not_a_number| wrong_repeat(star.column, what))?;
    Ok((Some(count), &rest[digits.len()..]))
}

/// Returns the mistake of a layout that repeats too much, or whose parentheses do not match.
fn wrong_repeat(column: usize, what: &str) -> ReadError {
    ReadError::new(format!("the layout at character {column}: {what}"))
}

/// Splits the letters into stages, and checks the order of the model's parts.
fn stages(letters: &[Letter]) -> Result<Vec<StageLetters>, ReadError> {
    let mut stages = vec![StageLetters::default()];
    let last_layer = letters.iter().rposition(|letter| letter.letter != '|');
    let first_layer = letters.iter().position(|letter| letter.letter != '|');
    let mut has_predictors = false;
    for (at, &Letter { letter, column }) in letters.iter().enumerate() {
        let index = stages.len() - 1;
        let wrong = |what: &str| Err(ReadError::in_stage(index, what));
        let stage = &mut stages[index];
        match letter {
            'E' if first_layer != Some(at) => {
                return wrong(
                    "the layout has an embedding that is not its first layer; write `E` once, as the first",
                );
            }
            'L' if last_layer != Some(at) => {
                return wrong(
                    "the layout has a head that is not its last layer; write `L` once, as the last",
                );
            }
            'E' => stage.embedding = true,
            'L' => stage.head = true,
            't' if has_predictors => {
                return wrong("the layout has a `t` after an `m`; write each `m` after the last `t`");
            }
            't' => stage.blocks += 1,
            'm' => {
                stage.predictors += 1;
                has_predictors = true;
            }
            '|' => stages.push(StageLetters::default()),
            letter => {
                return Err(ReadError::new(format!(
                    "the layout has `{letter}` at character {column}; Megatron knows `E`, `t`, `m`, `L`, `|`, `*3` and \
                     parentheses"
                )));
            }
        }
    }
    let ends = [
        (stages.iter().any(|stage| stage.embedding), 0, "embedding; write `E` as its first"),
        (stages.iter().any(|stage| stage.head), stages.len() - 1, "head; write `L` as its last"),
    ];
    match ends.into_iter().find(|(has, ..)| !has) {
        Some((_, stage, what)) => Err(ReadError::in_stage(stage, &format!("the layout has no {what} layer"))),
        None => Ok(stages),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[[u32; 2]]) {
        let stages = parse_stage_letters(text).expect("a layout");
        let found: Vec<[u32; 2]> = stages.iter().map(|stage| [stage.blocks, stage.predictors]).collect();
        assert_eq!(found, expected, "{text}");
        assert!(stages[0].embedding && stages[stages.len() - 1].head, "{text}");
    }

    fn refuse(text: &str, words: &str) {
        let error = parse_stage_letters(text).expect_err("a mistake").to_string();
        assert!(error.contains(words), "{text}: {error}");
    }

    #[test]
    fn letters_are_counted_by_stage() {
        check("EtL", &[[1, 0]]);
        check(
            "E t*11|(t*12|)*6 t*11 L",
            &[[11, 0], [12, 0], [12, 0], [12, 0], [12, 0], [12, 0], [12, 0], [11, 0]],
        );
        check("Et*3|(tt|)*2,m|L", &[[3, 0], [2, 0], [2, 0], [0, 1], [0, 0]]);
        check("E||t m*2 L", &[[0, 0], [0, 0], [1, 2]]);
    }

    #[test]
    fn printed_letters_are_read_again() {
        for text in ["EtL", "Ettt|tt||tmm|L", "E|tmL"] {
            assert_eq!(print_stage_letters(&parse_stage_letters(text).expect("a layout")), text);
        }
    }

    #[test]
    fn mistakes_say_where_they_are() {
        refuse("Ex|tL", "the layout has `x` at character 2");
        refuse("Et|mtL", "stage 1: the layout has a `t` after an `m`");
        refuse("t|tL", "stage 0: the layout has no embedding; write `E` as its first layer");
        refuse("Et|t", "stage 1: the layout has no head");
        refuse("Et|EtL", "stage 1: the layout has an embedding that is not its first layer");
        refuse("EL|tL", "stage 0: the layout has a head that is not its last layer");
        refuse("E(t|tL", "the layout at character 2: a parenthesis is not closed");
        refuse("E(t|)tL", "a group needs a number");
        refuse("E()*2tL", "a group is empty");
        refuse("Et*|L", "a `*` needs a number");
        refuse("Et*99999999L", "too many repetitions");
        refuse("", "no embedding");
    }
}
