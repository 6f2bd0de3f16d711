//! The builder's settings of the update: optimizer, groups, clipping, gradient hook.

use std::sync::Arc;

use burn::optim::ModuleOptimizer;

use super::builder::PipelineBuilder;
use crate::optimizer::{ClipGroup, GradientHook, OptimizerGroup};

impl PipelineBuilder {
    /// Sets the optimizer of every stage.
    pub fn optimizer(mut self, optimizer: ModuleOptimizer) -> Self {
        self.config.optimizer = Some(optimizer);
        self
    }

    /// Adds a group of parameters with an optimizer of its own. If several groups contain a parameter, the last one
    /// counts.
    pub fn optimizer_group(mut self, group: OptimizerGroup) -> Self {
        self.config.optimizer_groups.push(group);
        self
    }

    /// Sets the largest global norm of the gradients; greater gradients are scaled down to it. Default: no limit.
    pub fn clip_norm(mut self, norm: f64) -> Self {
        self.config.clip_norm = Some(norm);
        self
    }

    /// Adds a group of parameters with a largest norm of its own. The norm of [`clip_norm`](Self::clip_norm) is then that of
    /// the other parameters.
    pub fn clip_group(mut self, group: ClipGroup) -> Self {
        self.config.clip_groups.push(group);
        self
    }

    /// Sets the hook that is called for each gradient before the norm is computed. Default: none.
    pub fn gradient_hook(mut self, hook: impl GradientHook + 'static) -> Self {
        self.config.gradient_hook = Some(Arc::new(hook));
        self
    }
}
