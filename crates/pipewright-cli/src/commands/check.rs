//! `pipewright check`: everything that can be checked without training, and a summary of what would run.

use std::fmt::Write;

use crate::arguments::RunArguments;
use crate::commands::prepare::{Prepared, prepare};
use crate::failure::Failure;
use crate::output;
use crate::run_folder;

/// Runs the command.
pub(crate) fn run(arguments: &RunArguments) -> Result<(), Failure> {
    let prepared = prepare(arguments)?;
    run_folder::probe(&prepared.settings.run.out).map_err(Failure::input)?;
    output::write(None, &summary(&prepared))
}

fn summary(prepared: &Prepared) -> String {
    let Prepared { settings, layers, program, partition, rows, .. } = prepared;
    let mut text = String::new();
    let mut line = |what: &str, words: String| {
        writeln!(text, "{what:9} {words}").expect("a string takes all text");
    };
    let parameters = |range: std::ops::Range<usize>| -> u64 {
        layers.layers[range].iter().map(|layer| layer.parameters).sum()
    };
    let count = layers.layers.len();
    line("model", format!("{count} layers, {} parameters", parameters(0..count)));
    let placement = program.placement();
    for (stage, range) in placement.all_stages().zip(partition.ranges()) {
        let (rank, first, last) = (placement.rank_of(stage), range.start, range.end - 1);
        let words = format!("on rank {rank}: layers {first} to {last}, {} parameters", parameters(range));
        line(&format!("stage {stage}"), words);
    }
    let (ranks, microbatches) = (program.ranks(), program.microbatches());
    let schedule = &settings.pipeline.schedule;
    line("schedule", format!("{schedule}: {ranks} ranks, {microbatches} microbatches, proved sound"));
    if settings.mesh.data_parallel > 1 {
        let replicas = settings.mesh.data_parallel;
        let holds = match settings.mesh.is_sharded() {
            true => format!("each holds 1/{replicas} of the parameters and of the optimizer's state"),
            false => "each holds all parameters".to_owned(),
        };
        line("mesh", format!("{replicas} replicas, {} ranks in all; {holds}", ranks * replicas));
    }
    let (needed, tokens) = (settings.pipeline.rows(), rows.tokens());
    let per_epoch = rows.rows() / needed;
    line(
        "data",
        format!("{tokens} tokens, {} rows, {per_epoch} steps of {needed} rows an epoch", rows.rows()),
    );
    line("run", format!("{} steps, results in {}", settings.run.steps, settings.run.out.display()));
    text
}
