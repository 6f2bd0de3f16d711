//! Mixture of depths (Raposo et al., 2024): a router chooses the tokens that go through a block. The others
//! skip it.
//!
//! Training compares the tokens of a whole row, so a later token can take the place of an earlier one. The
//! router's loss brings the scores of chosen tokens above 0, and the scores of the others below 0. In
//! generation, where later tokens are not known, the tokens with a score above 0 are chosen.

use burn::module::Module;
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData};
use pipewright::nn::{Linear, choice_loss, scale_rows, sigmoid};
use pipewright::stage::StageContext;

use super::experts::one_gradient;
use super::tokens::Tokens;
use crate::valid_tokens::mean_weights;

/// The router of a block, which chooses the block's tokens.
#[derive(Module, Debug)]
pub(crate) struct Depths {
    pub(crate) router: Linear,
    /// The path of the block, for reports.
    #[module(skip)]
    pub(crate) path: String,
    /// The share of a row's tokens that are chosen.
    #[module(skip)]
    pub(crate) capacity: f64,
    /// The weight of the router's loss.
    #[module(skip)]
    pub(crate) weight: f64,
    /// The share of this block in the mean over all such blocks.
    #[module(skip)]
    pub(crate) share: f64,
}

/// How the router of a block chooses tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// It chooses the tokens with the largest scores of each row, as many as the capacity allows.
    Largest,
    /// It chooses the tokens with scores above 0, in a text that is one row.
    Positive,
}

impl Depths {
    /// Returns `x + sigmoid(r) branch(x)` for the chosen tokens, and `x` for the others; `r` are the router's
    /// scores of `x` `[tokens, hidden]`. The branch gets the chosen tokens in their order. If no token is
    /// chosen, the branch does not run.
    ///
    /// # Panics
    /// When tokens of several rows are chosen by scores above 0.
    pub(crate) fn forward(
        &self,
        choice: Choice,
        x: Tensor<2>,
        tokens: &Tokens,
        context: &StageContext,
        branch: impl FnOnce(Tensor<2>, &Tokens) -> Tensor<2>,
    ) -> Tensor<2> {
        // The choice of tokens is sensitive to rounding, so the router keeps its precision.
        let scores = self.router.forward(x.clone().cast(self.router.weight.dtype()));
        let on_host: Vec<f32> = scores.clone().into_data().iter().collect();
        if choice == Choice::Positive {
            assert_eq!(tokens.len(), tokens.scope.sequence, "a text is one row");
            let indices: Vec<usize> = (0..on_host.len()).filter(|&index| on_host[index] > 0.0).collect();
            if indices.is_empty() {
                return x;
            }
            let chosen = tokens.choose(&indices, indices.len());
            return add_to_chosen(x, scores, &indices, |x| branch(x, &chosen));
        }
        let length = ((self.capacity * tokens.scope.sequence as f64).floor() as usize).max(1);
        let indices = choose(&on_host, tokens, length);
        let mut was_chosen = vec![0f32; tokens.len()];
        indices.iter().for_each(|&index| was_chosen[index] = 1.0);
        let loss = choice_loss(scores.clone(), was_chosen.into(), mean_weights(&tokens.valid));
        context.auxiliary_loss_of(&self.path, "mod_aux", self.weight, loss.mul_scalar(self.share));
        let chosen = tokens.choose(&indices, length);
        add_to_chosen(one_gradient(x), scores, &indices, |x| branch(x, &chosen))
    }
}

/// Adds `sigmoid(r) branch(x)` to the tokens with these indices.
fn add_to_chosen(
    x: Tensor<2>,
    scores: Tensor<2>,
    indices: &[usize],
    branch: impl FnOnce(Tensor<2>) -> Tensor<2>,
) -> Tensor<2> {
    let ids: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
    let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [indices.len()]), &x.device());
    let mixed = branch(x.clone().select(0, ids.clone()));
    let gates = sigmoid(scores.select(0, ids.clone())).cast(mixed.dtype());
    x.select_assign(0, ids, scale_rows(mixed, gates), IndexingUpdateOp::Add)
}

