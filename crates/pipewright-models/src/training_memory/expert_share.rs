//! The profile of a run whose replicas hold the experts of each mixture together: the exchanges of its
//! layers, and the memory of a replica.

use pipewright::nn::TensorParallel;
use pipewright_schedule::profile::{LinkProfile, Profile};
use pipewright_schedule::sharding::StateBytes;

use crate::cut_model::CutModel;
use crate::error::ConfigError;
use crate::parameter::ParameterSpec;
use crate::training_memory::arrived_rows::{chosen_experts, sent_bytes};
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
}

impl ExpertShare {
    /// Writes into a profile of `model` what a replica exchanges and holds. A profile with another number of
    /// layers does not change.
    ///
    /// All experts are chosen equally often, so of `n` replicas each keeps a share of `1 / n` of its rows and
    /// sends the others, one after another over its link: an exchange of `b` bytes takes `latency + b (n - 1)
    /// / n / bandwidth`. Rows travel in single precision, which in half precision is more than some of them
    /// need. The computation does not change: as many rows arrive as leave.
    ///
    /// # Errors
    /// When the model does not know the parameters of one of its layers.
    pub fn add_to(
        &self,
        profile: &mut Profile,
        rule: &StateRule,
        model: &CutModel,
    ) -> Result<(), ConfigError> {
        let layers = model.describe(1).layers.len();
        if self.ranks < 2 || profile.layer_count() != layers as u64 {
            return Ok(());
        }
        let chosen = chosen_experts(model.model());
        let tokens = u64::from(self.tokens) * u64::from(profile.rows);
        let mut first = 0;
        for layer in &mut profile.layers {
            let specs = model.outline(first..first + 1, &TensorParallel::default())?;
            first += layer.count as usize;
            let Some(rows) = sent_bytes(&specs, chosen, tokens) else { continue };
            layer.exchange_s = EXCHANGES * self.exchange_seconds(rows);
            layer.activation_bytes = layer.activation_bytes.saturating_add(rows);
            let held = self.held(&specs, rule, model);
            layer.optimizer_bytes = Some(held.optimizer);
            layer.held_bytes = Some(held.parameters.saturating_add(held.copy));
        }
        Ok(())
    }

    /// Returns the time of one exchange of rows.
    fn exchange_seconds(&self, rows: u64) -> f64 {
        let ranks = f64::from(self.ranks);
        self.link.latency_s + rows as f64 * (ranks - 1.0) / ranks / self.link.bytes_per_s
    }

    /// Returns the parameters of a layer and the optimizer's state that a replica holds.
    fn held(&self, specs: &[ParameterSpec], rule: &StateRule, model: &CutModel) -> StateBytes {
        let (experts, others): (Vec<ParameterSpec>, Vec<ParameterSpec>) =
            specs.iter().cloned().partition(ParameterSpec::is_of_routed_expert);
        let [experts, others] = [experts, others].map(|specs| rule.of(&specs, |path| model.is_trained(path)));
        others.plus(experts.map(|bytes| bytes.div_ceil(u64::from(self.ranks))))
    }
}
