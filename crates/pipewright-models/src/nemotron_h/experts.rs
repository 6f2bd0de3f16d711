//! Blocks of experts: a router that scores with sigmoids, the experts that it chooses, and one that every
//! token passes.

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{Expert, Linear, TensorParallel, mix_held};
use pipewright::stage::StageContext;
use pipewright_shapes::nemotron_h::{Experts, NemotronHConfig};

use crate::error::ModelError;
use crate::experts::{ExpertForm, ExpertSizes};
use crate::parameter::Builder;
use crate::router::{GroupChoice, Router, Scores};
use crate::split::require_parts;

#[derive(Module, Debug)]
pub(crate) struct LatentExperts {
    gate: Router,
    /// The projection of the routed experts' inputs, if they have a width of their own.
    fc1_latent_proj: Option<Linear>,
    /// One entry for each expert; `None` if only another rank holds it.
    experts: Vec<Option<Expert>>,
    /// The projection of the sum of their outputs.
    fc2_latent_proj: Option<Linear>,
    shared_experts: Expert,
    #[module(skip)]
    choice: GroupChoice,
    /// The path of the router, for errors.
    #[module(skip)]
    path: String,
}

impl LatentExperts {
    pub(crate) fn build(
        config: &NemotronHConfig,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        let sizes =
            config.experts.as_ref().expect("a validated model with blocks of experts has their sizes");
        let count = sizes.n_routed_experts;
        let router = format!("{path}.gate");
        let gate = builder.router(&router, [hidden, count], true)?;
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
            form: ExpertForm::default(),
        };
        let experts = builder.experts(path, expert_sizes)?;
        let shared = ("moe_shared_expert_intermediate_size", sizes.moe_shared_expert_intermediate_size);
        require_parts(path, "shared_experts.up_proj.weight", shared, builder.tensor_ranks())?;
        let shared_experts =
            builder.split_expert(&format!("{path}.shared_experts"), [hidden, shared.1], false)?;
        let choice = choice(sizes);
        Ok(Self { gate, fc1_latent_proj, experts, fc2_latent_proj, shared_experts, choice, path: router })
    }

    /// Shapes: `[tokens, hidden]` in and out.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        rows: usize,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let layer = self.path.strip_suffix(".gate").unwrap_or(&self.path);
        let (chosen, weights) =
            self.gate.choose_for([layer, &self.path], x.clone(), rows, &self.choice, context);
        let projected = |projection: &Option<Linear>, x| match projection {
            Some(projection) => projection.forward(x),
            None => x,
        };
        let input = tensor.enter(projected(&self.fc1_latent_proj, x.clone()));
        let weights = tensor.enter(weights);
        let routed = tensor.sum(mix_held(input, weights, &chosen, &self.experts, tensor.expert_parallel()));
        let shared = tensor.sum(self.shared_experts.forward(tensor.enter(x)));
        projected(&self.fc2_latent_proj, routed) + shared
    }
}

/// Returns how a model with these experts chooses them.
fn choice(sizes: &Experts) -> GroupChoice {
    GroupChoice {
        scores: Scores::Sigmoid,
        groups: sizes.n_group,
        open_groups: sizes.topk_group,
        group_best: 2,
        count: sizes.num_experts_per_tok,
        normalised: sizes.norm_topk_prob,
        factor: sizes.routed_scaling_factor,
    }
}
