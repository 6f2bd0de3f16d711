//! Whether the replicas of each expert group hold the parameters that their modules say: one replica each
//! expert, and all of them every other parameter.
//!
//! A replica alone cannot see that: an expert whose placement is missing looks like a parameter that every
//! replica holds. So the root of the group's tree compares the lists of all replicas at launch
//! ([`parameters.rs`](super::parameters)).

use std::collections::{BTreeMap, BTreeSet};

use pipewright_schedule::StageIndex;
use pipewright_schedule::words::counted;

use super::parameters::ListedParameter;
use crate::failure::Cause;

/// The replicas that hold a parameter.
#[derive(Default)]
struct Holders {
    replicas: BTreeSet<u32>,
    on_one_replica: bool,
}

/// Returns an error unless one of `replicas` replicas holds each expert, and all hold the other parameters.
/// Integer and boolean parameters have no placement.
pub(super) fn check_holders(listed: &[ListedParameter], replicas: u32) -> Result<(), Cause> {
    let mut by_path: BTreeMap<(StageIndex, &str), Holders> = BTreeMap::new();
    for parameter in listed.iter().filter(|parameter| parameter.has_gradient) {
        let holders = by_path.entry((parameter.owner.stage, &parameter.path)).or_default();
        holders.replicas.insert(parameter.owner.replica);
        holders.on_one_replica |= parameter.on_one_replica;
    }
    for ((stage, path), holders) in by_path {
        let expected = if holders.on_one_replica { 1 } else { replicas as usize };
        if holders.replicas.len() != expected {
            return Err(Cause::Mistake(format!(
                "`{path}` of stage {stage} is on {} that hold the experts together, and should be on {expected}: build only \
                 the experts of `TensorParallel::experts` on each replica and name `Placement::ON_ONE_REPLICA` for them in \
                 `StageModule::placement`, and build every other parameter on each replica",
                counted(holders.replicas.len(), "replica")
            )));
        }
    }
    Ok(())
}
