//! The layout language: a cut by hand, with one letter for each layer.
//!
//! ```text
//! E | A*3 | (A M)*2 | A L
//! ```
//!
//! A capital letter is a layer: `E` the embedding, `L` the head, any other letter a layer of that kind. A bar
//! ends a stage. `*3` repeats the layer or the group before it; a group in parentheses may contain bars.
//! Spaces do not matter. The embedding comes first and the head last, each exactly once, and no stage is
//! empty. An embedding or a head that is cut into parts along the vocabulary is as many layers, each with its
//! own `E` or `L` ([`Layout::with_parts`]).
//!
//! ```
//! use pipewright_schedule::partition::Layout;
//! let layout: Layout = "E | A*3 | (A M)*2 | A L".parse()?;
//! assert_eq!((layout.kinds.as_str(), layout.boundaries.as_slice()), ("EAAAAMAMAL", &[1, 4, 8][..]));
//! # Ok::<(), pipewright_schedule::partition::LayoutError>(())
//! ```

use std::collections::BTreeMap;
use std::str::FromStr;

use thiserror::Error;

use crate::model::ModelDesc;

/// The largest number of layers of a layout.
pub const MAX_LAYOUT_LAYERS: usize = 10_000;
/// The deepest nesting of groups.
const MAX_DEPTH: usize = 32;

/// The letters of the embedding and of the head.
const ENDS: [char; 2] = ['E', 'L'];

/// The layers of a layout, and the cuts between its stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The text.
    pub text: String,
    /// The letters of all layers, in order.
    pub kinds: String,
    /// The first layer of each stage except the first.
    pub boundaries: Vec<usize>,
    /// The place of each layer's letter in the text, in characters from 0.
    columns: Vec<usize>,
}

/// A mistake in a layout. Its text has the layout and a caret below the mistake.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("column {}: {reason}\n  {text}\n  {}^", .column + 1, " ".repeat(*.column))]
pub struct LayoutError {
    /// The layout.
    pub text: String,
    /// The place of the mistake, in characters from 0.
    pub column: usize,
    /// The mistake, and what to do.
    pub reason: String,
}

crate::error_text::message_as_debug!(LayoutError);

/// A part of an expanded layout: a layer or a bar, with its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    letter: char,
    column: usize,
}

struct Parser<'a> {
    text: &'a str,
    letters: Vec<char>,
    at: usize,
}

impl FromStr for Layout {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        Self::with_parts(text, 1, 1)
    }
}

