//! A router that chooses experts by corrected scores, or among the experts of some groups: the routers of
//! DeepSeek-V2 (<https://arxiv.org/abs/2405.04434>) and DeepSeek-V3 (<https://arxiv.org/abs/2412.19437>), and
//! of families that took them over.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, TensorData};
use pipewright::nn::{
    Region, TensorParallel, at_least_single, count_choices, linear, row_sums, scale_rows, sigmoid, softmax,
};
use pipewright::stage::StageContext;
use pipewright::tensor::Placement;

use crate::error::ModelError;
use crate::file_layout::FileLayout;
use crate::parameter::{Builder, ParameterKind};
use crate::valid_tokens::{valid_choices, valid_tokens};

/// The name of a router's correction.
const CORRECTION: &str = "e_score_correction_bias";
/// The path of a router's correction below the path of its layer.
pub const ROUTER_CORRECTION: &str = "gate.e_score_correction_bias";
/// Added to the sum of a token's scores before they are divided by it.
const EPSILON: f64 = 1e-20;

/// A router.
#[derive(Module, Debug)]
pub(crate) struct Router {
    /// `[hidden, experts]`.
    weight: Param<Tensor<2>>,
    /// Added to the logits, `[experts]`.
    bias: Option<Param<Tensor<1>>>,
    /// Added to the scores for the choice alone, `[experts]`. It has no gradient.
    e_score_correction_bias: Option<Param<Tensor<1>>>,
}

/// The experts of each token, with their weights.
struct Chosen {
    /// The experts, the same number for each token.
    experts: Vec<usize>,
    /// The weights of the experts, `[tokens, experts of a token]`.
    weights: Tensor<2>,
    /// Whether all scores are numbers.
    is_finite: bool,
}

/// How experts are chosen by their scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupChoice {
    /// The function that makes scores of a router's logits.
    pub(crate) scores: Scores,
    /// The number of groups of neighbouring experts.
    pub(crate) groups: usize,
    /// The number of groups from which a token's experts are chosen: the groups with the largest sums.
    pub(crate) open_groups: usize,
    /// The number of a group's best scores in its sum.
    pub(crate) group_best: usize,
    /// The experts of a token.
    pub(crate) count: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub(crate) normalised: bool,
    /// The factor of the weights.
    pub(crate) factor: f64,
}

/// The function that makes scores of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scores {
    /// The probabilities over all experts.
    Softmax,
    /// Each logit by itself.
    Sigmoid,
}

impl Builder<'_> {
    /// Builds a router at `path` for hidden states of a width and a number of experts, without a bias.
    pub(crate) fn router(
        &mut self,
        path: &str,
        [hidden, experts]: [usize; 2],
        has_correction: bool,
    ) -> Result<Router, ModelError> {
        // transformers may write the router under the name that it has in most families.
        let usual = format!("{path}.weight");
        let named = self.named(path);
        let other_name = match named.strip_suffix(".layer") {
            Some(router) => Some(format!("{router}.weight")),
            None => (named != path).then_some(usual),
        };
        let (shape, layout) = ([hidden, experts], FileLayout { other_name, ..FileLayout::default() });
        let kind = (ParameterKind::Matrix, layout);
        let weight = self.stored(path, "weight", shape, kind, Placement::REPLICATED)?;
        let mut router = Router { weight, bias: None, e_score_correction_bias: None };
        if has_correction {
            let correction = self.parameter(path, CORRECTION, [experts], ParameterKind::Bias)?;
            router.e_score_correction_bias = Some(correction.set_require_grad(false));
        }
        Ok(router)
    }

    /// Adds a bias to the router at `path`.
    pub(crate) fn router_with_bias(&mut self, path: &str, router: Router) -> Result<Router, ModelError> {
        let [_, experts] = router.weight.dims();
        let bias = self.parameter(path, "bias", [experts], ParameterKind::Bias)?;
        Ok(Router { bias: Some(bias), ..router })
    }
}

impl Router {
    /// Returns the logits of tokens, `[tokens, experts]`. The choice of experts is sensitive to rounding, so
    /// the router keeps its precision.
    pub(crate) fn logits(&self, x: Tensor<2>) -> Tensor<2> {
        let x = x.cast(self.weight.dtype());
        linear(x, &self.weight, self.bias.as_ref(), &Region::of_whole(&TensorParallel::default()))
    }

    /// Chooses the experts of the tokens of `rows` rows, for the mixture at the path `layer`, whose router has
    /// the path `router`. Returns the experts, the same number for each token, with their weights. The step
    /// learns of scores that are not numbers, and of the choices of valid tokens.
    pub(crate) fn choose_for(
        &self,
        [layer, router]: [&str; 2],
        x: Tensor<2>,
        rows: usize,
        choice: &GroupChoice,
        context: &StageContext,
    ) -> (Vec<usize>, Tensor<2>) {
        let ([tokens, _], [_, count]) = (x.dims(), self.weight.dims());
        let Chosen { experts, weights, is_finite } = self.choose(x, choice);
        if !is_finite {
            context.not_finite(&format!("a score of the router `{router}`"));
        }
        let choices = match valid_tokens(context, [rows, tokens / rows.max(1)]) {
            None => count_choices(&experts, count),
            Some(valid) => valid_choices(&experts, count, &valid),
        };
        context.expert_load(layer, choices);
        (experts, weights)
    }

