//! Carries the state of some parameters over to an optimizer with other parameters or groups.

use std::collections::HashSet;

use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn_pack::{Reader, Writer};

use crate::checkpoint::LAST_UPDATE;

/// Returns `optimizer` with the state that `old` has for these parameters. An error of Burn's record is
/// returned as text.
pub(crate) fn with_state_of(
    optimizer: ModuleOptimizer,
    old: &ModuleOptimizer,
    kept: &HashSet<ParamId>,
) -> Result<ModuleOptimizer, String> {
    if kept.is_empty() {
        return Ok(optimizer);
    }
    let is_kept = |name: &str| id_of(name).is_some_and(|id| kept.contains(&id));
    carried(optimizer, old, &is_kept).map_err(|error| error.to_string())
}

/// Returns `optimizer` without the last updates of these parameters, by which their next updates would be corrected. An error
/// of Burn's record is returned as text.
pub(crate) fn without_last_updates(
    optimizer: &ModuleOptimizer,
    of: &HashSet<ParamId>,
) -> Result<ModuleOptimizer, String> {
    let is_kept = |name: &str| {
        let field = name.split_once('.').map(|(_, field)| field);
        field != Some(LAST_UPDATE) || id_of(name).is_none_or(|id| !of.contains(&id))
    };
    carried(optimizer.clone(), optimizer, &is_kept).map_err(|error| error.to_string())
}

/// Returns the parameter of a name in a record, which is `ID.FIELD`, or `ID` in the metadata.
fn id_of(name: &str) -> Option<ParamId> {
    name.split('.').next()?.parse::<u64>().ok().map(ParamId::from)
}

fn carried(
    optimizer: ModuleOptimizer,
    old: &ModuleOptimizer,
    is_kept: &dyn Fn(&str) -> bool,
) -> Result<ModuleOptimizer, Box<dyn std::error::Error>> {
    let reader = Reader::from_bytes(old.to_record().into_bytes()?)?;
    let (scalars, paths) = (reader.scalars().clone(), reader.metadata().clone());
    let tensors = reader.into_tensors()?.into_iter().filter(|tensor| is_kept(&tensor.name));
    let mut tensors_of_writer = Vec::new();
    for tensor in tensors {
        let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
        tensors_of_writer.push(burn_pack::Tensor::new(name, dtype, shape, id, bytes));
    }
    let writer = Writer::new(tensors_of_writer);
    let scalars = scalars.iter().filter(|(name, _)| is_kept(name));
    let writer = scalars.fold(writer, |writer, (name, value)| writer.with_scalar(name, *value));
    let paths = paths.iter().filter(|(id, _)| is_kept(id));
    let writer = paths.fold(writer, |writer, (id, path)| writer.with_metadata(id, path));
    Ok(optimizer.load_record(OptimizerRecord::from_bytes(writer.into_bytes()?)?))
}
