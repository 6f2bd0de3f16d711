//! Predictions against the second file of published runs: experts, sharded parameters, long sequences, fine-tuning and
//! measured memory.

use std::collections::BTreeMap;
use std::ops::Add;

use pipewright_cluster::accuracy::{Accuracy, KindErrors, kind_of, kinds};
use pipewright_cluster::catalogue::by_name;
use pipewright_cluster::implementation::{Optimizer, Stack};
use pipewright_cluster::layout::{Layout, Modules, Recompute};
use pipewright_cluster::machine::Machine;
use pipewright_cluster::memory::{Parameters, block_activations, block_parameters, table_parameters};
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::predict::predict;
use pipewright_cluster::published::{Published, read};
use pipewright_cluster::setting::Setting;

use crate::comparison::{Comparison, compare};
use crate::data::{RUNS, predicted, run};

fn published() -> Published {
    read(include_str!("runs2.toml")).expect("the second file of published runs")
}

pub(crate) fn comparison() -> Comparison {
    compare(&published()).expect("predictions")
}

#[test]
fn all_keys_are_used() {
    assert_eq!(published().remarks, Vec::<String>::new());
    assert_eq!(published().runs.len(), 41);
}

#[test]
fn errors_stay_within_bounds() {
    let comparison = comparison();
    let table = comparison.to_markdown();
    assert!(comparison.mean_error <= 0.05, "{table}");
    assert!(comparison.largest_error <= 0.2, "{table}");
    assert!(comparison.groups["moe-megatron"].mean <= 0.08, "{table}");
    assert!(comparison.mean_memory_error <= 0.08, "{table}");
}

#[test]
fn no_published_run_is_refused_for_memory() {
    for row in comparison().rows {
        assert!(row.fits, "{}, {}: {} GiB", row.model, row.source, row.predicted_memory_gib);
    }
}

/// The table of errors by kind, which plans cite.
#[test]
fn the_table_of_errors_is_up_to_date() {
    let mut found: Vec<(KindErrors, Vec<f64>)> = Vec::new();
    for file in [RUNS, include_str!("runs2.toml")] {
        let published = read(file).expect("published runs");
        for (run, row) in published.runs.iter().zip(compare(&published).expect("predictions").rows) {
            let stack = run.layout.implementation.stack.name().to_owned();
            let (machine, kind) =
                (run.machine.name.clone(), kind_of(&run.model, run.layout.sequence).to_owned());
            let is_same = |(judged, _): &&mut (KindErrors, Vec<f64>)| {
                (&judged.stack, &judged.machine, &judged.kind) == (&stack, &machine, &kind)
            };
            match found.iter_mut().find(is_same) {
                Some((_, errors)) => errors.push(row.error.abs()),
                None => found.push((
                    KindErrors { stack, machine, kind, runs: 0, mean: 0.0, largest: 0.0 },
                    vec![row.error.abs()],
                )),
            }
        }
    }
    let three_digits = |error: f64| (error * 1000.0).round() / 1000.0;
    let expected: Vec<KindErrors> = found
        .into_iter()
        .map(|(judged, errors)| KindErrors {
            runs: errors.len(),
            mean: three_digits(errors.iter().sum::<f64>() / errors.len() as f64),
            largest: three_digits(errors.iter().copied().fold(0.0, f64::max)),
            ..judged
        })
        .collect();
    if std::env::var_os("PIPEWRIGHT_WRITE_PAGES").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/errors_by_kind.toml");
        let text = std::fs::read_to_string(path).expect("the table");
        let head: String =
            text.lines().take_while(|line| line.starts_with('#')).map(|line| format!("{line}\n")).collect();
        let rows = BTreeMap::from([("kinds", &expected)]);
        let rows = toml::to_string(&rows).expect("a table");
        std::fs::write(path, format!("{head}\n{rows}")).expect("a file");
        return;
    }
    assert_eq!(kinds(), expected, "write it anew with PIPEWRIGHT_WRITE_PAGES=1");
}

#[test]
fn kinds_with_and_without_runs_say_how_well_they_were_judged() {
    let run = run("llama3-70B", "H100 80");
    let on = |machine: &str| by_name(machine).expect("a machine");
    let text = |machine: &Machine| {
        Accuracy::of(&Setting { model: &run.model, layout: &run.layout, machine }).to_string()
    };
    let own = text(&run.machine);
    assert!(own.starts_with("dense, H100 80 GB SXM, megatron: 9 published runs, mean error "), "{own}");
    let other = text(&on("mi300x"));
    assert!(other.starts_with("dense, other machines, megatron: "), "{other}");
    let mut unknown = run.clone();
    unknown.layout.implementation.stack = Stack::HaiLlm;
    let accuracy =
        Accuracy::of(&Setting { model: &unknown.model, layout: &unknown.layout, machine: &run.machine });
    assert_eq!(
        (accuracy.to_string().as_str(), accuracy.mean),
        ("no published run of this kind (dense, hai-llm) was compared: expect an error of 20% or more", 0.2)
    );
}

