//! The adapters of a configuration in a plan for a cluster: the layers that have one, with their sizes.

use std::collections::BTreeSet;
use std::path::Path;

use pipewright_cluster::model::{Division, Model};
use pipewright_cluster::training::{AdaptedLayer, AdapterSizes};
use pipewright_models::{CutModel, ModelConfig, input_of};

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
        let name = layer.rsplit_once('.').map_or(layer, |(_, name)| name);
        let block = layer.split('.').find_map(|name| name.parse().ok()).unwrap_or(0);
        let (input, output) = (input as u64, output as u64);
        let division = match name {
            _ if BY_INPUTS.contains(&name) => Division::Rows,
            _ if WHOLE.contains(&name) => Division::Whole,
            _ => Division::Columns,
        };
        let shares_input = !inputs.insert(input_of(layer));
        layers.push((block, AdaptedLayer { input, output, division, shares_input }));
    }
    Ok(PlannedAdapters { sizes, layers })
}

impl PlannedAdapters {
    /// Refuses tensor groups that the user gives if the adapters have dropout, as `train` does.
    pub(super) fn check(&self, tensor_parallel: Option<u32>) -> Result<(), Failure> {
        match tensor_parallel {
            Some(ranks) if self.sizes.has_dropout && ranks > 1 => Err(Failure::input(format!(
                "--tensor-parallel {ranks}: `adapter.dropout` needs layers that one rank computes; leave \
                 --tensor-parallel out, or set `adapter.dropout` to 0"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns a model whose adapters are trained.
    pub(super) fn on(self, model: Model) -> Result<Model, Failure> {
        model.with_adapters(self.sizes, self.layers).map_err(Failure::input)
    }
}
