//! Compares the tensors in the files of a directory with the tensors of the model that its configuration
//! describes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use super::layout::FilePlace;
use super::weights::{LABELS, PREFIXES, Weights};
use crate::error::ModelError;
use crate::parameter::{ParameterKind, ParameterSpec};

/// The end of the name of a tensor of a module that predicts further tokens. DeepSeek V3 stores such modules
/// as further layers.
const PREDICTOR: &str = ".eh_proj.weight";

/// The ends of the names of tensors that follow from the configuration: the frequencies of the positions, and
/// the masks of GPT-2.
const COMPUTED: [&str; 3] = ["rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];

/// The names of the lists of blocks.
const BLOCKS: [&str; 2] = ["layers.", "h."];

/// The head's matrix, which a model with tied embeddings does not have.
const HEAD: &str = "lm_head.weight";

/// Returns whether a model with these `parameters` has a head of labels, and the files of `dir` do not.
///
/// # Errors
/// When the files cannot be read.
pub fn lacks_labels(dir: &Path, parameters: &[ParameterSpec]) -> Result<bool, ModelError> {
    let weights = Weights::open(dir)?;
    Ok(parameters.iter().any(|spec| weights.lacks_labels(spec)))
}

/// Checks that `dir` has weights for the `parameters` of a model, and no further layers. It reads the headers
/// and lengths of the files. Every file that an index names must exist and be complete, whether the model
/// needs it or not. Returns the names of the tensors that the model does not use.
///
/// # Errors
/// When a file is missing, cut short or not a safetensors file, when a tensor is missing or has another shape
/// or an unknown element type, when the files have more layers than the model, or when the model's head is
/// tied to the embeddings and the files have another head.
pub fn check_weights(dir: &Path, parameters: &[ParameterSpec]) -> Result<Vec<String>, ModelError> {
    let mut weights = Weights::open(dir)?;
    for name in weights.file_names()? {
        weights.file(name)?;
    }
    for spec in parameters {
        if let Some(place) = weights.quantised_place(spec) {
            weights.check_quantised(spec, &place)?;
            continue;
        }
        if weights.lacks_labels(spec) {
            continue;
        }
        let (place, file) = weights.find(spec)?;
        weights.file(file)?.check(&place.tensor, &place.shape)?;
    }
    unused(&mut weights, parameters)
}

/// Returns the ranges of bytes, by file, that have these parameters in the files of `dir`. It reads the headers only, so the
/// tensors need not be there yet. An output head that the model ties to its embeddings belongs to these, because a
/// stage that loads them compares the two.
///
/// # Errors
/// When a file is missing or does not begin with a header, or a tensor has another shape.
pub fn weight_ranges(
    dir: &Path,
    parameters: &[ParameterSpec],
) -> Result<BTreeMap<String, Vec<Range<u64>>>, ModelError> {
    let mut weights = Weights::open(dir)?;
    let mut ranges: BTreeMap<String, Vec<Range<u64>>> = BTreeMap::new();
    for spec in parameters {
        if let Some(place) = weights.quantised_place(spec) {
            for (file, range) in weights.ranges_of_quantised(&place)? {
                ranges.entry(file).or_default().push(range);
            }
            continue;
        }
        // Adapters are not in the files of their base, and the loading reports what is missing.
        let Some(place) = weights.place_of(spec) else { continue };
        let file = weights.file_of(&place.tensor)?;
        let range = weights.file(file.clone())?.range_of(&place.tensor, &place.shape, place.elements)?;
        ranges.entry(file).or_default().push(range);
        let head = ParameterSpec { path: HEAD.to_owned(), ..spec.clone() };
        if spec.kind == ParameterKind::Table
            && let Ok((place, file)) = weights.find(&head)
            && let Ok(range) = weights.file(file.clone())?.range_of(HEAD, &place.shape, place.elements)
        {
            ranges.entry(file).or_default().push(range);
        }
    }
    Ok(ranges)
}

/// Returns the names of the tensors that the model with these parameters does not use, if they do not
/// contradict it.
pub(super) fn unused(weights: &mut Weights, parameters: &[ParameterSpec]) -> Result<Vec<String>, ModelError> {
    let used: BTreeSet<String> = parameters.iter().filter_map(|spec| tensor_of(weights, spec)).collect();
    let parts = weights.parts_of_quantised();
    let is_part = |tensor: &str| parts.get(tensor).is_some_and(|matrix| used.contains(matrix));
    let is_computed = |tensor: &str| COMPUTED.iter().any(|end| tensor.ends_with(end));
    let is_unused = |tensor: &&str| !used.contains(*tensor) && !is_computed(tensor) && !is_part(tensor);
    let mut unused: Vec<String> = weights.tensors().filter(is_unused).map(str::to_owned).collect();
    require_no_further_layers(weights, &used, &unused)?;
    let has_labels = parameters.iter().any(|spec| spec.path == LABELS);
    if unused.iter().any(|tensor| tensor == HEAD) && (has_labels || is_tied_to(weights, parameters)?) {
        unused.retain(|tensor| tensor != HEAD);
    }
    Ok(unused)
}

/// Returns the tensor with the elements of a parameter.
fn tensor_of(weights: &Weights, spec: &ParameterSpec) -> Option<String> {
    let quantised = weights.quantised_place(spec).map(|place| place.tensor);
    quantised.or_else(|| Some(weights.place_of(spec)?.tensor))
}

/// Returns the index of the layer that a tensor belongs to.
fn layer_of(tensor: &str) -> Option<usize> {
    let rest = PREFIXES.into_iter().find_map(|prefix| tensor.strip_prefix(prefix)).unwrap_or(tensor);
    BLOCKS.into_iter().find_map(|list| rest.strip_prefix(list))?.split('.').next()?.parse().ok()
}

/// Refuses further layers, except modules that predict further tokens.
fn require_no_further_layers(
    weights: &Weights,
    used: &BTreeSet<String>,
    unused: &[String],
) -> Result<(), ModelError> {
    let layers = |names: &mut dyn Iterator<Item = &String>| names.filter_map(|name| layer_of(name)).max();
    let expected = layers(&mut used.iter()).map_or(0, |last| last + 1);
    let predictors: BTreeSet<usize> =
        unused.iter().filter(|name| name.ends_with(PREDICTOR)).filter_map(|name| layer_of(name)).collect();
    let is_of_predictor = |name: &String| layer_of(name).is_some_and(|layer| predictors.contains(&layer));
    let mut others = unused.iter().filter(|name| !is_of_predictor(name));
    match layers(&mut others).map(|last| last + 1) {
        Some(found) if found > expected => {
            let fault = format!(
                "the files have {found} layers, and the configuration asks for {expected}: a model without its last layers is \
                 another model; correct the number of layers, or write a model of that size with transformers"
            );
            Err(ModelError::at(weights.index(), fault))
        }
        _ => Ok(()),
    }
}

/// Returns whether the head in the files equals the embeddings, to which the model ties its head.
fn is_tied_to(weights: &mut Weights, parameters: &[ParameterSpec]) -> Result<bool, ModelError> {
    /// Rows that are compared at a time.
    const ROWS: usize = 1024;
    let Some(table) = parameters.iter().find(|spec| spec.kind == ParameterKind::Table) else {
        return Ok(false);
    };
    if weights.quantised_place(table).is_some() {
        return Ok(false);
    }
    let head = ParameterSpec { path: HEAD.to_owned(), ..table.clone() };
    let ((FilePlace { tensor, shape, .. }, file), (_, head_file)) =
        (weights.find(table)?, weights.find(&head)?);
    let path = weights.directory().join(&head_file);
    let different = || {
        let fault = format!(
            "tensor `{HEAD}` differs from `{tensor}`, and `tie_word_embeddings` is true: set it to false in config.json, which \
             transformers assumes for such files too, or remove the tensor"
        );
        ModelError::at(&path, fault)
    };
    if weights.file(head_file.clone())?.check(HEAD, &shape).is_err() {
        return Err(different());
    }
    let (all, width) = (shape.iter().product(), shape.last().copied().unwrap_or(1).max(1));
    for start in (0..all).step_by(ROWS * width) {
        let rows = start..(start + ROWS * width).min(all);
        let own = weights.file(file.clone())?.read_elements(&tensor, &shape, rows.clone())?;
        let head = weights.file(head_file.clone())?.read_elements(HEAD, &shape, rows)?;
        // Values that are not numbers are reported when they are loaded.
        if own.iter().zip(&head).any(|(own, head)| own != head && !own.is_nan()) {
            return Err(different());
        }
    }
    Ok(true)
}
