//! Checkpoints: the whole state of a training run in a folder that is there complete or not at all.
//!
//! The state is every parameter and its optimizer state under the parameter's global path, the number of steps taken
//! and the data's cursor. Which ranks and stages wrote it plays no part in reading it: a run goes on under any other
//! number of ranks, stages, chunks and any schedule, with the same bits. Random state is the seed and the cursor, from
//! which the order of the data follows; numbers that a model draws from its device (dropout) are not kept, nor are
//! gradients that wait for an update, integer parameters and a model's own fields.
//!
//! ```text
//! Pipeline::state -----RankState a rank--> CheckpointWriter (a thread) --> Saving: shards, manifest, rename
//! Pipeline::restore <-------------------- Checkpoint <-- CheckpointFolder::newest
//! ```
//!
//! The protocol, and why a kill at any moment loses nothing, is in the README beside this file.

mod cursor;
mod error;
mod folder;
mod manifest;
mod optimizer;
mod read;
mod save;
mod state;
mod tensor_file;
mod writer;

pub use cursor::Cursor;
pub use error::CheckpointError;
pub use folder::CheckpointFolder;
pub use manifest::{MANIFEST, Manifest, Shard};
pub(crate) use optimizer::{Target, put_together};
pub use read::{Checkpoint, StoredTensor};
pub use save::Saving;
pub(crate) use state::{HeldParameter, StageState};
pub use state::{RankState, TrainingState};
pub use writer::CheckpointWriter;
