//! Writes the files of a plan for a system.

use crate::emit::deepspeed::deepspeed;
use crate::emit::emission::{Emission, EmitRequest};
use crate::emit::megatron::megatron;
use crate::emit::torchtitan::torchtitan;
use crate::plan::{Plan, Refusal, System};

/// Returns the files of a plan for `system`.
///
/// # Errors
/// When the system cannot run the plan.
pub fn emit(system: System, plan: &Plan, request: &EmitRequest<'_>) -> Result<Emission, Refusal> {
    match plan.refusal(system, request.profile) {
        Some(refusal) => Err(refusal),
        None => Ok(match system {
            System::Torchtitan => torchtitan(plan, request),
            System::Megatron => megatron(plan, request),
            System::Deepspeed => deepspeed(plan, request),
        }),
    }
}
