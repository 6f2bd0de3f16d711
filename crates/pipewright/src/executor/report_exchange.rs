//! The exchange of reports between processes.
//!
//! Within one process the caller collects the reports. Across processes they go up a tree of all ranks
//! ([`Tag::Report`]). Its root, the first rank, sends all of them, without their events, down the tree
//! ([`Tag::Summary`]). So no process ends a step before all ranks have finished it, and losses and figures
//! are the same everywhere. The summary also says whether all processes have begun the same next batch.
//!
//! If the gradient norm has said so already, the ranks begin that batch when they have updated. Their processes
//! then exchange the reports ([`OpenReport`]), while the ranks compute.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::ClockSkew;

use super::connection::Connection;
use super::context::RankContext;
use super::next_batch::common_digest;
use super::report::RankReport;
use super::report_message::{PackedSkew, ReportMessage, Times, largest_skew, unpacked_skew};
use crate::collective::Tree;
use crate::ids::WorldRank;
use crate::mesh::{Mesh, RankGroups};
use crate::message::{MessageError, Tag, decoded, encoded};

/// Returns this rank's reports as messages. `origin` is the start of the step in this process.
pub(super) fn report_messages(
    connection: &Connection,
    origin: Instant,
    reports: &mut [RankReport],
) -> Vec<ReportMessage> {
    let skews = [origin, Instant::now()].map(|at| connection.clock_skew(at));
    let skew = skews.into_iter().flatten().reduce(ClockSkew::max);
    let common = |seconds| connection.common_seconds(origin + Duration::from_secs_f64(seconds));
    let messages = reports.iter_mut().map(|report| {
        report.clock_skew = skew;
        ReportMessage::of(report, common)
    });
    messages.collect()
}

/// Sends the summary of all reports from the root, and adds the other ranks' reports to its own.
pub(super) fn send_summary(
    context: &RankContext,
    connection: &mut Connection,
    origin: Instant,
    reports: &mut Vec<RankReport>,
    messages: Vec<ReportMessage>,
) {
    let (bytes, summary) = summarized(messages);
    connection.send_bytes(&context.world_tree.children, Tag::Summary, &bytes);
    add_reports(&Receiver::new(context, connection, origin), reports, summary);
}

/// Passes on the summary, and adds the other ranks' reports to this rank's own.
pub(super) fn pass_summary(
    context: &RankContext,
    connection: &mut Connection,
    origin: Instant,
    reports: &mut Vec<RankReport>,
    summary: &Arc<[u8]>,
) -> Result<(), MessageError> {
    let tree = &context.world_tree;
    connection.send_bytes(&tree.children, Tag::Summary, summary);
    let from = tree.parent.unwrap_or(context.world_rank);
    let summary = decoded(from, Tag::Summary, summary)?;
    add_reports(&Receiver::new(context, connection, origin), reports, summary);
    Ok(())
}

/// The report of a rank that begins the next step before it has the reports of the others. Its process exchanges
/// it for them, in the same tree.
pub(crate) struct OpenReport {
    reports: Vec<RankReport>,
    /// The reports of the rank's subtree, as far as they have arrived.
    messages: Vec<ReportMessage>,
    receiver: Receiver,
    /// The ranks that the process exchanges messages with.
    pub(crate) tree: Tree,
}

impl OpenReport {
    /// `messages` are the rank's reports as messages.
    pub(super) fn new(
        context: &RankContext,
        connection: &Connection,
        origin: Instant,
        reports: Vec<RankReport>,
        messages: Vec<ReportMessage>,
    ) -> Self {
        let receiver = Receiver::new(context, connection, origin);
        Self { reports, messages, receiver, tree: context.world_tree.clone() }
    }

    /// Adds the encoded reports of a child's subtree. Children come in their order.
    pub(crate) fn add_subtree(&mut self, from: WorldRank, reports: &Arc<[u8]>) -> Result<(), MessageError> {
        self.messages.extend(decoded::<Vec<ReportMessage>>(from, Tag::Report, reports)?);
        Ok(())
    }

    /// Returns the encoded reports of the subtree, for the parent.
    pub(crate) fn subtree(&self) -> Arc<[u8]> {
        encoded(&self.messages)
    }

    /// Returns the encoded summary of all reports, and the reports of all ranks. Only the root calls this.
    pub(crate) fn summarize(mut self) -> (Arc<[u8]>, Vec<RankReport>) {
        let (bytes, summary) = summarized(self.messages);
        add_reports(&self.receiver, &mut self.reports, summary);
        (bytes, self.reports)
    }

    /// Returns the reports of all ranks, from the summary.
    pub(crate) fn complete(
        mut self,
        from: WorldRank,
        summary: &Arc<[u8]>,
    ) -> Result<Vec<RankReport>, MessageError> {
        add_reports(&self.receiver, &mut self.reports, decoded(from, Tag::Summary, summary)?);
        Ok(self.reports)
    }
}

/// The reports of all ranks, the largest skew of their clocks, and the digest of the next batch that all
/// processes have begun.
type Summary = (Vec<ReportMessage>, Option<PackedSkew>, Option<u64>);

/// Returns the summary of the reports of all ranks, encoded without the times of the events, and with them.
fn summarized(mut messages: Vec<ReportMessage>) -> (Arc<[u8]>, Summary) {
    let times: Vec<Times> = messages.iter_mut().map(|message| std::mem::take(&mut message.times)).collect();
    let skew = largest_skew(&times);
    let next_batch = common_digest(times.iter().map(|times| times.next_batch));
    let bytes = encoded(&(&messages, skew, next_batch));
    messages.iter_mut().zip(times).for_each(|(message, times)| message.times = times);
    (bytes, (messages, skew, next_batch))
}

/// The rank that gets the reports of the others.
struct Receiver {
    rank: WorldRank,
    mesh: Mesh,
    /// The start of the step in its process, on the common clock.
    origin: f64,
}

impl Receiver {
    fn new(context: &RankContext, connection: &Connection, origin: Instant) -> Self {
        let (rank, mesh) = (context.world_rank, context.mesh);
        Self { rank, mesh, origin: connection.common_seconds(origin) }
    }
}

/// Adds the reports of the other ranks, with the start of the step in this process as the origin of their
/// times.
fn add_reports(receiver: &Receiver, reports: &mut Vec<RankReport>, (messages, skew, next_batch): Summary) {
    for own in reports.iter_mut() {
        own.clock_skew = skew.map(unpacked_skew);
        own.next_batch = next_batch;
    }
    let Receiver { rank, mesh, origin } = receiver;
    let others = messages.into_iter().filter(|message| message.rank != *rank);
    reports.extend(others.map(|message| {
        let row = mesh.timeline_row(message.rank);
        message.into_report(row, *origin)
    }));
}
