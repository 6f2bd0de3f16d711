//! [`ReturningHosts`]: asks the hosts that a run does not use whether they answer, while the processes run.
//!
//! A question runs on a thread of its own and has a deadline, so a host that does not answer delays nothing.
//! Nodes that have left the allocation of Slurm join it again first.

use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::launch::answer::ask;
use crate::launch::attempt::Stop;
use crate::launch::hosts::Host;
use crate::launch::starter::Starter;
use pipewright_run::fault::Start;

/// A question to hosts.
pub(super) struct Question {
    pub(super) starter: Starter,
    pub(super) hosts: Vec<Host>,
    /// The folder of the run, which the hosts must see.
    pub(super) folder: PathBuf,
    /// The start of the processes that run. Hosts that were away may have processes of earlier ones.
    pub(super) start: Start,
    /// The longest time of an answer.
    pub(super) patience: Duration,
}

/// The questions during one attempt.
pub(super) struct ReturningHosts {
    /// The time between two questions.
    pause: Duration,
    /// When the next question is due.
    next: Instant,
    asked: Option<Asked>,
}

/// A question that is under way.
struct Asked {
    stop: Stop,
    thread: JoinHandle<Answering>,
}

/// The result of a question.
pub(super) struct Answering {
    /// The hosts that answer.
    pub(super) hosts: Vec<Host>,
    /// Words about hosts that Slurm does not let take part again.
    pub(super) refusal: Option<String>,
}

impl ReturningHosts {
    /// Returns the questions. The first one is due after a `pause`.
    pub(super) fn new(pause: Duration) -> Self {
        Self { pause, next: Instant::now() + pause, asked: None }
    }

    /// Begins the next question if it is due. Returns its result once it is over.
    pub(super) fn poll(&mut self, question: impl FnOnce() -> Question) -> Option<Answering> {
        if let Some(asked) = self.asked.take_if(|asked| asked.thread.is_finished()) {
            self.next = Instant::now() + self.pause;
            // A question that panicked has no answer.
            return asked.thread.join().ok();
        }
        if self.asked.is_none() && Instant::now() >= self.next {
            let (stop, question) = (Stop::default(), question());
            let thread_stop = stop.clone();
            let thread = std::thread::spawn(move || question.answering(&thread_stop));
            self.asked = Some(Asked { stop, thread });
        }
        None
    }
}

impl Drop for ReturningHosts {
    fn drop(&mut self) {
        if let Some(Asked { stop, thread }) = self.asked.take() {
            stop.request();
            // The commands of the question end within one look at them, except those that hand a node over.
            let _ = thread.join();
        }
    }
}

impl Question {
    /// Asks the hosts.
    fn answering(self, stop: &Stop) -> Answering {
        let Self { starter, hosts, folder, start, patience } = self;
        let refusal = starter.rejoin(&hosts, || stop.is_asked()).err();
        // A folder that takes no file ends the run by itself.
        let answers = ask(&starter, &hosts, (&folder, &start), patience, stop).unwrap_or_default();
        let answering = hosts.into_iter().zip(answers).filter(|(_, answer)| answer.is_ok());
        Answering { hosts: answering.map(|(host, _)| host).collect(), refusal }
    }
}
