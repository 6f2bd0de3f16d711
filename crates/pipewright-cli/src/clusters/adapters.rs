//! The adapters of a configuration in a plan for a cluster: the layers that have one, with their sizes.

use std::collections::BTreeSet;
use std::path::Path;

use pipewright_models::{CutModel, ModelConfig, input_of, is_split_by_inputs, is_whole};
use pipewright_shapes::model::{Division, Model};
use pipewright_shapes::training::{AdaptedLayer, AdapterSizes};

use crate::failure::{Exit, Failure};
use pipewright_run::settings::Settings;
use pipewright_run::settings::adapter::AdapterSettings;
use pipewright_run::training::model::adapter_of;

/// Adapters on the layers of a model.
#[derive(Debug)]
pub(crate) struct PlannedAdapters {
    sizes: AdapterSizes,
    /// The adapted layers, each with the index of its block.
    layers: Vec<(usize, AdaptedLayer)>,
}

/// Returns the adapters of a configuration on the model in the folder `from`, which needs no weights.
pub(super) fn read(
    from: &Path,
    settings: &Settings,
    adapter: &AdapterSettings,
) -> Result<PlannedAdapters, Failure> {
    let model = ModelConfig::read(from).map_err(Failure::input)?;
    let adapter = adapter_of(settings, adapter, &model)?;
    let lora = &adapter.lora;
    let sizes =
        AdapterSizes { rank: lora.rank.into(), has_magnitudes: lora.dora, has_dropout: lora.dropout > 0.0 };
    let specs = CutModel::from(model).with_adapter(adapter).and_then(|model| model.trained_parameters());
    let mut layers: Vec<(usize, AdaptedLayer)> = Vec::new();
    let mut inputs = BTreeSet::new();
    for specs in specs.map_err(Failure::input)?.windows(2) {
        let [first, second] = specs else { continue };
        let (Some(layer), &[input, _], &[_, output]) =
            (first.path.strip_suffix(".lora_A.weight"), first.shape.as_slice(), second.shape.as_slice())
        else {
            continue;
        };
        // The model makes these paths, and all of its adapters are in blocks.
        let block = layer.split('.').find_map(|name| name.parse::<usize>().ok()).ok_or_else(|| {
            Failure::new(Exit::Bug, format!("the layer `{layer}` has an adapter, and is not in a block"))
        })?;
        let (input, output) = (input as u64, output as u64);
        let division = if is_split_by_inputs(layer) {
            Division::Rows
        } else if is_whole(layer) {
            Division::Whole
        } else {
            Division::Columns
        };
        let shares_input = !inputs.insert(input_of(layer));
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
