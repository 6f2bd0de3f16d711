//! Plans in the words of other systems: their options and files, written from a plan and read back.
//!
//! [`emit`] writes the files that torchtitan, Megatron or DeepSpeed takes, and lists the parts of the plan that they lack.
//! [`SystemFile`] reads such a file, including a handwritten one, and returns a [`ReadPlan`], which
//! [`predict`](crate::plan::predict) predicts at the costs of a profile. [`limit_of`] names the stage and the
//! kind of layer that limit it. Nothing here opens a file.
//!
//! The versions are torchtitan 0.3.0 and its main branch of August 2026, Megatron-LM with Megatron Core 0.16.1, and DeepSpeed 0.19.8.
//!
//! ```
//! use pipewright_schedule::emit::{EmitRequest, SystemFile, emit};
//! use pipewright_schedule::plan::{PlanRequest, System, plan};
//! use pipewright_schedule::profile::{LayerProfile, LinkProfile, Profile};
//! let block = LayerProfile { kind: "block".into(), count: 8, forward_s: 1e-3, ..LayerProfile::default() };
//! let profile = Profile { link: LinkProfile::new(0.0, 1e10), layers: vec![block], ..Profile::default() };
//! let system = System::Megatron;
//! let request = PlanRequest { ranks: 2, microbatches: 8, system: Some(system), ..PlanRequest::default() };
//! let best = plan(&profile, &request, &mut || true)?.plans.remove(0);
//! let emission = emit(system, &best, &EmitRequest::new(&profile))?;
//! let file = SystemFile::parse(&emission.files[0].text)?;
//! assert_eq!(file.plan(&profile, None, Some(2))?.choice.boundaries, best.boundaries);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod read_error;
mod model_parts;
mod read_plan;
mod shell;
mod options;
mod nested_options;
mod json_options;
mod mapping;
mod block_modules;
mod emission;
mod stage_letters;
mod layout;
mod balanced;
mod megatron;
mod read_megatron;
mod modules;
mod torchtitan;
mod read_torchtitan;
mod deepspeed;
mod read_deepspeed;
mod system_file;
mod limit;

pub use block_modules::Modules;
pub use emission::{
    Dispatch, Emission, EmitRequest, EmittedFile, MeshOptions, NarrowProducts, PlanScope, RecomputedPart,
    Release,
};
pub use limit::{Limit, limit_of};
pub use mapping::Remark;
pub use model_parts::{ModelParts, StageParts};
pub use nested_options::NestedOptions;
pub use options::{CHECKPOINTING, GivenOption, Options};
pub use read_deepspeed::DEEPSPEED_SIZES;
pub use read_error::ReadError;
pub use read_megatron::megatron_stages;
pub use read_plan::ReadPlan;
pub use stage_letters::{StageLetters, parse_stage_letters, print_stage_letters};
pub use system_file::SystemFile;

use crate::plan::{Plan, Refusal, System};

/// Returns the files of a plan for `system`.
///
/// # Errors
/// When the system cannot run the plan.
pub fn emit(system: System, plan: &Plan, request: &EmitRequest<'_>) -> Result<Emission, Refusal> {
    match plan.refusal(system, request.profile) {
        Some(refusal) => Err(refusal),
        None => Ok(match system {
            System::Torchtitan => torchtitan::torchtitan(plan, request),
            System::Megatron => megatron::megatron(plan, request),
            System::Deepspeed => deepspeed::deepspeed(plan, request),
        }),
    }
}
