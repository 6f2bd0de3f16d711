//! The expected goodput of a plan for a cluster: its options, and the failures and checkpoints that they
//! mean.

use clap::Args;
use clap::builder::RangedU64ValueParser;
use pipewright_cluster::goodput::{Faults, Goodput};
use pipewright_cluster::machine::Machine;
use pipewright_cluster::search::{ClusterPlan, Request};
use pipewright_schedule::bytes::{bytes_text, parse_bytes, parse_time};
use serde::Serialize;

use crate::failure::Failure;

/// The bytes of a parameter in a checkpoint: the parameter and both moments of AdamW, in single precision.
const BYTES_OF_PARAMETER: f64 = 12.0;
/// The bytes per second that a node writes if nothing else is given, which is an assumption: the storage of
/// Llama 3 sustains 2 TB/s (arXiv 2407.21783, section 3.3.1), and its largest run has 2,048 nodes of 8 GPUs.
const NODE_BANDWIDTH: f64 = 1e9;
/// The seconds of a restart if nothing else is given, which is an assumption.
const RESTART: f64 = 300.0;

/// The seed of the failures if nothing else is given.
const SEED: u64 = 42;

/// The failures of the GPUs, and the costs of checkpoints.
#[derive(Debug, Args)]
#[command(next_help_heading = "Goodput of a plan for a cluster")]
pub(crate) struct FailureArguments {
    /// The mean time between failures of a GPU, such as 50000h; by default, the published one of the machine
    #[arg(long, value_name = "TIME", value_parser = parse_positive_time, requires = "cluster", conflicts_with = "node_mtbf")]
    pub(crate) gpu_mtbf: Option<f64>,
    /// The mean time between failures of a node, in place of --gpu-mtbf
    #[arg(long, value_name = "TIME", value_parser = parse_positive_time, requires = "cluster")]
    pub(crate) node_mtbf: Option<f64>,
    /// The size of a checkpoint, such as 5TB; by default, 12 bytes per parameter
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, requires = "cluster")]
    pub(crate) checkpoint_size: Option<u64>,
    /// The bandwidth with which all nodes together write a checkpoint, such as 2TB/s; by default, 1 GB/s per
    /// node
    #[arg(long, value_name = "SIZE/s", value_parser = parse_bandwidth, requires = "cluster")]
    pub(crate) checkpoint_bandwidth: Option<f64>,
    /// The time for which a checkpoint stops the training; by default, until it is written
    #[arg(long, value_name = "TIME", value_parser = parse_any_time, requires = "cluster")]
    pub(crate) checkpoint_stall: Option<f64>,
    /// The time from a failure until the training continues; by default, 5m
    #[arg(long, value_name = "TIME", value_parser = parse_any_time, requires = "cluster")]
    pub(crate) restart_time: Option<f64>,
    /// The steps between two checkpoints; by default, the number with the best goodput
    #[arg(long, value_name = "STEPS", value_parser = RangedU64ValueParser::<u64>::new().range(1..=1_000_000_000), requires = "cluster")]
    pub(crate) checkpoint_every: Option<u64>,
    /// The seed of the simulated failures; by default, 42
    #[arg(long, value_name = "N", requires = "cluster")]
    pub(crate) failure_seed: Option<u64>,
}

/// The failures of the GPUs of a request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct ExpectedFaults {
    /// Seconds between two failures of any GPU.
    between_failures_s: f64,
    checkpoint_bytes: f64,
    write_bytes_per_s: f64,
    write_s: f64,
    stall_s: f64,
    restart_s: f64,
    /// The seed of the simulation.
    seed: u64,
    /// The given steps between two checkpoints.
    #[serde(skip)]
    steps: Option<u64>,
}

/// The expected goodput of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct PlanGoodput {
    /// The simulated shares.
    #[serde(flatten)]
    pub(crate) simulated: Goodput,
    /// The closed form of the useful share, if the training stops while a checkpoint is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) closed_form: Option<f64>,
}

