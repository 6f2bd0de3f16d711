//! The sizes of a plan that the user gives: GPUs, rows and fixed parts.

use std::path::Path;

use pipewright_cluster::layout::{Cut, Precision};
use pipewright_cluster::machine::Machine;
use pipewright_cluster::placed::Machines;
use pipewright_cluster::search::{Fixed, Request};
use pipewright_cluster::size_names::Names;
use pipewright_document::text::{quoted, set_flags};

use crate::clusters::arguments::{ClusterArguments, GivenStages};
use crate::clusters::machine::{NamedMachines, machine};
use crate::configurations::Configurations;
use crate::failure::Failure;
use crate::plans::emitted::Target;

/// The options of `plan --cluster`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlanOptions<'a> {
    /// The machines.
    pub(crate) machines: &'a NamedMachines<'a>,
    /// The options that only plans for clusters have.
    pub(crate) cluster: &'a ClusterArguments,
    /// The model, a folder or a configuration.
    pub(crate) config: Option<&'a Path>,
    /// The keys of the configuration that are overridden.
    pub(crate) set: &'a [String],
    /// All GPUs.
    pub(crate) ranks: Option<u32>,
    /// The most bytes of a rank.
    pub(crate) memory: Option<u64>,
    /// The replicas.
    pub(crate) data_parallel: Option<u32>,
    /// The ranks of a tensor group.
    pub(crate) tensor_parallel: Option<u32>,
    /// The system whose files are written, and where.
    pub(crate) target: Option<&'a Target<'a>>,
    /// The reader of configurations for training.
    pub(crate) configurations: &'a dyn Configurations,
}

/// The numbers that every search needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// The GPUs of the first machine.
    pub(super) gpus: u32,
    /// The rows of a step.
    pub(super) batch: u32,
    /// The tokens of a row.
    pub(super) sequence: u32,
}

