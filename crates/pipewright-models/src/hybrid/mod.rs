//! The hybrid family: attention, Mamba-2, experts and feed-forward layers in the order of a pattern, with
//! documents in rows, windows, blocks that only some tokens pass, embeddings of the text's structure, and
//! predictions of further tokens.
//!
//! In the list of layers, layer 0 is all embeddings, one layer for each block and one for each further
//! prediction follow, and the last layer is the norms with the head.
//!
//! # The messages between stages
//!
//! Hidden states and the token ids of the rows, which add one 32-bit number to the `hidden_size` numbers of a
//! token. Every stage finds the documents in the ids, and further predictions embed the ids. Behind such a
//! prediction, its states are further rows of the hidden states. The other inputs of a stage are side inputs,
//! which each stage looks up by its microbatch's index.
//!
//! # What is shared
//!
//! The embedding's table and the table of the relations. A tied head and every further prediction have a copy
//! of the embedding's table, and every attention has a copy of the table of the relations. All copies have
//! one path. The pipeline sums their gradients in the order of the layers, so the
//! copies stay equal and the sum does not depend on the cut.

mod depths;
mod describe;
mod embedding;
mod experts;
mod relations;
mod side_inputs;
mod sizes;
mod tokens;

pub(crate) use depths::{Choice, Depths};
pub(crate) use describe::describe_layers;
pub(crate) use embedding::{FurtherEmbeddings, with_zero_gradient};
pub(crate) use experts::ExpertMixer;
pub use pipewright_shapes::hybrid::{BlockKind, EmbedNorm, HybridConfig, Pattern};
pub(crate) use relations::{RELATION_BIAS, RelationBias, RelationCopy};
pub(crate) use side_inputs::check_side;
pub use side_inputs::{COUNTS, DOCUMENTS, PLATFORM, RELATIONS, STRUCTURES};
pub(crate) use sizes::{further, mamba_sizes, scoped_attention};
pub(crate) use tokens::Tokens;
