//! Blocks of experts: a router that scores with sigmoids, the experts that it chooses, and one that every
//! token passes.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, TensorData, activation};
use pipewright::nn::{Expert, Linear, TensorParallel, count_choices, mix_held};
use pipewright::stage::StageContext;

use super::config::{Experts, NemotronHConfig};
use crate::experts::ExpertSizes;
use crate::parameter::{Builder, ParameterKind, ParameterSource};
use crate::split::require_parts;
use crate::valid_tokens::{valid_choices, valid_tokens};

/// Added to the sum of a token's scores before they are divided by it.
const EPSILON: f64 = 1e-20;

#[derive(Module, Debug)]
pub(super) struct ExpertMixer {
    gate: Router,
    /// The projection of the routed experts' inputs, if they have a width of their own.
    fc1_latent_proj: Option<Linear>,
    /// One entry for each expert; `None` if only another rank holds it.
    experts: Vec<Option<Expert>>,
    /// The projection of the sum of their outputs.
    fc2_latent_proj: Option<Linear>,
    shared_experts: Expert,
    #[module(skip)]
    choice: Choice,
    /// The path of the router, for errors.
    #[module(skip)]
    path: String,
}

#[derive(Module, Debug)]
struct Router {
    /// `[hidden, experts]`.
    weight: Param<Tensor<2>>,
    /// Added to the scores for the choice alone, `[experts]`. It is not trained.
    e_score_correction_bias: Param<Tensor<1>>,
}

impl ExpertMixer {
    pub(super) fn build<S: ParameterSource>(
        config: &NemotronHConfig,
        path: &str,
        builder: &mut Builder<'_, S>,
    ) -> Result<Self, S::Error> {
        let hidden = config.hidden_size;
        let sizes =
            config.experts.as_ref().expect("a validated model with blocks of experts has their sizes");
        let count = sizes.n_routed_experts;
        let router = format!("{path}.gate");
        let bias = "e_score_correction_bias";
        let gate = Router {
            weight: builder.parameter(&router, "weight", [hidden, count], ParameterKind::Matrix)?,
            e_score_correction_bias: builder
                .parameter(&router, bias, [count], ParameterKind::Bias)?
                .set_require_grad(false),
        };
        let (mut fc1_latent_proj, mut fc2_latent_proj) = (None, None);
        if let Some(latent) = sizes.moe_latent_size {
            fc1_latent_proj = Some(builder.linear(&format!("{path}.fc1_latent_proj"), hidden, latent)?);
            fc2_latent_proj = Some(builder.linear(&format!("{path}.fc2_latent_proj"), latent, hidden)?);
        }
        let expert_sizes = ExpertSizes {
            count: ("n_routed_experts", count),
            width: sizes.width(hidden),
            inner: ("moe_intermediate_size", sizes.moe_intermediate_size),
            has_gate: false,
        };
        let experts = builder.experts(path, expert_sizes)?;
        let shared = ("moe_shared_expert_intermediate_size", sizes.moe_shared_expert_intermediate_size);
        require_parts(path, "shared_experts.up_proj.weight", shared, builder.tensor_ranks())?;
        let shared_experts =
            builder.split_expert(&format!("{path}.shared_experts"), [hidden, shared.1], false)?;
        let choice = Choice::new(sizes);
        Ok(Self { gate, fc1_latent_proj, experts, fc2_latent_proj, shared_experts, choice, path: router })
    }

