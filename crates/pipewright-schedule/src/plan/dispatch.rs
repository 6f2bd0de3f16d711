//! Chooses how a request is planned: for equal ranks, for one pipeline of unlike ranks, or for replicas of them.

use crate::plan::planner::plan_pipelines;
use crate::plan::report::{PlanError, PlanReport};
use crate::plan::request::PlanRequest;
use crate::plan::streamed::{never_fits, plan_streamed};
use crate::plan::unlike_replicas::plan_replicas;
use crate::profile::Profile;

/// Searches the best plans. `keep_going` is asked before each simulation; once it says no, the search ends
/// with what it has. At least one plan is tried. If it says no while the bound is computed, the bound of the
/// rest is a simpler one.
///
/// # Errors
/// When the profile or the request has values that cannot be, or when no plan fits into the memory.
pub fn plan(
    profile: &Profile,
    request: &PlanRequest,
    keep_going: &mut dyn FnMut() -> bool,
) -> Result<PlanReport, PlanError> {
    let problems = profile.problems();
    if !problems.is_empty() {
        let (count, first) = (problems.len(), &problems[0]);
        return Err(PlanError::Input(format!("{count} problems in the profile, the first: {first}")));
    }
    check_unlike(profile, request)?;
    check_reads(profile, request)?;
    let (profile, memory) = profile.with_equal_ranks_merged();
    let request = &PlanRequest { memory: memory.or(request.memory), ..request.clone() };
    if profile.has_unlike_ranks() {
        return match request.data_parallel {
            Some(replicas) if replicas > 1 => plan_replicas(&profile, request, replicas, keep_going),
            _ => plan_pipelines(
                &profile,
                &PlanRequest { data_parallel: Some(1), ..request.clone() },
                keep_going,
            ),
        };
    }
    // The reads of unlike ranks are not planned.
    let can_stream = request.system.is_none() && profile.layers.iter().any(|layer| layer.streamed_bytes > 0);
    if !can_stream {
        return plan_pipelines(&profile, request, keep_going);
    }
    if request.always_streams || never_fits(&profile, request) {
        return plan_streamed(&profile, request, keep_going);
    }
    match plan_pipelines(&profile, request, keep_going) {
        Err(error @ (PlanError::DoesNotFit { .. } | PlanError::Stopped)) => {
            plan_streamed(&profile, request, keep_going).map_err(|streamed| match streamed {
                // No plan leaves the base in its files, so what stands in the way is the memory.
                PlanError::Input(_) => error,
                streamed => streamed,
            })
        }
        found => found,
    }
}

/// Refuses a base that must stay in its files where its reads are not planned.
fn check_reads(profile: &Profile, request: &PlanRequest) -> Result<(), PlanError> {
    if !request.always_streams || profile.layers.iter().all(|layer| layer.streamed_bytes == 0) {
        return Ok(());
    }
    if !profile.has_unlike_ranks() {
        return Ok(());
    }
    let advice = "remove [[rank]] and [[pair]] from the profile, or set model.stream=false";
    Err(PlanError::Input(format!(
        "the reads of a base that stays in its files are not planned for unlike ranks: {advice}"
    )))
}

/// Reports ranks and pairs that do not fit the request, and requests that are not planned for unlike ranks.
fn check_unlike(profile: &Profile, request: &PlanRequest) -> Result<(), PlanError> {
    if let Some(problem) = profile.problems_for(request.ranks).first() {
        return Err(PlanError::Input(problem.to_string()));
    }
    if !profile.has_unlike_ranks() {
        return Ok(());
    }
    if let Some(size) = request.tensor_parallel.filter(|&size| size > 1) {
        return Err(PlanError::Input(format!(
            "{size} tensor-parallel ranks were asked for, and the profile has unlike ranks ([[rank]] or [[pair]]): they \
             would wait for the slowest of them in each layer; ask for 1, or remove these sections"
        )));
    }
    if request.system.is_some() {
        return Err(PlanError::Input(
            "the profile has unlike ranks ([[rank]] or [[pair]]), and a plan for another system has equal ones; remove \
             these sections, or plan for `train`"
                .to_owned(),
        ));
    }
    Ok(())
}
