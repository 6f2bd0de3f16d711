//! [`CheckpointSpace`]: the bytes that the disk needs for the next checkpoint of a run.

use std::path::PathBuf;

use pipewright_models::{FirstCopies, ParameterSpec};

use crate::run_folder::newest_checkpoint_bytes;
use crate::training::optimizer::state_rule;
use crate::training::prepare::RunParts;

/// The size of the checkpoints of a run.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointSpace {
    run: PathBuf,
    /// The bytes of the trained parameters and of the optimizer's state.
    estimate: u64,
}

impl CheckpointSpace {
    /// Returns the size for a run.
    pub(crate) fn of(run: RunParts<'_>) -> Self {
        let (settings, model) = (run.settings, run.model);
        // Training refuses a model whose parameters are not known.
        let stages = run.outlines().unwrap_or_default().concat();
        // A checkpoint has each shared parameter once.
        let parameters = FirstCopies::default().of(&stages).into_iter();
        let trained = parameters.filter(|spec| model.is_trained(&spec.path));
        let (experts, others): (Vec<_>, Vec<_>) = trained.partition(ParameterSpec::is_of_routed_expert);
        let bytes = |specs: &[ParameterSpec]| {
            let state = state_rule(settings).of(specs, |_| true);
            state.parameters.saturating_add(state.optimizer)
        };
        // Each replica of an expert group holds as many experts.
        let experts = bytes(&experts).saturating_mul(settings.mesh.expert_parallel.into());
        let shard = bytes(&others).saturating_add(experts);
        let estimate = shard.saturating_mul(settings.mesh.tensor_parallel.into());
        Self { run: settings.run.out.clone(), estimate }
    }

    /// Returns the estimated bytes of the whole state.
    pub(crate) fn estimate(&self) -> u64 {
        self.estimate
    }

    /// Returns the bytes of the newest checkpoint, or an estimate if the run has no checkpoint.
    pub(crate) fn bytes(&self) -> u64 {
        newest_checkpoint_bytes(&self.run).unwrap_or(self.estimate)
    }
}
