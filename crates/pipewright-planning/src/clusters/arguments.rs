//! The arguments of `pipewright plan --cluster`.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, value_parser};
use pipewright_cluster::implementation::{Implementation, Stack};
use pipewright_cluster::layout::{Precision, Recompute, ShardedState};
use pipewright_schedule::bytes::parse_with_unit;
use pipewright_schedule::emit::{StageLetters, parse_stage_letters};

use crate::clusters::failures::FailureArguments;

/// The cluster, the batch and the fixed parts of a plan. The help names what each option needs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Plans for a cluster")]
pub(crate) struct ClusterArguments {
    /// Plan for this machine: a name that `pipewright clusters` lists, or a cluster file; or for several kinds with
    /// their nodes, such as h100:4,a100:2. Needs a model: a config.json, its folder, or a configuration
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub(crate) cluster: Option<String>,
    /// The model, in place of the first argument
    #[arg(long, value_name = "CONFIG.json|DIR", requires = "cluster", conflicts_with = "config")]
    pub(crate) model: Option<PathBuf>,
    /// The number of nodes; --ranks is the number of GPUs instead
    #[arg(long, value_name = "N", requires = "cluster", conflicts_with = "ranks")]
    pub(crate) nodes: Option<u32>,
    /// The rows of a step, over all replicas
    #[arg(long, visible_alias = "batch", value_name = "ROWS", requires = "cluster")]
    pub(crate) global_batch: Option<u32>,
    /// The tokens of a step, such as 16Mi, in place of --global-batch
    #[arg(long, value_name = "TOKENS", value_parser = parse_count, requires = "cluster", conflicts_with = "global_batch")]
    pub(crate) batch_tokens: Option<u64>,
    /// The tokens of a row
    #[arg(long, visible_alias = "sequence", value_name = "TOKENS", requires = "cluster")]
    pub(crate) seq_len: Option<u32>,
    /// The precision of the products with parameters; the rest is bf16, or f32 with f32
    #[arg(long, value_parser = one_of(&PRECISIONS, Precision::name), requires = "cluster")]
    pub(crate) precision: Option<Precision>,
    /// The stack whose kernels and launches are predicted; megatron by default
    #[arg(long, value_parser = one_of(&STACKS, Stack::name), requires = "cluster")]
    pub(crate) stack: Option<Stack>,
    /// The rows of the most loaded expert rank, in percent of the mean; 125 by default
    #[arg(long, value_name = "PERCENT", value_parser = value_parser!(u32).range(100..=1000), requires = "cluster")]
    pub(crate) expert_load: Option<u32>,
    /// Add days, GPU hours and energy of a training, such as tokens=15.6T
    #[arg(long, value_name = "tokens=N", value_parser = parse_goal, requires = "cluster")]
    pub(crate) goal: Option<u64>,
    /// Replace predicted rates, links and layers by measured ones
    #[arg(long, value_name = "FILE.toml", requires = "cluster")]
    pub(crate) measured: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) fixed: FixedArguments,
    #[command(flatten)]
    pub(crate) failures: FailureArguments,
}

impl ClusterArguments {
    /// Returns how the stack trains, with the load of experts that is given.
    pub(super) fn implementation(&self) -> Implementation {
        self.with_load(Implementation::usual(self.stack.unwrap_or_default()))
    }

    /// Returns how a stack trains with the load of experts that is given.
    pub(super) fn with_load(&self, implementation: Implementation) -> Implementation {
        let expert_load = self.expert_load.unwrap_or(implementation.expert_load);
        Implementation { expert_load, ..implementation }
    }
}

/// The parts of a plan that are given. The search chooses the others.
#[derive(Debug, Args)]
pub(crate) struct FixedArguments {
    /// The number of ranks of a pipeline
    #[arg(long, value_name = "P", requires = "cluster")]
    pub(crate) pipeline_parallel: Option<u32>,
    /// The number of ranks that divide each row
    #[arg(long, value_name = "C", requires = "cluster")]
    pub(crate) context_parallel: Option<u32>,
    /// The number of ranks that divide the experts
    #[arg(long, value_name = "E", requires = "cluster")]
    pub(crate) expert_parallel: Option<u32>,
    /// The number of stages on each rank of a pipeline
    #[arg(long, value_name = "V", requires = "cluster")]
    pub(crate) stages_per_rank: Option<u32>,
    /// The stages in Megatron's letters, such as 'Et*11|(t*12|)*6t*11L': E embedding, t block, m predictor, L loss; |
    /// ends a stage. Needs --pipeline-parallel
    #[arg(long, value_name = "LETTERS", value_parser = parse_letters, requires_all = ["cluster", "pipeline_parallel"], conflicts_with = "stages_per_rank")]
    pub(crate) layout: Option<GivenStages>,
    /// The number of ranks that divide each expert: 1, or a tensor group
    #[arg(long, value_name = "N", requires = "cluster")]
    pub(crate) expert_tensor_parallel: Option<u32>,
    /// Whether the ranks of a tensor group divide the sequence between their products
    #[arg(long, value_parser = one_of(&SWITCH, switch), requires = "cluster")]
    pub(crate) sequence_parallel: Option<bool>,
    /// The rows of a microbatch
    #[arg(long, value_name = "ROWS", requires = "cluster")]
    pub(crate) microbatch_size: Option<u32>,
    /// The schedule of the pipeline
    #[arg(long, value_name = "NAME", requires = "cluster")]
    pub(crate) schedule: Option<String>,
    /// The part of the forward that the backward computes again
    #[arg(long, value_parser = one_of(&RECOMPUTES, Recompute::name), requires = "cluster")]
    pub(crate) recompute: Option<Recompute>,
    /// The tensors that replicas divide among themselves
    #[arg(long, value_parser = one_of(&SHARDINGS, ShardedState::name), requires = "cluster")]
    pub(crate) sharding: Option<ShardedState>,
    /// The number of replicas that divide these tensors; further replicas have copies (HSDP)
    #[arg(long, value_name = "N", requires = "cluster")]
    pub(crate) shards: Option<u32>,
    /// Whether tokens travel to experts and back while another microbatch is computed
    #[arg(long, value_parser = one_of(&OVERLAP, switch), requires = "cluster")]
    pub(crate) expert_overlap: Option<bool>,
}

