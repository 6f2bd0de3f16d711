//! The feed-forward layer of a block: dense, or a mixture of experts.

use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::activation::{gelu_approximate, silu};
use pipewright::nn::{
    Expert, Linear, Routing, TensorParallel, at_least_single, mix_held, router_losses, swiglu,
};
use pipewright::stage::StageContext;
use pipewright_schedule::divisor::greatest_common_divisor;
use pipewright_shapes::decoder::{DecoderConfig, MixtureConfig};

use super::form::{Activation, BlockForm, SharedForm};
use super::shared_expert::SharedExpert;
use crate::error::ModelError;
use crate::experts::ExpertSizes;
use crate::file_layout::OutputParts;
use crate::parameter::{Builder, SplitLinear};
use crate::projection::{Projection, SharedInput, part_of};
use crate::router::{GroupChoice, Router};
use crate::split::require_parts;
use crate::valid_tokens::{mean_weights, valid_choices, valid_loads, valid_tokens};

/// The most groups of a joined projection, and so the most ranks that can compute one together. It is a power
/// of 2, so the number of groups is one too. Checkpoints depend on it.
const MOST_GROUPS: u64 = 64;

/// The name of the router's balance loss in reports.
const BALANCE: &str = "moe_aux";

/// One struct for both kinds, because parameter paths consist of field names and both kinds are named `mlp`.
/// A dense layer has the three projections, a mixture the router and the experts.
#[derive(Module, Debug)]
pub(crate) struct FeedForward {
    gate_proj: Option<Projection>,
    up_proj: Option<Projection>,
    /// The matrix that makes both, in a family that joins them.
    gate_up_proj: Option<Projection>,
    /// The parts of its outputs.
    #[module(skip)]
    joined: Option<OutputParts>,
    down_proj: Option<Projection>,
    /// The router.
    gate: Option<Router>,
    /// One entry for each expert; `None` if only another rank holds it.
    experts: Vec<Option<Expert>>,
    /// The expert that every token goes through, in a family that gives it a gate.
    shared_expert: Option<SharedExpert>,
    /// The factor of its output.
    shared_expert_gate: Option<Linear>,
    /// The expert that every token goes through, in the other families.
    shared_experts: Option<SharedExpert>,
    #[module(skip)]
    activation: Activation,
    #[module(skip)]
    choice: Option<Choice>,
}

/// How a mixture chooses its experts.
#[derive(Clone, Debug)]
struct Choice {
    /// The path of the layer, for reports.
    path: String,
    /// The path of the router, for errors.
    router: String,
    kind: ChoiceKind,
    /// The share of this layer in the model's balance loss, and the weight of that loss.
    balance: Option<(f64, f64)>,
}

#[derive(Clone, Copy, Debug)]
enum ChoiceKind {
    /// The largest probabilities.
    Probabilities {
        /// The experts of a token.
        count: usize,
        normalised: bool,
    },
    /// Scores, which may be corrected, in groups.
    Scores(GroupChoice),
}

impl FeedForward {
    pub(crate) fn build(
        config: &DecoderConfig,
        form: &BlockForm<'_>,
        index: usize,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        match form.mixture_of(index) {
            Some(mixture) => Self::sparse(config, form, mixture, path, builder),
            None if form.joins_projections && !form.has_no_gate => {
                Self::joined(config, form.activation, path, builder)
            }
            None => {
                let inner = ("intermediate_size", config.intermediate_size);
                let first = if form.has_no_gate { "up_proj.weight" } else { "gate_proj.weight" };
                let (path_in_files, first) = (builder.named(path), builder.named(first));
                require_parts(&path_in_files, &first, inner, builder.tensor_ranks())?;
                Self::dense(config, form, path, builder)
            }
        }
    }

    /// Returns a layer without parameters.
    fn empty(activation: Activation) -> Self {
        Self {
            gate_proj: None,
            up_proj: None,
            gate_up_proj: None,
            joined: None,
            down_proj: None,
            gate: None,
            experts: Vec::new(),
            shared_expert: None,
            shared_expert_gate: None,
            shared_experts: None,
            activation,
            choice: None,
        }
    }

