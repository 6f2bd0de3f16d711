//! Matrices whose elements are stored in a few bits each, in blocks with scales, and products with them. They
//! are frozen: nothing here changes an element.
//!
//! ```text
//! matrix   [rows, columns], rows are the outputs of a linear layer; one file per form of its elements
//! decode   neighbouring elements of a row -> f32 or bfloat16
//! product  x wᵀ and g w (`quantised_product`): a panel of some columns of the product at a time is decoded into the form that the
//!          kernel of the product reads
//! row      x wᵀ of one row x in single precision (`one_row`): nothing is decoded into a panel
//! ```
//!
//! No product decodes a whole matrix. Except for `row`, its result has the bits of a product with the decoded matrix in the same
//! order of rows and columns: in single precision a panel has whole columns of the product, and in bfloat16 the
//! packed operand is the same.
//!
//! A further form is one file with its `decode` and `part`, and a variant of [`Form`].

mod error;
#[cfg(target_arch = "x86_64")]
mod lookup;
mod decoded;
mod codebook;
mod fp8;
mod grouped;
mod plain;
mod block_kind;
#[cfg(target_arch = "x86_64")]
mod wide_blocks;
mod blocks;
pub mod block_codes;
pub mod nf4;
mod matrix;
mod operand;
mod eights;
mod one_row;

pub use block_kind::BlockKind;
pub use blocks::Blocks;
pub use codebook::{Codebook, DoubleScales, Scales};
pub use decoded::Rounding;
pub use error::{CodebookError, CutError};
pub use fp8::Fp8;
pub use grouped::Grouped;
pub use matrix::{Form, QuantisedMatrix};
pub use one_row::row_product;
pub use operand::QuantisedOperand;
pub use plain::{FloatType, Plain};
