//! Optimizer state by parameter path, for any of Burn's optimizers.
//!
//! Burn stores the state of a module's parameters under their ids, which differ from run to run, and gives
//! access to it only as a burnpack record. A record's names are `ID.FIELD`; this file converts them to
//! `PATH@FIELD` and back. Numbers of the state (the count of steps, the tensor's rank) are texts such as
//! `uint 7`; floating point numbers are stored as their bits.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::TensorData;
use burn_pack::{Reader, Scalar, Writer};

use super::error::CheckpointError;
use super::stored::{OptimizerFields, StoredState};
use super::tensor_file::FIELD;
use crate::tensor::TensorShard;
use crate::tensor::shard::RowShard;

/// The field of a parameter's value before the last update, if parameters are delayed by one update. Files store it
/// like the optimizer's state, in the same rows, but it does not belong to that state.
pub(super) const OLDER: &str = "older";

/// The field of the last update, which a correction of delayed updates adds to the state of any optimizer.
pub(crate) const LAST_UPDATE: &str = "update";

/// What [`put_together`] has read.
pub(crate) struct Restored {
    pub(crate) optimizer: ModuleOptimizer,
    /// The values before the last update, if the state has them.
    pub(crate) older: HashMap<ParamId, TensorData>,
}

/// An optimizer's state as separate tensors and numbers.
#[derive(Default)]
pub(super) struct Parts {
    /// The tensors by `PATH@FIELD`.
    pub(super) tensors: BTreeMap<String, TensorData>,
    /// The numbers by `PATH@FIELD`.
    pub(super) scalars: BTreeMap<String, String>,
}

/// A parameter of the optimizer that a state is restored into.
pub(crate) struct Target<'a> {
    pub(crate) id: ParamId,
    pub(crate) path: &'a Arc<str>,
    /// The shard that the stage holds.
    pub(crate) shard: TensorShard,
    /// The rows of the shard that the replica holds.
    pub(crate) rows: RowShard,
    /// The path inside the stage's module, which Burn uses to choose among several optimizers.
    pub(crate) local: &'a str,
}

/// Returns the state of the parameters in `paths`, whose keys are parameter ids.
pub(super) fn take_apart(
    optimizer: &ModuleOptimizer,
    paths: &HashMap<ParamId, Arc<str>>,
) -> Result<Parts, CheckpointError> {
    let unreadable = |reason: &dyn std::fmt::Display| {
        CheckpointError::Refused(format!("the optimizer's state cannot be read: {reason}"))
    };
    let bytes = optimizer.to_record().into_bytes().map_err(|error| unreadable(&error))?;
    let reader = Reader::from_bytes(bytes).map_err(|error| unreadable(&error))?;
    let mut parts = Parts::default();
    for (name, scalar) in reader.scalars() {
        if let Some(name) = by_path(name, paths) {
            parts.scalars.insert(name, to_text(*scalar));
        }
    }
    for tensor in reader.into_tensors().map_err(|error| unreadable(&error))? {
        if let Some(path) = by_path(&tensor.name, paths) {
            let (_, dtype, shape, _, bytes) = tensor.into_parts().map_err(|error| unreadable(&error))?;
            parts.tensors.insert(path, TensorData::from_bytes(bytes, shape, dtype));
        }
    }
    Ok(parts)
}

fn by_path(name: &str, paths: &HashMap<ParamId, Arc<str>>) -> Option<String> {
    let (id, field) = name.split_once('.')?;
    let path = paths.get(&ParamId::from(id.parse::<u64>().ok()?))?;
    Some(format!("{path}{FIELD}{field}"))
}

