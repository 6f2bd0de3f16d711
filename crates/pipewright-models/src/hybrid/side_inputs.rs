//! The side inputs of a model, and the check of a companion file of them, so that a run refuses it before its
//! first step. A side input is a tensor whose first dimension has one entry for each row of token ids.

use pipewright::train::data::{DataError, SideRows, SideTensor};

pub use pipewright::train::data::{DOCUMENTS, VALID_TOKENS as COUNTS};
use pipewright_shapes::hybrid::HybridConfig;
pub use pipewright_shapes::hybrid::STRUCTURES;

/// The side input with the relations between tokens.
pub const RELATIONS: &str = "chunk_relation_mask";
/// The side input with the platform of each row.
pub const PLATFORM: &str = "platform_ids";

/// Checks every side input; see [`ModelFamily::check_side`](crate::ModelFamily::check_side).
pub(crate) fn check_side(config: &HybridConfig, side: &SideRows, sequence: usize) -> Result<(), DataError> {
    side.tensors().iter().try_for_each(|tensor| {
        check(config, tensor, sequence).map_err(|problem| side.error(&tensor.name, problem))
    })
}

fn check(config: &HybridConfig, tensor: &SideTensor, sequence: usize) -> Result<(), String> {
    match tensor.name.as_str() {
        COUNTS => {
            shape(tensor, &[])?;
            range(tensor, 1, sequence as i64, &format!("from 1 to the {sequence} tokens of a row"))
        }
        DOCUMENTS => {
            shape(tensor, &[sequence])?;
            range(tensor, 0, i64::MAX, "at least 0")?;
            ascending(tensor, sequence)
        }
        RELATIONS => {
            if config.num_relations == 0 {
                return Err("needs a table, and the model has `num_relations = 0`".to_owned());
            }
            shape(tensor, &[config.num_relations, sequence, sequence])?;
            range(tensor, 0, 1, "0 or 1")
        }
        PLATFORM => {
            shape(tensor, &[])?;
            ids(tensor, config.platform_vocab_size, "platform_vocab_size")
        }
        name if STRUCTURES.contains(&name) => {
            shape(tensor, &[sequence])?;
            let rows = config.structure_vocab_sizes.get(name).copied().unwrap_or(0);
            ids(tensor, rows, "structure_vocab_sizes")
        }
        _ => {
            let names = [COUNTS, DOCUMENTS, RELATIONS, PLATFORM].into_iter().chain(STRUCTURES);
            Err(format!("is not an input of the model: those are {}", names.collect::<Vec<_>>().join(", ")))
        }
    }
}

/// Checks the dimensions of a row.
fn shape(tensor: &SideTensor, expected: &[usize]) -> Result<(), String> {
    if tensor.shape.get(1..) == Some(expected) {
        return Ok(());
    }
    Err(format!("has shape {:?}, and the model asks for {expected:?} in each row", tensor.shape))
}

fn ids(tensor: &SideTensor, rows: usize, key: &str) -> Result<(), String> {
    if rows == 0 {
        return Err(format!("needs a table, and the model has none of that name in `{key}`"));
    }
    range(tensor, 0, rows as i64 - 1, &format!("below the {rows} rows of its table (`{key}`)"))
}

fn range(tensor: &SideTensor, low: i64, high: i64, what: &str) -> Result<(), String> {
    let outside = |number: &i32| !(low..=high).contains(&i64::from(*number));
    let Some(index) = tensor.values.iter().position(outside) else { return Ok(()) };
    let row = index / tensor.shape[1..].iter().product::<usize>().max(1);
    Err(format!("has {} in row {row}, counted from 0: it must be {what}", tensor.values[index]))
}

fn ascending(tensor: &SideTensor, sequence: usize) -> Result<(), String> {
    let falls = |row: &[i32]| row.windows(2).any(|pair| pair[1] < pair[0]);
    match tensor.values.chunks(sequence).position(falls) {
        Some(row) => Err(format!("falls along row {row}, counted from 0: documents follow each other")),
        None => Ok(()),
    }
}
