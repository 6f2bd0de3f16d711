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
use std::fmt;
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
#[error("column {}: {kind}\n  {text}\n  {}^", .column + 1, " ".repeat(*.column))]
pub struct LayoutError {
    /// The layout.
    pub text: String,
    /// The place of the mistake, in characters from 0.
    pub column: usize,
    /// The mistake.
    pub kind: LayoutErrorKind,
}

crate::error_text::message_as_debug!(LayoutError);

/// A kind of mistake in a layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayoutErrorKind {
    /// A character that has no meaning.
    Unknown(char),
    /// A stage without a layer.
    EmptyStage,
    /// A group without a layer.
    EmptyGroup,
    /// A `*` without something to repeat.
    NothingToRepeat,
    /// A `*` without a number of at least 1.
    NoCount,
    /// A `(` without its `)`.
    Unclosed,
    /// A `)` without its `(`.
    Unopened,
    /// Groups inside groups, too deep.
    TooDeep,
    /// More than [`MAX_LAYOUT_LAYERS`] layers.
    TooLong,
    /// The head has several parts, and not as many letters.
    HeadParts {
        /// The number of letters.
        found: usize,
        /// The number of parts.
        parts: u32,
    },
    /// The embedding has several parts, and not as many letters.
    EmbeddingParts {
        /// The number of letters.
        found: usize,
        /// The number of parts.
        parts: u32,
    },
    /// A second embedding or head.
    Twice(char),
    /// An embedding that is not the first layer, or a head that is not the last.
    OutOfPlace(char),
    /// No embedding or no head.
    Missing(char),
    /// The model has another number of layers.
    OtherCount {
        /// The layers of the layout.
        layout: usize,
        /// The layers of the model.
        model: usize,
    },
    /// A letter is of layers that differ in kind.
    OtherKind {
        /// The letter.
        letter: char,
        /// The place of the layer among all layers, from 0.
        layer: usize,
        /// Its kind in the model.
        kind: String,
        /// The kind of the first layer with this letter.
        first: String,
    },
}

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
    fn error(&self, column: usize, kind: LayoutErrorKind) -> LayoutError {
        LayoutError { text: self.text.to_owned(), column, kind }
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
                    let nothing = self.error(column, LayoutErrorKind::NothingToRepeat);
                    let start = last.take().ok_or(nothing)?;
                    self.repeat(&mut parts, start, column)?;
                }
                letter if letter.is_whitespace() => {}
                letter => return Err(self.error(column, LayoutErrorKind::Unknown(letter))),
            }
            if parts.len() > 2 * MAX_LAYOUT_LAYERS {
                return Err(self.error(column, LayoutErrorKind::TooLong));
            }
        }
        Ok(parts)
    }

    fn group(&mut self, depth: usize, open: usize) -> Result<Vec<Part>, LayoutError> {
        if depth == MAX_DEPTH {
            return Err(self.error(open, LayoutErrorKind::TooDeep));
        }
        let group = self.sequence(depth + 1)?;
        if self.letters.get(self.at) != Some(&')') {
            return Err(self.error(open, LayoutErrorKind::Unclosed));
        }
        self.at += 1;
        if group.iter().any(|part| part.letter != '|') {
            Ok(group)
        } else {
            Err(self.error(open, LayoutErrorKind::EmptyGroup))
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
            return Err(self.error(if digits.is_empty() { star } else { column }, LayoutErrorKind::NoCount));
        }
        let too_long = self.error(column, LayoutErrorKind::TooLong);
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
                    return Err(self.error(part.column, LayoutErrorKind::EmptyStage));
                }
                is_empty = true;
                boundaries.push(kinds.len());
            } else {
                is_empty = false;
                kinds.push(part.letter);
            }
        }
        if is_empty {
            return Err(self.error(self.letters.len(), LayoutErrorKind::EmptyStage));
        }
        if kinds.len() > MAX_LAYOUT_LAYERS {
            return Err(self.error(self.letters.len(), LayoutErrorKind::TooLong));
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
        let (column, kind) = match found.len() {
            0 => (missing, LayoutErrorKind::Missing(letter)),
            2.. if count == 1 => (layers[found[1]].column, LayoutErrorKind::Twice(letter)),
            other if other != count => {
                let column = found.get(count).map_or(missing, |&at| layers[at].column);
                let kind = if is_first {
                    LayoutErrorKind::EmbeddingParts { found: other, parts }
                } else {
                    LayoutErrorKind::HeadParts { found: other, parts }
                };
                (column, kind)
            }
            _ => {
                match found.iter().find(|&&at| if is_first { at >= count } else { at + count < layers.len() })
                {
                    Some(&at) => (layers[at].column, LayoutErrorKind::OutOfPlace(letter)),
                    None => return Ok(()),
                }
            }
        };
        Err(self.error(column, kind))
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
            return Err(parser.error(parser.at, LayoutErrorKind::Unopened));
        }
        parser.assemble(&sequence, [embedding, head].map(|parts| parts.max(1)))
    }

    /// Checks that a model has as many layers as the layout, and that layers with one letter are of one kind.
    ///
    /// # Errors
    /// At the first layer that does not fit.
    pub fn check(&self, model: &ModelDesc) -> Result<(), LayoutError> {
        let error = |column, kind| LayoutError { text: self.text.clone(), column, kind };
        let mut kinds: BTreeMap<char, &str> = BTreeMap::new();
        for (layer, (described, letter)) in model.layers.iter().zip(self.kinds.chars()).enumerate() {
            let first = *kinds.entry(letter).or_insert(&described.kind);
            if first != described.kind {
                let (kind, first) = (described.kind.clone(), first.to_owned());
                let kind = LayoutErrorKind::OtherKind { letter, layer, kind, first };
                return Err(error(self.columns[layer], kind));
            }
        }
        let (layout, model) = (self.columns.len(), model.layers.len());
        if layout == model {
            return Ok(());
        }
        let column = self.columns.get(model).copied().unwrap_or_else(|| self.text.chars().count());
        Err(error(column, LayoutErrorKind::OtherCount { layout, model }))
    }
}