impl Parser<'_> {
    fn error(&self, column: usize, reason: impl Into<String>) -> LayoutError {
        LayoutError { text: self.text.to_owned(), column, reason: reason.into() }
    }

    fn too_long(&self, column: usize) -> LayoutError {
        self.error(column, format!("the layout has more than {MAX_LAYOUT_LAYERS} layers; use fewer"))
    }

    fn empty_stage(&self, column: usize) -> LayoutError {
        self.error(column, "this stage has no layer; remove the bar, or write a layer")
    }

    /// Reads layers, bars and groups up to the end or to a `)`, and expands them.
    fn sequence(&mut self, depth: usize) -> Result<Vec<Part>, LayoutError> {
        let mut parts: Vec<Part> = Vec::new();
        // Where the last layer or group begins, if a `*` may follow.
        let mut last: Option<usize> = None;
        while let Some(&letter) = self.letters.get(self.at) {
            let column = self.at;
            self.at += 1;
            match letter {
                'A'..='Z' => {
                    last = Some(parts.len());
                    parts.push(Part { letter, column });
                }
                '|' => {
                    last = None;
                    parts.push(Part { letter, column });
                }
                '(' => {
                    last = Some(parts.len());
                    let group = self.group(depth, column)?;
                    parts.extend(group);
                }
                ')' => {
                    self.at = column;
                    return Ok(parts);
                }
                '*' => {
                    let nothing = "there is nothing to repeat; write `*` directly behind a layer or a group";
                    let start = last.take().ok_or_else(|| self.error(column, nothing))?;
                    self.repeat(&mut parts, start, column)?;
                }
                letter if letter.is_whitespace() => {}
                letter => {
                    let words = "is not part of a layout; write capital letters, `|`, `*3` and parentheses";
                    return Err(self.error(column, format!("`{letter}` {words}")));
                }
            }
            if parts.len() > 2 * MAX_LAYOUT_LAYERS {
                return Err(self.too_long(column));
            }
        }
        Ok(parts)
    }

    fn group(&mut self, depth: usize, open: usize) -> Result<Vec<Part>, LayoutError> {
        if depth == MAX_DEPTH {
            let words = format!("groups are nested more than {MAX_DEPTH} deep; write some of them out");
            return Err(self.error(open, words));
        }
        let group = self.sequence(depth + 1)?;
        if self.letters.get(self.at) != Some(&')') {
            return Err(self.error(open, "this group is not closed; write `)` at its end"));
        }
        self.at += 1;
        if group.iter().any(|part| part.letter != '|') {
            Ok(group)
        } else {
            Err(self.error(open, "this group has no layer; remove it, or write a layer"))
        }
    }

    /// Reads the number after a `*`, and repeats the parts from `start` on.
    fn repeat(&mut self, parts: &mut Vec<Part>, start: usize, star: usize) -> Result<(), LayoutError> {
        while self.letters.get(self.at).is_some_and(|letter| letter.is_whitespace()) {
            self.at += 1;
        }
        let digits: String =
            self.letters[self.at..].iter().take_while(|letter| letter.is_ascii_digit()).collect();
        let column = self.at;
        self.at += digits.len();
        if digits.is_empty() || digits.chars().all(|digit| digit == '0') {
            let column = if digits.is_empty() { star } else { column };
            return Err(self.error(column, "`*` needs a number of at least 1, such as `A*3`"));
        }
        let too_long = self.too_long(column);
        let count: usize = digits.parse().map_err(|_too_many_digits| too_long.clone())?;
        let unit = parts[start..].to_vec();
        if unit.len().saturating_mul(count) > 2 * MAX_LAYOUT_LAYERS {
            return Err(too_long);
        }
        for _ in 1..count {
            parts.extend_from_slice(&unit);
        }
        Ok(())
    }

    /// Splits the parts at their bars, and checks the stages and the ends.
    fn assemble(&self, parts: &[Part], [embedding, head]: [u32; 2]) -> Result<Layout, LayoutError> {
        let (mut kinds, mut boundaries) = (String::new(), Vec::new());
        let mut is_empty = true;
        let layers: Vec<Part> = parts.iter().copied().filter(|part| part.letter != '|').collect();
        for part in parts {
            if part.letter == '|' {
                if is_empty {
                    return Err(self.empty_stage(part.column));
                }
                is_empty = true;
                boundaries.push(kinds.len());
            } else {
                is_empty = false;
                kinds.push(part.letter);
            }
        }
        if is_empty {
            return Err(self.empty_stage(self.letters.len()));
        }
        if kinds.len() > MAX_LAYOUT_LAYERS {
            return Err(self.too_long(self.letters.len()));
        }
        self.check_end(&layers, ENDS[0], embedding)?;
        self.check_end(&layers, ENDS[1], head)?;
        let columns = layers.iter().map(|part| part.column).collect();
        Ok(Layout { text: self.text.to_owned(), kinds, boundaries, columns })
    }

    /// Checks that each part of the embedding or of the head is where its letter belongs, and nowhere else.
    fn check_end(&self, layers: &[Part], letter: char, parts: u32) -> Result<(), LayoutError> {
        let count = parts as usize;
        let is_first = letter == ENDS[0];
        let found: Vec<usize> = (0..layers.len()).filter(|&at| layers[at].letter == letter).collect();
        let missing = if is_first { 0 } else { self.letters.len() };
        let (name, end) = if is_first { ("embedding", "first") } else { ("head", "last") };
        let (column, reason) = match found.len() {
            0 => (missing, format!("there is no {name}; write `{letter}` {end}")),
            2.. if count == 1 => (layers[found[1]].column, format!("a second {name}; write `{letter}` once")),
            other if other != count => (
                found.get(count).map_or(missing, |&at| layers[at].column),
                format!(
                    "the {name} has {parts} parts, and the layout {other}; write `{letter}` {parts} times, as the {end} layers"
                ),
            ),
            _ => {
                let is_elsewhere =
                    |&&at: &&usize| if is_first { at >= count } else { at + count < layers.len() };
                let Some(&at) = found.iter().find(is_elsewhere) else { return Ok(()) };
                (layers[at].column, format!("the {name} is not the {end} layer; write `{letter}` {end}"))
            }
        };
        Err(self.error(column, reason))
    }
}

impl Layout {
    /// Reads a layout of a model whose embedding and head are cut into so many layers along the vocabulary.
    ///
    /// # Errors
    /// At the first mistake, also if `E` or `L` is not written once for each part.
    pub fn with_parts(text: &str, embedding: u32, head: u32) -> Result<Self, LayoutError> {
        let mut parser = Parser { text, letters: text.chars().collect(), at: 0 };
        let sequence = parser.sequence(0)?;
        if parser.at < parser.letters.len() {
            return Err(parser.error(parser.at, "there is no group to close; remove the `)`"));
        }
        parser.assemble(&sequence, [embedding, head].map(|parts| parts.max(1)))
    }

    /// Checks that a model has as many layers as the layout, and that layers with one letter are of one kind.
    ///
    /// # Errors
    /// At the first layer that does not fit.
    pub fn check(&self, model: &ModelDesc) -> Result<(), LayoutError> {
        let error = |column, reason| LayoutError { text: self.text.clone(), column, reason };
        let mut kinds: BTreeMap<char, &str> = BTreeMap::new();
        for (layer, (described, letter)) in model.layers.iter().zip(self.kinds.chars()).enumerate() {
            let first = *kinds.entry(letter).or_insert(&described.kind);
            if first != described.kind {
                let reason = format!(
                    "layer {layer} of the model is of the kind `{}`, and `{letter}` is of the kind `{first}` before it; write \
                     another letter",
                    described.kind
                );
                return Err(error(self.columns[layer], reason));
            }
        }
        let (layout, model) = (self.columns.len(), model.layers.len());
        if layout == model {
            return Ok(());
        }
        let column = self.columns.get(model).copied().unwrap_or_else(|| self.text.chars().count());
        let words = "write one letter for each";
        Err(error(column, format!("the layout has {layout} layers and the model {model}; {words}")))
    }
}

#[cfg(test)]
mod tests;
