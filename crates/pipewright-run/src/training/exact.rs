//! `run.exact`: the processors on which a run has the same bits.
//!
//! Only AMX adds in an order of its own. So a run has the same bits on every processor if it does not use AMX.

use pipewright::tensor::Precision;
use pipewright_kernel::bf16_product::{Instruction, instruction, leave_out_amx};

use crate::error::RunError;
use crate::settings::run::{Exact, RunSettings};

/// Leaves out AMX if the settings ask for the same bits on every processor. Returns a sentence about products of bfloat16 on
/// a processor without an instruction for them.
///
/// # Errors
/// When a product of this process has used AMX before.
pub fn require(run: &RunSettings) -> Result<Option<String>, RunError> {
    if run.exact == Exact::Everywhere && !leave_out_amx() {
        return Err(RunError::input(
            "`run.exact` is \"everywhere\", and this process has used AMX before: start another process for the run",
        ));
    }
    let is_widened = multiplies_bfloat16(run) && instruction().is_none();
    Ok(is_widened.then(|| {
        "note: this processor has no instruction for products of bfloat16, so they are computed in single precision, with the \
         same bits as with AVX512-BF16"
            .to_owned()
    }))
}

/// Returns the order in which this process adds products of bfloat16, under the name that processes compare; `None` if
/// it is the same everywhere.
pub(crate) fn order_of_products(run: &RunSettings) -> Option<(String, String)> {
    if run.exact == Exact::Everywhere || !multiplies_bfloat16(run) {
        return None;
    }
    let order = if uses_amx(run) { "that of AMX" } else { "the usual one" };
    Some(("order of bfloat16 sums (equal with run.exact=everywhere)".to_owned(), order.to_owned()))
}

/// Returns whether a run with these settings adds products in the order of AMX in this process.
pub(crate) fn uses_amx(run: &RunSettings) -> bool {
    run.exact != Exact::Everywhere && multiplies_bfloat16(run) && instruction() == Some(Instruction::Amx)
}

fn multiplies_bfloat16(run: &RunSettings) -> bool {
    run.precision == Precision::Bf16 && run.devices.are_processor()
}
