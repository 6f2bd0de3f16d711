//! Plans a hybrid model whose ends are as heavy as its blocks, and compares its steps with the lower bound of
//! all plans with as many head parts.
//!
//! The head has a large vocabulary, and further predictions have a block each. With `--tied`, the head uses
//! the table of the embedding. The bench measures the layers with as many ranks at once as the run has, and
//! plans twice: with the head in one part, as a layer that no cut goes through, and with the best of four
//! numbers of parts: 1, and 1, 2 and 4 times the number of ranks. It then trains by the second plan, in turn
//! with a measurement of the same layers. The bound is the lower bound of all plans with as many head parts
//! for these measured layers ([`PlanReport::lower_bound_s`]); both times are with the optimizer.

use pipewright_models::hybrid::{HybridConfig, Pattern};
use pipewright_models::{CutModel, ModelConfig};
use pipewright_schedule::plan::{PlanReport, PlanRequest, plan};

use crate::harness::{Outcome, Spread};
use crate::model::VOCABULARY;
use crate::predicted_run::{InTurn, Run, in_turn, link};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Steps that count.
    #[arg(long, default_value_t = 21)]
    steps: usize,
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 16)]
    microbatches: u32,
    /// Further predictions; 0: none.
    #[arg(long, default_value_t = 1)]
    depth: usize,
    /// The head uses the table of the embedding.
    #[arg(long)]
    tied: bool,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let &Options { steps, ranks, microbatches, .. } = options;
    let model = CutModel::from(ModelConfig::Hybrid(config(options)));
    let link = link()?;
    let InTurn { profile, .. } = in_turn(&model, link, ranks, &[], steps)?;
    let request = |head_parts| PlanRequest {
        ranks,
        microbatches,
        data_parallel: Some(1),
        larger_microbatches: false,
        head_parts,
        ..PlanRequest::default()
    };
    let whole = plan(&profile, &request(vec![1]), &mut || true)?;
    print_plan("head in one part", &whole);
    let parts = vec![1, ranks, 2 * ranks, 4 * ranks];
    let report = plan(&profile, &request(parts), &mut || true)?;
    print_plan("head in parts", &report);

    let best = &report.plans[0];
    let model = model.with_parts(best.head_parts)?;
    let planned = Run::of_plan(best);
    let InTurn { profile, taken } = in_turn(&model, link, ranks, &[&planned], steps)?;
    let bound = plan(&profile, &request(vec![best.head_parts]), &mut || true)?.lower_bound_s;
    let predicted = planned.predicted(&model, &profile)?.step;
    let over =
        |seconds: f64| Spread::new(taken[0].iter().map(|step| step.wall.as_secs_f64() / seconds).collect());
    println!(
        "a step on {ranks} ranks over the bound of all plans with {} head parts: {}",
        best.head_parts,
        over(bound)
    );
    println!("a step on {ranks} ranks over the prediction of its plan: {}", over(predicted));
    Ok(())
}

/// Prints the best plan of a report.
fn print_plan(what: &str, report: &PlanReport) {
    let best = &report.plans[0];
    println!(
        "{what}: {} with {} parts, first layers {:?}, {:.1} ms, {:.1}% bubble, within {:.1}% of the best possible",
        best.name,
        best.head_parts,
        best.boundaries,
        best.step_s * 1e3,
        best.bubble_fraction * 100.0,
        report.gap() * 100.0
    );
}

/// Returns a model of twelve blocks whose head is as heavy as all of them.
fn config(options: &Options) -> HybridConfig {
    HybridConfig {
        num_attention_heads: 4,
        mamba_num_heads: 4,
        mamba_head_dim: 64,
        ssm_state_size: 32,
        intermediate_size: 704,
        tie_word_embeddings: options.tied,
        mtp_loss_weight: if options.depth > 0 { 0.3 } else { 0.0 },
        mtp_depth: options.depth.max(1),
        ..HybridConfig::new(
            64 * VOCABULARY,
            256,
            Pattern::new("ADMDADMDADMD").expect("its letters are known"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SEQUENCE;

    #[test]
    fn the_head_is_as_heavy_as_all_blocks() {
        let options = Options { steps: 1, ranks: 2, microbatches: 1, depth: 0, tied: false };
        let weights = ModelConfig::Hybrid(config(&options)).describe(SEQUENCE).weights();
        let [_, blocks @ .., head] = weights.as_slice() else { panic!("a model has ends") };
        let ratio = *head as f64 / blocks.iter().sum::<u64>() as f64;
        assert!((0.5..2.0).contains(&ratio), "{ratio}");
    }
}
