//! The adapters of a configuration in a plan for a cluster: the layers that have one, with their sizes.

use std::path::Path;

use pipewright_models::{CutModel, ModelConfig, adapted_experts, adapted_layers};
use pipewright_planning::configurations::PlannedAdapters;
use pipewright_planning::failure::Failure;
use pipewright_run::settings::Settings;
use pipewright_run::settings::adapter::AdapterSettings;
use pipewright_run::training::model::adapter_of;
use pipewright_shapes::training::AdaptedLayer;

/// Returns the adapters of a configuration on the model in the folder `from`, which needs no weights.
pub(super) fn read(
    from: &Path,
    settings: &Settings,
    adapter: &AdapterSettings,
) -> Result<PlannedAdapters, Failure> {
    let model = ModelConfig::read(from).map_err(Failure::input)?;
    let adapter = adapter_of(settings, adapter, &model)?;
    let lora = adapter.lora.clone();
    if !lora.modules_to_save.is_empty() {
        return Err(Failure::input(
            "`adapter.modules_to_save`: a plan for a cluster counts adapters alone: leave the key out for the plan",
        ));
    }
    let specs = CutModel::from(model).with_adapter(adapter).and_then(|model| model.trained_parameters());
    let specs = specs.map_err(Failure::input)?;
    if let Some(experts) = adapted_experts(&specs).first() {
        return Err(Failure::input(format!(
            "`adapter.targets`: a plan for a cluster counts adapters of linear layers alone: leave `{experts}` out for the plan"
        )));
    }
    let adapted = adapted_layers(&lora, &specs);
    let with_block = |(path, layer): (String, AdaptedLayer)| {
        let block = path.split('.').find_map(|name| name.parse::<usize>().ok()).ok_or_else(|| {
            Failure::input(format!(
                "`adapter.targets`: a plan for a cluster counts adapters in blocks alone: leave `{path}` out for the plan"
            ))
        })?;
        Ok((block, layer))
    };
    let layers = adapted.into_iter().map(with_block).collect::<Result<_, Failure>>()?;
    Ok(PlannedAdapters { sizes: lora.sizes(), layers })
}
