//! The bytes of parameters, of their copy in half precision, and of the optimizer's state.

use pipewright::nn::TensorParallel;
use pipewright::optimizer::blocks_of_row;
use pipewright::tensor::{Precision, TensorRank};
use pipewright_schedule::divisor::divisors;
use pipewright_schedule::mesh::DataParallelMode;
use pipewright_schedule::plan::TrainingState;
use pipewright_schedule::profile::Profile;
use pipewright_schedule::sharding::{StageBytes, StateBytes};

use crate::cut_model::CutModel;
use crate::error::ModelError;
use crate::lora::{HEAD, SCORE};
use crate::parameter::{FirstCopies, ParameterKind, ParameterSpec};

/// The bytes of an element of a parameter, of its gradient, or of the optimizer's state.
const ELEMENT: u64 = 4;

/// The optimizer, as far as the size of its state depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerState {
    /// Two numbers for each element: Adam and AdamW.
    TwoMoments,
    /// Two bytes for each element of a matrix and two numbers for each block of a row, and two numbers for each element of
    /// a vector: AdamW in 8 bits.
    TwoMomentsIn8Bits,
    /// One number for each element: SGD with momentum, Lion.
    Momentum,
    /// No state: SGD without momentum.
    Stateless,
    /// One number for each element of a hidden matrix, and two for other parameters: Muon, with AdamW.
    Muon,
    /// One number for each row and column of a matrix, and one for each element of other parameters:
    /// Adafactor.
    Adafactor,
}

impl OptimizerState {
    /// Returns the bytes of the state that the optimizer has for a parameter.
    pub fn bytes(self, spec: &ParameterSpec) -> u64 {
        let all = product(&spec.shape);
        let numbers = match self {
            Self::TwoMoments => all.saturating_mul(2),
            Self::TwoMomentsIn8Bits => match spec.shape.as_slice() {
                [rows @ .., width] if !rows.is_empty() => {
                    let scales = product(rows).saturating_mul(blocks_of_row(*width) as u64);
                    return all.saturating_add(scales.saturating_mul(ELEMENT)).saturating_mul(2);
                }
                _ => all.saturating_mul(2),
            },
            Self::Muon if !is_hidden_matrix(spec) => all.saturating_mul(2),
            Self::Momentum | Self::Muon => all,
            Self::Stateless => 0,
            Self::Adafactor => match spec.shape.as_slice() {
                [outer @ .., rows, columns] => product(outer).saturating_mul((rows + columns) as u64),
                _ => all,
            },
        };
        numbers.saturating_mul(ELEMENT)
    }
}

/// Returns whether a parameter is a matrix between embedding and head, which Muon updates.
pub fn is_hidden_matrix(spec: &ParameterSpec) -> bool {
    let is_of_head = [HEAD, SCORE].iter().any(|head| spec.path.starts_with(head));
    spec.kind == ParameterKind::Matrix && spec.shape.len() == 2 && !is_of_head
}

/// The rule for the state of each parameter in training, without its gradient.
///
/// ```
/// use pipewright::tensor::Precision;
/// use pipewright_models::decoder::DecoderConfig;
/// use pipewright_models::training_memory::{OptimizerState, StateRule};
/// use pipewright_models::{CutModel, ModelConfig};
///
/// let model = ModelConfig::of_sizes("llama", DecoderConfig::new(256, 4), Default::default())?;
/// let rule = StateRule { optimizer: OptimizerState::TwoMoments, precision: Precision::F32, is_corrected: false };
/// let layers = rule.of_layers(&CutModel::new(model, 1)?)?;
/// assert!(layers.iter().all(|layer| layer.optimizer == 2 * layer.parameters && layer.copy == 0));
/// # Ok::<(), pipewright_models::ModelError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRule {
    /// The optimizer.
    pub optimizer: OptimizerState,
    /// The precision in which stages compute. In half precision they have a copy of their parameters.
    pub precision: Precision,
    /// Whether the last update of each parameter is kept to correct the next one ([`ErrorFeedback`](pipewright::optimizer::ErrorFeedback)).
    pub is_corrected: bool,
}

impl StateRule {
    /// Returns the bytes for these parameters, without their gradients. The optimizer has a state for
    /// parameters whose paths `is_trained` accepts. Each of them counts, so leave out the copies of a shared
    /// parameter that a rank holds once ([`FirstCopies`](crate::FirstCopies)).
    pub fn of(&self, specs: &[ParameterSpec], is_trained: impl Fn(&str) -> bool) -> StateBytes {
        let (trained, frozen): (Vec<_>, Vec<_>) = specs.iter().partition(|spec| is_trained(&spec.path));
        let elements = |specs: &[&ParameterSpec]| {
            specs.iter().map(|spec| product(&spec.shape)).fold(0, u64::saturating_add)
        };
        let state = trained.iter().map(|spec| self.optimizer.bytes(spec));
        let state = state.fold(0, u64::saturating_add);
        let base = frozen.iter().map(|spec| self.frozen_bytes(spec)).fold(0, u64::saturating_add);
        let trained = elements(&trained);
        let updates = if self.is_corrected { trained.saturating_mul(ELEMENT) } else { 0 };
        StateBytes {
            parameters: trained.saturating_mul(ELEMENT).saturating_add(base),
            copy: match self.precision {
                Precision::F32 => 0,
                // Adapters compute in single precision.
                _ if base > 0 => 0,
                half => trained.saturating_mul(half.bytes()),
            },
            optimizer: state.saturating_add(updates),
        }
    }

