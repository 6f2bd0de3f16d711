//! Tests of the tables and of the refusals.

use pipewright::device::{BackEnd, DeviceChoice};

use super::*;

/// Returns the plan of ranks that need as many bytes, on a machine that has `machine`.
fn plan(ranks: impl IntoIterator<Item = u64>, shape: RunShape, machine: Option<u64>) -> MemoryPlan {
    let rank = |parameters| HeldBytes { parameters, ..HeldBytes::default() };
    let ranks = ranks.into_iter().map(rank).collect();
    MemoryPlan::new(TrainingMemory::new(ranks, Vec::new()), shape, machine)
}

fn shape(is_local: bool, replicas: u32) -> RunShape {
    RunShape { replicas, tensor_ranks: 1, is_local }
}

#[test]
fn threads_of_one_machine_add_up_and_processes_do_not() {
    let on = |machine, is_local, replicas| {
        require_fit(&plan([40, 50], shape(is_local, replicas), machine)).map_err(|failure| {
            assert_eq!(failure.kind, ErrorKind::CheckFailed);
            failure.text()
        })
    };
    assert_eq!(on(Some(100), true, 1), Ok(()));
    assert_eq!(on(Some(100), false, 2), Ok(()));
    let words = on(Some(100), true, 2).expect_err("180 bytes in 100");
    assert!(
        words.contains("need 180 B, and this machine has 100 B, which is 80 B too little; rank 1"),
        "{words}"
    );
    assert!(on(Some(49), false, 1).is_err());
    assert_eq!(on(None, true, 2), Ok(()));
}

#[test]
fn what_replicas_share_counts_once() {
    let on = |is_local, replicas, machine| {
        let rank = HeldBytes { parameters: 40, ..HeldBytes::default() };
        let memory = TrainingMemory::new(vec![rank; 2], Vec::new()).with_shared(60, 0);
        MemoryPlan::new(memory, shape(is_local, replicas), Some(machine))
    };
    // 80 bytes of the first replica, and 20 of each further one.
    assert_eq!(on(true, 3, 120).shortage(), None);
    assert!(require_fit(&on(true, 3, 119)).is_err());
    assert_eq!(on(false, 3, 40).shortage(), None);
    let words = "base      the replicas hold the base of the adapters once, which takes 60 B";
    assert!(table(&on(true, 3, 120)).contains(words));
    for other in [on(true, 1, 120), on(false, 3, 120)] {
        assert!(!table(&other).contains("base "));
    }
}

#[test]
fn copies_in_memory_count() {
    let on = |machine| plan([40, 50], shape(true, 1), Some(machine)).with_copies(30);
    assert_eq!(on(120).shortage(), None);
    let words = require_fit(&on(119)).expect_err("120 bytes in 119").text();
    assert!(words.contains("need 120 B with 30 B of copies in memory (run.copy_every), and"), "{words}");
    assert!(table(&on(120)).contains("copies    copies of the state in memory take 30 B"));
}

#[test]
fn copies_of_ranks_on_devices_are_in_the_memory_of_the_machine() {
    let on = |machine| {
        let choices = ["cuda:0", "cuda:1"].map(|name| name.parse::<DeviceChoice>().expect("a device"));
        let plan = plan([10, 20], shape(true, 1), Some(machine)).with_copies(30);
        plan.on_devices(choices, |_| Some(45))
    };
    assert_eq!(on(30).shortage(), None);
    let words = require_fit(&on(29)).expect_err("30 bytes in 29").text();
    assert!(
        words.contains("the copies in memory (run.copy_every) need 30 B, and this machine has 29 B"),
        "{words}"
    );
}

#[test]
fn of_many_ranks_those_that_need_the_most_are_shown() {
    let table = table(&plan(0..100, shape(true, 1), Some(1 << 20)));
    assert!(table.contains("  99  ") && !table.contains("  83  "), "{table}");
    assert!(table.contains("these 16 of 100 ranks need the most"), "{table}");
}

/// Returns the plan of ranks on these devices. Rank `r` needs `10 (r + 1)` bytes, and each GPU has 45.
fn on_devices(names: &[&str], is_local: bool) -> MemoryPlan {
    let needs = (1..=names.len() as u64).map(|rank| 10 * rank);
    let choices = names.iter().map(|name| name.parse::<DeviceChoice>().expect("a device"));
    plan(needs, shape(is_local, 1), None).on_devices(choices, |device| match device.back_end {
        BackEnd::Cuda => Some(45),
        BackEnd::Flex => Some(1_000),
        _ => None,
    })
}

fn check_devices(names: &[&str], is_local: bool, expected: Option<&str>) {
    let failure = require_fit(&on_devices(names, is_local)).err().map(|failure| failure.text());
    match (failure, expected) {
        (None, None) => {}
        (Some(failure), Some(expected)) => assert!(failure.contains(expected), "{failure}"),
        (failure, expected) => panic!("{failure:?} instead of {expected:?}"),
    }
}

#[test]
fn ranks_on_a_device_share_its_memory() {
    check_devices(&["cuda:0", "cuda:1", "cuda:0"], true, None);
    // `cuda` is the first one, so ranks 0 and 3 share it.
    let expected = "`cuda:0` has 45 B of memory; its 2 ranks together need 50 B, which is 5 B too little; rank 3 needs \
                    the most, 40 B; use more devices";
    check_devices(&["cuda", "cuda:1", "flex", "cuda:0"], true, Some(expected));
}

#[test]
fn processes_may_be_on_several_machines() {
    check_devices(&["cuda"; 4], false, None);
    let expected = "; rank 4 needs 50 B, which is 5 B too little; use";
    check_devices(&["cuda"; 5], false, Some(expected));
}

#[test]
fn memory_that_is_not_known_is_not_compared() {
    let plan = on_devices(&["wgpu"; 9], true);
    assert_eq!(plan.shortage(), None);
    let expected =
        "`wgpu` has an amount of memory that its back end does not know; its 9 ranks together need 450 B";
    assert_eq!(device_balance(&plan.devices()[0]), expected);
}
