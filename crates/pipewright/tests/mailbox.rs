//! The local transport's mailbox under the thread interleavings of a model checker: this test compiles the
//! mailbox's file a second time, with the checker's locks.
//!
//! A thread that sleeps for ever is a deadlock to the checker, which has no clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shuttle::sync::atomic::{AtomicBool, Ordering};
use shuttle::{check_pct, check_random, thread};

mod sync {
    pub(super) use shuttle::sync::{Condvar, Mutex, MutexGuard};
    pub(super) use shuttle::thread::yield_now;
    pub(super) use std::sync::PoisonError;

    /// Few, so that the checker often reaches the code around parking.
    pub(super) const YIELDS: u32 = 1;
}

#[path = "../src/transport/mailbox.rs"]
mod mailbox;

use mailbox::{Mailbox, Woken};

const ORDERS: usize = 2_000;

/// Tries many interleavings: uniformly random ones, and ones with few preemptions at critical points.
fn check(run: impl Fn() + Send + Sync + Clone + 'static) {
    check_random(run.clone(), ORDERS);
    check_pct(run, ORDERS, 3);
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// Returns whether a rank has failed. The checker switches threads before its own operations, never after
/// them; a yield adds a switch between reading the flag and acting on it.
fn is_raised(failed: &AtomicBool) -> bool {
    let is_raised = failed.load(Ordering::Acquire);
    thread::sleep(Duration::ZERO);
    is_raised
}

/// Takes `count` messages, as a rank does.
fn receive(mailbox: &Mailbox<u32>, count: usize) -> Vec<u32> {
    let (mut all, mut taken) = (Vec::new(), Vec::new());
    while all.len() < count {
        assert_eq!(mailbox.wait(later(), || false), Woken::Arrived);
        mailbox.take_into(&mut taken);
        all.append(&mut taken);
    }
    all
}

#[test]
fn no_message_and_no_wake_up_is_lost() {
    check(|| {
        let mailbox = Arc::new(Mailbox::default());
        let senders: Vec<_> = (0..3u32)
            .map(|sender| {
                let mailbox = mailbox.clone();
                thread::spawn(move || (0..2).for_each(|number| mailbox.deliver(sender * 2 + number)))
            })
            .collect();
        let mut found = receive(&mailbox, 6);
        senders.into_iter().for_each(|sender| sender.join().expect("it sends"));
        for sender in 0..3 {
            let of_sender: Vec<u32> = found.iter().copied().filter(|message| message / 2 == sender).collect();
            assert_eq!(of_sender, [sender * 2, sender * 2 + 1], "a sender's messages keep their order");
        }
        found.sort_unstable();
        assert_eq!(found, [0, 1, 2, 3, 4, 5]);
    });
}

/// A rank waits until a message that it sent has left, as it does for `WAIT_SEND`: it reads a state that
/// another thread changes before it nudges.
#[test]
fn no_nudge_is_lost() {
    check(|| {
        let mailbox = Arc::new(Mailbox::<u32>::default());
        let has_left = Arc::new(AtomicBool::new(false));
        let (to, left) = (mailbox.clone(), has_left.clone());
        let sender = thread::spawn(move || {
            left.store(true, Ordering::Release);
            to.nudge();
        });
        while !is_raised(&has_left) {
            assert_eq!(mailbox.wait(later(), || false), Woken::Arrived);
        }
        sender.join().expect("it sends");
    });
}

/// Two ranks wait and a third fails: it raises the flag and wakes both with `wake`.
fn abort(wake: fn(&Mailbox<u32>)) {
    let mailboxes: Arc<[Mailbox<u32>; 2]> = Arc::default();
    let failed = Arc::new(AtomicBool::new(false));
    let waiting: Vec<_> = [0, 1]
        .map(|rank| {
            let (mailboxes, failed) = (mailboxes.clone(), failed.clone());
            thread::spawn(move || mailboxes[rank].wait(later(), || is_raised(&failed)))
        })
        .into_iter()
        .collect();
    failed.store(true, Ordering::Release);
    mailboxes.iter().for_each(wake);
    for rank in waiting {
        assert_eq!(rank.join().expect("it wakes"), Woken::Stopped);
    }
}

#[test]
fn an_abort_wakes_everybody() {
    check(|| abort(Mailbox::wake));
}

/// The checker finds a missing lock: without it, a rank that has checked the queue but is not yet asleep
/// misses the signal.
#[test]
#[should_panic(expected = "deadlock")]
fn without_the_lock_a_wake_up_is_lost() {
    check(|| abort(Mailbox::signal));
}

#[test]
fn an_abort_comes_before_messages() {
    check(|| {
        let mailbox = Arc::new(Mailbox::default());
        let failed = Arc::new(AtomicBool::new(false));
        let (to, flag) = (mailbox.clone(), failed.clone());
        let failing = thread::spawn(move || {
            to.deliver(1u32);
            flag.store(true, Ordering::Release);
            to.wake();
        });
        // A rank that takes the messages and waits again must still learn of the failure.
        let mut taken = Vec::new();
        while mailbox.wait(later(), || is_raised(&failed)) == Woken::Arrived {
            mailbox.take_into(&mut taken);
            taken.clear();
        }
        failing.join().expect("it fails");
        assert!(failed.load(Ordering::Acquire));
    });
}