    /// Returns the bytes of a parameter of the base of adapters: it is held in the precision in which it
    /// computes, or quantised.
    fn frozen_bytes(&self, spec: &ParameterSpec) -> u64 {
        let in_precision = || product(&spec.shape).saturating_mul(self.precision.bytes());
        spec.quantised_bytes.unwrap_or_else(in_precision)
    }

    /// Returns the bytes of the base of adapters that are the same in all replicas. `is_trained` accepts the
    /// paths of other parameters. Routed experts do not count if several replicas hold them together.
    pub(super) fn shared_bytes(
        &self,
        specs: &[ParameterSpec],
        expert_ranks: u32,
        is_trained: impl Fn(&str) -> bool,
    ) -> u64 {
        let is_shared = |spec: &&ParameterSpec| {
            !is_trained(&spec.path) && (expert_ranks <= 1 || !spec.is_of_routed_expert())
        };
        let bytes = specs.iter().filter(is_shared).map(|spec| self.frozen_bytes(spec));
        bytes.fold(0, u64::saturating_add)
    }

    /// Like [`StateRule::of`], but apart for the routed experts of mixtures.
    pub fn of_stage(&self, specs: &[ParameterSpec], is_trained: impl Fn(&str) -> bool) -> StageBytes {
        let (experts, others): (Vec<ParameterSpec>, Vec<ParameterSpec>) =
            specs.iter().cloned().partition(ParameterSpec::is_of_routed_expert);
        // A stage with the base of adapters needs no copy of its parameters, and its experts alone do not
        // show that it has a base.
        let has_copy = self.of(specs, &is_trained).copy > 0;
        let of = |specs: &[ParameterSpec]| {
            let state = self.of(specs, &is_trained);
            StateBytes { copy: if has_copy { state.copy } else { 0 }, ..state }
        };
        StageBytes { experts: of(&experts), others: of(&others) }
    }

    /// Returns the bytes for the parameters of each layer.
    ///
    /// # Errors
    /// When the model does not know the parameters of one of its layers.
    pub fn of_layers(&self, model: &CutModel) -> Result<Vec<StateBytes>, ModelError> {
        (0..model.layers())
            .map(|layer| {
                let specs = model.outline(layer..layer + 1, &TensorParallel::default())?;
                Ok(self.of(&FirstCopies::default().of(&specs), |path| model.is_trained(path)))
            })
            .collect()
    }

    /// Returns the bytes for each byte of a model's parameters, for a plan of replicas that share parameters
    /// in `groups` and gather the parameters of `window` stages at the same time.
    ///
    /// # Errors
    /// When the model does not know its parameters.
    pub fn per_byte(
        &self,
        model: &CutModel,
        groups: DataParallelMode,
        window: u32,
    ) -> Result<TrainingState, ModelError> {
        let whole = self.of(&model.model().parameters()?, |_| true);
        let share = |bytes: u64| bytes as f64 / whole.parameters.max(1) as f64;
        let (optimizer, copy) = (share(whole.optimizer), share(whole.copy));
        Ok(TrainingState { optimizer, copy, groups, window, ..TrainingState::default() })
    }

    /// Writes the optimizer's state of each layer into a profile of the model, and with adapters the memory
    /// for its parameters. A profile with another number of layers does not change: a plan then counts the
    /// share of the parameters that the whole model needs.
    ///
    /// # Errors
    /// The errors of [`StateRule::of_layers`].
    pub fn add_to(&self, profile: &mut Profile, model: &CutModel) -> Result<(), ModelError> {
        let states = self.of_layers(model)?;
        if profile.layer_count() == states.len() as u64 {
            let mut first = 0;
            for layer in &mut profile.layers {
                let state = states.get(first);
                layer.optimizer_bytes = state.map(|state| state.optimizer);
                let of_adapter = state.filter(|_| model.adapter().is_some());
                layer.held_bytes = of_adapter.map(|state| state.parameters);
                layer.copy_bytes = of_adapter.map(|state| state.copy);
                first += layer.count as usize;
            }
        }
        Ok(())
    }
}

