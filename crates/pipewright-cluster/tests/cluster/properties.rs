//! Properties of predictions for any sizes.

use pipewright_cluster::catalogue::{by_name, machines};
use pipewright_cluster::layout::Precision;
use pipewright_cluster::machine::Machine;
use pipewright_cluster::product::Product;
use proptest::prelude::*;

use crate::data::{on, predicted, published, run};

/// Checks that no published run is slower on a machine that is better in one respect.
fn check_never_slower(better: impl Fn(&mut Machine)) {
    for run in published().runs.iter().filter(|run| run.layout.microbatches() <= 64) {
        let mut changed = run.clone();
        better(&mut changed.machine);
        let (before, after) = (predicted(run).seconds, predicted(&changed).seconds);
        assert!(after <= before * (1.0 + 1e-9), "{}: {before} and {after}", run.model.name);
    }
}

#[test]
fn more_bandwidth_is_never_slower() {
    check_never_slower(|machine| machine.memory_bandwidth *= 1.5);
    check_never_slower(|machine| machine.node_bandwidth *= 1.5);
    check_never_slower(|machine| machine.network_bandwidth *= 1.5);
}

#[test]
fn a_higher_peak_is_never_slower() {
    check_never_slower(|machine| machine.bf16 = machine.bf16.map(|peak| peak * 1.5));
    check_never_slower(|machine| machine.fp8 = machine.fp8.map(|peak| peak * 1.5));
}

proptest! {
    /// With any shape, twice the rows take at most twice the time.
    #[test]
    fn a_larger_microbatch_never_has_less_efficient_products(
        rows in 1.0..1e5f64,
        columns in 1.0..1e5f64,
        inner in 1.0..1e5f64,
        growth in 1.0..4.0f64,
    ) {
        let (run, machine) = (run("llama2-7B", "H100"), by_name("h100").expect("a machine"));
        for precision in [Precision::Half, Precision::Fp8] {
            let product = Product { rows, columns, inner, output_bytes: 2.0 };
            let larger = Product { rows: rows * growth, ..product };
            let rate = |product: Product| product.operations() / product.seconds(&on(&run, &machine), precision);
            prop_assert!(rate(larger) >= rate(product) * (1.0 - 1e-9));
        }
    }
}

#[test]
fn no_product_exceeds_the_sustained_rate() {
    let run = run("llama2-7B", "H100");
    for machine in machines() {
        let product = Product { rows: 16_384.0, columns: 16_384.0, inner: 16_384.0, output_bytes: 2.0 };
        let rate = product.operations() / product.seconds(&on(&run, machine), Precision::Half);
        let share = rate / machine.product_rate(Precision::Half);
        assert!((0.95..1.0).contains(&share), "{}: {share}", machine.name);
    }
}