    fn dense(
        config: &DecoderConfig,
        form: &BlockForm<'_>,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let shards = builder.tensor_ranks();
        let mut linear = |name, sizes, split| {
            builder.projection(form.mlp_bias, &format!("{path}.{name}"), sizes, split).map(Some)
        };
        let outputs = SplitLinear::Outputs { shards };
        Ok(Self {
            gate_proj: if form.has_no_gate { None } else { linear("gate_proj", [hidden, inner], outputs)? },
            up_proj: linear("up_proj", [hidden, inner], outputs)?,
            down_proj: linear("down_proj", [inner, hidden], SplitLinear::Inputs)?,
            ..Self::empty(form.activation)
        })
    }

    /// Builds a dense layer in which one matrix makes the gate and the up projection, without biases.
    fn joined(
        config: &DecoderConfig,
        activation: Activation,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (both, down) = (format!("{path}.gate_up_proj"), format!("{path}.down_proj"));
        // Fewer groups would be copied faster, but no more ranks than groups can compute the layer together.
        let groups = greatest_common_divisor(inner as u64, MOST_GROUPS) as usize;
        let parts = OutputParts { groups, widths: [inner / groups, inner / groups, 0] };
        let of_inner = (("intermediate_size", inner), parts);
        Ok(Self {
            gate_up_proj: Some(builder.joined_projection(false, &both, hidden, of_inner)?),
            joined: Some(parts),
            down_proj: Some(builder.projection(false, &down, [inner, hidden], SplitLinear::Inputs)?),
            ..Self::empty(activation)
        })
    }

    /// Returns what the down projection of a dense layer takes.
    fn inner(&self, x: &SharedInput, context: &StageContext) -> Tensor<2> {
        let [gate, up] = match (self.gate_up_proj.as_ref().zip(self.joined), &self.gate_proj, &self.up_proj) {
            (Some((joined, parts)), ..) => {
                let both = joined.forward(x, context);
                [0, 1].map(|part| part_of(both.clone(), parts, part))
            }
            (None, Some(gate), Some(up)) => [gate.forward(x, context), up.forward(x, context)],
            (None, None, Some(up)) => return self.activation.of(up.forward(x, context)),
            (None, _, None) => unreachable!("a feed-forward layer without experts has an up projection"),
        };
        self.activation.gated(gate, up)
    }

    fn sparse(
        config: &DecoderConfig,
        form: &BlockForm<'_>,
        mixture: &MixtureConfig,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        let share = form.balance_share(config.num_hidden_layers);
        let is_corrected = form.router.is_some_and(|router| router.is_corrected);
        let router = format!("{path}.gate");
        let mut gate = builder.router(&router, [hidden, mixture.num_experts], is_corrected)?;
        if form.experts.has_bias {
            gate = builder.router_with_bias(&router, gate)?;
        }
        let sizes = ExpertSizes {
            count: (form.expert_keys.count, mixture.num_experts),
            width: hidden,
            inner: (form.expert_keys.inner, mixture.moe_intermediate_size),
            has_gate: true,
            form: form.experts,
        };
        let (count, normalised) = (mixture.num_experts_per_tok, mixture.norm_topk_prob);
        let choice = Choice {
            path: builder.named(path),
            router: builder.named(&router),
            kind: match form.router {
                Some(router) => ChoiceKind::Scores(router.choice),
                None => ChoiceKind::Probabilities { count, normalised },
            },
            balance: mixture.output_router_logits.then_some((share, mixture.router_aux_loss_coef)),
        };
        let experts = builder.experts(path, sizes)?;
        let layer = Self { gate: Some(gate), experts, choice: Some(choice), ..Self::empty(Activation::Silu) };
        match form.shared_expert {
            Some(shared) => layer.with_shared_expert(shared, hidden, path, builder),
            None => Ok(layer),
        }
    }

    /// Adds the expert that every token goes through.
    fn with_shared_expert(
        self,
        SharedForm { inner, has_gate }: SharedForm,
        hidden: usize,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        if !has_gate {
            let inner = ("n_shared_experts * moe_intermediate_size", inner);
            let expert = SharedExpert::build(&format!("{path}.shared_experts"), (hidden, inner), builder)?;
            return Ok(Self { shared_experts: Some(expert), ..self });
        }
        let (path, inner) = (format!("{path}.shared_expert"), ("shared_expert_intermediate_size", inner));
        Ok(Self {
            shared_expert: Some(SharedExpert::build(&path, (hidden, inner), builder)?),
            shared_expert_gate: Some(builder.linear(&format!("{path}_gate"), hidden, 1)?),
            ..self
        })
    }

