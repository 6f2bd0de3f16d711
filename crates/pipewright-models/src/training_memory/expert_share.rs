//! The profile of a run whose replicas hold the experts of each mixture together: the exchanges of its
//! layers, and the memory of a replica.

use pipewright::nn::TensorParallel;
use pipewright::tensor::Precision;
use pipewright_schedule::profile::{LinkProfile, Profile};
use pipewright_schedule::sharding::{StageBytes, StateBytes};

use crate::cut_model::CutModel;
use crate::error::ModelError;
use crate::parameter::ParameterSpec;
use crate::training_memory::arrived_rows::{chosen_experts, row_bytes};
use crate::training_memory::state::StateRule;

/// The number of exchanges of a mixture in a forward, and in a backward: to the experts and back.
const EXCHANGES: f64 = 2.0;

/// The replicas that hold the experts of each mixture together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertShare {
    /// The number of these replicas.
    pub ranks: u32,
    /// The tokens of a row.
    pub tokens: u32,
    /// The link between two of them.
    pub link: LinkProfile,
    /// The number of replicas that hold the other parameters together; 1 if each holds all.
    pub shards: u32,
}

impl ExpertShare {
    /// Writes into a profile of `model` what a replica exchanges and holds. With one replica, the profile does
    /// not change.
    ///
    /// All experts are chosen equally often, so of `n` replicas each keeps a share of `1 / n` of its rows and
    /// sends the others, one after another over its link: an exchange of `b` bytes takes `latency + b (n - 1)
    /// / n / bandwidth`. Rows travel in single precision, which in half precision is more than some of them
    /// need. A replica keeps the rows that arrive in the precision of `rule`. The computation does not change:
    /// as many rows arrive as leave.
    ///
    /// # Errors
    /// When the profile has another number of layers than the model, or the model does not know the parameters
    /// of one of its layers.
    pub fn add_to(
        &self,
        profile: &mut Profile,
        rule: &StateRule,
        model: &CutModel,
    ) -> Result<(), ModelError> {
        if self.ranks < 2 {
            return Ok(());
        }
        let (found, expected) = (profile.layer_count(), model.layers());
        if found != expected as u64 {
            let found = pipewright_schedule::words::counted(found, "layer");
            return Err(ModelError::new(format!(
                "the profile has {found} and the model {expected}: give a profile of this model"
            )));
        }
        let chosen = chosen_experts(model.model());
        let tokens = u64::from(self.tokens) * u64::from(profile.rows);
        let mut first = 0;
        for layer in &mut profile.layers {
            let specs = model.outline(first..first + 1, &TensorParallel::default())?;
            first += layer.count as usize;
            let Some(matrix) = specs.iter().find(|spec| spec.is_of_routed_expert()) else { continue };
            let bytes_in = |precision| row_bytes(matrix, chosen, tokens, precision);
            layer.exchange_s = EXCHANGES * self.exchange_seconds(bytes_in(Precision::F32));
            layer.activation_bytes = layer.activation_bytes.saturating_add(bytes_in(rule.precision));
            let held = self.held(&specs, rule, model);
            layer.optimizer_bytes = Some(held.optimizer);
            layer.held_bytes = Some(held.parameters);
            layer.copy_bytes = Some(held.copy);
        }
        Ok(())
    }

    /// Returns the time of one exchange of rows of so many bytes together.
    fn exchange_seconds(&self, bytes: u64) -> f64 {
        let ranks = f64::from(self.ranks);
        self.link.latency_s + bytes as f64 * (ranks - 1.0) / ranks / self.link.bytes_per_s
    }

    /// Returns the parameters of a layer and the optimizer's state that a replica computes with.
    ///
    /// A plan divides both by the number of replicas that hold the parameters together, and adds the
    /// parameters that are gathered. Fewer replicas share an expert, so each of them holds a larger part of
    /// it. The difference is added to the optimizer's state, which is never gathered. An expert that one
    /// replica holds is not gathered, and is always whole.
    fn held(&self, specs: &[ParameterSpec], rule: &StateRule, model: &CutModel) -> StateBytes {
        let StageBytes { experts, others } = rule.of_stage(specs, |path| model.is_trained(path));
        let experts = experts.map(|bytes| bytes.div_ceil(u64::from(self.ranks)));
        if self.shards <= 1 {
            return others.plus(experts);
        }
        let sharers = self.ranks.min(self.shards);
        let is_gathered = self.shards > self.ranks;
        let gathered = if is_gathered { experts.parameters } else { 0 };
        let in_addition = experts.parameters.saturating_mul(sharers.into()).saturating_sub(gathered);
        let optimizer = experts.optimizer.saturating_mul(sharers.into()).saturating_add(in_addition);
        others.plus(StateBytes { parameters: gathered, optimizer, ..experts })
    }
}

#[cfg(test)]
mod tests {
    use pipewright_schedule::profile::LayerProfile;
    use pipewright_schedule::sharding::Sharding;

    use super::*;
    use crate::ModelConfig;
    use crate::decoder::DecoderConfig;
    use crate::training_memory::state::OptimizerState;

    const TOKENS: u32 = 10;
    const ROWS: u32 = 3;

    /// Returns a model whose second block of two has experts.
    fn model() -> CutModel {
        let keys = [("mlp_only_layers".to_owned(), serde_json::json!([0]))].into_iter().collect();
        let model = ModelConfig::of_sizes("qwen3_moe", DecoderConfig::new(256, 4), keys);
        CutModel::new(model.expect("sizes of a model"), 1).expect("a whole head")
    }

