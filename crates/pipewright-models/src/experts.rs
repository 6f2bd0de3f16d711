//! Builds the experts of a mixture: on each of the ranks that compute a stage together, a shard of every
//! expert, or some whole experts.

use pipewright::nn::Expert;

use crate::error::ConfigError;
use crate::parameter::{Builder, ParameterSource, SplitLinear};
use crate::split::require_parts;

/// The sizes of a mixture's experts, with their keys in `config.json`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertSizes {
    /// The number of experts.
    pub(crate) count: (&'static str, usize),
    /// The width of an expert's inputs and outputs.
    pub(crate) width: usize,
    /// The inner width of an expert.
    pub(crate) inner: (&'static str, usize),
    /// Whether an expert has a gate.
    pub(crate) has_gate: bool,
}

impl<S: ParameterSource> Builder<'_, S> {
    /// Builds the experts of the mixture `layer`. An expert that this rank does not hold is `None`.
    pub(crate) fn experts(
        &mut self,
        layer: &str,
        sizes: ExpertSizes,
    ) -> Result<Vec<Option<Expert>>, S::Error> {
        let ExpertSizes { count: (key, count), width, inner, has_gate } = sizes;
        let ranks = self.tensor_ranks();
        let parameter = format!("experts.0.{}.weight", if has_gate { "gate_proj" } else { "up_proj" });
        let is_whole = self.tensor().holds_whole_experts();
        if !is_whole {
            require_parts(&self.named(layer), &self.named(&parameter), inner, ranks)?;
        } else if count < ranks as usize {
            let parameter = self.named(&format!("{layer}.{parameter}")).into();
            let layer = self.named(layer).into();
            return Err(ConfigError::FewExperts { layer, parameter, key, count, ranks }.into());
        }
        let split = if is_whole {
            [SplitLinear::OneRank; 2]
        } else {
            [SplitLinear::Outputs { shards: ranks }, SplitLinear::Inputs]
        };
        let held = self.tensor().experts(count);
        let mut expert =
            |index| self.expert(&format!("{layer}.experts.{index}"), [width, inner.1], has_gate, split);
        (0..count).map(|index| held.contains(&index).then(|| expert(index)).transpose()).collect()
    }

    /// Builds a feed-forward layer without biases whose inner width is split over all ranks.
    pub(crate) fn split_expert(
        &mut self,
        path: &str,
        sizes: [usize; 2],
        has_gate: bool,
    ) -> Result<Expert, S::Error> {
        let outputs = SplitLinear::Outputs { shards: self.tensor_ranks() };
        self.expert(path, sizes, has_gate, [outputs, SplitLinear::Inputs])
    }

    /// Builds an expert of this width and inner width. `outputs` says how the ranks hold the layers up and
    /// gate, and `inputs` how they hold the layer down.
    fn expert(
        &mut self,
        path: &str,
        [width, inner]: [usize; 2],
        has_gate: bool,
        [outputs, inputs]: [SplitLinear; 2],
    ) -> Result<Expert, S::Error> {
        let mut up =
            |name: &str| self.split_linear(false, &format!("{path}.{name}"), [width, inner], outputs);
        let gate_proj = has_gate.then(|| up("gate_proj")).transpose()?;
        let up_proj = up("up_proj")?;
        let down_proj = self.split_linear(false, &format!("{path}.down_proj"), [inner, width], inputs)?;
        Ok(Expert { gate_proj, up_proj, down_proj })
    }
}
