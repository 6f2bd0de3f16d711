//! Measures the profile of a run: its layers on its devices, and the link between its ranks.

use std::time::Duration;

use burn::tensor::Device;
use pipewright::device::{Devices, RankThreads};
use pipewright::ids::WorldRank;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::profile::{
    MeasureConfig, Measured, MeasuredRank, Quartiles, measure, unlike_links, unlike_ranks,
};
use pipewright::train::data::TokenRows;
use pipewright::train::{LearningRate, Trainer};
use pipewright_models::hf::{ReadRate, read_rate};
use pipewright_models::{CutModel, InitialParameters, Place};
use pipewright_planning::failure::{Exit, Failure, sentence};
use pipewright_run::run_model::open_training;
use pipewright_run::settings::Settings;
use pipewright_run::settings::model::ModelSettings;
use pipewright_run::settings::pipeline::TransportChoice;
use pipewright_run::settings::profile::ProfiledRun;
use pipewright_run::training::exact;
use pipewright_run::training::launch::failure;
use pipewright_run::training::memory::memory_of_rank;
use pipewright_run::training::model::{described, streamable};
use pipewright_run::training::optimizer::state_rule;
use pipewright_run::training::pipeline_settings::pipeline_config;
use pipewright_run::training::prepare::require_whole_layers;
use pipewright_run::training::process_group::ProcessGroup;
use pipewright_schedule::ModelDesc;
use pipewright_schedule::analytic::Workload;
use pipewright_schedule::profile::{DeviceProfile, Profile, RankProfile};

use crate::planning::rates::{assumed_link, assumed_rates, device_name};

/// The microbatches of a measured step, for each rank.
const MICROBATCHES: u32 = 3;

/// A profile and what it was made of.
pub(crate) struct Measurement {
    pub(crate) profile: Profile,
    pub(crate) measured: Measured,
    pub(crate) layers: ModelDesc,
    /// The rate at which the base is read, if it stays in its files.
    pub(crate) read_rate: Option<ReadRate>,
}

/// The time in which the disk's rate is measured.
const READ_TIME: Duration = Duration::from_secs(3);

/// Measures the model of a run with as many ranks at once as the run has. Takes about `time`. Every process
/// of the run calls it; only the leader measures the link.
pub(crate) fn measure_run(
    settings: &Settings,
    model: &CutModel,
    processes: &mut ProcessGroup,
    time: Duration,
) -> Result<Measurement, Failure> {
    require_whole_layers(&settings.mesh)?;
    // The run multiplies without AMX if it must, so its layers are measured so.
    exact::require(&settings.run)?;
    let transport = settings.pipeline.transport;
    processes.join_for(transport)?;
    let subject = Subject::open(settings, model, processes);
    let subject = processes.all_succeed(subject, Exit::WrongInput)?;
    let links = unlike_links(&processes.measure_links(&subject.devices)?);
    let measured = measure_layers(settings, model, &subject, time);
    let measured = processes.all_succeed(measured, Exit::RankFailed)?;
    let ranks = processes.combine(&measured_ranks(settings, &measured, processes.rank()), all_ranks, time)?;
    let layers = subject.layers;
    let workload = workload(settings, &layers);
    let (link, pairs) = links.unzip();
    let mut profile = measured.profile(&workload, link, assumed_link(settings), assumed_rates(settings));
    // Threads on one device differ by what else runs on the machine, which changes within seconds. Plans for replicas and
    // tensor-parallel ranks take all ranks as equal.
    let differs = |rank: &MeasuredRank| (&rank.device, rank.threads) != (&ranks[0].device, ranks[0].threads);
    let are_apart = transport == TransportChoice::Mpi || ranks.iter().any(differs);
    if are_apart && settings.mesh.ranks(1) == 1 {
        profile.pairs = pairs.unwrap_or_default();
        profile.ranks = unlike_ranks(&measured, &layers, &ranks);
        if profile.ranks.is_empty() && !profile.pairs.is_empty() {
            profile.ranks = vec![RankProfile::default(); ranks.len()];
        }
    }
    if transport == TransportChoice::Mpi && settings.mesh.ranks(settings.pipeline.ranks) > 1 {
        // Each process measures one rank, so no gradients are summed.
        profile.assumed.push("link.reduce_bytes_per_s".to_owned());
    }
    profile.device = Some(DeviceProfile {
        name: device_name(settings),
        memory_bytes: memory_of_rank(settings),
        device: Some(settings.run.devices.to_string()),
        precision: Some(settings.run.precision.to_string()),
        ranks: Some(settings.mesh.ranks(settings.pipeline.ranks)),
        // Otherwise `[[rank]]` has the threads of each rank.
        threads_per_rank: ranks
            .iter()
            .all(|rank| rank.threads == ranks[0].threads)
            .then_some(ranks[0].threads),
    });
    // One process alone: several on a host would measure their shares of its disk.
    let read_rate = match &settings.model {
        ModelSettings::From { from, .. } if processes.is_leader() => {
            let can_stream = streamable(settings, model).map(|model| model.is_some());
            can_stream
                .and_then(|can| can.then(|| read_rate(from, READ_TIME)).transpose().map_err(Failure::input))
        }
        _ => Ok(None),
    };
    let read_rate = processes.all_succeed(read_rate, Exit::WrongInput)?;
    profile.link.read_bytes_per_s = read_rate.map(|rate| rate.bytes_per_s);
    Ok(Measurement { profile, measured, layers, read_rate })
}