    /// Shapes: `[tokens, hidden]` in and out.
    /// The tokens are those of `rows` rows.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        rows: usize,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        if let (Some(gate), Some(choice)) = (&self.gate, &self.choice) {
            let (chosen, weights) = choice.choose(gate, x.clone(), rows, context);
            let weights = tensor.enter(weights);
            let routed =
                mix_held(tensor.enter(x.clone()), weights, &chosen, &self.experts, tensor.expert_parallel());
            let routed = tensor.sum(routed);
            let gate = self.shared_expert_gate.as_ref();
            return match self.shared_expert.as_ref().or(self.shared_experts.as_ref()) {
                Some(expert) => routed + expert.forward(x, gate, tensor, context),
                None => routed,
            };
        }
        let down = self.down_proj.as_ref().expect("a layer without experts has a down projection");
        let x = SharedInput::of_several(tensor.enter(x));
        let inner = self.inner(&x, context);
        drop(x);
        down.forward_split_inputs(&SharedInput::new(inner), tensor, context)
    }
}

impl Activation {
    /// Returns the function of the gate times the up projection.
    fn gated(self, gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Silu => swiglu(gate, up),
            Self::GeluTanh => self.of(gate) * up,
        }
    }

    /// Returns the function of `x`.
    fn of(self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Silu => silu(x),
            Self::GeluTanh => {
                // The composition adds 1 to numbers near -1, which half precision rounds too much.
                let precision = x.dtype();
                gelu_approximate(at_least_single(x)).cast(precision)
            }
        }
    }
}

impl Choice {
    /// Returns the experts of each token with their weights, and counts the choices of the valid tokens.
    fn choose(
        &self,
        gate: &Router,
        x: Tensor<2>,
        rows: usize,
        context: &StageContext,
    ) -> (Vec<usize>, Tensor<2>) {
        match self.kind {
            ChoiceKind::Probabilities { count, normalised } => {
                let routing = self.routing(gate.logits(x), (count, normalised), rows, context);
                (routing.chosen().to_vec(), routing.weights())
            }
            ChoiceKind::Scores(choice) => {
                gate.choose_for([&self.path, &self.router], x, rows, &choice, context)
            }
        }
    }

    /// Chooses the experts, and adds the balance loss of the valid tokens to the step's.
    fn routing(
        &self,
        logits: Tensor<2>,
        (count, normalised): (usize, bool),
        rows: usize,
        context: &StageContext,
    ) -> Routing {
        let [tokens, _] = logits.dims();
        let routing = Routing::new(logits.clone(), count, normalised);
        if !routing.is_finite() {
            context.not_finite(&format!("a probability of the router `{}`", self.router));
        }
        let valid = valid_tokens(context, [rows, tokens / rows.max(1)]);
        let choices = match &valid {
            None => routing.counts(),
            Some(valid) => valid_choices(routing.chosen(), routing.experts(), valid),
        };
        if let Some((share, weight)) = self.balance {
            let loss = match &valid {
                None => routing.balance_loss(),
                Some(valid) => {
                    let loads = valid_loads(&choices, valid);
                    router_losses(logits, loads, mean_weights(valid)).narrow(0, 0, 1)
                }
            };
            context.auxiliary_loss_of(&self.path, BALANCE, weight, loss * share);
        }
        context.expert_load(&self.path, choices);
        routing
    }
}

/// Returns a tensor times a factor.
pub(crate) fn scaled<const D: usize>(x: Tensor<D>, factor: f64) -> Tensor<D> {
    if factor == 1.0 { x } else { x * factor }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, TensorData};

    use super::*;

    #[test]
    fn gelu_keeps_its_negative_side_in_half_precision() {
        let device = Device::flex();
        let gates = TensorData::from([[-3.0f32, -3.5, -2.0, 1.0]]);
        let gate = Tensor::<2>::from_data(gates, &device).cast(DType::BF16);
        let result = Activation::GeluTanh.gated(gate.clone(), gate.ones_like());
        assert_eq!(result.dtype(), DType::BF16);
        // Of PyTorch 2.15, `gelu(x, approximate="tanh")` in double precision.
        let expected = [-0.0036373922f32, -0.0006161977, -0.045402306, 0.841192];
        for (found, expected) in result.cast(DType::F32).into_data().iter::<f32>().zip(expected) {
            assert!((found - expected).abs() <= expected.abs() / 256.0, "{found}, not {expected}");
        }
    }
}