impl FailureArguments {
    /// Returns the failures of the GPUs of a request; `None` if their rate is neither given nor published.
    pub(super) fn faults(&self, request: &Request) -> Result<Option<ExpectedFaults>, Failure> {
        let kinds = request.kinds();
        let nodes: f64 =
            kinds.iter().map(|(machine, gpus)| f64::from(gpus.div_ceil(machine.gpus_per_node.max(1)))).sum();
        let of_kind = |&(machine, gpus): &(&Machine, u32)| {
            self.gpu_mtbf.or(machine.between_failures).map(|time| time / f64::from(gpus))
        };
        // The rates of failures of all kinds add up.
        let of_gpus = kinds.iter().map(of_kind).reduce(|one, other| {
            let (one, other) = (one?, other?);
            Some(one * other / (one + other))
        });
        let of_gpus = of_gpus.flatten();
        let Some(between_failures_s) = self.node_mtbf.map(|time| time / nodes).or(of_gpus) else {
            let unknown = kinds.iter().find(|kind| of_kind(kind).is_none()).unwrap_or(&kinds[0]);
            return self.require_no_option(&unknown.0.name).map(|()| None);
        };
        // A checkpoint of adapters has only the parameters of the adapters.
        let parameters = request.model.trained_parameters() as f64;
        let checkpoint_bytes =
            self.checkpoint_size.map_or(BYTES_OF_PARAMETER * parameters, |size| size as f64);
        let write_bytes_per_s = self.checkpoint_bandwidth.unwrap_or(NODE_BANDWIDTH * nodes);
        let write_s = checkpoint_bytes / write_bytes_per_s;
        let stall_s = self.checkpoint_stall.unwrap_or(write_s);
        if stall_s > write_s {
            return Err(Failure::input(format!(
                "--checkpoint-stall is {stall_s} s, but a checkpoint of {} is written in {write_s:.3} s; use a shorter time",
                bytes_text(checkpoint_bytes as u64)
            )));
        }
        let restart_s = self.restart_time.unwrap_or(RESTART);
        let (steps, seed) = (self.checkpoint_every, self.failure_seed.unwrap_or(SEED));
        Ok(Some(ExpectedFaults {
            between_failures_s,
            checkpoint_bytes,
            write_bytes_per_s,
            write_s,
            stall_s,
            restart_s,
            seed,
            steps,
        }))
    }

    /// Refuses options that have no effect without a rate of failures.
    fn require_no_option(&self, machine: &str) -> Result<(), Failure> {
        let given = [
            ("--checkpoint-size", self.checkpoint_size.is_some()),
            ("--checkpoint-bandwidth", self.checkpoint_bandwidth.is_some()),
            ("--checkpoint-stall", self.checkpoint_stall.is_some()),
            ("--restart-time", self.restart_time.is_some()),
            ("--checkpoint-every", self.checkpoint_every.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((flag, _)) => Err(Failure::input(format!(
                "{flag} has no effect, because no rate of failures is known for {machine}; give --gpu-mtbf or --node-mtbf"
            ))),
        }
    }
}

impl ExpectedFaults {
    /// Simulates the failures of a training with a plan.
    pub(crate) fn goodput(&self, plan: &ClusterPlan) -> PlanGoodput {
        let step = plan.prediction.seconds;
        let &Self { between_failures_s, write_s, stall_s, restart_s, seed, .. } = self;
        let faults = Faults {
            between_failures: between_failures_s,
            write: write_s,
            stall: stall_s,
            restart: restart_s,
        };
        let steps = self.steps.unwrap_or_else(|| faults.best_steps(step));
        let closed_form = (stall_s == write_s).then(|| faults.closed_form(step, steps));
        PlanGoodput { simulated: faults.simulate(step, steps, seed), closed_form }
    }

    /// Returns the seconds between two failures of any GPU.
    pub(crate) fn between_failures(&self) -> f64 {
        self.between_failures_s
    }

    /// Says what a checkpoint and a restart cost.
    pub(crate) fn sentence(&self) -> String {
        let Self { checkpoint_bytes, write_bytes_per_s, write_s, stall_s, restart_s, .. } = self;
        format!(
            "goodput: checkpoints of {} written with {}/s, each stops the training for {stall_s:.1} of {write_s:.1} s; \
             restarts of {restart_s:.0} s",
            bytes_text(*checkpoint_bytes as u64),
            bytes_text(*write_bytes_per_s as u64),
        )
    }
}

const TIMES: &str = "write a time such as 50000h, 30d or 90s";

fn parse_positive_time(text: &str) -> Result<f64, String> {
    parse_time(text, 1.0..=1e12).ok_or_else(|| TIMES.to_owned() + ", of at least 1s")
}

fn parse_any_time(text: &str) -> Result<f64, String> {
    parse_time(text, 0.0..=1e9).ok_or_else(|| TIMES.to_owned())
}

/// Reads a bandwidth such as `2TB/s`.
fn parse_bandwidth(text: &str) -> Result<f64, String> {
    let size = text.trim().strip_suffix("/s").and_then(|size| parse_bytes(size).ok());
    size.map(|size| size as f64).ok_or_else(|| "write a bandwidth such as 2TB/s or 500GB/s".to_owned())
}
