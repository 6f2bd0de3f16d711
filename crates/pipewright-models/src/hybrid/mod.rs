//! The hybrid family: attention, Mamba-2, experts and feed-forward layers in the order of a pattern, with documents in
//! rows, windows, blocks that only some tokens pass, embeddings of the text's structure, and a second prediction head.
//!
//! In the list of layers, layer 0 is all embeddings, one layer for each block follows, and the last layer is the final
//! norm with the head and the second prediction head.
//!
//! # What travels between stages
//!
//! Hidden states, and with them the token ids of the rows (a 32-bit number a token beside `hidden_size` of them): every
//! stage finds the documents in the ids, and the last stage embeds them for its second head. Everything else that a stage
//! needs beside the hidden states is a side input, which each stage looks up by its microbatch's index.
//!
//! # What is shared
//!
//! The embedding's table, of which the last stage has a copy if the head is tied or there is a second head; and the table
//! of the relations, of which every attention has a copy. Copies have one path; the pipeline sums their gradients in the
//! order of the layers, so that they stay equal, and the sum does not depend on the cut.

mod block;
mod boundary;
mod config;
mod depths;
mod describe;
mod embedding;
mod experts;
mod head;
mod initial;
mod pattern;
mod side_check;
mod side_inputs;
mod stage;
mod tokens;
mod validate;

pub use boundary::{HybridInput, HybridOutput};
pub use config::{EmbedNorm, HybridConfig};
pub use pattern::{BlockKind, Pattern};
pub use side_inputs::{COUNTS, DOCUMENTS, PLATFORM, RELATIONS, STRUCTURES};
pub use stage::HybridStage;