/// Returns the indices of the chosen tokens, `length` of each row in ascending order. They have the largest
/// scores. If several scores are equal, the first one counts. Padding comes after every valid token.
fn choose(scores: &[f32], tokens: &Tokens, length: usize) -> Vec<usize> {
    let sequence = tokens.scope.sequence;
    let mut indices = Vec::with_capacity(scores.len() / sequence * length);
    for start in (0..scores.len()).step_by(sequence) {
        let mut row: Vec<usize> = (start..start + sequence).collect();
        row.sort_by(|&a, &b| {
            let validity = tokens.valid[b].cmp(&tokens.valid[a]);
            validity.then_with(|| scores[b].total_cmp(&scores[a])).then(a.cmp(&b))
        });
        row.truncate(length);
        row.sort_unstable();
        indices.append(&mut row);
    }
    indices
}

#[cfg(test)]
mod tests {
    use burn::module::Param;
    use burn::tensor::Device;
    use pipewright::nn::TokenScope;
    use pipewright_schedule::{Microbatch, StageIndex};

    use super::*;

    /// Returns what a block adds to a text whose scores are its second elements. The branch returns the number
    /// of its tokens for each of them, and checks their positions.
    fn added(scores: &[f32], expected: &'static [u32]) -> Vec<f32> {
        let device = Device::flex();
        let router = Linear { weight: Param::from_data([[0.0], [1.0]], &device), bias: None };
        let depths = Depths { router, path: "block".into(), capacity: 0.1, weight: 1.0, share: 1.0 };
        let count = scores.len();
        let tokens = Tokens {
            scope: TokenScope { positions: (7..).take(count).collect(), ..TokenScope::whole(1, count) },
            valid: vec![true; count].into(),
            relations: None,
        };
        let x: Vec<f32> = scores.iter().flat_map(|score| [1.0, *score]).collect();
        let x = Tensor::<2>::from_data(TensorData::new(x, [count, 2]), &device);
        let branch = |x: Tensor<2>, tokens: &Tokens| {
            assert_eq!(*tokens.scope.positions, *expected);
            x.ones_like() * expected.len() as f64
        };
        let y = depths.forward(
            Choice::Positive,
            x.clone(),
            &tokens,
            &StageContext::new(StageIndex::new(0), Microbatch::new(0)),
            branch,
        );
        (y - x).narrow(1, 0, 1).into_data().iter().collect()
    }

    #[test]
    fn texts_are_chosen_by_positive_scores_alone() {
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let close = |found: Vec<f32>, expected: &[f32]| {
            let is_close =
                found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-6);
            assert!(is_close && found.len() == expected.len(), "{found:?} for {expected:?}");
        };
        let found = added(&[2.0, -1.0, 0.0, 0.5, -3.0, 1e-3], &[7, 10, 12]);
        close(found, &[3.0 * sigmoid(2.0), 0.0, 0.0, 3.0 * sigmoid(0.5), 0.0, 3.0 * sigmoid(1e-3)]);
        // The branch does not run without tokens.
        close(added(&[-1.0, -0.5], &[]), &[0.0; 2]);
    }

    #[test]
    fn the_largest_scores_are_chosen_and_padding_is_last() {
        let tokens = Tokens {
            scope: TokenScope::whole(2, 4),
            valid: vec![true, true, true, true, true, false, false, false].into(),
            relations: None,
        };
        let scores = [0.5, -1.0, 0.5, 0.5, -9.0, 1.0, 3.0, 2.0];
        assert_eq!(choose(&scores, &tokens, 2), [0, 2, 4, 6]);
        assert_eq!(choose(&scores, &tokens, 3), [0, 2, 3, 4, 6, 7]);
    }
}