impl PlanOptions<'_> {
    /// Returns the path of the model or of the configuration.
    pub(super) fn path(&self) -> Option<&Path> {
        self.cluster.model.as_deref().or(self.config)
    }

    /// Refuses sizes of 0, options that do not suit machines with their nodes, and stages that the ranks of a pipeline
    /// do not divide.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let NamedMachines { argument, nodes, further, .. } = self.machines;
        let given = [
            ("--nodes", nodes.is_some() && self.cluster.nodes.is_some(), "leave it out"),
            ("--ranks", nodes.is_some() && self.ranks.is_some(), "leave it out"),
            (
                "--measured",
                !further.is_empty() && self.cluster.measured.is_some(),
                "write what was measured into a cluster file of its machine",
            ),
        ];
        if let Some((flag, _, advice)) = given.into_iter().find(|(_, is_given, _)| *is_given) {
            let machines = if flag == "--measured" { "has several machines" } else { "has the nodes" };
            return Err(Failure::input(format!("{flag}: --cluster {argument} {machines}; {advice}")));
        }
        let (cluster, fixed) = (self.cluster, &self.cluster.fixed);
        let sizes = [
            ("--nodes", cluster.nodes),
            ("--ranks", self.ranks),
            ("--global-batch", cluster.global_batch),
            ("--seq-len", cluster.seq_len),
            ("--tensor-parallel", self.tensor_parallel),
            ("--pipeline-parallel", fixed.pipeline_parallel),
            ("--data-parallel", self.data_parallel),
            ("--context-parallel", fixed.context_parallel),
            ("--expert-parallel", fixed.expert_parallel),
            ("--stages-per-rank", fixed.stages_per_rank),
            ("--microbatch-size", fixed.microbatch_size),
            ("--expert-tensor-parallel", fixed.expert_tensor_parallel),
            ("--shards", fixed.shards),
        ];
        if let Some((flag, _)) = sizes.into_iter().find(|&(_, size)| size == Some(0)) {
            return Err(Failure::input(format!("{flag} is 0; use at least 1")));
        }
        let stages = fixed.layout.as_ref().map(|GivenStages(stages)| stages.len());
        match (stages, fixed.pipeline_parallel) {
            (Some(stages), Some(ranks)) if !stages.is_multiple_of(ranks as usize) => {
                Err(Failure::input(format!(
                    "--layout has {stages} stages, which {ranks} ranks do not divide evenly; change --pipeline-parallel"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Returns the sizes of the request. `sequence` and `batch` come from the configuration.
    ///
    /// # Errors
    /// When sizes are missing or too large, or the tokens of the batch are not whole rows.
    pub(super) fn sizes(
        &self,
        machine: &Machine,
        sequence: Option<u32>,
        batch: Option<u32>,
    ) -> Result<Sizes, Failure> {
        let cluster = self.cluster;
        let tokens = cluster.batch_tokens.map(Batch::Tokens);
        let batch = tokens.or(cluster.global_batch.or(batch).map(Batch::Rows));
        match (self.gpus(machine)?, cluster.seq_len.or(sequence), batch) {
            (Some(gpus), Some(sequence), Some(batch)) => {
                Ok(Sizes { gpus, batch: batch.rows(sequence)?, sequence })
            }
            (gpus, sequence, batch) => Err(self.missing(gpus.is_none(), batch.is_none(), sequence.is_none())),
        }
    }

    /// Names all missing sizes, with a command that has them.
    fn missing(&self, gpus: bool, batch: bool, sequence: bool) -> Failure {
        let cluster = self.cluster;
        // The flag, its value, and an example if it is missing.
        let sizes = [
            ("--nodes", cluster.nodes.map(u64::from), gpus.then_some(16)),
            ("--ranks", self.ranks.map(u64::from), None),
            ("--global-batch", cluster.global_batch.map(u64::from), batch.then_some(1024)),
            ("--batch-tokens", cluster.batch_tokens, None),
            ("--seq-len", cluster.seq_len.map(u64::from), sequence.then_some(8192)),
        ];
        let missing: Vec<&str> =
            sizes.iter().filter(|(.., example)| example.is_some()).map(|(flag, ..)| *flag).collect();
        let (are, them) = if missing.len() == 1 { ("is", "it") } else { ("are", "them") };
        let model =
            self.path().map_or_else(String::new, |path| format!(" {}", quoted(&path.to_string_lossy())));
        let (set, machine) = (set_flags(self.set), quoted(self.machines.argument));
        let mut command = format!("pipewright plan{model}{set} --cluster {machine}");
        for (flag, given, example) in sizes {
            if let Some(value) = given.or(example) {
                command.push_str(&format!(" {flag} {value}"));
            }
        }
        Failure::input(format!("{} {are} missing; give {them}, such as `{command}`", missing.join(", ")))
    }

    pub(super) fn gpus(&self, machine: &Machine) -> Result<Option<u32>, Failure> {
        if let Some(nodes) = self.machines.nodes {
            return self.gpus_of(nodes, machine, 0).map(Some);
        }
        let Some(nodes) = self.cluster.nodes else { return Ok(self.ranks) };
        let per_node = machine.gpus_per_node;
        nodes.checked_mul(per_node).map(Some).ok_or_else(|| {
            let most = u32::MAX / per_node;
            Failure::input(format!("--nodes {nodes}: there are too many GPUs; use at most {most}"))
        })
    }

    /// Returns the GPUs of the nodes of a machine of `--cluster`, in addition to `others`.
    fn gpus_of(&self, nodes: u32, machine: &Machine, others: u32) -> Result<u32, Failure> {
        let own = nodes.checked_mul(machine.gpus_per_node);
        own.filter(|own| own.checked_add(others).is_some()).ok_or_else(|| {
            let argument = self.machines.argument;
            Failure::input(format!("--cluster {argument}: there are too many GPUs; use at most {}", u32::MAX))
        })
    }

    /// Adds the machines after the first one to a request.
    ///
    /// # Errors
    /// When a machine is not known, its file cannot be read, it lacks the precision, or there are too many GPUs.
    pub(super) fn add_machines(&self, request: &mut Request) -> Result<(), Failure> {
        for &(name, nodes) in &self.machines.further {
            let machine = machine(name)?;
            self.precision(&machine)?;
            let gpus = self.gpus_of(nodes, &machine, request.gpus)?;
            request.gpus += gpus;
            request.further.push(Machines { machine, gpus });
        }
        Ok(())
    }

    /// Returns the precision of the products.
    ///
    /// # Errors
    /// When the machine has no rate for it.
    pub(super) fn precision(&self, machine: &Machine) -> Result<Precision, Failure> {
        let precision = self.cluster.precision.unwrap_or(Precision::Half);
        if !machine.has_rate(precision) {
            let (name, precision) = (&machine.name, precision.name());
            let key = if precision == "nvfp4" { "nvfp4_tflops" } else { "fp8_tflops" };
            let what = if precision == "fp8" { "FP8" } else { precision };
            return Err(Failure::input(format!(
                "--precision {precision}: {name} has no rate for {what}; use bf16, or a cluster file with {key}"
            )));
        }
        Ok(precision)
    }

    /// Returns how errors of the search name the options.
    pub(super) fn names(&self) -> Names {
        Names::Options { in_nodes: self.cluster.nodes.is_some(), batch_tokens: self.cluster.batch_tokens }
    }

    /// Returns the fixed parts of a plan.
    pub(super) fn fixed(&self) -> Fixed {
        let given = &self.cluster.fixed;
        let stages = given.layout.as_ref();
        let ranks = given.pipeline_parallel.unwrap_or(1);
        let chunks = stages.map(|GivenStages(stages)| stages.len() as u32 / ranks.max(1));
        // Stages are in a loop over the ranks.
        let looped = chunks.map(|chunks| if chunks > 1 { "interleaved1f1b" } else { "1f1b" }.to_owned());
        Fixed {
            tensor: self.tensor_parallel,
            pipeline: given.pipeline_parallel,
            context: given.context_parallel,
            data: self.data_parallel,
            expert: given.expert_parallel,
            chunks: given.stages_per_rank.or(chunks),
            microbatch: given.microbatch_size,
            schedule: given.schedule.clone().or(looped),
            recompute: given.recompute,
            sharding: given.sharding,
            sequence_parallel: given.sequence_parallel,
            expert_tensor: given.expert_tensor_parallel,
            cut: stages.map(|GivenStages(stages)| Cut::of_letters(stages)),
            shards: given.shards,
            overlaps_experts: given.expert_overlap,
        }
    }
}

/// The batch of a step as the user gives it.
enum Batch {
    Rows(u32),
    Tokens(u64),
}

impl Batch {
    /// Returns the number of rows.
    ///
    /// # Errors
    /// When the tokens are too many, or are not whole rows.
    fn rows(self, sequence: u32) -> Result<u32, Failure> {
        let tokens = match self {
            Self::Rows(rows) => return Ok(rows),
            Self::Tokens(tokens) => tokens,
        };
        let (length, most) = (u64::from(sequence), u64::from(u32::MAX));
        if tokens / length > most {
            return Err(Failure::input(format!(
                "--batch-tokens {tokens} is more than {most} rows of {sequence} tokens; use at most {}",
                most * length
            )));
        }
        if !tokens.is_multiple_of(length) {
            let near = ((tokens + length / 2) / length).clamp(1, most) * length;
            return Err(Failure::input(format!(
                "--batch-tokens {tokens} is not a whole number of rows of {sequence} tokens; use --batch-tokens {near}"
            )));
        }
        Ok((tokens / length) as u32)
    }
}