    /// Shapes: `[tokens, hidden]` in and out.
    pub(super) fn forward(
        &self,
        x: Tensor<2>,
        sequence: usize,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let router = Linear { weight: self.gate.weight.clone(), bias: None };
        // The choice of experts is sensitive to rounding, so the router keeps its precision.
        let scores = activation::sigmoid(router.forward(x.clone().cast(router.weight.dtype())));
        let on_host = |data: TensorData| data.iter::<f32>().collect::<Vec<f32>>();
        let correction = on_host(self.gate.e_score_correction_bias.val().into_data());
        let found = on_host(scores.clone().into_data());
        if !found.iter().all(|score| score.is_finite()) {
            context.not_finite(&format!("a score of the router `{}`", self.path));
        }
        let chosen = self.choice.choose(&found, &correction);
        let [tokens, experts] = scores.dims();
        let layer = self.path.strip_suffix(".gate").unwrap_or(&self.path);
        let load = match valid_tokens(context, [tokens / sequence.max(1), sequence]) {
            None => count_choices(&chosen, experts),
            Some(valid) => valid_choices(&chosen, experts, &valid),
        };
        context.expert_load(layer, load);
        let ids: Vec<i64> = chosen.iter().map(|&expert| expert as i64).collect();
        let ids = TensorData::new(ids, [tokens, self.choice.count]);
        let mut weights = scores.clone().gather(1, Tensor::<2, Int>::from_data(ids, &scores.device()));
        if self.choice.normalised {
            weights = weights.clone() / (weights.sum_dim(1) + EPSILON);
        }
        let projected = |projection: &Option<Linear>, x| match projection {
            Some(projection) => projection.forward(x),
            None => x,
        };
        let input = tensor.enter(projected(&self.fc1_latent_proj, x.clone()));
        let weights = tensor.enter(weights * self.choice.factor);
        let routed = tensor.sum(mix_held(input, weights, &chosen, &self.experts));
        let shared = tensor.sum(self.shared_experts.forward(tensor.enter(x)));
        projected(&self.fc2_latent_proj, routed) + shared
    }
}

/// How experts are chosen.
#[derive(Clone, Copy, Debug)]
struct Choice {
    groups: usize,
    open_groups: usize,
    count: usize,
    normalised: bool,
    factor: f64,
}

impl Choice {
    fn new(sizes: &Experts) -> Self {
        Self {
            groups: sizes.n_group,
            open_groups: sizes.topk_group,
            count: sizes.num_experts_per_tok,
            normalised: sizes.norm_topk_prob,
            factor: sizes.routed_scaling_factor,
        }
    }

    /// Returns the experts of each token, `count` each. They have the largest corrected scores in the groups
    /// with the largest sums of their two best scores. If several scores are equal, the first expert is
    /// chosen.
    fn choose(&self, scores: &[f32], correction: &[f32]) -> Vec<usize> {
        let experts = correction.len();
        let size = experts / self.groups;
        let mut chosen = Vec::with_capacity(scores.len() / experts * self.count);
        for scores in scores.chunks_exact(experts) {
            let corrected: Vec<f32> = scores.iter().zip(correction).map(|(s, c)| s + c).collect();
            let group_scores: Vec<f32> = match self.groups {
                1 => vec![0.0],
                _ => {
                    corrected.chunks_exact(size).map(|group| best(group, 2).map(|i| group[i]).sum()).collect()
                }
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

    const CHOICE: Choice = Choice { groups: 2, open_groups: 1, count: 2, normalised: true, factor: 1.0 };

    #[test]
    fn the_best_group_is_that_with_the_best_pair() {
        // The best expert is in the first group; the second has the better pair.
        let scores = [0.9, 0.1, 0.1, 0.6, 0.5, 0.2];
        assert_eq!(CHOICE.choose(&scores, &[0.0; 6]), [3, 4]);
        assert_eq!(Choice { open_groups: 2, ..CHOICE }.choose(&scores, &[0.0; 6]), [0, 3]);
        assert_eq!(Choice { groups: 1, count: 3, ..CHOICE }.choose(&scores, &[0.0; 6]), [0, 3, 4]);
    }

    #[test]
    fn a_correction_changes_the_choice() {
        let scores = [0.9, 0.8, 0.7, 0.6];
        let choice = Choice { groups: 1, ..CHOICE };
        assert_eq!(choice.choose(&scores, &[-1.0, 0.0, 0.0, 0.15]), [1, 3]);
    }

    #[test]
    fn an_expert_outside_the_best_groups_is_never_chosen() {
        let corrected_below_zero = [-0.5, -0.6, -2.0, -2.0];
        assert_eq!(CHOICE.choose(&[0.0; 4], &corrected_below_zero), [0, 1]);
    }

    #[test]
    fn of_equal_scores_the_first_is_chosen() {
        assert_eq!(best(&[1.0, 2.0, 2.0, 2.0], 2).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(best(&[f32::NAN, -1.0], 1).collect::<Vec<_>>(), [1]);
    }
}
