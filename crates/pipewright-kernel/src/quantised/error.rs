//! The faults of the parts of a quantised matrix, and cuts that are not possible.

use std::error::Error;
use std::fmt;

/// A fault of the parts of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodebookError {
    /// Another number of bytes than the elements need.
    Codes {
        /// The bytes that the elements need.
        needed: usize,
    },
    /// Another number of scales than the blocks need.
    Scales {
        /// The scales that the blocks need.
        needed: usize,
    },
    /// Another number of scales of scales than their blocks need.
    ScalesOfScales {
        /// The scales that the blocks need.
        needed: usize,
    },
    /// The size of a block is 0.
    Block,
    /// Rows that do not consist of whole blocks.
    Columns {
        /// The elements of a block.
        block: usize,
    },
    /// A number that is not finite.
    NotFinite,
}

impl fmt::Display for CodebookError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Codes { needed } => write!(f, "its elements need {needed} bytes"),
            Self::Scales { needed } => write!(f, "its blocks need {needed} scales"),
            Self::ScalesOfScales { needed } => write!(f, "its scales need {needed} scales of their own"),
            Self::Block => write!(f, "its blocks have no elements"),
            Self::Columns { block } => {
                write!(f, "its rows do not consist of whole blocks of {block} elements")
            }
            Self::NotFinite => write!(f, "a scale or a number of its table is not finite"),
        }
    }
}

impl Error for CodebookError {}

/// A part of a matrix that is not a matrix of the same form, because its border goes through a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutError {
    /// The column at which the border is.
    pub column: usize,
    /// The columns of a block.
    pub block: usize,
}

impl fmt::Display for CutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a cut at input {} goes through a block of {} elements", self.column, self.block)
    }
}

impl Error for CutError {}
