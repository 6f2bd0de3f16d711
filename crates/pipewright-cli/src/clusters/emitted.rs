//! The files of a plan for a cluster in the options of another system.

use std::path::Path;

use pipewright_cluster::emit::emit;
use pipewright_cluster::search::{ClusterPlan, Request, SearchError, SearchErrorKind, search};
use pipewright_cluster::systems::refusal;
use pipewright_schedule::plan::System;

use crate::failure::{Exit, Failure};
use crate::planning::emitted::{Emitted, Target};

/// Makes the files for the best plan of a search. If the system cannot run it, searches the best one that
/// it can run.
pub(super) fn emitted(
    request: &Request,
    best: &ClusterPlan,
    target: &Target<'_>,
) -> Result<Emitted<ClusterPlan>, Failure> {
    let system = target.system;
    refuse_frozen_blocks(system, request)?;
    let refusal = refusal(system, &best.layout, &request.model).map(|refusal| refusal.to_string());
    let plan = match &refusal {
        None => best.clone(),
        Some(refusal) => {
            let request = Request { system: Some(system), plans: 1, ..request.clone() };
            let found = search(&request).map_err(|error| {
                let among = match error.kind {
                    SearchErrorKind::System => String::new(),
                    _ => format!("among the plans that {system} runs:\n"),
                };
                refused(error).below(format!("{system} cannot run the best plan: {refusal}\n{among}"))
            })?;
            found.plans.into_iter().next().ok_or_else(|| Failure::input("there is no plan to write"))?
        }
    };
    let folder: &Path = target.folder();
    let emission = emit(system, request, &plan, &folder.to_string_lossy())
        .map_err(|error| Failure::new(Exit::Bug, error))?;
    let longer = plan.prediction.seconds / best.prediction.seconds - 1.0;
    Ok(Emitted::new(plan, emission, folder, refusal, longer))
}

/// Refuses plans for models with frozen blocks: other systems run the backwards that are left out here.
fn refuse_frozen_blocks(system: System, request: &Request) -> Result<(), Failure> {
    if !request.model.is_adapted() {
        return Ok(());
    }
    Err(Failure::input(format!(
        "--emit {}: the configuration has an [adapter], and a plan leaves out the weight gradients of frozen layers, \
         which {system} computes: leave --emit out, or set adapter.kind = \"none\"",
        system.name()
    )))
}

/// Returns the failure of a search. A plan that does not fit is a check that failed. Anything else is wrong
/// input.
pub(super) fn refused(error: SearchError) -> Failure {
    let exit = match error.kind {
        SearchErrorKind::Memory(_) => Exit::CheckFailed,
        SearchErrorKind::Request | SearchErrorKind::System => Exit::WrongInput,
    };
    Failure::new(exit, error)
}
