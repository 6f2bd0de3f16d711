//! The feed-forward layer of a block: dense, or a mixture of experts.

use burn::module::Module;
use burn::tensor::Tensor;
use pipewright::nn::{
    Expert, Linear, Region, Routing, TensorParallel, gelu_tanh, mix_held, router_losses, scale_rows, sigmoid,
    silu, swiglu,
};
use pipewright::stage::StageContext;
use pipewright::train::REFERENCE_PASS;
use pipewright_schedule::divisor::greatest_common_divisor;
use pipewright_shapes::decoder::{DecoderConfig, MixtureConfig};

use super::form::{Activation, BlockForm, SharedForm};
use crate::error::ModelError;
use crate::experts::{ExpertSizes, without_adapters};
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

/// The feed-forward layer of a block.
#[expect(clippy::large_enum_variant, reason = "a block has one, and its parameters are elsewhere")]
#[derive(Module, Debug)]
pub(crate) enum FeedForward {
    Dense(DenseLayer),
    Mixture(Mixture),
}

/// A dense layer, whose activation may have a gate.
#[derive(Module, Debug)]
pub(crate) struct DenseLayer {
    /// The projections in front of the activation.
    inner: Vec<Projection>,
    down_proj: Projection,
    /// The parts of the outputs of a matrix that makes the gate and the up projection.
    #[module(skip)]
    joined: Option<OutputParts>,
    #[module(skip)]
    activation: Activation,
}

/// Experts behind a router.
#[derive(Module, Debug)]
pub(crate) struct Mixture {
    router: Router,
    /// One entry for each expert; `None` if only another rank holds it.
    experts: Vec<Option<Expert>>,
    /// The expert that every token goes through.
    shared: Option<DenseLayer>,
    /// The factor of its output.
    shared_gate: Option<Linear>,
    #[module(skip)]
    choice: Choice,
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
        if let Some(mixture) = form.mixture_of(index) {
            return Mixture::build(config, form, mixture, path, builder).map(Self::Mixture);
        }
        let (hidden, inner) = (config.hidden_size, ("intermediate_size", config.intermediate_size));
        if (form.joins_projections || form.joins_feed_forward) && !form.has_no_gate {
            let (inner, paths) = if form.joins_feed_forward {
                (("shared_intermediate_size", inner.1), shared_paths(path))
            } else {
                (inner, [format!("{path}.gate_up_proj"), format!("{path}.down_proj")])
            };
            return DenseLayer::joined(hidden, inner, form.activation, paths, builder).map(Self::Dense);
        }
        let (has_gate, bias) = (!form.has_no_gate, form.mlp_bias);
        DenseLayer::build(hidden, inner, [has_gate, bias], form.activation, path, builder).map(Self::Dense)
    }

    /// Shapes: `[tokens, hidden]` in and out. The tokens are those of `rows` rows.
    pub(crate) fn forward(
        &self,
        x: Tensor<2>,
        rows: usize,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        match self {
            Self::Dense(layer) => layer.forward(x, &tensor.region(rows), context),
            Self::Mixture(mixture) => mixture.forward(x, rows, tensor, context),
        }
    }
}

