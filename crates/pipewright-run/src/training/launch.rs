//! Turns a prepared run into a trainer: stages with their parameters, an optimizer, and ranks that wait for
//! the first step.

use std::sync::Arc;

use burn::tensor::Device;
use pipewright::batch::BatchDisagreement;
use pipewright::checkpoint::Checkpoint;
use pipewright::device::Devices;
use pipewright::failure::Cause;
use pipewright::mesh::RankGroups;
use pipewright::nn::TensorParallel;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::stage::Stage;
use pipewright::tensor::Precision;
use pipewright::train::{ResumeError, Trainer};
use pipewright::transport::World;
use pipewright_models::{InitialParameters, Place};
use pipewright_schedule::error_text::with_causes as sentence;
use pipewright_schedule::words::counted;
use pipewright_schedule::{Partition, StageIndex};

use crate::error::{ErrorKind, FailedRun, RunError};
use crate::fault::Fault;
use crate::recovery::Attempts;
use crate::run_model::RunModel;
use crate::settings::Settings;
use crate::settings::pipeline::TransportChoice;
use crate::training::optimizer::expert_balance;
use crate::training::pipeline_settings::pipeline_config;
use crate::training::prepare::Prepared;
use crate::training::process_group::{ProcessGroup, disagreement, lost};
use crate::training::rate_change::rates;

/// Starts this process's ranks: all ranks or, if there are several processes, one rank. They have the state of a
/// checkpoint, or else initial parameters.
pub(crate) fn launch(
    mut prepared: Prepared,
    checkpoint: Option<&Arc<Checkpoint>>,
    processes: &mut ProcessGroup,
    attempts: &Attempts,
) -> Result<Trainer, RunError> {
    let Some(checkpoint) = checkpoint else { return launch_new(prepared, processes, attempts) };
    // Unless only adapters are trained, the checkpoint contains all parameters, so the weights of a model
    // directory need not be read.
    if prepared.model.adapter().is_none() {
        prepared.initial = InitialParameters::Seed(prepared.settings.run.seed);
    }
    let mut trainer = launch_new(prepared, processes, attempts)?;
    match trainer.resume(checkpoint) {
        Ok(()) => Ok(trainer),
        Err(ResumeError::Pipeline(error)) => Err(failure(&error)),
        Err(error) => Err(RunError::input(error)),
    }
}

fn launch_new(
    prepared: Prepared,
    processes: &mut ProcessGroup,
    attempts: &Attempts,
) -> Result<Trainer, RunError> {
    processes.observer().before_ranks();
    let transport = prepared.settings.pipeline.transport;
    let mesh = prepared.settings.mesh.mesh(prepared.program.ranks());
    let ranks = mesh.ranks().ok_or_else(|| RunError::input(format!("{mesh:?} has too many ranks")))?;
    let mut world = match transport {
        TransportChoice::Local if processes.is_several() => {
            return Err(RunError::input(
                "several processes were started, and each would run all ranks by itself: set \
                 pipeline.transport=mpi, or start one process",
            ));
        }
        TransportChoice::Local => World::local(ranks),
        TransportChoice::Mpi => processes.take_world()?,
    };
    if world.ranks() != ranks {
        let started = match world.ranks() {
            1 => "1 process was started".to_owned(),
            several => format!("{several} processes were started"),
        };
        // The failure is reported before any process ends, because a launcher ends all processes when one
        // fails.
        let profile_ranks: Vec<String> =
            prepared.settings.pipeline.profile_ranks.iter().map(u32::to_string).collect();
        let place = match &profile_ranks[..] {
            [] => String::new(),
            [rank] => format!(" on the host of rank {rank} of the profile (pipeline.profile_ranks)"),
            ranks => {
                format!(" on the hosts of ranks {} of the profile (pipeline.profile_ranks)", ranks.join(", "))
            }
        };
        return processes.settle(Err(RunError::input(format!(
            "{started} for {}: start `mpirun -n {ranks} pipewright ...`{place}, or set pipeline.ranks, mesh.data_parallel \
             or mesh.tensor_parallel",
            counted(ranks, "rank")
        ))));
    }
    let Prepared { settings, model, initial, program, partition, rows, validation, mut devices, .. } =
        prepared;
    if transport == TransportChoice::Mpi {
        devices = processes.settle(own_device(&settings, &mut world))?;
    }
    let config = pipeline_config(&settings, &*model)?;
    let balance = expert_balance(&settings.optimizer, &*model)?;
    let sends_gradients = |rank| {
        let stages = program.placement().stages_of(mesh.coord(rank).rank);
        stages.iter().any(|stage| stage.get() > 0)
    };
    let (interrupt, hook) = (Some(attempts.interrupt().flag()), attempts.hook(ranks, sends_gradients)?);
    let config = PipelineConfig { interrupt, hook, devices, ..config };
    // Each stage is made on the thread of its rank, in the processor's memory, and then moved to the rank's
    // device.
    let make_stage = stage_maker(model, initial, partition, config.precision);
    let pipeline = Pipeline::launch_split(program, world, &config, make_stage);
    let pipeline = pipeline.map_err(|error| failure(&error))?;
    let rate = rates(&settings);
    let trainer = Trainer::new(pipeline, rows, settings.pipeline.rows(), rate);
    let trainer = trainer.accumulating(settings.run.accumulate).with_rampup(settings.run.rampup_steps);
    let trainer = match balance {
        Some(balance) => trainer.with_expert_balance(balance),
        None => trainer,
    };
    Ok(match validation {
        Some(validation) => trainer.with_validation(validation),
        None => trainer,
    })
}

