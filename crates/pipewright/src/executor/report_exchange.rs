//! The exchange of reports between processes.
//!
//! Within one process the caller collects the reports. Across processes they go up a tree of all ranks
//! ([`Tag::Report`]). Its root, the first rank, sends all of them, without their events, down the tree
//! ([`Tag::Summary`]). So no process ends a step before all ranks have finished it, and losses and figures
//! are the same everywhere. The summary also says whether all processes have begun the same next batch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::ClockSkew;

use super::connection::Connection;
use super::context::RankContext;
use super::report::RankReport;
use super::report_message::{PackedSkew, ReportMessage, Times, common_batch, largest_skew, unpacked_skew};
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
    mut messages: Vec<ReportMessage>,
) {
    let times: Vec<Times> = messages.iter_mut().map(|message| std::mem::take(&mut message.times)).collect();
    let (skew, next_batch) = (largest_skew(&times), common_batch(&times));
    let summary = encoded(&(&messages, skew, next_batch));
    connection.send_bytes(context.world_tree().children(), Tag::Summary, &summary);
    messages.iter_mut().zip(times).for_each(|(message, times)| message.times = times);
    add_reports(context, connection, origin, reports, (messages, skew, next_batch));
}

/// Passes on the summary, and adds the other ranks' reports to this rank's own.
pub(super) fn pass_summary(
    context: &RankContext,
    connection: &mut Connection,
    origin: Instant,
    reports: &mut Vec<RankReport>,
    summary: &Arc<[u8]>,
) -> Result<(), MessageError> {
    let tree = context.world_tree();
    connection.send_bytes(tree.children(), Tag::Summary, summary);
    let from = tree.parent().unwrap_or(context.world_rank());
    let summary = decoded(from, Tag::Summary, summary)?;
    add_reports(context, connection, origin, reports, summary);
    Ok(())
}

/// Adds the reports of the other ranks, with the start of the step in this process as the origin of their
/// times.
fn add_reports(
    context: &RankContext,
    connection: &Connection,
    origin: Instant,
    reports: &mut Vec<RankReport>,
    (messages, skew, next_batch): (Vec<ReportMessage>, Option<PackedSkew>, Option<u64>),
) {
    for own in reports.iter_mut() {
        own.clock_skew = skew.map(unpacked_skew);
        own.next_batch = next_batch;
    }
    let origin = connection.common_seconds(origin);
    let others = messages.into_iter().filter(|message| message.rank != context.world_rank());
    reports.extend(others.map(|message| {
        let row = context.timeline_row_of(message.rank);
        message.into_report(row, origin)
    }));
}
