//! The second prediction head (DeepSeek-AI, 2024, depth 1), and the losses of both heads.

use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorData};
use pipewright::nn::{Embedding, Linear, RmsNorm, ScopedAttention, split_cross_entropy};
use pipewright::stage::StageContext;

use super::block::Block;
use super::boundary::HybridOutput;
use super::config::HybridConfig;
use super::pattern::BlockKind;
use super::tokens::{Tokens, counts};
use crate::parameter::{Builder, ParameterSource};
use crate::split::SplitStage;

/// Predicts the token after the next one from the hidden states of the last block and the next token.
#[derive(Module, Debug)]
pub(super) struct SecondHead {
    hidden_norm: RmsNorm,
    embed_norm: RmsNorm,
    proj: Linear,
    block: Block,
    norm: RmsNorm,
}

impl SecondHead {
    pub(super) fn build<S: ParameterSource>(
        config: &HybridConfig,
        kind: BlockKind,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let width = config.hidden_size;
        let norm = |builder: &mut Builder<'_, S>, name: &str| {
            builder.norm(&format!("mtp.{name}"), width, config.rms_norm_eps)
        };
        let rope_theta = Some(config.rope_theta);
        let attention = ScopedAttention { head_dim: config.head_dim(), rope_theta, window: None };
        Ok(Self {
            hidden_norm: norm(builder, "hidden_norm")?,
            embed_norm: norm(builder, "embed_norm")?,
            proj: builder.linear("mtp.proj", 2 * width, width)?,
            block: Block::of_kind(config, kind, attention, "mtp.block", builder)?,
            norm: norm(builder, "norm")?,
        })
    }

    /// Returns what the model's head takes, `[tokens, hidden]`, from the hidden states after the last block.
    /// The result at the last position of a row has no meaning: its next token is not among the ids.
    pub(super) fn forward(
        &self,
        hidden: Tensor<2>,
        ids: &Tensor<2, Int>,
        table: &Embedding,
        tokens: &Tokens,
        split: &SplitStage,
        context: &StageContext,
    ) -> Tensor<2> {
        let SplitStage { tensor, vocabulary, .. } = split;
        let [rows, sequence] = ids.dims();
        let last = ids.clone().narrow(1, sequence - 1, 1);
        let next = match sequence {
            1 => last,
            _ => Tensor::cat(vec![ids.clone().narrow(1, 1, sequence - 1), last], 1),
        };
        let [count, width] = hidden.dims();
        let embedded = table.forward_split(next, *vocabulary, tensor).reshape([rows * sequence, width]);
        let embedded = self.embed_norm.forward(embedded);
        let joined = Tensor::cat(vec![self.hidden_norm.forward(hidden), embedded], 1);
        let x = self.proj.forward(joined.reshape([count, 2 * width]));
        self.norm.forward(self.block.forward(x, tokens, tensor, context))
    }
}

/// Returns the mean cross entropy of the valid positions, and adds the second head's loss as `mtp`.
///
/// # Panics
/// When the output has no logits, or a target lies outside the vocabulary.
pub(super) fn loss(
    weight: f64,
    output: HybridOutput,
    targets: &Tensor<2, Int>,
    split: &SplitStage,
    context: &StageContext,
) -> Tensor<1> {
    let HybridOutput::Logits { logits, second } = output else {
        panic!("the last stage returns logits, not hidden states")
    };
    let [rows, sequence] = targets.dims();
    let counts = counts(context, rows, sequence);
    if let Some(second) = second {
        // Position `t` predicts the token after the target of `t`, which is the target of `t + 1`.
        let indices = |row: usize| (0..counts[row] - 1).map(move |t| row * sequence + t);
        let indices: Vec<usize> = (0..rows).flat_map(indices).collect();
        context.auxiliary_loss("mtp", weight, mean_loss(second, targets, &indices, 1, split));
    }
    let indices = |row: usize| (0..counts[row]).map(move |t| row * sequence + t);
    let indices: Vec<usize> = (0..rows).flat_map(indices).collect();
    mean_loss(logits, targets, &indices, 0, split)
}

/// Returns the mean cross entropy of the logits at `indices` against the targets `ahead` positions after
/// them; 0, with a gradient of 0, if there are no indices. A rank has the logits of its part of the
/// vocabulary.
fn mean_loss(
    logits: Tensor<3>,
    targets: &Tensor<2, Int>,
    indices: &[usize],
    ahead: usize,
    SplitStage { tensor, vocabulary, .. }: &SplitStage,
) -> Tensor<1> {
    let [rows, sequence, part] = logits.dims();
    let logits = logits.reshape([rows * sequence, part]);
    if indices.is_empty() {
        return logits.sum().mul_scalar(0.0);
    }
    let targets = targets.clone().reshape([rows * sequence]);
    if indices.len() == rows * sequence {
        return split_cross_entropy(logits, targets, *vocabulary, tensor);
    }
    let ids = |ahead: usize, tensor: &Tensor<1, Int>| {
        let ids: Vec<i64> = indices.iter().map(|&index| (index + ahead) as i64).collect();
        Tensor::<1, Int>::from_data(TensorData::new(ids, [indices.len()]), &tensor.device())
    };
    let chosen_targets = targets.clone().select(0, ids(ahead, &targets));
    split_cross_entropy(logits.select(0, ids(0, &targets)), chosen_targets, *vocabulary, tensor)
}
