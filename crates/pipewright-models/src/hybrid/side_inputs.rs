//! The side inputs of a model. A side input is a tensor whose first dimension has one entry for each row of token ids.

pub use pipewright::train::data::DOCUMENTS;

/// The side input with the number of valid tokens of each row.
pub const COUNTS: &str = "row_valid_token_counts";
/// The side input with the relations between tokens.
pub const RELATIONS: &str = "chunk_relation_mask";
/// The side input with the platform of each row.
pub const PLATFORM: &str = "platform_ids";
/// The side inputs about the structure of the text.
pub const STRUCTURES: [&str; 5] =
    ["structure_ids", "dep_levels", "ast_depth_ids", "sibling_index_ids", "node_type_ids"];
