//! The side inputs of a model. A side input is a tensor whose first dimension has one entry for each row of token ids.

use pipewright::batch::SideInputError;
use pipewright::stage::StageContext;
use pipewright::tensor::Boundary;

/// The side input with the number of valid tokens of each row.
pub const COUNTS: &str = "row_valid_token_counts";
/// The side input with the document of each token.
pub const DOCUMENTS: &str = "doc_ids";
/// The side input with the relations between tokens.
pub const RELATIONS: &str = "chunk_relation_mask";
/// The side input with the platform of each row.
pub const PLATFORM: &str = "platform_ids";
/// The side inputs about the structure of the text.
pub const STRUCTURES: [&str; 5] =
    ["structure_ids", "dep_levels", "ast_depth_ids", "sibling_index_ids", "node_type_ids"];

/// Returns a side input, or `None` if the step has none of that name.
///
/// # Panics
/// When it has other tensors than `T`.
pub(super) fn side<T: Boundary>(context: &StageContext, name: &str) -> Option<T> {
    match context.side(name) {
        Ok(tensors) => Some(tensors),
        Err(SideInputError::Missing { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}
