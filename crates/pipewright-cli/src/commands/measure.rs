//! Measures the profile of a run: its layers on its devices, and the link between its ranks.

use std::time::Duration;

use burn::tensor::Device;
use pipewright::device::Devices;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::profile::{MeasureConfig, Measured, measure};
use pipewright::train::data::TokenRows;
use pipewright::train::{Decay, LearningRate, Trainer};
use pipewright_models::{InitialParameters, ModelConfig};
use pipewright_schedule::ModelDesc;
use pipewright_schedule::analytic::Workload;
use pipewright_schedule::profile::{DeviceProfile, Profile};

use crate::commands::launch::{failure, pipeline_config};
use crate::commands::memory::machine_bytes;
use crate::commands::peak_rates::{assumed_link, assumed_rates, device_name};
use crate::commands::prepare::{open_data, read_model};
use crate::commands::process_group::ProcessGroup;
use crate::config::Settings;
use crate::config::pipeline::TransportChoice;
use crate::failure::Failure;

/// The microbatches of a measured step, for each rank.
const MICROBATCHES: u32 = 3;
/// The runs of the short model, each with data of its own.
const RUNS: usize = 2;

/// A profile and what it was made of.
pub(super) struct Measurement {
    pub(super) profile: Profile,
    pub(super) measured: Measured,
    pub(super) layers: ModelDesc,
}

/// Measures the model of a run with as many ranks at once as the run has in this process. Takes about `time`. Every
/// process of the run calls it; only the leader measures the link.
pub(super) fn measure_run(
    settings: &Settings,
    processes: &mut ProcessGroup,
    time: Duration,
) -> Result<Measurement, Failure> {
    let model = read_model(&settings.model)?;
    let layers = model.describe(settings.data.seq_len as usize);
    let all = settings.pipeline.ranks.saturating_mul(settings.mesh.data_parallel);
    let (ranks, devices) = match settings.pipeline.transport {
        TransportChoice::Local => {
            (all, settings.run.devices.open(all, settings.run.precision).map_err(Failure::input)?)
        }
        TransportChoice::Mpi => {
            let devices = settings.run.devices.open_one(processes.rank(), settings.run.precision);
            (1, devices.map_err(Failure::input)?)
        }
    };
    let link = processes.measure_link(settings.pipeline.transport, &devices)?;
    let measured = measure_layers(settings, &model, &layers, ranks, devices, time)?;
    let rates = assumed_rates(settings);
    let workload = workload(settings, &layers);
    let mut profile = measured.profile(&workload, link, assumed_link(settings), rates);
    profile.device = Some(DeviceProfile {
        name: device_name(settings),
        memory_bytes: memory_of_rank(settings),
        device: Some(settings.run.devices.to_string()),
        ranks: Some(ranks),
        threads_per_rank: Some(settings.pipeline.threads_per_rank),
    });
    Ok(Measurement { profile, measured, layers })
}

/// Returns what a microbatch of a run computes.
pub(super) fn workload<'a>(settings: &Settings, layers: &'a ModelDesc) -> Workload<'a> {
    Workload { model: layers, tokens: settings.data.seq_len, rows: settings.pipeline.microbatch_size }
}

/// Returns the share of the machine's memory that each rank has, if the ranks compute on the processor.
pub(super) fn memory_of_rank(settings: &Settings) -> Option<u64> {
    let ranks = settings.pipeline.ranks.saturating_mul(settings.mesh.data_parallel);
    let machine = machine_bytes().filter(|_| settings.run.devices.are_processor())?;
    // Processes may be on several machines, which are not known here, or all on this one.
    Some(machine / u64::from(ranks.max(1)))
}

fn measure_layers(
    settings: &Settings,
    model: &ModelConfig,
    layers: &ModelDesc,
    ranks: u32,
    devices: Devices,
    time: Duration,
) -> Result<Measured, Failure> {
    let rows = settings.pipeline.microbatch_size;
    let config = MeasureConfig {
        pipeline: PipelineConfig { devices, ..pipeline_config(settings, model)? },
        ranks,
        rows,
        time_limit: time,
        memory: machine_bytes().filter(|_| settings.run.devices.are_processor()),
        ..MeasureConfig::default()
    };
    let open = |_| open_data(settings, model).map(|(training, _)| training);
    let data = (0..RUNS).map(open).collect::<Result<Vec<TokenRows>, _>>()?;
    let mut data = data.into_iter();
    let feed = |pipeline: Pipeline| {
        let rows_per_step = (MICROBATCHES * ranks * rows) as usize;
        // A rate of 0 leaves the parameters as they are, and takes the optimizer as long.
        let rate = LearningRate { peak: 0.0, decay: Decay::Constant, warmup_steps: 0, steps: u64::MAX };
        let data = data.next().expect("there is data for each run of the short model");
        let mut trainer = Trainer::new(pipeline, data, rows_per_step, rate);
        move || trainer.step().map(|(_, summary)| summary)
    };
    // The values of the parameters do not affect the times, so a model directory need not be read.
    let (maker, initial) = (model.clone(), InitialParameters::Seed(settings.run.seed));
    let make = move |range| {
        let made = maker.training_stage(range, &initial, &Device::flex().autodiff());
        made.map_err(|error| error.to_string())
    };
    measure(layers, &config, make, feed).map_err(|error| failure(&error))
}