impl DenseLayer {
    /// Builds a layer with an up and a down projection. The inner width comes with the key that says it.
    fn build(
        hidden: usize,
        inner: (&'static str, usize),
        [has_gate, bias]: [bool; 2],
        activation: Activation,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let names: &[&str] = if has_gate { &["gate_proj", "up_proj"] } else { &["up_proj"] };
        let (path_in_files, first) = (builder.named(path), builder.named(&format!("{}.weight", names[0])));
        let shards = builder.tensor_ranks();
        require_parts(&path_in_files, &first, inner, shards)?;
        let (sizes, split) = ([hidden, inner.1], SplitLinear::Outputs { shards });
        let up = |name: &&str| builder.projection(bias, &format!("{path}.{name}"), sizes, split);
        let projections = names.iter().map(up).collect::<Result<_, ModelError>>()?;
        let (down, sizes) = (format!("{path}.down_proj"), [inner.1, hidden]);
        let down_proj = builder.projection(bias, &down, sizes, SplitLinear::Inputs)?;
        Ok(Self { inner: projections, down_proj, joined: None, activation })
    }

    /// Builds a layer in which one matrix makes the gate and the up projection, without biases.
    fn joined(
        hidden: usize,
        (key, inner): (&'static str, usize),
        activation: Activation,
        [both, down]: [String; 2],
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        // Fewer groups would be copied faster, but no more ranks than groups can compute the layer together.
        let groups = greatest_common_divisor(inner as u64, MOST_GROUPS) as usize;
        let parts = OutputParts { groups, widths: [inner / groups, inner / groups, 0] };
        let both = builder.joined_projection(false, &both, hidden, ((key, inner), parts))?;
        let down_proj = builder.projection(false, &down, [inner, hidden], SplitLinear::Inputs)?;
        Ok(Self { inner: vec![both], down_proj, joined: Some(parts), activation })
    }

    fn forward(&self, x: Tensor<2>, region: &Region<'_>, context: &StageContext) -> Tensor<2> {
        let x = SharedInput::of_several(region.enter(x));
        let inner = match (self.inner.as_slice(), self.joined) {
            ([gate, up], _) => self.activation.gated(gate.forward(&x, context), up.forward(&x, context)),
            ([both], Some(parts)) => {
                let both = both.forward(&x, context);
                self.activation.gated(part_of(both.clone(), parts, 0), part_of(both, parts, 1))
            }
            ([up], None) => self.activation.of(up.forward(&x, context)),
            _ => unreachable!("a layer has one or two projections in front of the activation"),
        };
        drop(x);
        self.down_proj.forward_region(&SharedInput::new(inner), region, context)
    }
}

impl Mixture {
    fn build(
        config: &DecoderConfig,
        form: &BlockForm<'_>,
        mixture: &MixtureConfig,
        path: &str,
        builder: &mut Builder<'_>,
    ) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        let share = form.balance_share(config.num_hidden_layers);
        let is_corrected = form.router.is_some_and(|router| router.is_corrected);
        let gate = format!("{path}.gate");
        let mut router = builder.router(&gate, [hidden, mixture.num_experts], is_corrected)?;
        if form.experts.has_bias {
            router = builder.router_with_bias(&gate, router)?;
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
            router: builder.named(&gate),
            kind: match form.router {
                Some(router) => ChoiceKind::Scores(router.choice),
                None => ChoiceKind::Probabilities { count, normalised },
            },
            balance: mixture.output_router_logits.then_some((share, mixture.router_aux_loss_coef)),
        };
        let experts = builder.experts(path, sizes)?;
        let (mut shared, mut shared_gate) = (None, None);
        if let Some(SharedForm { inner, .. }) = form.shared_expert.filter(|_| form.joins_feed_forward) {
            let (inner, paths) = (("shared_intermediate_size", inner), shared_paths(path));
            shared = Some(DenseLayer::joined(hidden, inner, Activation::Silu, paths, builder)?);
        } else if let Some(SharedForm { inner, has_gate }) = form.shared_expert {
            let (name, key) = if has_gate {
                ("shared_expert", "shared_expert_intermediate_size")
            } else {
                ("shared_experts", "n_shared_experts * moe_intermediate_size")
            };
            let (path, inner, activation) = (format!("{path}.{name}"), (key, inner), Activation::Silu);
            shared = Some(DenseLayer::build(hidden, inner, [true, false], activation, &path, builder)?);
            let gate = format!("{path}_gate");
            shared_gate = has_gate.then(|| builder.linear(&gate, hidden, 1)).transpose()?;
        }
        Ok(Self { router, experts, shared, shared_gate, choice })
    }

    fn forward(
        &self,
        x: Tensor<2>,
        rows: usize,
        tensor: &TensorParallel,
        context: &StageContext,
    ) -> Tensor<2> {
        let (chosen, weights) = self.choice.choose(&self.router, x.clone(), rows, context);
        let weights = tensor.enter(weights);
        // The reference of preference training is the base.
        let base = context.value::<bool>(REFERENCE_PASS).is_ok().then(|| without_adapters(&self.experts));
        let experts = base.as_deref().unwrap_or(&self.experts);
        let routed = mix_held(tensor.enter(x.clone()), weights, &chosen, experts, tensor.expert_parallel());
        let routed = tensor.sum(routed);
        let Some(shared) = &self.shared else { return routed };
        // The gate has one output for each token.
        let share = self.shared_gate.as_ref().map(|gate| sigmoid(gate.forward(x.clone())));
        let result = shared.forward(x, &Region::of_whole(tensor), context);
        routed
            + match share {
                Some(share) => scale_rows(result, share),
                None => result,
            }
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
            Self::GeluTanh => gelu_tanh(x),
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

/// Returns the paths of the two matrices of the layer that every token goes through in Granite 4, next to the experts at `path`.
fn shared_paths(path: &str) -> [String; 2] {
    let block = path.strip_suffix(".mlp").unwrap_or(path);
    ["input_linear", "output_linear"].map(|name| format!("{block}.shared_mlp.{name}"))
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