/// Replaces the state of `optimizer` with the stored state for these parameters.
pub(crate) fn put_together(
    optimizer: ModuleOptimizer,
    targets: &[Target<'_>],
    stored: &dyn StoredState,
) -> Result<Restored, CheckpointError> {
    let unfit = |reason: String| {
        CheckpointError::unusable(
            stored.place(),
            format!(
                "the optimizer does not take the state that is stored for it: {reason}; resume with the optimizer that wrote \
                 it"
            ),
        )
    };
    let mut tensors = Vec::new();
    let mut scalars = Vec::new();
    let mut locals = Vec::new();
    let (mut older, mut last_updates) = (HashMap::new(), 0);
    for Target { id: parameter, path, shard, rows, local } in targets {
        let id = parameter.val();
        let fields: OptimizerFields = stored.read_optimizer(path, *shard, *rows)?;
        for (field, text) in fields.scalars {
            let scalar =
                from_text(&text).ok_or_else(|| unfit(format!("`{path}{FIELD}{field}` is `{text}`")))?;
            scalars.push((format!("{id}.{field}"), scalar));
        }
        for (field, data) in fields.tensors {
            if field == OLDER {
                older.insert(*parameter, data);
                continue;
            }
            last_updates += usize::from(field == LAST_UPDATE);
            let (bytes, shape, dtype) = data.into_parts();
            tensors.push(burn_pack::Tensor::new(format!("{id}.{field}"), dtype, shape, Some(id), bytes));
        }
        locals.push((id.to_string(), *local));
    }
    let expected = tensors.len();
    let writer = Writer::new(tensors);
    let writer = scalars.iter().fold(writer, |writer, (name, scalar)| writer.with_scalar(name, *scalar));
    let writer = locals.iter().fold(writer, |writer, (id, local)| writer.with_metadata(id, local));
    let bytes = writer.into_bytes().map_err(|error| unfit(error.to_string()))?;
    let record = OptimizerRecord::from_bytes(bytes).map_err(|error| unfit(error.to_string()))?;
    let optimizer = optimizer.load_record(record);
    // Burn ignores state that it cannot use, and would start that parameter without state.
    // An optimizer without a correction takes no last updates, and everything else.
    let record = optimizer.to_record();
    let taken = record.len();
    let taken_updates = if last_updates == 0 { Ok(0) } else { last_updates_of(record) };
    let taken_updates = taken_updates.map_err(|error| unfit(error.to_string()))?;
    let takes_others = taken - taken_updates == expected - last_updates;
    if takes_others && (taken_updates == last_updates || taken_updates == 0) {
        Ok(Restored { optimizer, older })
    } else {
        Err(unfit(format!("it takes {taken} tensors of {expected}")))
    }
}

/// Returns the number of last updates in a record.
fn last_updates_of(record: OptimizerRecord) -> Result<usize, Box<dyn std::error::Error>> {
    let reader = Reader::from_bytes(record.into_bytes()?)?;
    let fields = reader.tensor_names().into_iter().filter_map(|name| name.split_once('.'));
    Ok(fields.filter(|(_, field)| *field == LAST_UPDATE).count())
}

fn to_text(scalar: Scalar) -> String {
    match scalar {
        Scalar::Int(value) => format!("int {value}"),
        Scalar::UInt(value) => format!("uint {value}"),
        Scalar::Float(value) => format!("float {:016x}", value.to_bits()),
        Scalar::Bool(value) => format!("bool {value}"),
    }
}

fn from_text(text: &str) -> Option<Scalar> {
    let (kind, value) = text.split_once(' ')?;
    match kind {
        "int" => value.parse().ok().map(Scalar::Int),
        "uint" => value.parse().ok().map(Scalar::UInt),
        "float" => u64::from_str_radix(value, 16).ok().map(|bits| Scalar::Float(f64::from_bits(bits))),
        "bool" => value.parse().ok().map(Scalar::Bool),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back() {
        for scalar in [Scalar::Int(-3), Scalar::UInt(u64::MAX), Scalar::Float(0.1), Scalar::Bool(true)] {
            assert_eq!(from_text(&to_text(scalar)), Some(scalar));
        }
        assert_eq!(from_text("uint"), None);
        assert_eq!(from_text("hex 7"), None);
    }
}
