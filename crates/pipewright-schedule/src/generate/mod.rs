//! Generates schedules by name: the computations of each rank, in order.
//!
//! Each generator has its own file. Its [`Guide`] has the paper, the order, the bubble and the memory, and
//! the book prints it. The list of generators is in `catalogue.rs`. A size that a schedule does not have is
//! refused with sizes that it has, which `repair.rs` finds by trying them. [`mod@crate::lower`] adds
//! communication. Generators share five files: `building_block.rs` (v-half and v-min), `phases.rs` (1F1B
//! and the ZB-H family), `interleaving.rs` (the order of chunks), `stage_cursor.rs` (a stage's next action) and
//! `search.rs` (the shortest of several runs).
//!
//! ```
//! use pipewright_schedule::{ScheduleSpec, csv, generate};
//! let schedule = generate("1f1b", &ScheduleSpec { ranks: 2, microbatches: 3, ..ScheduleSpec::default() })?;
//! assert_eq!(csv::print_schedule(&schedule), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
//! # Ok::<(), pipewright_schedule::GenerateError>(())
//! ```

mod advice;
mod catalogue;
mod error;
mod generator;
mod repair;
mod settings;
mod spec;
pub(crate) mod ticks;
mod search;

mod interleaving;
mod stage_cursor;
mod phases;
mod building_block;

mod dual_pipe_v;
mod forward_only;
mod gpipe;
mod group_interleaved;
mod hanayo;
mod interleaved_1f1b;
mod interleaved_zb_h1;
mod interleaved_zero_bubble;
mod looped_bfs;
mod one_f_one_b;
mod seq1f1b;
mod v_half;
mod v_min;
mod vocab_1f1b;
mod zb_greedy;
mod zb_h1;
mod zb_h2;
mod zbv_zero_bubble;

pub use advice::Advice;
pub use catalogue::{
    catalogue, check, depends_on_costs, find, generate, generate_at, generate_within, most_cells,
    shared_microbatches,
};
pub use error::{GenerateError, GenerateErrorKind, MAX_COMPUTE_ACTIONS};
pub use generator::{Formula, Generator, Guide, Limits, StageRule};
pub use settings::Setting;
pub(crate) use spec::rounds;
pub use spec::{PerStage, ScheduleSpec};
