//! Checkpoints: the whole state of a training run in a folder, which is either complete or absent.
//!
//! The state consists of every parameter and its optimizer state under the parameter's global path, the
//! number of steps taken, and the data's cursor. It does not matter which ranks and stages wrote a
//! checkpoint: a run resumes under any other number of ranks, stages and chunks, and any schedule, with the
//! same bits. Random state is the seed and the cursor, from which the order of the data follows. A checkpoint
//! does not store the state of a device's random generator, gradients that wait for an update, or a model's
//! own fields that are not parameters.
//!
//! ```text
//! Pipeline::state ---RankState per rank--> CheckpointWriter (a thread) --> Saving: files, manifest, rename
//! Pipeline::restore <-------------------- Checkpoint <-- CheckpointFolder::newest
//! ```
//!
//! The protocol, and why a kill at any moment loses nothing, is in the README of this folder.

mod error;
mod finite;
mod rank_file;
mod piece_file;
mod folder;
mod committed;
mod copy_parts;
mod copy;
mod copy_exchange;
mod identity;
mod location;
mod manifest;
mod stored;
mod optimizer;
mod read;
mod save;
mod sent_parts;
mod moved;
mod state;
mod fingerprint;
mod tensor_file;
mod writer;

pub use copy::{COPIES, CopyFolder};
pub use copy_exchange::CopyExchange;
pub use copy_parts::{CopyPart, GatheredCopy, Holder};
pub use error::CheckpointError;
pub use fingerprint::{Digest, Fingerprint};
pub(crate) use fingerprint::{PartialLeaf, StageLeaves, leaves_of};
pub use finite::NotFinite;
pub use folder::CheckpointFolder;
pub use identity::FolderIdentity;
pub use manifest::{MANIFEST, Manifest, StateFile};
pub(crate) use moved::MovedState;
pub(crate) use optimizer::{LAST_UPDATE, Restored, Target, put_together};
pub use pipewright_data::Cursor;
pub use rank_file::is_rank_file;
pub use read::{Checkpoint, StoredTensor};
pub use save::Saving;
pub use sent_parts::{PartArrivals, PartPiece, PartReceiver, PartSender};
pub(crate) use state::{HeldParameter, StageState};
pub use state::{RankState, TrainingState};
pub(crate) use stored::StoredState;
pub use writer::{CheckpointWriter, CopyTarget};
