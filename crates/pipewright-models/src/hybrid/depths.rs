//! Mixture of depths (Raposo et al., 2024): a router chooses the tokens that go through a block. The others
//! skip it.

use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData, activation};
use pipewright::nn::{Linear, choice_loss};
use pipewright::stage::StageContext;

use super::experts::one_gradient;
use super::tokens::Tokens;
use crate::valid_tokens::mean_weights;

/// How a block chooses its tokens.
#[derive(Clone, Debug)]
pub(super) struct Depths {
    /// The path of the block, for reports.
    pub(super) path: String,
    /// The share of a row's tokens that are chosen.
    pub(super) capacity: f64,
    /// The weight of the router's loss.
    pub(super) weight: f64,
    /// The share of this block in the mean over all such blocks.
    pub(super) share: f64,
}

impl Depths {
    /// Returns `x + sigmoid(r) branch(x)` for the chosen tokens, and `x` for the others; `r` are the router's
    /// scores of `x` `[tokens, hidden]`. The branch gets the chosen tokens in their order.
    pub(super) fn forward(
        &self,
        router: &Linear,
        x: Tensor<2>,
        tokens: &Tokens,
        context: &StageContext,
        branch: impl FnOnce(Tensor<2>, &Tokens) -> Tensor<2>,
    ) -> Tensor<2> {
        // The choice of tokens is sensitive to rounding, so the router keeps its precision.
        let scores = router.forward(x.clone().cast(router.weight.dtype()));
        let on_host: Vec<f32> = scores.clone().into_data().iter().collect();
        let length = ((self.capacity * tokens.scope.sequence as f64).floor() as usize).max(1);
        let indices = choose(&on_host, tokens, length);
        let mut was_chosen = vec![0f32; tokens.len()];
        indices.iter().for_each(|&index| was_chosen[index] = 1.0);
        let loss = choice_loss(scores.clone(), was_chosen.into(), mean_weights(&tokens.valid));
        context.auxiliary_loss_of(&self.path, "mod_aux", self.weight, loss.mul_scalar(self.share));
        let x = one_gradient(x);

        let ids: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [indices.len()]), &x.device());
        let chosen = x.clone().select(0, ids.clone());
        let mixed = branch(chosen, &tokens.choose(&indices, length));
        let gates = activation::sigmoid(scores.select(0, ids.clone())).cast(mixed.dtype());
        x.select_assign(0, ids, mixed * gates, IndexingUpdateOp::Add)
    }
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
    use pipewright::nn::TokenScope;

    use super::*;

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
