//! Cuts a hybrid model in two by the costs of its description, and compares a step of 1F1B on two ranks with
//! the half of the work of one rank.
//!
//! Blocks of experts are ten times as heavy as the others, and two of the three are at the beginning. So the
//! cut is good only if the costs of all kinds of blocks are right relative to each other.
//!
//! If messages follow whole actions, a step of `m` microbatches on `p` ranks takes at least `(1 + (p - 1) /
//! m) W / p`, where `W` is the time of all computations on one rank. The second summand is the fill of the
//! pipeline. Two ranks share the memory and the clock rate of the machine, so the work is measured twice: on
//! one rank alone, and on as many one-rank pipelines as there are ranks, side by side. All runs alternate.
//! Times are without the optimizer, which follows the parameters and not the work.

use pipewright::pipeline::StepSummary;
use pipewright::transport::World;
use pipewright_models::hybrid::{HybridConfig, Pattern};
use pipewright_models::{InitialParameters, ModelConfig};
use pipewright_schedule::{Method, ModelDesc, Rank, partition};

use crate::harness::{Figures, Outcome};
use crate::model::{Bench, SEED, SEQUENCE, Setup, VOCABULARY, random_rows, side_by_side, without_update};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Steps that count; the first two do not.
    #[arg(long, default_value_t = 9)]
    steps: usize,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 8)]
    microbatches: u32,
    /// The blocks.
    #[arg(long, default_value = PATTERN)]
    pattern: String,
    /// Cuts the same number of layers for each rank instead.
    #[arg(long)]
    even: bool,
}

const RANKS: u32 = 2;
const PATTERN: &str = "AEMEAMDAMDAMDAMDE";

pub(crate) fn run(options: &Options) -> Outcome {
    let &Options { steps, microbatches, even, .. } = options;
    let model = ModelConfig::Hybrid(config(Pattern::new(&options.pattern)?));
    let method = if even { Method::Even } else { Method::Optimal };
    print_cut(&model.describe(SEQUENCE), &method)?;

    let rows = random_rows(microbatches, SEQUENCE);
    let start = |schedule, ranks| -> Outcome<Bench> {
        let setup = Setup { cut: &method, send_early: false, ..Setup::new(schedule, ranks, microbatches) };
        let initial = InitialParameters::Seed(SEED);
        Ok(Bench::of_model(World::local(ranks), &setup, model.clone(), initial)?.on_rows(&rows))
    };
    let mut pipeline = start("1f1b", RANKS)?;
    let mut singles = (0..RANKS).map(|_| start("gpipe", 1)).collect::<Result<Vec<_>, _>>()?;
    pipeline.steps(2, 0)?;
    side_by_side(&mut singles)?;

    let mut figures = Figures::default();
    for turn in 0..steps {
        let one = turn % singles.len();
        let alone = work(&singles[one].step()?);
        let step = pipeline.step()?;
        let beside = side_by_side(&mut singles)?;
        let beside = beside.iter().map(work).sum::<f64>() / beside.len() as f64;
        let over = |work| without_update(&step) / bound(work, RANKS, microbatches);
        figures.add("over (work of one rank alone / ranks + fill)", over(alone));
        figures.add("over (work of one-rank pipelines side by side / ranks + fill)", over(beside));
        let busy = (0..RANKS).map(|rank| step.timeline.busy(Rank::new(rank)));
        let (most, sum) = busy.fold((0.0, 0.0), |(most, sum), busy| (f64::max(most, busy), sum + busy));
        figures.add("the busiest rank over the mean of the ranks", most * f64::from(RANKS) / sum);
    }
    print!("a step on {RANKS} ranks\n{figures}");
    Ok(())
}

/// Prints the layers of each stage with their part of the whole cost.
fn print_cut(model: &ModelDesc, method: &Method) -> Outcome {
    let weights = model.weights();
    let all: u64 = weights.iter().sum();
    for range in partition(&weights, RANKS, method)?.ranges() {
        let cost: u64 = weights[range.clone()].iter().sum();
        let kinds: Vec<&str> = model.layers[range].iter().map(|layer| layer.kind.as_str()).collect();
        println!("{:.1}% of the cost: {}", 100.0 * cost as f64 / all as f64, kinds.join(" "));
    }
    Ok(())
}

/// Returns the time in which a one-rank pipeline computes.
fn work(step: &StepSummary) -> f64 {
    step.timeline.busy(Rank::new(0))
}

/// Returns the shortest time of `work` on these ranks, with the fill of the pipeline.
fn bound(work: f64, ranks: u32, microbatches: u32) -> f64 {
    let share = work / f64::from(ranks);
    share + f64::from(ranks - 1) * share / f64::from(microbatches)
}

/// Returns a model of these blocks.
fn config(pattern: Pattern) -> HybridConfig {
    HybridConfig {
        num_attention_heads: 4,
        mamba_num_heads: 4,
        mamba_head_dim: 64,
        ssm_state_size: 64,
        intermediate_size: 384,
        num_experts: 8,
        num_experts_per_tok: 2,
        moe_intermediate_size: 2144,
        ..HybridConfig::new(VOCABULARY, 256, pattern)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_ten_times_as_heavy_as_the_other_blocks() {
        let model = ModelConfig::Hybrid(config(Pattern::new("AMDE").expect("a pattern"))).describe(SEQUENCE);
        let weights = model.weights();
        for block in 1..4 {
            let ratio = weights[4] as f64 / weights[block] as f64;
            assert!((9.0..11.0).contains(&ratio), "{}: {ratio}", model.layers[block].kind);
        }
    }

    #[test]
    fn the_model_can_be_cut_in_halves() {
        let weights = ModelConfig::Hybrid(config(Pattern::new(PATTERN).expect("a pattern")))
            .describe(SEQUENCE)
            .weights();
        let cut = partition(&weights, RANKS, &Method::Optimal).expect("it has enough layers");
        let half = weights.iter().sum::<u64>() as f64 / 2.0;
        for range in cut.ranges() {
            let part = weights[range].iter().sum::<u64>() as f64 / half;
            assert!((0.98..1.02).contains(&part), "{part}");
        }
    }

    #[test]
    fn the_bound_has_the_fill() {
        assert_eq!(bound(8.0, 2, 4), 5.0);
        assert_eq!(bound(8.0, 1, 4), 8.0);
    }
}