/// The stages of `--layout`.
#[derive(Debug, Clone)]
pub(crate) struct GivenStages(pub(crate) Vec<StageLetters>);

fn parse_letters(text: &str) -> Result<GivenStages, String> {
    parse_stage_letters(text).map(GivenStages).map_err(|error| error.to_string())
}

/// A value of an option with its help.
type Helped<T> = (T, &'static str);

const PRECISIONS: [Helped<Precision>; 5] = [
    (Precision::Half, "bfloat16"),
    (Precision::Fp8, "FP8 in linear layers, bf16 in the rest"),
    (Precision::Mxfp8, "FP8 with scales of 32 numbers in linear layers"),
    (Precision::Nvfp4, "4 bits with scales of 16 numbers in linear layers"),
    (Precision::Single, "single precision in all parts"),
];

const STACKS: [Helped<Stack>; 5] = [
    (Stack::Megatron, "Megatron Core"),
    (Stack::Torchtitan, "torchtitan"),
    (Stack::Automodel, "NeMo Automodel"),
    (Stack::OlmoCore, "OLMo-core"),
    (Stack::HaiLlm, "DeepSeek's HAI-LLM"),
];

const SWITCH: [Helped<bool>; 2] = [(true, "They do"), (false, "Each has all of it")];

const RECOMPUTES: [Helped<Recompute>; 3] = [
    (Recompute::None, "Nothing"),
    (Recompute::Selective, "Elementwise operations and every second product"),
    (Recompute::Full, "Whole blocks"),
];

const OVERLAP: [Helped<bool>; 2] = [(true, "They do"), (false, "Each rank waits for its tokens")];

fn switch(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}

const SHARDINGS: [Helped<ShardedState>; 4] = [
    (ShardedState::Nothing, "Nothing"),
    (ShardedState::Optimizer, "The state of the optimizer (ZeRO 1)"),
    (ShardedState::Gradients, "Gradients and the state of the optimizer (ZeRO 2)"),
    (ShardedState::Parameters, "Parameters, gradients and the state of the optimizer (ZeRO 3, FSDP)"),
];

/// Returns the parser of an option that has one of some values. `name` returns the name of a value.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    values: &'static [Helped<T>],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let possible = values.iter().map(move |&(value, help)| PossibleValue::new(name(value)).help(help));
    PossibleValuesParser::new(possible).try_map(move |given| {
        let value = values.iter().find(|(value, _)| name(*value) == given);
        value.map(|&(value, _)| value).ok_or("the parser knows no other names")
    })
}

/// Reads a goal such as `tokens=15.6T`.
fn parse_goal(text: &str) -> Result<u64, String> {
    let number =
        text.trim().strip_prefix("tokens=").ok_or("write the tokens of the training: tokens=15.6T")?;
    parse_count(number)
}

/// Reads a number such as `1024`, `15.6T` or `16Mi`, and rounds it to a whole one.
fn parse_count(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, f64); 8] = [
        ("ki", 1024.0),
        ("mi", 1_048_576.0),
        ("gi", 1_073_741_824.0),
        ("ti", 1_099_511_627_776.0),
        ("k", 1e3),
        ("m", 1e6),
        ("b", 1e9),
        ("t", 1e12),
    ];
    let value = parse_with_unit(text, &UNITS, 1.0..=1e18).map(|value| value.round() as u64);
    value.ok_or_else(|| "write a number of tokens such as 4000000, 16Mi, 4M, 300B or 15.6T".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_and_counts() {
        assert_eq!(parse_goal("tokens=15.6T"), Ok(15_600_000_000_000));
        assert_eq!(parse_count("16Mi"), Ok(16 << 20));
        assert_eq!(parse_count("1Gi"), Ok(1 << 30));
        assert_eq!(parse_count("0.5Ti"), Ok(1 << 39));
        assert_eq!(parse_count("4.1M"), Ok(4_100_000));
        assert_eq!(parse_count("300B"), Ok(300_000_000_000));
        assert!(["15.6T", "tokens=", "steps=3"].iter().all(|wrong| parse_goal(wrong).is_err()));
        assert!(["", "0", "-1", "nan", "4 million", "1e30"].iter().all(|wrong| parse_count(wrong).is_err()));
    }
}
