//! The layouts in which a stack sends tokens to experts and back while it computes another microbatch.
//!
//! - Megatron Core 0.16.1 (`core/transformer/transformer_config.py`, `core/pipeline_parallel/combined_1f1b.py`) runs the
//!   forward of a microbatch with the backward of another one in interleaved 1F1B, and without a pipeline. It computes
//!   neither whole blocks nor experts again, and has at most one block that predicts a further token.
//! - DeepSeek's HAI-LLM does so with DualPipe (arXiv 2412.19437, section 3.2.1), which is DualPipeV here.

use crate::implementation::{Precision, Stack};
use crate::layout::{Layout, Modules, Recompute};
use pipewright_shapes::model::Model;

/// Returns why the stack of a layout does not hide the exchange of tokens behind another microbatch, as the end of a
/// sentence about the stack; `None` if it does.
pub(crate) fn fault(layout: &Layout, model: &Model) -> Option<&'static str> {
    let recomputes_experts = match layout.recompute {
        Recompute::Full => true,
        Recompute::Modules(modules) => modules.has(Modules::EXPERTS),
        Recompute::None | Recompute::Selective => false,
    };
    let is_combined = match layout.schedule_name() {
        "1f1b" => layout.pipeline == 1,
        "interleaved1f1b" => true,
        _ => false,
    };
    let implementation = &layout.implementation;
    match implementation.stack {
        _ if !model.has_experts() || layout.expert == 1 => {
            Some("exchanges no tokens between ranks of experts")
        }
        _ if layout.microbatches() == 1 => Some("has no other microbatch to compute"),
        Stack::Megatron if !is_combined => Some(
            "combines the forward of a microbatch with the backward of another one in interleaved 1F1B alone",
        ),
        Stack::Megatron if recomputes_experts => Some("does not compute whole blocks or experts again then"),
        Stack::Megatron if model.predictors > 1 => {
            Some("has at most one block that predicts a further token then")
        }
        Stack::Megatron if layout.precision == Precision::Single => Some("needs bf16 for it"),
        Stack::HaiLlm if layout.schedule_name() != "dualpipev" => Some("does so in DualPipe alone"),
        Stack::Megatron | Stack::HaiLlm => None,
        Stack::Torchtitan | Stack::Automodel | Stack::OlmoCore => Some("does not do so"),
    }
}

/// Returns the schedules that only serve this overlap.
pub(crate) fn schedules(stack: Stack) -> &'static [&'static str] {
    match stack {
        Stack::HaiLlm => &["dualpipev"],
        Stack::Megatron | Stack::Torchtitan | Stack::Automodel | Stack::OlmoCore => &[],
    }
}