/// Returns the measurements of the ranks of this process, which have the numbers from `first` on.
fn measured_ranks(settings: &Settings, measured: &Measured, first: WorldRank) -> Vec<MeasuredRank> {
    let rank = |(number, times): (u32, &Vec<Quartiles>)| {
        let rank = WorldRank::new(first.get() + number);
        MeasuredRank {
            times: times.clone(),
            memory_bytes: memory_of_rank(settings),
            threads: settings.pipeline.threads_per_rank.of(rank) as u32,
            device: settings.run.devices.choice_of(rank).to_string(),
        }
    };
    (0..).zip(&measured.times_by_rank).map(rank).collect()
}

/// Returns the ranks of all processes.
fn all_ranks(processes: &[(WorldRank, Vec<MeasuredRank>)]) -> Vec<MeasuredRank> {
    processes.iter().flat_map(|(_, ranks)| ranks.clone()).collect()
}

/// Returns what a microbatch of a run computes.
pub(crate) fn workload<'a>(settings: &Settings, layers: &'a ModelDesc) -> Workload<'a> {
    Workload { model: layers, tokens: settings.data.seq_len, rows: settings.pipeline.microbatch_size }
}

/// Returns the run that a profile must be for.
pub(crate) fn profiled_run<'a>(settings: &'a Settings, workload: Workload<'a>) -> ProfiledRun<'a> {
    ProfiledRun {
        workload,
        rates: assumed_rates(settings),
        devices: settings.run.devices.clone(),
        precision: settings.run.precision,
        threads: settings.pipeline.threads_per_rank.clone(),
        ranks: settings.mesh.ranks(settings.pipeline.ranks),
        profile_ranks: &settings.pipeline.profile_ranks,
    }
}

/// The model that a process measures, with its data and devices.
struct Subject {
    layers: ModelDesc,
    rows: TokenRows,
    /// The ranks of this process.
    ranks: u32,
    devices: Devices,
    threads: RankThreads,
}

impl Subject {
    fn open(settings: &Settings, model: &CutModel, processes: &ProcessGroup) -> Result<Self, Failure> {
        let layers = described(settings, model);
        let rows = open_training(settings, model, settings.pipeline.rows())?;
        let run = &settings.run;
        let threads = settings.pipeline.threads_per_rank.clone();
        let (ranks, devices, threads) = match settings.pipeline.transport {
            TransportChoice::Local => {
                let all = settings.mesh.ranks(settings.pipeline.ranks);
                (all, run.devices.open(all, run.precision), threads)
            }
            TransportChoice::Mpi => {
                let own = processes.rank();
                (1, run.devices.open_one(own, run.precision), threads.of_ranks([own]))
            }
        };
        Ok(Self { layers, rows, ranks, devices: devices.map_err(Failure::input)?, threads })
    }
}

fn measure_layers(
    settings: &Settings,
    model: &CutModel,
    subject: &Subject,
    time: Duration,
) -> Result<Measured, Failure> {
    let Subject { layers, rows: data, ranks, devices, threads } = subject;
    let (ranks, rows) = (*ranks, settings.pipeline.microbatch_size);
    let pipeline = pipeline_config(settings, model)?;
    let layer_states = state_rule(settings).of_layers(model).map_err(Failure::input)?;
    let config = MeasureConfig {
        pipeline: PipelineConfig { devices: devices.clone(), threads_per_rank: threads.clone(), ..pipeline },
        ranks,
        rows,
        time_limit: time,
        memory: memory_of_rank(settings).map(|of_rank| of_rank.saturating_mul(u64::from(ranks))),
        state_bytes: layer_states.iter().map(|state| state.total()).collect(),
        ..MeasureConfig::default()
    };
    let feed = |pipeline: Pipeline| {
        let rows_per_step = (MICROBATCHES * ranks * rows) as usize;
        // A rate of 0 leaves the parameters as they are, and takes the optimizer as long.
        let rate = LearningRate::constant(0.0);
        let mut trainer = Trainer::new(pipeline, data.clone(), rows_per_step, rate);
        move || trainer.step().map(|(_, summary)| summary)
    };
    // The values of the parameters do not affect the times, so a model directory need not be read.
    let (maker, initial) = (model.clone(), InitialParameters::Seed(settings.run.seed));
    let precision = settings.run.precision;
    let make = move |range| {
        let place = Place { precision, ..Device::flex().autodiff().into() };
        let made = maker.training_stage(range, &initial, place);
        made.map_err(|error| sentence(&error))
    };
    measure(layers, &config, make, feed).map_err(|error| failure(&error))
}
