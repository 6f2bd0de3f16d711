//! The adapters of a configuration in a plan for a cluster: the layers that have one, with their sizes.

use std::path::Path;

use pipewright_cluster::model::{Division, Model};
use pipewright_cluster::training::{AdaptedLayer, AdapterSizes};
use pipewright_models::{CutModel, ModelConfig};

use crate::config::Settings;
use crate::config::adapter::AdapterSettings;
use crate::failure::Failure;
use crate::training::model::adapter_of;

/// Adapters on the layers of a model.
#[derive(Debug)]
pub(crate) struct PlannedAdapters {
    sizes: AdapterSizes,
    /// The adapted layers, each with the index of its block.
    layers: Vec<(usize, AdaptedLayer)>,
}

/// The names of the layers that the ranks of a tensor group divide by their inputs.
const BY_INPUTS: [&str; 3] = ["o_proj", "down_proj", "c_proj"];
/// The names of the layers that each rank of a tensor group has as a whole: they make latents.
const WHOLE: [&str; 2] = ["q_a_proj", "kv_a_proj_with_mqa"];

/// Returns the adapters of a configuration on the model in the folder `from`, which needs no weights.
pub(super) fn read(
    from: &Path,
    settings: &Settings,
    adapter: &AdapterSettings,
) -> Result<PlannedAdapters, Failure> {
    let model = ModelConfig::read(from).map_err(Failure::input)?;
    let adapter = adapter_of(settings, adapter, &model)?;
    let sizes = AdapterSizes { rank: adapter.lora.rank.into(), has_magnitudes: adapter.lora.dora };
    let specs = CutModel::from(model).with_adapter(adapter).and_then(|model| model.trained_parameters());
    let mut layers: Vec<(usize, AdaptedLayer)> = Vec::new();
    let mut inputs: Vec<(String, u64)> = Vec::new();
    for specs in specs.map_err(Failure::input)?.windows(2) {
        let [first, second] = specs else { continue };
        let (Some(layer), &[input, _], &[_, output]) =
            (first.path.strip_suffix(".lora_A.weight"), first.shape.as_slice(), second.shape.as_slice())
        else {
            continue;
        };
        let (part, name) = layer.rsplit_once('.').unwrap_or(("", layer));
        let block = layer.split('.').find_map(|name| name.parse().ok()).unwrap_or(0);
        let (input, output) = (input as u64, output as u64);
        let division = match name {
            _ if BY_INPUTS.contains(&name) => Division::Rows,
            _ if WHOLE.contains(&name) => Division::Whole,
            _ => Division::Columns,
        };
        // The layers of a part that are divided by their outputs, or not at all, have the same input if it is
        // as wide.
        let of_part = (part.to_owned(), input);
        let shares_input = division != Division::Rows && inputs.contains(&of_part);
        if division != Division::Rows && !shares_input {
            inputs.push(of_part);
        }
        layers.push((block, AdaptedLayer { input, output, division, shares_input }));
    }
    Ok(PlannedAdapters { sizes, layers })
}

impl PlannedAdapters {
    /// Returns a model whose adapters are trained.
    pub(super) fn on(self, model: Model) -> Result<Model, Failure> {
        model.with_adapters(self.sizes, self.layers).map_err(Failure::input)
    }
}
