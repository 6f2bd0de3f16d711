//! Carries the state of some parameters over to an optimizer with other parameters or groups.

use std::collections::HashSet;

use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn_pack::{Reader, Writer};

use crate::checkpoint::LAST_UPDATE;

type Failure = Box<dyn std::error::Error>;

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
    let carry = || carried(optimizer, read(old)?, &is_kept);
    carry().map_err(|error: Failure| error.to_string())
}

/// Returns `optimizer` without the last updates of these parameters, by which their next updates would be corrected; `None` if
/// there are no such updates. An error of Burn's record is returned as text.
pub(crate) fn without_last_updates(
    optimizer: &ModuleOptimizer,
    of: &HashSet<ParamId>,
) -> Result<Option<ModuleOptimizer>, String> {
    let is_kept = |name: &str| {
        let field = name.split_once('.').map(|(_, field)| field);
        field != Some(LAST_UPDATE) || id_of(name).is_none_or(|id| !of.contains(&id))
    };
    let carry = || {
        let state = read(optimizer)?;
        let has_all = state.tensor_names().into_iter().all(is_kept);
        (!has_all).then(|| carried(optimizer.clone(), state, &is_kept)).transpose()
    };
    carry().map_err(|error: Failure| error.to_string())
}

fn read(optimizer: &ModuleOptimizer) -> Result<Reader, Failure> {
    Ok(Reader::from_bytes(optimizer.to_record().into_bytes()?)?)
}

/// Returns the parameter of a name in a record, which is `ID.FIELD`, or `ID` in the metadata.
fn id_of(name: &str) -> Option<ParamId> {
    name.split('.').next()?.parse::<u64>().ok().map(ParamId::from)
}

fn carried(
    optimizer: ModuleOptimizer,
    reader: Reader,
    is_kept: &dyn Fn(&str) -> bool,
) -> Result<ModuleOptimizer, Failure> {
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