    fn rule(precision: Precision) -> StateRule {
        StateRule { optimizer: OptimizerState::TwoMoments, precision, is_corrected: false }
    }

    fn profile(layers: u64) -> Profile {
        let layer = LayerProfile { activation_bytes: 1, ..LayerProfile::default() };
        Profile { rows: ROWS, layers: vec![layer; layers as usize], ..Profile::default() }
    }

    /// Returns the layers of a profile for `ranks` replicas with a link of 2 s and 1000 bytes per second.
    fn layers(ranks: u32, precision: Precision) -> Vec<LayerProfile> {
        let mut profile = profile(4);
        let share = ExpertShare { ranks, tokens: TOKENS, link: LinkProfile::new(2.0, 1e3), shards: 1 };
        share.add_to(&mut profile, &rule(precision), &model()).expect("the model's layers");
        profile.layers
    }

    #[test]
    fn exchanges_take_the_latency_and_the_bytes_that_leave() {
        // Two experts for each token, and rows of 64 numbers in single precision.
        let bytes = f64::from(2 * 64 * TOKENS * ROWS * 4);
        for precision in [Precision::F32, Precision::Bf16] {
            for (ranks, share) in [(2, 0.5), (4, 0.75)] {
                let exchanges: Vec<f64> =
                    layers(ranks, precision).iter().map(|layer| layer.exchange_s).collect();
                let expected = 2.0 * (2.0 + bytes * share / 1e3);
                assert_eq!(exchanges, [0.0, 0.0, expected, 0.0], "{ranks} {precision}");
            }
        }
    }

    #[test]
    fn rows_are_kept_in_the_precision_of_the_run() {
        for precision in [Precision::F32, Precision::Bf16] {
            let kept: Vec<u64> =
                layers(2, precision).iter().map(|layer| layer.activation_bytes - 1).collect();
            let expected = u64::from(2 * 64 * TOKENS * ROWS) * precision.bytes();
            assert_eq!(kept, [0, 0, expected, 0], "{precision}");
        }
    }

    #[test]
    fn a_replica_holds_its_share_of_the_experts() {
        let specs = model().outline(2..3, &TensorParallel::default()).expect("a layer");
        let numbers = |is_expert: bool| -> u64 {
            let own = specs.iter().filter(|spec| spec.is_of_routed_expert() == is_expert);
            own.map(|spec| spec.shape.iter().product::<usize>() as u64).sum()
        };
        let (experts, others) = (numbers(true), numbers(false));
        assert!(experts > 0 && others > 0);
        for ranks in [2, 4] {
            let numbers = others + experts / u64::from(ranks);
            let single = &layers(ranks, Precision::F32)[2];
            let state = |parameters, copy| StateBytes { parameters, copy, optimizer: 8 * numbers };
            assert_eq!(state_of(single), Some(state(4 * numbers, 0)));
            let half = &layers(ranks, Precision::Bf16)[2];
            assert_eq!(state_of(half), Some(state(4 * numbers, 2 * numbers)));
        }
        assert_eq!(state_of(&layers(2, Precision::F32)[1]), None);
    }

    /// Returns the state that a plan counts for a layer; `None` if it depends on the request.
    fn state_of(layer: &LayerProfile) -> Option<StateBytes> {
        let (parameters, copy) = (layer.held_bytes?, layer.copy_bytes?);
        Some(StateBytes { parameters, copy, optimizer: layer.optimizer_bytes? })
    }

    /// A plan has the bytes of the estimate of a run, in which one stage has experts and the other one more
    /// parameters that are gathered.
    #[test]
    fn a_replica_with_sharded_parameters_holds_its_rows_of_the_experts() {
        let specs = model().outline(2..3, &TensorParallel::default()).expect("a layer");
        for precision in [Precision::F32, Precision::Bf16] {
            let rule = rule(precision);
            let stage = rule.of_stage(&specs, |_| true);
            let larger = stage.others.map(|bytes| 2 * bytes);
            for (ranks, shards) in [(2, 2), (2, 4), (4, 2), (4, 8), (2, 8)] {
                let share = ExpertShare { ranks, tokens: TOKENS, link: LinkProfile::new(0.0, 1e9), shards };
                let mut profile = profile(4);
                share.add_to(&mut profile, &rule, &model()).expect("the model's layers");
                let planned = state_of(&profile.layers[2]).expect("a layer with experts");
                let experts = stage.experts.map(|bytes| bytes.div_ceil(ranks.into()));
                let own =
                    [StageBytes { experts, ..stage }, StageBytes { others: larger, ..StageBytes::default() }];
                for window in [0, 1, 2] {
                    let sharding = Sharding { shards, window };
                    let run = sharding.held_with_experts(own, ranks);
                    let plan = sharding.held([planned, larger]);
                    assert_eq!(plan.total(), run.total(), "{precision} {ranks} {shards} {window}");
                }
            }
        }
    }

    #[test]
    fn a_profile_of_another_model_is_refused() {
        let added = |ranks, count| {
            let mut profile = profile(count);
            let before = profile.clone();
            let share = ExpertShare { ranks, tokens: TOKENS, link: LinkProfile::new(0.0, 1e9), shards: 1 };
            let added = share.add_to(&mut profile, &rule(Precision::F32), &model());
            added.map(|()| profile == before).map_err(|error| error.to_string())
        };
        let expected = "the profile has 5 layers and the model 4: give a profile of this model";
        assert_eq!(added(2, 5), Err(expected.to_owned()));
        assert_eq!(added(1, 5), Ok(true));
        assert_eq!(added(1, 4), Ok(true));
        assert_eq!(added(2, 4), Ok(false));
    }
}
