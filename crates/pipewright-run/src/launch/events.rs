//! The events that a launch reacts to, and its decisions.

use std::time::Duration;

use crate::error::RunError;
use crate::launch::answer::{Answers, Returned};
use crate::launch::ended::Ended;
use crate::launch::hosts::Host;
use crate::launch::watch::{Order, Seen};
use crate::recovery::{Restart, SlowRank};

/// The circumstances of an event.
#[derive(Clone, Debug, Default)]
pub(super) struct Moment {
    /// The time since the launch began.
    pub(super) time: Duration,
    /// Whether a signal has asked for the end of the run.
    pub(super) is_asked: bool,
    /// The report of the loss of the run's folder. It is not looked for while the processes run.
    pub(super) loss: Option<String>,
}

/// Something that has happened.
#[derive(Debug)]
pub(super) enum Event {
    /// The launch begins.
    Launched,
    /// All hosts were asked.
    Answered(Result<Answers, RunError>),
    /// The number of processes of the run on the hosts, or why it does not fit there.
    Fitted(Result<u32, Option<RunError>>),
    /// The disk has the space that the run needs, or was waited for in vain.
    Space(bool),
    /// The next attempt is prepared, or cannot be.
    Prepared(Result<(), RunError>),
    /// The processes run.
    Looked(Look),
    /// The processes are asked to end, so that the run can grow, or the request could not be written.
    GrowthRequested(bool),
    /// The launcher has ended.
    Ended(Ended),
    /// The launch itself has failed: the launcher cannot be started or ended.
    Failed(RunError),
}

/// The results of a look at the processes.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) seen: Seen,
    /// The slow ranks whose hosts the processes ask to replace.
    pub(super) slow: Vec<SlowRank>,
    /// The answers of the hosts that the run does not use.
    pub(super) returned: Option<Returned>,
}

/// The next thing to do.
#[derive(Debug)]
pub(super) enum Decision {
    /// Ask all hosts whether they can take part.
    Ask(Patience),
    /// Ask these hosts while the processes run.
    AskAside(Vec<Host>),
    /// Find how the run continues on so many processes.
    Fit(u32),
    /// Wait until the disk has so many bytes.
    AwaitSpace(u64),
    /// Prepare the folder of the run for a start.
    Prepare(Start),
    /// Start the processes.
    Start(Start),
    /// Do this with the launcher, then look at it.
    Launcher(Order),
    /// Ask the processes to end after their next checkpoint, so that the run can grow onto these hosts.
    RequestGrowth(Vec<String>),
    /// Remove the request to replace a slow host.
    KeepSlow,
    /// The launch ends.
    End(Result<(), RunError>),
}

/// How long hosts are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// Once, and the processes of hosts that share no folder must meet: the run has not begun.
    First,
    Once,
    /// Again while all are silent: they belong to a run that has begun.
    UntilOneAnswers,
}

/// A start of the processes.
#[derive(Clone, Debug, Default)]
pub(super) struct Start {
    /// The hosts; none for this machine.
    pub(super) hosts: Vec<Host>,
    /// The record of the restart or the growth; its number is 0 at the first start.
    pub(super) record: Restart,
    /// The processes that the hosts take.
    pub(super) slots: u32,
    /// Whether a restart may leave out a host: the run has several, and a restart is left.
    pub(super) leaves_out_hosts: bool,
}
