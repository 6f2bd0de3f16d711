//! Blocks of experts with their two losses.

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{Expert, Linear, Routing, TensorParallel, mix_held, router_losses};
use pipewright::stage::StageContext;
use pipewright_shapes::hybrid::{BlockKind, HybridConfig};

use super::tokens::Tokens;
use crate::error::ModelError;
use crate::experts::{ExpertForm, ExpertSizes};
use crate::parameter::Builder;
use crate::split::require_parts;
use crate::valid_tokens::{mean_weights, valid_choices, valid_loads};

#[derive(Module, Debug)]
pub(crate) struct ExpertMixer {
    router: Linear,
    /// One entry for each expert; `None` if only another rank holds it.
    experts: Vec<Option<Expert>>,
    shared_expert: Option<Expert>,
    #[module(skip)]
    settings: Settings,
}

#[derive(Clone, Debug)]
struct Settings {
    /// The path of the router, for errors.
    path: String,
    count: usize,
    normalised: bool,
    /// The weights of the balance loss and of the loss of the logits.
    weights: (f64, f64),
    /// The share of this block in the mean over all blocks of experts.
    share: f64,
}

impl ExpertMixer {
    pub(crate) fn build(
        config: &HybridConfig,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let width = config.hidden_size;
        let router = builder.linear(&format!("{path}.router"), width, config.num_experts)?;
        let (count, inner) = (config.num_experts, config.moe_intermediate_size);
        let sizes = ExpertSizes {
            count: ("num_experts", count),
            width,
            inner: ("moe_intermediate_size", inner),
            has_gate: true,
            form: ExpertForm::default(),
        };
        let experts = builder.experts(path, sizes)?;
        let shared_expert = match config.shared_expert_intermediate_size {
            0 => None,
            inner => {
                let (parameter, size) =
                    ("shared_expert.gate_proj.weight", ("shared_expert_intermediate_size", inner));
                require_parts(path, parameter, size, builder.tensor_ranks())?;
                Some(builder.split_expert(&format!("{path}.shared_expert"), [width, inner], true)?)
            }
        };
        let settings = Settings {
            path: format!("{path}.router"),
            count: config.num_experts_per_tok,
            normalised: config.norm_topk_prob,
            weights: (config.moe_aux_loss_weight, config.moe_router_z_loss_weight),
            share: 1.0 / config.pattern.count(BlockKind::Experts).max(1) as f64,
        };
        Ok(Self { router, experts, shared_expert, settings })
    }

    /// Shapes: `[tokens, hidden]` in and out.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        tokens: &Tokens,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        // The choice of experts is sensitive to rounding, so the router keeps its precision.
        let logits = self.router.forward(x.clone().cast(self.router.weight.dtype()));
        let Settings { path, count, normalised, weights: (balance, z), share } = &self.settings;
        let routing = Routing::new(logits.clone(), *count, *normalised);
        if !routing.is_finite() {
            context.not_finite(&format!("a probability of the router `{path}`"));
        }
        let counts = valid_choices(routing.chosen(), routing.experts(), &tokens.valid);
        let loads = valid_loads(&counts, &tokens.valid);
        let losses = router_losses(logits, loads, mean_weights(&tokens.valid)).mul_scalar(*share);
        let layer = path.strip_suffix(".router").unwrap_or(path);
        context.auxiliary_loss_of(layer, "moe_aux", *balance, losses.clone().narrow(0, 0, 1));
        context.auxiliary_loss_of(layer, "moe_z", *z, losses.narrow(0, 1, 1));
        context.expert_load(layer, counts);
        // The experts' gradients are added first, and then the router's: see `one_gradient`.
        let x = tensor.enter(one_gradient(x));
        assert_eq!(routing.experts(), self.experts.len(), "the routing is of these experts");
        let weights = tensor.enter(routing.weights());
        let mixed = mix_held(x.clone(), weights, routing.chosen(), &self.experts, tensor.expert_parallel());
        tensor.sum(match &self.shared_expert {
            Some(shared) => mixed + shared.forward(x),
            None => mixed,
        })
    }
}

/// Returns `x` as a tensor of its own on the tape, which passes one gradient on. Where losses join the
/// backward pass in the middle of a stage, the order in which a tensor gets more than two gradients depends
/// on the cut, and so would the last bits of their sum.
pub(crate) fn one_gradient(x: Tensor<2>) -> Tensor<2> {
    x.mul_scalar(1.0)
}