    /// Chooses the experts of tokens. Gradients flow through the weights.
    fn choose(&self, x: Tensor<2>, choice: &GroupChoice) -> Chosen {
        let logits = at_least_single(self.logits(x));
        let scores = match choice.scores {
            Scores::Softmax => softmax(logits),
            Scores::Sigmoid => sigmoid(logits),
        };
        let on_host = |data: TensorData| data.iter::<f32>().collect::<Vec<f32>>();
        let found = on_host(scores.clone().into_data());
        let [tokens, count] = scores.dims();
        let correction = match &self.e_score_correction_bias {
            Some(correction) => on_host(correction.val().into_data()),
            None => vec![0.0; count],
        };
        let experts = choice.choose(&found, &correction);
        let ids: Vec<i64> = experts.iter().map(|&expert| expert as i64).collect();
        let ids = TensorData::new(ids, [tokens, choice.count]);
        let mut weights = scores.clone().gather(1, Tensor::<2, Int>::from_data(ids, &scores.device()));
        if choice.normalised {
            weights = scale_rows(weights.clone(), (row_sums(weights) + EPSILON).recip());
        }
        let is_finite = found.iter().all(|score| score.is_finite());
        Chosen { experts, weights: weights * choice.factor, is_finite }
    }
}

/// The ends of the paths of a router's parameters, here and in files of families with other names.
const PARAMETERS: [&str; 6] = [
    ".gate.weight",
    ".gate.bias",
    ".router.weight",
    ".router.layer.weight",
    ".router.bias",
    ".mod_router.weight",
];

/// Returns whether a parameter belongs to a router.
pub(crate) fn is_of_router(parameter: &str) -> bool {
    PARAMETERS.iter().any(|end| parameter.ends_with(end)) || parameter.ends_with(CORRECTION)
}

impl GroupChoice {
    /// Returns the experts of each token, `count` each. They have the largest corrected scores in the groups
    /// with the largest sums of their best scores. If several scores are equal, the first expert is chosen.
    fn choose(&self, scores: &[f32], correction: &[f32]) -> Vec<usize> {
        let experts = correction.len();
        let size = experts / self.groups;
        let mut chosen = Vec::with_capacity(scores.len() / experts * self.count);
        for scores in scores.chunks_exact(experts) {
            let corrected: Vec<f32> = scores.iter().zip(correction).map(|(s, c)| s + c).collect();
            let group_score =
                |group: &[f32]| best(group, self.group_best).map(|index| group[index]).sum::<f32>();
            let group_scores: Vec<f32> = match self.groups {
                1 => vec![0.0],
                _ => corrected.chunks_exact(size).map(group_score).collect(),
            };
            let mut open = vec![false; self.groups];
            best(&group_scores, self.open_groups).for_each(|group| open[group] = true);
            let eligible: Vec<usize> = (0..experts).filter(|expert| open[expert / size]).collect();
            let eligible_scores: Vec<f32> = eligible.iter().map(|&expert| corrected[expert]).collect();
            chosen.extend(best(&eligible_scores, self.count).map(|index| eligible[index]));
        }
        chosen
    }
}

/// Returns the indices of the `count` largest numbers, the largest first; of equal numbers the first. NaN is
/// smaller than any number.
fn best(numbers: &[f32], count: usize) -> impl Iterator<Item = usize> {
    let key = |index: usize| if numbers[index].is_nan() { f32::NEG_INFINITY } else { numbers[index] };
    let mut indices: Vec<usize> = (0..numbers.len()).collect();
    indices.sort_by(|&a, &b| key(b).total_cmp(&key(a)));
    indices.into_iter().take(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHOICE: GroupChoice = GroupChoice {
        scores: Scores::Sigmoid,
        groups: 2,
        open_groups: 1,
        group_best: 2,
        count: 2,
        normalised: true,
        factor: 1.0,
    };

    #[test]
    fn the_best_group_is_that_with_the_best_pair() {
        // The best expert is in the first group; the second has the better pair.
        let scores = [0.9, 0.1, 0.1, 0.6, 0.5, 0.2];
        assert_eq!(CHOICE.choose(&scores, &[0.0; 6]), [3, 4]);
        assert_eq!(GroupChoice { open_groups: 2, ..CHOICE }.choose(&scores, &[0.0; 6]), [0, 3]);
        assert_eq!(GroupChoice { groups: 1, count: 3, ..CHOICE }.choose(&scores, &[0.0; 6]), [0, 3, 4]);
    }

    #[test]
    fn the_best_group_may_be_that_with_the_best_expert() {
        let scores = [0.9, 0.1, 0.1, 0.6, 0.5, 0.2];
        assert_eq!(GroupChoice { group_best: 1, ..CHOICE }.choose(&scores, &[0.0; 6]), [0, 1]);
    }

    #[test]
    fn a_correction_changes_the_choice() {
        let scores = [0.9, 0.8, 0.7, 0.6];
        let choice = GroupChoice { groups: 1, ..CHOICE };
        assert_eq!(choice.choose(&scores, &[-1.0, 0.0, 0.0, 0.15]), [1, 3]);
    }

    #[test]
    fn an_expert_outside_the_best_groups_is_never_chosen() {
        let corrected_below_zero = [-0.5, -0.6, -2.0, -2.0];
        assert_eq!(CHOICE.choose(&[0.0; 4], &corrected_below_zero), [0, 1]);
    }

    #[test]
    fn routers_are_known_by_their_paths() {
        let routers =
            ["layers.0.mlp.gate.weight", "layers.1.mixer.router.weight", "layers.2.mod_router.weight"];
        assert!(
            routers.into_iter().all(is_of_router) && is_of_router(&format!("layers.3.{ROUTER_CORRECTION}"))
        );
        assert!(!is_of_router("layers.0.mlp.shared_expert_gate.weight"));
    }

    #[test]
    fn of_equal_scores_the_first_is_chosen() {
        assert_eq!(best(&[1.0, 2.0, 2.0, 2.0], 2).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(best(&[f32::NAN, -1.0], 1).collect::<Vec<_>>(), [1]);
    }
}
