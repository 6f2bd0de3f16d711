//! The times of exchanges of tokens: rows that are under way, and waits for a replica that has not sent its
//! rows yet.

use std::thread;
use std::time::Duration;

use pipewright::message::Tag;
use pipewright::transport::World;
use pipewright_schedule::{Rank, Scope};

use super::expert_overlaps::{Moment, config, delays, launch, take_delivered_step};
use super::model::{MICROBATCHES, sizes, take_step};

/// One replica sleeps at the end of each forward and at the beginning of each backward, for long enough that the load of the
/// machine matters little.
#[test]
fn a_wait_for_a_slow_replica_is_no_exchange() {
    let (sizes, pause) = (sizes(1, 2, 1), Duration::from_millis(100));
    let sleeps = move |moment: Moment| {
        if moment.replica == 1 {
            thread::sleep(pause);
        }
    };
    let mut pipeline = launch(World::local(sizes.data), sizes, &config(sizes, 2), sleeps);
    let summary = take_step(&mut pipeline, 0).expect("a step");
    let [other, slow] = summary.expert_exchange[..] else { panic!("two replicas: {summary:?}") };
    // The rank has two stages.
    let slept = pause * 2 * 2 * (MICROBATCHES / sizes.data);
    assert!(other.waited > slept / 2, "{other:?}, it slept {slept:?}");
    assert!(other.exposed < other.waited / 2, "{other:?}");
    assert!(slow.waited < other.waited / 2, "{slow:?} {other:?}");
}

#[test]
fn a_wait_for_rows_that_travel_is_a_part_of_the_exchange() {
    let (sizes, transit) = (sizes(1, 2, 1), Duration::from_millis(8));
    let delays = delays(transit, |tag| matches!(tag, Tag::ExpertGroup { .. }));
    let summary = take_delivered_step(sizes, &config(sizes, 2), delays);
    for (rank, exchange) in (0..sizes.data).map(Rank::new).zip(&summary.expert_exchange) {
        let scopes = summary.timeline.scopes_of(rank).iter();
        let exchanges = scopes.filter(|scope: &&Scope| scope.is_exchange()).count() as u32;
        // The rows of both halves of an overlap may travel at the same time, and those of two exchanges of a
        // half, because the other replica may have all rows of the first one already.
        assert!(exchanges > 0 && exchange.total >= transit * exchanges / 4, "{exchanges}: {exchange:?}");
        // One half computes while the rows of the other one travel. On a busy machine it may take longer than
        // most of them.
        assert!(!exchange.exposed.is_zero() && exchange.exposed < exchange.total, "{exchange:?}");
    }
}
