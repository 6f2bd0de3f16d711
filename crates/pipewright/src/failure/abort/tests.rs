//! Tests of the flag that stops all ranks, and of the notices of other processes.

use super::*;
use crate::failure::cause::Cause;
use crate::ids::WorldRank;

fn error(rank: u32) -> StepError {
    StepError {
        rank: WorldRank::new(rank),
        step: StepNumber::new(3),
        action: None,
        cause: Cause::Panic { message: "out of cheese".to_owned() },
    }
}

/// Returns the notice of another process whose attempt has failed.
fn notice(error: StepError, attempt: Attempt) -> FailureNotice {
    FailureNotice { error, attempt, stops_all: false, diverged: None }
}

#[test]
fn the_first_cause_wins() {
    let abort = Abort::default();
    abort.raise(error(2));
    abort.raise(error(1));
    assert_eq!(abort.first().map(|first| first.rank), Some(WorldRank::new(2)));
    abort.clear();
    assert!(!abort.is_raised() && abort.first().is_none());
}

#[test]
fn a_failure_stops_its_attempt_and_later_ones() {
    let abort = Abort::default();
    let (earlier, later) = (Attempt::new(4), Attempt::new(5));
    abort.begin_step(earlier);
    abort.begin_step(later);
    abort.raise_from(later, error(0));
    assert!(abort.is_raised() && abort.is_raised_in(later) && !abort.is_raised_in(earlier));
    assert!(abort.first_in(earlier).is_none());
    abort.clear_in(earlier);
    assert!(abort.is_raised_in(later), "the earlier attempt has not failed");
    // The earlier one fails too.
    abort.raise_from(earlier, error(1));
    abort.raise_from(later, error(2));
    assert!(abort.is_raised_in(earlier));
    assert_eq!(abort.first().map(|first| first.rank), Some(WorldRank::new(1)));
    abort.begin_step(earlier);
    abort.clear_in(earlier);
    assert!(!abort.is_raised());
    abort.raise_from_remote(notice(error(1), later));
    assert!(!abort.is_raised(), "it has begun, and is over");
}

#[test]
fn a_failure_of_the_process_is_the_cause_in_attempts_that_have_not_failed() {
    let abort = Abort::default();
    let causes = || [4, 5].map(|attempt| abort.first_in(Attempt::new(attempt)).map(|first| first.rank));
    abort.raise_from(Attempt::new(5), error(0));
    assert_eq!(causes(), [None, Some(WorldRank::new(0))]);
    abort.raise(error(1));
    abort.raise(error(2));
    assert!(abort.is_raised_in(Attempt::new(0)));
    // A rank stops because of it.
    abort.raise_from(Attempt::new(4), error(3));
    assert_eq!(causes(), [Some(WorldRank::new(1)), Some(WorldRank::new(0))]);
    abort.clear_in(Attempt::new(4));
    assert!(!abort.is_raised());
}

/// Another process that has begun the next attempt may be the first to miss a third one, or cannot continue.
#[test]
fn a_failure_of_another_whole_process_stops_the_earlier_attempt_too() {
    let attempts = [4, 5].map(Attempt::new);
    for begun in [&attempts[..1], &attempts] {
        let [own, other] = [Abort::default(), Abort::default()];
        let notified = own.clone();
        other.on_raise(move |notice| notified.raise_from_remote(notice));
        begun.iter().for_each(|&attempt| own.begin_step(attempt));
        other.begin_step(attempts[1]);
        other.raise(error(1));
        let causes = attempts.map(|attempt| own.first_in(attempt).map(|first| first.rank));
        assert_eq!(causes, [Some(WorldRank::new(1)); 2], "{begun:?}");
        assert!(own.is_raised_in(attempts[0]), "{begun:?}");
    }
}

/// The notice arrives when this process has handled the failure of the same attempt, and waits in the next
/// one.
#[test]
fn a_failure_of_another_whole_process_stops_the_attempt_after_one_that_is_over() {
    let [own, other] = [Abort::default(), Abort::default()];
    let attempts = [4, 5].map(Attempt::new);
    [&own, &other].into_iter().for_each(|abort| abort.begin_step(attempts[0]));
    own.raise_from(attempts[0], error(0));
    own.clear_in(attempts[0]);
    own.begin_step(attempts[1]);
    let notified = own.clone();
    other.on_raise(move |notice| notified.raise_from_remote(notice));
    other.raise(error(1));
    assert_eq!(own.first_in(attempts[1]).map(|first| first.rank), Some(WorldRank::new(1)));
    assert!(own.is_raised_in(attempts[1]));
}

