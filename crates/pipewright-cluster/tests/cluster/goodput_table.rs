//! The table of goodput against the rate of failures in `docs/cluster-plans.md` has the figures of the
//! simulation.

use std::fmt::Write;
use std::path::Path;

use pipewright_cluster::goodput::Faults;

/// The seconds of a step.
const STEP: f64 = 10.0;

/// The seconds in which the state of a model of 405 billion parameters, 12 bytes each, is written to the disk
/// by nodes of 8 GPUs, each with 1 GB/s.
fn write_time(gpus: f64) -> f64 {
    405e9 * 12.0 / (gpus / 8.0 * 1e9)
}

/// Returns the useful share in percent with checkpoints on the disk at the best interval.
fn on_disk(between_failures: f64, write: f64, restart: f64) -> f64 {
    let faults = Faults { between_failures, write, stall: write, restart };
    100.0 * faults.simulate(STEP, faults.best_steps(STEP), 42).useful
}

/// Returns the useful share in percent with a copy after each step, which is complete at the end of the next
/// one.
fn on_neighbour(between_failures: f64, restart: f64) -> f64 {
    let faults = Faults { between_failures, write: STEP, stall: 0.0, restart };
    100.0 * faults.simulate(STEP, 1, 42).useful
}

/// Returns a time in hours or minutes.
fn time(seconds: f64) -> String {
    if seconds < 3600.0 { format!("{:.1} min", seconds / 60.0) } else { format!("{:.1} h", seconds / 3600.0) }
}

#[test]
fn the_table_of_the_book_has_the_figures_of_the_simulation() {
    let mut table = String::new();
    for (gpus, name) in [(1024.0, "1,024"), (16_384.0, "16,384")] {
        for (hours, of_gpu) in [(50_700.0, "50,700 h"), (5000.0, "5,000 h"), (500.0, "500 h")] {
            let between = hours * 3600.0 / gpus;
            let [disk, near, quick] = [
                on_disk(between, write_time(gpus), 300.0),
                on_neighbour(between, 300.0),
                on_neighbour(between, 30.0),
            ];
            let between = time(between);
            writeln!(table, "| {name} | {of_gpu} | {between} | {disk:.1}% | {near:.1}% | {quick:.1}% |")
                .expect("a text grows");
        }
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cluster-plans.md");
    let page = std::fs::read_to_string(page).expect("the page");
    assert!(page.contains(&table), "the table should be:\n{table}");
}