/// Per parameter, Muon has one moment less and products that make updates orthogonal.
#[test]
fn muon_needs_less_memory_and_more_time() {
    let run = run("llama3-70B", "H100 80");
    let with = |optimizer: Optimizer| {
        let mut run = run.clone();
        run.layout.implementation.optimizer = optimizer;
        predicted(&run)
    };
    let (adam, muon) = (with(Optimizer::Adam), with(Optimizer::Muon));
    let (model, layout) = (&run.model, &run.layout);
    // All blocks are alike.
    let of_rank: usize = adam.blocks.iter().step_by(layout.pipeline as usize).sum();
    let blocks = model.blocks[..of_rank].iter().map(|block| block_parameters(block, model, layout));
    let blocks = blocks.fold(Parameters::default(), Add::add);
    let tables = blocks.tables + table_parameters(model, layout);
    let expected = (8.0 * blocks.matrices + 12.0 * tables) / (12.0 * (blocks.matrices + tables));
    let found = muon.memory[0].optimizer / adam.memory[0].optimizer;
    assert!((found - expected).abs() < 1e-9, "{found} and {expected}");
    assert!(muon.optimizer > 3.0 * adam.optimizer, "{} and {}", muon.optimizer, adam.optimizer);
}

/// Two runs of the schedule in a step fill and drain the pipeline twice.
#[test]
fn a_pipeline_that_empties_within_a_step_waits_longer() {
    let mut run = run("llama3-70B", "H100 80");
    let once = predicted(&run);
    run.layout.pass_microbatches = Some(run.layout.step_microbatches() / 2);
    let twice = predicted(&run);
    assert!((twice.bubble / once.bubble - 2.0).abs() < 0.1, "{} and {}", twice.bubble, once.bubble);
}

/// Activations of half of the blocks leave the GPU, and a slow link to the host takes longer than the forward.
#[test]
fn activations_on_the_host_free_memory_and_wait_for_the_link() {
    let mut run = run("llama3-8B", "H100 96");
    run.layout.recompute = Recompute::None;
    let own = predicted(&run);
    run.layout.offload_layers = 16;
    let offloaded = predicted(&run);
    assert!((offloaded.memory[0].activations / own.memory[0].activations - 0.5).abs() < 0.01);
    run.machine.host_bandwidth = Some(1e9);
    assert!(predicted(&run).parts.offload > 1.0);
    run.machine.host_bandwidth = None;
    let setting = Setting { model: &run.model, layout: &run.layout, machine: &run.machine };
    let error = predict(&setting, &mut Programs::default()).expect_err("an error").to_string();
    assert!(error.contains("has no `host_gb_per_s`; add it to the machine"), "{error}");
}

#[test]
fn some_recomputed_blocks_are_between_none_and_all() {
    let mut run = run("llama3-8B", "H100 96");
    let mut at = |recompute: Recompute, layers: Option<u32>| {
        (run.layout.recompute, run.layout.recompute_layers) = (recompute, layers);
        let predicted = predicted(&run);
        (predicted.memory[0].activations, predicted.seconds)
    };
    let (none, half, all) =
        (at(Recompute::None, None), at(Recompute::Full, Some(16)), at(Recompute::Full, None));
    assert!((half.0 / (none.0 + all.0) - 0.5).abs() < 1e-6, "{none:?} {half:?} {all:?}");
    assert!(none.1 < half.1 && half.1 < all.1, "{none:?} {half:?} {all:?}");
}

/// Latent attention makes queries, keys and values again from latent vectors.
#[test]
fn recomputed_modules_free_their_tensors() {
    let published = published();
    let run = published.runs.iter().find(|run| run.model.name == "deepseek-v3").expect("a run");
    let kept = |modules: Modules| {
        let recompute = Recompute::Modules(modules);
        let layout = Layout { recompute, ..run.layout.clone() };
        block_activations(run.model.blocks.last().expect("a block"), &run.model, &layout)
    };
    let mut before = kept(Modules::default());
    let mut all = Modules::default();
    for (name, module) in Modules::NAMES.into_iter().filter(|(name, _)| !["core_attn", "mlp"].contains(name))
    {
        all = all.with(module);
        let after = kept(all);
        assert!(after < before || name == "shared_experts", "{name}: {before} {after}");
        before = after;
    }
}
