//! The settings of a run's pipeline.

use pipewright::loss_scale::LossScaling;
use pipewright::offload::OffloadTo;
use pipewright::pipeline::PipelineConfig;

use crate::error::RunError;
use crate::run_model::RunModel;
use crate::settings::Settings;
use crate::settings::offload::OffloadPlace;
use crate::training::optimizer::{Update, update};

/// Returns the settings of a pipeline besides the devices.
pub fn pipeline_config(settings: &Settings, model: &dyn RunModel) -> Result<PipelineConfig, RunError> {
    let clip_norm = settings.optimizer.clip_norm;
    let Update { optimizer, groups, clip_groups } = update(&settings.optimizer, model)?;
    Ok(PipelineConfig {
        seed: settings.run.seed,
        optimizer: Some(optimizer),
        optimizer_groups: groups,
        clip_groups,
        clip_norm: (clip_norm > 0.0).then_some(clip_norm),
        post_validation: settings.optimizer.post_validation,
        delayed: settings.optimizer.delay > 0,
        threads_per_rank: settings.pipeline.threads_per_rank.clone(),
        recompute: settings.pipeline.recompute.clone(),
        offload: offload_to(settings),
        precision: settings.run.precision,
        loss_scaling: LossScaling {
            initial: settings.run.loss_scale as f64,
            interval: settings.run.loss_scale_interval,
        },
        deadline: settings.run.deadline(),
        data_parallel: settings.mesh.data_parallel,
        batch_shares: settings.mesh.batch_shares.clone(),
        tensor_parallel: settings.mesh.tensor_parallel,
        whole_experts: settings.mesh.whole_experts,
        sequence_parallel: settings.mesh.sequence_parallel,
        expert_parallel: settings.mesh.expert_parallel,
        data_parallel_mode: settings.mesh.data_parallel_mode,
        keep_gathered: settings.mesh.keep_gathered,
        targets_for_all: model.needs_targets(),
        verify: settings.run.verify,
        name_not_finite: true,
        fingerprint_every: settings.run.fingerprint_every,
        ..PipelineConfig::default()
    })
}

/// Returns the place to which the inputs of recomputed forwards go.
fn offload_to(settings: &Settings) -> Option<OffloadTo> {
    Some(match settings.pipeline.offload.place()? {
        OffloadPlace::Host => OffloadTo::Host,
        OffloadPlace::File => {
            let folder = settings.pipeline.offload_folder.as_ref().unwrap_or(&settings.run.out);
            OffloadTo::Folder(folder.clone())
        }
    })
}
