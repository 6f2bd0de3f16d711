//! Losses and gradient norms of whole runs. Norms are clipped at 1, which most steps exceed.

use crate::reference::Step;
use crate::run::Run;
use crate::{DEVICE, devices};

/// Checks a run against PyTorch, and against one rank to the bit.
fn check(schedule: &str, ranks: u32) {
    let Some(devices) = devices(&[DEVICE]) else { return };
    let run = Run { schedule, ranks, ..Run::default() };
    let steps = run.check(&devices);
    let one_rank = Run { schedule: "1f1b", ranks: 1, ..run }.check(&devices);
    assert_eq!(steps, one_rank, "{schedule} on {ranks} ranks: the bits of one rank");
}

#[test]
fn all_steps_retrace_pytorch() {
    let Some(devices) = devices(&[DEVICE]) else { return };
    Run { steps: 12, ..Run::default() }.check(&devices);
}

#[test]
fn gpipe() {
    check("gpipe", 1);
    check("gpipe", 2);
    check("gpipe", 4);
}

#[test]
fn one_f_one_b() {
    check("1f1b", 2);
    check("1f1b", 4);
}

#[test]
fn interleaved() {
    check("interleaved1f1b", 1);
    check("interleaved1f1b", 2);
    check("interleaved1f1b", 4);
}

#[test]
fn zero_bubble() {
    check("zbvzerobubble", 1);
    check("zbvzerobubble", 2);
    check("zbvzerobubble", 4);
}

#[test]
fn dual_pipe() {
    check("dualpipev", 1);
    check("dualpipev", 2);
    check("dualpipev", 4);
}

#[test]
fn the_processor_and_a_device_train_together() {
    let Some(devices) = devices(&["flex", DEVICE]) else { return };
    let run = Run { ranks: 2, ..Run::default() };
    let first = run.check(&devices);
    assert_eq!(first, run.check(&devices), "the same bits in every run");
    Run { schedule: "zbvzerobubble", ..run }.check(&devices);
}

#[test]
fn tied_embeddings_on_two_devices() {
    let run = Run { model: "llama-tied-tiny", ranks: 2, ..Run::default() };
    for names in [[DEVICE, DEVICE], ["flex", DEVICE]] {
        let Some(devices) = devices(&names) else { return };
        run.check(&devices);
    }
}

#[test]
fn replicas_and_shards() {
    let close = |a: &[Step], b: &[Step]| {
        for (a, b) in a.iter().zip(b) {
            assert!((a.loss - b.loss).abs() <= 1e-6 * b.loss, "{} {}", a.loss, b.loss);
        }
    };
    let run = Run { ranks: 2, microbatches: 4, replicas: 2, ..Run::default() };
    for names in [&[DEVICE][..], &["flex", DEVICE]] {
        let Some(devices) = devices(names) else { return };
        let replicated = run.check(&devices);
        let sharded = Run { is_sharded: true, ..run }.check(&devices);
        assert_eq!(replicated, sharded, "the bits of whole replicas");
        close(&sharded, &Run { ranks: 1, ..Run::default() }.check(&devices));
    }
}
