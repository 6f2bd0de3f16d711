//! How schedules compute backwards: whole, or the gradients of weights apart.

use pipewright_schedule::generate::find;
use pipewright_schedule::{ScheduleSpec, Slices};

use crate::layout::Layout;

/// The schedules in addition to 1F1B and interleaved 1F1B. All of them compute gradients of weights apart.
pub(super) const SPLIT: [&str; 4] = ["zb-h1", "interleaved-zb-h1", "zbvzerobubble", "v-half"];

/// The form of the backwards of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BackwardForm {
    /// A forward and a whole backward.
    Whole,
    /// A forward, the gradients of inputs, and the gradients of weights.
    Split,
    /// Some backwards are whole, and others are split.
    Mixed,
    /// Microbatches are cut into slices.
    Slices,
}

/// Returns the form of the backwards of a layout's schedule.
pub(super) fn backward_form(layout: &Layout) -> BackwardForm {
    let Some(name) = layout.schedule.as_deref() else { return BackwardForm::Whole };
    match find(name) {
        _ if SPLIT.contains(&name) => BackwardForm::Split,
        Ok(generator) if generator.slices_of(&ScheduleSpec::default()) != Slices::ONE => BackwardForm::Slices,
        Ok(generator) if !generator.splits_backward() => BackwardForm::Whole,
        Ok(_) | Err(_) => BackwardForm::Mixed,
    }
}