/// A step fails on a rank, and then the transport of its process. The other process may know the first
/// failure, or not: its notice was lost.
#[test]
fn a_failure_of_a_whole_process_is_known_after_one_of_the_same_attempt() {
    let attempts = [4, 5].map(Attempt::new);
    let ranks = |abort: &Abort| attempts.map(|attempt| abort.first_in(attempt).map(|first| first.rank));
    let [first, whole] = [0, 1].map(WorldRank::new);
    for is_first_known in [true, false] {
        let [own, other] = [Abort::default(), Abort::default()];
        let notified = own.clone();
        [&own, &other].into_iter().for_each(|abort| abort.begin_step(attempts[0]));
        other.raise_from(attempts[0], error(0));
        if is_first_known {
            own.raise_from_remote(notice(error(0), attempts[0]));
        }
        other.on_raise(move |notice| notified.raise_from_remote(notice));
        other.raise(error(1));
        for abort in [&own, &other] {
            assert_eq!(ranks(abort), [Some(first); 2], "{is_first_known}");
            let cause = abort.clear_in(attempts[0]).map(|cause| cause.rank);
            assert_eq!(cause, Some(first), "{is_first_known}");
            abort.begin_step(attempts[1]);
            assert!(abort.is_raised_in(attempts[1]), "{is_first_known}");
            assert_eq!(ranks(abort)[1], Some(whole), "{is_first_known}");
            abort.clear_in(attempts[1]);
            assert!(!abort.is_raised(), "{is_first_known}");
        }
    }
}

/// Whether a failure is this process's own or another's makes no difference to which one is kept.
#[test]
fn the_failure_of_the_earlier_attempt_wins_whoever_reports_it() {
    for (is_first_own, is_second_own) in [(false, false), (false, true), (true, false), (true, true)] {
        let abort = Abort::default();
        [4, 5].into_iter().for_each(|attempt| abort.begin_step(Attempt::new(attempt)));
        let raise = |attempt, rank, is_own: bool| {
            let attempt = Attempt::new(attempt);
            if is_own {
                abort.raise_from(attempt, error(rank));
            } else {
                abort.raise_from_remote(notice(error(rank), attempt));
            }
        };
        raise(5, 0, is_first_own);
        raise(4, 1, is_second_own);
        assert_eq!(abort.first_in(Attempt::new(4)).map(|first| first.rank), Some(WorldRank::new(1)));
    }
}

#[test]
fn a_reported_failure_counts_for_its_own_attempt() {
    let notice = |step| notice(StepError { step: StepNumber::new(step), ..error(1) }, Attempt::new(step));
    let abort = Abort::default();
    abort.begin_step(Attempt::new(2));
    abort.raise_from_remote(notice(3));
    assert!(!abort.is_raised(), "it has not begun here");
    abort.raise_from_remote(notice(2));
    assert!(abort.is_raised());
    abort.clear();
    abort.raise_from_remote(notice(2));
    assert!(!abort.is_raised(), "it is over here");
    abort.begin_step(Attempt::new(3));
    assert_eq!(abort.first().map(|first| first.step), Some(StepNumber::new(3)));
}

#[test]
fn work_of_an_attempt_that_is_over_raises_nothing() {
    let abort = Abort::default();
    abort.begin_step(Attempt::new(2));
    abort.raise_in(Attempt::new(2), &error(1));
    assert!(abort.is_raised());
    abort.clear();
    abort.raise_in(Attempt::new(2), &error(1));
    assert!(!abort.is_raised(), "its failure was handled");
    abort.begin_step(Attempt::new(4));
    abort.raise_in(Attempt::new(3), &error(1));
    assert!(!abort.is_raised(), "a later attempt has begun");
    abort.begin_next(Attempt::new(5), Attempt::new(4));
    abort.raise_in(Attempt::new(4), &error(1));
    assert!(abort.is_raised_in(Attempt::new(4)), "both attempts run");
}

#[test]
fn ranks_that_have_updated_notify_those_that_have_not() {
    let [own, other] = [Abort::default(), Abort::default()];
    let notified = own.clone();
    other.on_raise(move |notice| notified.raise_from_remote(notice));
    for abort in [&own, &other] {
        abort.begin_step(Attempt::new(7));
    }
    // This process fails first. A later notice says that the other one had updated.
    own.raise(error(1));
    own.clear();
    let diverged = |abort: &Abort| abort.diverged().map(|diverged| (diverged.step, diverged.first.rank));
    assert_eq!(diverged(&own), None);
    other.diverge(StepNumber::new(3), &error(1));
    let expected = Some((StepNumber::new(3), WorldRank::new(1)));
    assert_eq!([&own, &other].map(diverged), [expected; 2]);
    assert!(!own.is_raised(), "the attempt is over");
    // One that has begun meanwhile cannot end.
    own.begin_step(Attempt::new(8));
    // A later failure is not the cause.
    other.diverge(StepNumber::new(4), &error(2));
    assert!(own.is_raised());
    assert_eq!([&own, &other].map(diverged), [expected; 2]);
}
