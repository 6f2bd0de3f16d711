//! Brings the parameters of a process's ranks to its host: of the model that the settings name, or of the checkpoint from
//! which the run resumes.

use std::collections::BTreeSet;
use std::time::Duration;

use pipewright::checkpoint::Checkpoint;
use pipewright::ids::WorldRank;
use pipewright::mesh::RankGroups;
use pipewright::nn::TensorParallel;
use pipewright_models::{InitialParameters, ParameterSpec, hf};

use crate::error::RunError;
use crate::settings::replan::Replan;
use crate::training::prepare::Prepared;
use crate::training::process_group::ProcessGroup;
use crate::training::remote_files::{Files, Folder, Wanted, bring_pieces, time_to_send};

/// Brings the parameters of this process's ranks into its mirror. All processes call it, before their ranks start.
///
/// # Errors
/// Fails in all processes if the parameters of one do not come.
pub(crate) fn fetch_parameters(
    processes: &mut ProcessGroup,
    prepared: &Prepared,
    checkpoint: Option<&Checkpoint>,
) -> Result<(), RunError> {
    if matches!(processes.files(), Files::Shared) {
        return Ok(());
    }
    let needed = match processes.files() {
        Files::Remote(remote) => needed(processes, prepared, checkpoint).map(|mut needed| {
            // A copy in memory is on each host.
            needed.retain(|file| remote.mirror.has(&file.path));
            needed
        }),
        _ => Ok(Vec::new()),
    };
    let bytes: u64 = needed.iter().flatten().map(Wanted::bytes).sum();
    // They come one after the other at the slowest.
    let sum = |all: &[(WorldRank, u64)]| all.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let work = time_to_send(processes.combine(&bytes, sum, Duration::ZERO)?);
    let brought = match processes.files() {
        Files::Remote(remote) => needed.and_then(|needed| bring_pieces(&remote.client, &needed)),
        _ => Ok(()),
    };
    let own = brought.as_ref().err().map(RunError::text);
    let first = |all: &[(WorldRank, Option<String>)]| {
        all.iter().find_map(|(rank, reason)| reason.as_ref().map(|reason| format!("rank {rank}: {reason}")))
    };
    match processes.combine(&own, first, work)? {
        Some(reason) => Err(RunError::input(reason)),
        None => Ok(()),
    }
}

/// Returns the parts of files that this process needs.
fn needed(
    processes: &ProcessGroup,
    prepared: &Prepared,
    checkpoint: Option<&Checkpoint>,
) -> Result<Vec<Wanted>, RunError> {
    let specs = own_parameters(processes, prepared)?;
    let mut needed = Vec::new();
    if let Some(checkpoint) = checkpoint {
        let paths: BTreeSet<&str> = specs.iter().map(|spec| spec.path.as_str()).collect();
        for file in &checkpoint.manifest().files {
            let path = checkpoint.path().join(&file.name);
            let ranges = Checkpoint::ranges_of(&path, |parameter| paths.contains(parameter));
            needed.push(Wanted {
                folder: Folder::Checkpoint,
                path,
                ranges: ranges.map_err(RunError::input)?,
            });
        }
    }
    // A checkpoint has all parameters, unless only adapters are trained.
    let reads_model = checkpoint.is_none() || prepared.model.adapter().is_some();
    // A GGUF file comes as a whole.
    if let (InitialParameters::Directory { path: folder, .. }, true) = (&prepared.initial, reads_model)
        && !folder.is_file()
    {
        for (name, ranges) in hf::weight_ranges(folder, &specs).map_err(RunError::input)? {
            needed.push(Wanted { folder: Folder::Model, path: folder.join(name), ranges });
        }
    }
    Ok(needed)
}

/// Returns the parameters, in whole, of the stages of this process's rank, or of all stages if layers may move.
fn own_parameters(processes: &ProcessGroup, prepared: &Prepared) -> Result<Vec<ParameterSpec>, RunError> {
    let Prepared { settings, model, program, partition, .. } = prepared;
    let mesh = settings.mesh.mesh(program.ranks());
    let outline = |layers| model.outline(layers, &TensorParallel::default());
    // The ranks start later, and report another number of processes.
    let is_other_mesh = mesh.ranks() != Some(processes.count());
    if settings.run.replan == Replan::WhenSlow || is_other_mesh {
        return outline(0..prepared.layers.layers.len());
    }
    let stages = program.placement().stages_of(mesh.coord(processes.rank()).rank);
    let stages = stages.iter().map(|stage| outline(partition.range(*stage)));
    Ok(stages.collect::<Result<Vec<_>, _>>()?.concat())
}
