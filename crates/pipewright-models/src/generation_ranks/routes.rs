//! How messages reach the ranks of a world, and how their reports and failures come back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};

use pipewright::ids::WorldRank;
use pipewright::rank_link::RankLink;
use pipewright_schedule::words::counted;

use crate::generation_ranks::worker::{Inbox, Message, RemoteReport, Report, ReportRoute, Worker, lost};
use crate::generation_ranks::{RankFailure, RankStage, RanksConfig, RanksError};
use crate::split::Place;

/// Returns the error for a world of another number of ranks.
pub(super) fn other_count(found: usize, expected: usize) -> RanksError {
    let found = counted(found, "rank");
    let message =
        format!("the world has {found}, and the model is distributed over {expected}: make them equal");
    RankFailure::of_all(message).into()
}

/// Tells all ranks that an error ends them. The first failure counts, so the one of a rank that has recorded
/// it itself stays.
pub(super) fn give_up(link: &RankLink, error: &RanksError) {
    let rank = error.rank().map_or(link.rank(), |rank| WorldRank::new(rank as u32));
    link.give_up(rank, error.cause());
}

/// Returns where a rank gets its messages. The first rank of the world takes `messages`.
pub(super) fn inbox(link: &RankLink, tensor: usize, messages: Option<Receiver<Message>>) -> Inbox {
    let rank = link.rank().index();
    match messages {
        Some(messages) => Inbox::Chooser(messages),
        // The first rank passes messages on to the other ranks of the first stage.
        None => Inbox::Rank(WorldRank::new(rank.saturating_sub(tensor) as u32)),
    }
}

pub(super) fn worker(link: &RankLink, config: &RanksConfig, inbox: Inbox, report: ReportRoute) -> Worker {
    let RankStage { layers, device } = config.stages[link.rank().index()].clone();
    let tensor = link.tensor().with_whole_experts(config.whole_experts);
    let stages = config.stages.len() / tensor.ranks() as usize;
    let place = Place { tensor, ..Place::from(device) };
    Worker { link: link.clone(), layers, place, stages, inbox, report }
}

/// Passes the reports of other processes on, until a rank fails or `ends`.
pub(super) fn pass_reports(link: &RankLink, reports: &Sender<Report>, ends: &AtomicBool) {
    while !ends.load(Ordering::Relaxed) {
        let report = match link.next_report::<RemoteReport>() {
            Ok(Some(report)) => report.map_err(RanksError::Failed),
            Ok(None) => continue,
            Err(_) => Err(lost(link)),
        };
        let has_failed = report.is_err();
        if reports.send(report).is_err() || has_failed {
            return;
        }
    }
}