/// Returns a function that makes the stages of a cut.
pub(crate) fn stage_maker(
    model: Arc<dyn RunModel>,
    initial: InitialParameters,
    partition: Partition,
    precision: Precision,
) -> impl Fn(StageIndex, &TensorParallel) -> Result<Stage, String> + Send + Sync + 'static {
    move |stage, tensor| {
        let place = Place { tensor: tensor.clone(), precision, ..Device::flex().autodiff().into() };
        model.stage(partition.range(stage), &initial, place)
    }
}

/// Returns the device of the rank of this process. If the device of any process cannot be used, all processes
/// fail.
fn own_device(settings: &Settings, world: &mut World) -> Result<Devices, RunError> {
    let run = &settings.run;
    let rank = world.own_ranks().next().unwrap_or_default();
    let opened = run.devices.open_one(rank, run.precision);
    let claim = opened.as_ref().map(|_| run.devices.own_name(rank)).map_err(|error| sentence(error));
    let agreed = world.claim_device(claim, run.deadline());
    // The process's own error is more detailed than the report that the others receive.
    let devices = opened.map_err(RunError::input)?;
    agreed.map_err(|error| disagreement(&error)).map(|()| devices)
}

/// Returns the error of the run for an error of the pipeline. The settings and the program are already
/// checked, so most errors without their own kind are bugs.
pub fn failure(error: &PipelineError) -> RunError {
    let exit = match error {
        PipelineError::Agreement(error) => return disagreement(error),
        // Another process cannot read its data.
        PipelineError::Data(_) | PipelineError::Disagreement(BatchDisagreement::Refused { .. }) => {
            ErrorKind::WrongInput
        }
        PipelineError::OffloadFolder { .. } => ErrorKind::WrongInput,
        // A stage is made from the user's files, so a failure to make it is wrong input.
        PipelineError::Step(step)
            if matches!(
                step.cause,
                Cause::Build { .. } | Cause::Restore { .. } | Cause::WrongInput { .. }
            ) =>
        {
            ErrorKind::WrongInput
        }
        PipelineError::Step(_) | PipelineError::Thread { .. } | PipelineError::Diverged { .. } => {
            ErrorKind::RankFailed
        }
        _ => ErrorKind::Bug,
    };
    let cause = match error {
        PipelineError::Step(step) => Some(step),
        PipelineError::Diverged { first, .. } => Some(&**first),
        _ => None,
    };
    let fault = cause.filter(|_| exit == ErrorKind::RankFailed).map(Fault::of_step);
    let lost = cause.and_then(lost);
    RunError::new(exit, sentence(error)).loss_of(lost).with_fault(fault)
}

/// Notifies the other processes of a failure that only this process knows of, so that they do not wait for
/// it. After a mistake of the user, which no restart mends, they end with the same exit code.
pub(crate) fn abandon(trainer: &mut Trainer, failure: RunError) -> RunError {
    if failure.kind == ErrorKind::WrongInput && failure.fault().is_none() {
        trainer.pipeline().refuse(&failure.text());
    } else {
        trainer.pipeline().abandon(&failure.text());
    }
    failure
}

#[cfg(test)]
mod tests {
    use pipewright::failure::StepError;
    use pipewright::ids::WorldRank;

    use super::*;

    #[test]
    fn a_mistake_that_another_process_finds_in_a_step_is_wrong_input() {
        let of = |cause| {
            let error = StepError { rank: WorldRank::new(1), step: 7.into(), action: None, cause };
            failure(&PipelineError::Step(error))
        };
        let message = || "out.csv: cannot be written".to_owned();
        let mistake = of(Cause::WrongInput { message: message() });
        assert!(mistake.kind == ErrorKind::WrongInput && mistake.fault().is_none(), "{}", mistake.text());
        let fault = of(Cause::Abandoned { message: message() });
        assert!(fault.kind == ErrorKind::RankFailed && fault.fault().is_some(), "{}", fault.text());
    }

    /// A process that has begun the next step learns that others have not ended the one before.
    #[test]
    fn a_step_that_ends_in_half_an_update_is_a_fault_with_its_first_cause() {
        let [rank, peer] = [2, 1].map(WorldRank::new);
        let first = StepError { rank, step: 7.into(), action: None, cause: Cause::LostPeer { peer } };
        let diverged = failure(&PipelineError::Diverged { step: 7.into(), first: Box::new(first.clone()) });
        assert_eq!((diverged.kind, diverged.lost()), (ErrorKind::RankFailed, Some(peer)));
        assert_eq!(diverged.fault(), Some(&Fault::of_step(&first)));
        assert!(diverged.text().ends_with("step 7: rank 2: rank 1 is lost: its thread or process has ended"));
    }

    #[test]
    fn data_that_another_process_cannot_read_is_wrong_input() {
        let reason = "data.txt: cannot be read".to_owned();
        let refused = BatchDisagreement::Refused { rank: WorldRank::new(1), reason };
        let failure = failure(&PipelineError::Disagreement(refused));
        assert_eq!(failure.kind, ErrorKind::WrongInput);
        assert!(failure.text().contains("data.txt: cannot be read"), "{}", failure.text());
    }
}
