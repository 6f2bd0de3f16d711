//! Groups of parameters with an optimizer and a learning rate of their own, and groups with a largest norm of
//! their own.

use std::sync::Arc;

use burn::grad_clipping::GradientClipping;
use burn::module::{ParamGroup, ParamId};
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};

/// A group of parameters, chosen by their global paths, with an optimizer of its own.
///
/// Global paths do not depend on the cut, so neither do groups. If several groups of a pipeline contain a
/// parameter, the last one counts.
///
/// ```
/// use pipewright::optimizer::{AdamW, OptimizerGroup};
/// use pipewright::pipeline::PipelineConfig;
///
/// let adamw = AdamW { weight_decay: 0.1, ..AdamW::default() };
/// let biases = OptimizerGroup::new(|path| path.ends_with(".bias"), AdamW { weight_decay: 0.0, ..adamw });
/// let first = OptimizerGroup::new(|path| path.starts_with("layers.0."), adamw).rate(0.1);
/// let config = PipelineConfig {
///     optimizer: Some(adamw.init()),
///     optimizer_groups: vec![biases, first],
///     ..PipelineConfig::default()
/// };
/// ```
#[derive(Clone)]
pub struct OptimizerGroup {
    parameters: Parameters,
    add: Arc<AddGroup>,
    rate: f64,
    clipping: Option<GradientClipping>,
}

/// Adds the group's optimizer, for these parameters, to a module's optimizer.
type AddGroup = dyn Fn(&OptimizerGroup, ModuleOptimizer, ParamGroup) -> ModuleOptimizer + Send + Sync;

impl OptimizerGroup {
    /// Makes a group of the parameters for whose global path `contains` returns true. It must return the same
    /// in every process of a run.
    pub fn new<O: Optimizer>(contains: impl Fn(&str) -> bool + Send + Sync + 'static, optimizer: O) -> Self {
        let add = move |group: &Self, whole: ModuleOptimizer, members| {
            let optimizer = AtRate { rate: group.rate, optimizer: optimizer.clone() };
            whole.with_group(members, optimizer, group.clipping.clone())
        };
        Self { parameters: Parameters(Arc::new(contains)), add: Arc::new(add), rate: 1.0, clipping: None }
    }

    /// Sets the factor by which the learning rate of a step is multiplied for the group. Default: 1.
    pub fn rate(mut self, factor: f64) -> Self {
        self.rate = factor;
        self
    }

    /// Clips the gradient of each parameter alone: each of its elements, or its own norm. Default: none.
    /// Clipping by norm comes first.
    pub fn clip(mut self, clipping: GradientClipping) -> Self {
        self.clipping = Some(clipping);
        self
    }

    /// Adds the group's optimizer to a module's optimizer. `members` are the group's parameters in the
    /// module.
    pub(crate) fn add_to(&self, whole: ModuleOptimizer, members: Vec<ParamId>) -> ModuleOptimizer {
        if members.is_empty() { whole } else { (self.add)(self, whole, ParamGroup::from_ids(members)) }
    }
}

impl std::fmt::Debug for OptimizerGroup {
    /// Shows what can be compared between processes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OptimizerGroup").field("rate", &self.rate).finish_non_exhaustive()
    }
}

/// A group of parameters, chosen by their global paths, whose gradients together have a largest norm of their
/// own.
///
/// If several groups of a pipeline contain a parameter, the last one counts. The largest norm of the pipeline
/// then applies to the parameters that no group contains.
#[derive(Clone)]
pub struct ClipGroup {
    parameters: Parameters,
    /// The largest norm, over all ranks.
    pub(crate) norm: f64,
}

impl ClipGroup {
    /// Makes a group of the parameters for whose global path `contains` returns true. It must return the same
    /// in every process of a run.
    pub fn new(contains: impl Fn(&str) -> bool + Send + Sync + 'static, norm: f64) -> Self {
        Self { parameters: Parameters(Arc::new(contains)), norm }
    }
}

impl std::fmt::Debug for ClipGroup {
    /// Shows what can be compared between processes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClipGroup").field("norm", &self.norm).finish_non_exhaustive()
    }
}

/// The parameters of a group.
#[derive(Clone)]
pub(crate) struct Parameters(Arc<dyn Fn(&str) -> bool + Send + Sync>);

/// A group of parameters by their paths.
pub(crate) trait Group {
    /// Returns the parameters of the group.
    fn parameters(&self) -> &Parameters;
}

impl Group for OptimizerGroup {
    fn parameters(&self) -> &Parameters {
        &self.parameters
    }
}

impl Group for ClipGroup {
    fn parameters(&self) -> &Parameters {
        &self.parameters
    }
}

/// Returns the place of the group that counts for a parameter; `None` if no group contains it.
pub(crate) fn group_of<G: Group>(groups: &[G], path: &str) -> Option<usize> {
    groups.iter().rposition(|group| (group.parameters().0)(path))
}

/// The factors by which gradient sums are multiplied before the optimizer gets them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Factors {
    /// The factor of the parameters that no [`ClipGroup`] contains.
    pub rest: f64,
    /// The factor of the parameters of each [`ClipGroup`].
    pub groups: Vec<f64>,
}

impl Factors {
    /// Returns the factor of a parameter of this group.
    pub(crate) fn of(&self, group: Option<usize>) -> f64 {
        group.and_then(|group| self.groups.get(group).copied()).unwrap_or(self.rest)
    }
}

/// An optimizer at a fraction or a multiple of the learning rate. It has the state of the optimizer.
#[derive(Clone)]
struct AtRate<O> {
    rate: f64,
    optimizer: O,
}

impl<O: Optimizer> Optimizer for AtRate<O> {
    type State<const D: usize> = O::State<D>;

    fn step<const D: usize>(
        &self,
        learning_rate: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<O::State<D>>,
    ) -> (Tensor<D>, Option<O::State<D>>) {
        self.optimizer.step(learning_rate * self.rate, parameter, gradient, state)
    }

    fn to_device<const D: usize>(state: O::State<D>, device: &Device) -> O::State<D> {
        O::to_device(state, device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_group_counts() {
        let group = |part: &'static str| ClipGroup::new(move |path| path.contains(part), 1.0);
        let groups = [group("layers"), group("bias")];
        let found = ["layers.0.weight", "layers.0.bias", "head.weight"].map(|path| group_of(&groups, path));
        assert_eq!(found, [Some(0), Some(1), None]);
        let factors = Factors { rest: 0.5, groups: vec![1.0, 2.0] };
        assert_eq!(found.map(|group| factors.of(group)), [1.0, 2.0, 0.5]);
    }
}
