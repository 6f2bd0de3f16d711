//! The pattern of a model: a letter for each block, and bars where stages may be cut.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::ShapeError;
use crate::key_range::unknown_block;

/// The kind of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockKind {
    /// Attention.
    Attention,
    /// A Mamba-2 mixer.
    Mamba,
    /// A mixture of experts.
    Experts,
    /// A feed-forward layer.
    Dense,
}

const LETTERS: &str = "A (attention), M (Mamba-2), E (experts), D or - (dense feed-forward)";

impl BlockKind {
    /// Returns the name in tables of stages.
    pub fn label(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Mamba => "mamba",
            Self::Experts => "experts",
            Self::Dense => "dense",
        }
    }

    fn from_letter(letter: char) -> Option<Self> {
        match letter {
            'A' => Some(Self::Attention),
            'M' => Some(Self::Mamba),
            'E' => Some(Self::Experts),
            'D' | '-' => Some(Self::Dense),
            _ => None,
        }
    }
}

/// The blocks of a model in order, and the bars between them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern {
    text: String,
    blocks: Vec<BlockKind>,
    /// The number of blocks before each bar.
    cuts: Vec<usize>,
}

impl Pattern {
    /// Reads a pattern such as `AEME|AEME`.
    ///
    /// # Errors
    /// When a letter is unknown, or there is no block in the pattern or between two bars.
    pub fn new(text: &str) -> Result<Self, ShapeError> {
        let (mut blocks, mut cuts) = (Vec::new(), Vec::new());
        for (stage, letters) in text.split('|').enumerate() {
            if stage > 0 {
                cuts.push(blocks.len());
            }
            if letters.is_empty() {
                let message = format!("`pattern = {text:?}`: stage {stage} has no block");
                return Err(ShapeError::new(&["pattern"], message));
            }
            for letter in letters.chars() {
                let unknown = || unknown_block("pattern", blocks.len(), &letter.to_string(), LETTERS);
                blocks.push(BlockKind::from_letter(letter).ok_or_else(unknown)?);
            }
        }
        Ok(Self { text: text.to_owned(), blocks, cuts })
    }

    /// Returns the blocks.
    pub fn blocks(&self) -> &[BlockKind] {
        &self.blocks
    }

    /// Returns the number of blocks before each bar.
    pub fn cuts(&self) -> &[usize] {
        &self.cuts
    }

    /// Returns the number of blocks of a kind.
    pub fn count(&self, kind: BlockKind) -> usize {
        self.blocks.iter().filter(|block| **block == kind).count()
    }
}

impl TryFrom<String> for Pattern {
    type Error = ShapeError;

    fn try_from(text: String) -> Result<Self, ShapeError> {
        Self::new(&text)
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> Self {
        pattern.text
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_blocks_and_bars_are_cuts() {
        let pattern = Pattern::new("AM|ED-|A").expect("it is one");
        use BlockKind::{Attention, Dense, Experts, Mamba};
        assert_eq!(pattern.blocks(), [Attention, Mamba, Experts, Dense, Dense, Attention]);
        assert_eq!(pattern.cuts(), [2, 5]);
        assert_eq!(pattern.to_string(), "AM|ED-|A");
    }

    #[test]
    fn what_is_no_pattern_says_where() {
        let refused = |text| Pattern::new(text).map_err(|error| error.to_string());
        let unknown = format!("`pattern`: block 2 is `x`, counted from 0; the kinds of blocks are {LETTERS}");
        assert_eq!(refused("AM|x"), Err(unknown));
        assert_eq!(refused(""), Err("`pattern = \"\"`: stage 0 has no block".to_owned()));
        assert_eq!(refused("A||M"), Err("`pattern = \"A||M\"`: stage 1 has no block".to_owned()));
        assert_eq!(refused("A|"), Err("`pattern = \"A|\"`: stage 1 has no block".to_owned()));
    }
}