/// Writes into a profile of a model, whose base stays in its files, the bytes that each layer reads, and what it holds besides. A
/// profile with another number of layers does not change.
///
/// # Errors
/// When the model does not know the parameters of one of its layers.
pub fn add_streamed(profile: &mut Profile, model: &CutModel, rule: StateRule) -> Result<(), ModelError> {
    let states = rule.of_layers(model)?;
    if profile.layer_count() != states.len() as u64 {
        return Ok(());
    }
    let mut numbers = divisors(profile.node.map_or(1, |node| node.ranks));
    numbers.retain(|&of| of > 1);
    let mut first = 0;
    for layer in &mut profile.layers {
        let specs = model.outline(first..first + 1, &TensorParallel::default())?;
        let streamed =
            specs.iter().filter(|spec| spec.read_bytes.is_some()).filter_map(|spec| spec.quantised_bytes);
        layer.streamed_bytes = streamed.fold(0, u64::saturating_add);
        // All numbers of ranks read the same matrices whole. A layer that none divides has no plans with tensor-parallel ranks.
        let part_of = |of| {
            let rank = TensorParallel::unconnected(TensorRank { index: 0, of });
            model.outline(first..first + 1, &rank).ok()
        };
        let parts = numbers.iter().find_map(|&of| part_of(of)).unwrap_or_default();
        let sizes: Vec<u64> = parts.iter().filter_map(ParameterSpec::read_whole).collect();
        let sum = sizes.iter().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
        layer.read_whole_bytes = [sum, sizes.into_iter().max().unwrap_or(0)];
        layer.unstreamed_bytes = states[first].parameters.saturating_sub(layer.streamed_bytes);
        first += layer.count as usize;
    }
    Ok(())
}

/// Returns the bytes of the gradients of the parameters whose paths `is_trained` accepts.
///
/// An expert has a sum for each of the `expert_ranks` replicas whose tokens reach it. A shared parameter has a
/// sum for each of its copies, also on one rank: they are added when the step ends, in an order that does not
/// depend on the cut.
pub(super) fn gradient_bytes(
    specs: &[ParameterSpec],
    expert_ranks: u32,
    is_trained: impl Fn(&str) -> bool,
) -> u64 {
    let sums = |spec: &ParameterSpec| if spec.is_of_routed_expert() { u64::from(expert_ranks) } else { 1 };
    let bytes =
        |spec: &ParameterSpec| product(&spec.shape).saturating_mul(ELEMENT).saturating_mul(sums(spec));
    specs.iter().filter(|spec| is_trained(&spec.path)).map(bytes).fold(0, u64::saturating_add)
}

/// Returns the number of elements of a shape.
fn product(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |product: u64, &size| product.saturating_mul(size as u64))
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::profile::{LayerProfile, NodeProfile};

    use super::*;
    use crate::ModelConfig;
    use crate::adapter::{Adapter, AdapterStart};
    use crate::decoder::DecoderConfig;
    use crate::lora::LoraConfig;
    use crate::quantisation::QuantisedBytes;

    /// Three ranks can divide three heads, and two cannot.
    #[test]
    fn tensor_ranks_of_any_number_read_whole_matrices() {
        let sizes = DecoderConfig {
            hidden_size: 96,
            intermediate_size: 120,
            num_hidden_layers: 1,
            ..DecoderConfig::new(256, 3)
        };
        let model = ModelConfig::of_sizes("llama", sizes, serde_json::Map::new()).expect("a model");
        let matrices = model.parameters().expect("known").into_iter().filter(is_hidden_matrix);
        let in_file = |spec: ParameterSpec| {
            let bytes =
                QuantisedBytes { divided: 2 * product(&spec.shape), has_rows: true, ..Default::default() };
            (spec.path, bytes)
        };
        let adapter = Adapter { lora: LoraConfig::default(), start: AdapterStart::Seed(0) };
        let streamed = matrices.map(in_file).collect();
        let model = CutModel::from(model).with_adapter(adapter).expect("adapters").with_streamed(&streamed);
        let rule = StateRule {
            optimizer: OptimizerState::Stateless,
            precision: Precision::Bf16,
            is_corrected: false,
        };
        let read_whole = |ranks: Option<u32>| {
            let node = ranks.map(|ranks| NodeProfile { ranks, latency_s: 0.0, bytes_per_s: 1e9 });
            let layers = vec![LayerProfile::default(); model.layers()];
            let mut profile = Profile { node, layers, ..Profile::default() };
            add_streamed(&mut profile, &model, rule).expect("it is counted");
            profile.layers[1].read_whole_bytes
        };
        let [output, down] = [96, 120].map(|inputs| 2 * 96 * inputs);
        assert_eq!([Some(3), Some(6)].map(read_whole), [[output + down, down]; 2]);
        assert_eq!([None, Some(2)].map(read_whole), [[0; 2]; 2]);
    }
}
