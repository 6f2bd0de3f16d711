//! The builder's settings that are fields of [`PipelineConfig`].

use std::sync::Arc;
use std::time::Duration;

use burn::optim::ModuleOptimizer;
use pipewright_schedule::Recompute;

use super::builder::PipelineBuilder;
use crate::config::PipelineConfig;
use crate::device::{Devices, RankThreads};
use crate::hook::ActionHook;
use crate::loss_scale::LossScaling;
use crate::mesh::DataParallelMode;
use crate::offload::OffloadTo;
use crate::optimizer::{ClipGroup, GradientHook, OptimizerGroup};
use crate::tensor::{CheckMetadata, Metadata, OnMismatch, Precision};
use crate::verification::Verify;

impl PipelineBuilder {
    /// Sets the optimizer of every stage.
    pub fn optimizer(self, optimizer: ModuleOptimizer) -> Self {
        self.configured(|config| config.optimizer = Some(optimizer))
    }

    /// Adds a group of parameters with an optimizer of its own. If several groups contain a parameter, the
    /// last one counts.
    pub fn optimizer_group(self, group: OptimizerGroup) -> Self {
        self.configured(|config| config.optimizer_groups.push(group))
    }

    /// Sets the largest global norm of the gradients; greater gradients are scaled down to it. Default: no
    /// limit.
    pub fn clip_norm(self, norm: f64) -> Self {
        self.configured(|config| config.clip_norm = Some(norm))
    }

    /// Adds a group of parameters with a largest norm of its own. [`clip_norm`](Self::clip_norm) then limits
    /// the norm of the other parameters.
    pub fn clip_group(self, group: ClipGroup) -> Self {
        self.configured(|config| config.clip_groups.push(group))
    }

    /// Sets whether a rank updates its parameters while the gradient norm is computed, and repairs the update
    /// if the norm says so ([`PipelineConfig::post_validation`]). Default: it waits for the norm.
    pub fn post_validation(self, updates_early: bool) -> Self {
        self.configured(|config| config.post_validation = updates_early)
    }

    /// Sets whether each batch is computed at the parameters before the last update ([`PipelineConfig::delayed`]).
    /// Default: at the parameters after it.
    pub fn delayed(self, delayed: bool) -> Self {
        self.configured(|config| config.delayed = delayed)
    }

    /// Sets the hook that is called for each gradient before the norm is computed. Default: none.
    pub fn gradient_hook(self, hook: impl GradientHook + 'static) -> Self {
        self.configured(|config| config.gradient_hook = Some(Arc::new(hook)))
    }

    /// Sets the time without any progress after which a step fails. Default: a minute.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.configured(|config| config.deadline = deadline)
    }

    /// Sets whether suspicious steps are computed again, and their bits compared
    /// ([`PipelineConfig::verify`]). Default: they are not.
    pub fn verify(self, verify: Verify) -> Self {
        self.configured(|config| config.verify = verify)
    }

    /// Sets whether the failure of a step with a loss or a gradient that is not finite names the first such value
    /// ([`PipelineConfig::name_not_finite`]). Default: it does not.
    pub fn name_not_finite(self, names: bool) -> Self {
        self.configured(|config| config.name_not_finite = names)
    }

    /// Sets the number of threads that compute for a rank: one number for all of them, or a list, from which rank `r`
    /// takes entry `r` modulo its length. The results have the same bits for all numbers. Default: 1.
    pub fn threads_per_rank(self, threads: impl Into<RankThreads>) -> Self {
        self.configured(|config| config.threads_per_rank = threads.into())
    }

    /// Sets the devices of the ranks: one for all of them, or a list, from which rank `r` takes entry `r`
    /// modulo its length. Layers are moved there after they are made. So make layers on the CPU: its
    /// generator is the one that the
    /// [`seed`](Self::seed) applies to, and the initial parameters do not depend on the devices. Batches may be on any
    /// device.
    pub fn devices(self, devices: impl Into<Devices>) -> Self {
        self.configured(|config| config.devices = devices.into())
    }

    /// Sets the number of replicas of the pipeline, which share the microbatches of a step. Default: 1.
    pub fn data_parallel(self, replicas: u32) -> Self {
        self.configured(|config| config.data_parallel = replicas)
    }

    /// Sets the share of each replica in the rows of a batch
    /// ([`PipelineConfig::batch_shares`](super::PipelineConfig::batch_shares)). Default: equal shares.
    pub fn batch_shares(self, shares: impl Into<Vec<u32>>) -> Self {
        self.configured(|config| config.batch_shares = shares.into())
    }

    /// Sets the part of the parameters that each replica holds. Default: all.
    pub fn data_parallel_mode(self, mode: DataParallelMode) -> Self {
        self.configured(|config| config.data_parallel_mode = mode)
    }

    /// Keeps sharded parameters gathered between the batches of a step
    /// ([`PipelineConfig::keep_gathered`](super::PipelineConfig::keep_gathered)). Default: no.
    pub fn keep_gathered(self) -> Self {
        self.configured(|config| config.keep_gathered = true)
    }

    /// Sets the element type in which stages compute. Default: single precision.
    pub fn precision(self, precision: Precision) -> Self {
        self.configured(|config| config.precision = precision)
    }

    /// Sets how losses are scaled if the precision is f16. Default: from 65536, doubled after 2000 updates.
    pub fn loss_scaling(self, loss_scaling: LossScaling) -> Self {
        self.configured(|config| config.loss_scaling = loss_scaling)
    }

    /// Sets how the shapes and types of the tensors between stages are known. Default: from the first step.
    pub fn metadata(self, metadata: Metadata) -> Self {
        self.configured(|config| config.metadata = metadata)
    }

    /// Sets when the tensors between stages are checked, and what happens if they differ. Default: in the
    /// first step, and the step fails.
    pub fn check_metadata(self, check: CheckMetadata, on_mismatch: OnMismatch) -> Self {
        self.configured(|config| (config.check_metadata, config.on_mismatch) = (check, on_mismatch))
    }

    /// Sets the stages that keep only their inputs after a forward, and compute it again in their backward.
    /// Default: none.
    pub fn recompute(self, recompute: Recompute) -> Self {
        self.configured(|config| config.recompute = recompute)
    }

    /// Moves the inputs that recomputed forwards keep to a place until their backwards. The builder adds `OFFLOAD` and
    /// `RELOAD` to the programs that it makes, unless [`PipelineBuilder::lower`] gives it the passes. Default: they stay in
    /// memory.
    pub fn offload(self, place: OffloadTo) -> Self {
        self.configured(|config| config.offload = Some(place))
    }

    /// Gives every stage the targets, as the side input [`TARGETS`](crate::batch::TARGETS) of every batch.
    /// Default: only the last stage gets them.
    pub fn targets_for_all(self) -> Self {
        self.configured(|config| config.targets_for_all = true)
    }

    /// Sets the hook, which is called around every action. Default: none.
    pub fn hook(self, hook: Arc<dyn ActionHook>) -> Self {
        self.configured(|config| config.hook = Some(hook))
    }

    /// Sets all settings of [`Pipeline::launch`](super::Pipeline::launch). It replaces earlier calls of the
    /// methods above that set a field of the configuration; later calls replace its fields.
    pub fn config(self, config: PipelineConfig) -> Self {
        self.configured(|own| *own = config)
    }
}
