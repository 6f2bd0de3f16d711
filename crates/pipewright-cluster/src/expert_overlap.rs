//! The layouts in which a stack sends tokens to experts and back while it computes another microbatch.
//!
//! - Megatron Core 0.16.1 (`core/transformer/transformer_config.py`, `core/pipeline_parallel/combined_1f1b.py`) runs the
//!   forward of a microbatch with the backward of another one in interleaved 1F1B, and without a pipeline. It computes
//!   neither whole blocks nor experts again, and has at most one block that predicts a further token.
//!   The forward of a layer keeps its activations while the backward of a layer frees others, so memory has the peak of
//!   1F1B.
//! - DeepSeek's HAI-LLM does so with DualPipe (arXiv 2412.19437, section 3.2.1), which is DualPipeV here.

use crate::implementation::{Precision, Stack};
use crate::layout::{Layout, Modules, Recompute};
use pipewright_shapes::model::Model;

/// Returns why a stack does not hide the exchange of tokens behind another microbatch in a layout, as the end of a
/// sentence about the stack; `None` if it does.
pub(crate) fn fault(layout: &Layout, stack: Stack, model: &Model) -> Option<&'static str> {
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
    match stack {
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

#[cfg(test)]
mod tests {
    use super::*;
    use pipewright_shapes::reader;

    /// Checks why a stack does not overlap in a layout of 8 expert ranks with 16 microbatches that is changed, by the
    /// end of the sentence; empty if it does.
    fn check(stack: Stack, change: impl FnOnce(&mut Layout, &mut Model), end: &str) {
        let mut model =
            reader::read(include_str!("../tests/cluster/deepseek_v3.json")).expect("a model").model;
        let mut layout = Layout {
            gpus: 64,
            pipeline: 8,
            chunks: 2,
            expert: 8,
            batch: 128,
            ..Layout::on_one_gpu(4096, Precision::Half)
        };
        change(&mut layout, &mut model);
        let why = fault(&layout, stack, &model);
        assert_eq!(why.is_none(), end.is_empty(), "{why:?}");
        assert!(why.is_none_or(|why| why.ends_with(end)), "{why:?}");
    }

    #[test]
    fn each_stack_has_its_conditions() {
        let named = |name: &'static str| {
            move |layout: &mut Layout, _: &mut Model| layout.schedule = Some(name.to_owned())
        };
        let recompute = |recompute| move |layout: &mut Layout, _: &mut Model| layout.recompute = recompute;
        check(Stack::Megatron, |_, _| {}, "");
        check(Stack::Megatron, |layout, _| layout.chunks = 1, "in interleaved 1F1B alone");
        check(Stack::Megatron, |layout, _| (layout.chunks, layout.pipeline) = (1, 1), "");
        check(Stack::Megatron, named("zbvzerobubble"), "in interleaved 1F1B alone");
        check(Stack::Megatron, |layout, _| layout.expert = 1, "between ranks of experts");
        check(Stack::Megatron, |layout, _| layout.batch = 8, "no other microbatch to compute");
        check(Stack::Megatron, recompute(Recompute::Full), "again then");
        check(Stack::Megatron, recompute(Recompute::Modules(Modules::EXPERTS)), "again then");
        check(Stack::Megatron, recompute(Recompute::Modules(Modules::NORMS)), "");
        check(Stack::Megatron, |_, model| model.predictors = 2, "a further token then");
        check(Stack::Megatron, |layout, _| layout.precision = Precision::Single, "bf16 for it");
        check(Stack::HaiLlm, named("dualpipev"), "");
        check(Stack::HaiLlm, |_, _| {}, "in DualPipe alone");
        check(Stack::Torchtitan, |_, _| {}, "does not do so");
    }
}