impl fmt::Display for LayoutErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |letter: &char| if *letter == ENDS[0] { "embedding" } else { "head" };
        match self {
            Self::Unknown(letter) => {
                write!(
                    f,
                    "`{letter}` is not part of a layout; write capital letters, `|`, `*3` and parentheses"
                )
            }
            Self::EmptyStage => f.write_str("this stage has no layer; remove the bar, or write a layer"),
            Self::EmptyGroup => f.write_str("this group has no layer; remove it, or write a layer"),
            Self::NothingToRepeat => {
                f.write_str("there is nothing to repeat; write `*` directly behind a layer or a group")
            }
            Self::NoCount => f.write_str("`*` needs a number of at least 1, such as `A*3`"),
            Self::Unclosed => f.write_str("this group is not closed; write `)` at its end"),
            Self::Unopened => f.write_str("there is no group to close; remove the `)`"),
            Self::TooDeep => {
                write!(f, "groups are nested more than {MAX_DEPTH} deep; write some of them out")
            }
            Self::TooLong => write!(f, "the layout has more than {MAX_LAYOUT_LAYERS} layers; use fewer"),
            Self::HeadParts { found, parts } => write!(
                f,
                "the head has {parts} parts, and the layout {found}; write `L` {parts} times, as the last layers"
            ),
            Self::EmbeddingParts { found, parts } => write!(
                f,
                "the embedding has {parts} parts, and the layout {found}; write `E` {parts} times, as the first layers"
            ),
            Self::Twice(letter) => write!(f, "a second {}; write `{letter}` once", name(letter)),
            Self::OutOfPlace('E') => f.write_str("the embedding is not the first layer; write `E` first"),
            Self::OutOfPlace(letter) => {
                write!(f, "the {} is not the last layer; write `{letter}` last", name(letter))
            }
            Self::Missing(letter) => {
                let end = if *letter == ENDS[0] { "first" } else { "last" };
                write!(f, "there is no {}; write `{letter}` {end}", name(letter))
            }
            Self::OtherCount { layout, model } => {
                write!(f, "the layout has {layout} layers and the model {model}; write one letter for each")
            }
            Self::OtherKind { letter, layer, kind, first } => write!(
                f,
                "layer {layer} of the model is of the kind `{kind}`, and `{letter}` is of the kind `{first}` before it; \
                 write another letter"
            ),
        }
    }
}

#[cfg(test)]
mod tests;
