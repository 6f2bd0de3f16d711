//! Makes the overview of a prepared run for the display.

use std::path::Path;

use pipewright_document::text::escape;
use pipewright_schedule::{Action, ValidatedProgram};

use crate::error::RunError;
use crate::observer::Overview;
use crate::settings::pipeline::ScheduleChoice;
use crate::training::prepare::Prepared;

/// Returns the overview of a run. May read all data once.
pub(crate) fn overview(prepared: &Prepared) -> Result<Overview, RunError> {
    let Prepared { settings, model, layers, program, rows, .. } = prepared;
    let replicas = settings.mesh.data_parallel;
    let is_text = prepared.is_loss_of_tokens();
    let file_name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(Overview {
        model: model.to_json()["model_type"].as_str().map_or("model".into(), escape).into_owned(),
        layers: layers.layers.len(),
        parameters: layers.layers.iter().map(|layer| layer.parameters).sum(),
        ranks: settings.mesh.ranks(program.ranks()),
        replicas,
        stages: program.placement().stages(),
        schedule: match &settings.pipeline.schedule {
            ScheduleChoice::Named(name) => name.clone(),
            ScheduleChoice::Csv(path) => escape(&file_name(path).unwrap_or_default()).into_owned(),
        },
        defers_weights: defers_weights(program),
        microbatches: settings.pipeline.microbatches,
        device: settings.run.devices.to_string(),
        frequency_loss: if is_text { rows.frequency_entropy().map_err(RunError::input)? } else { 0.0 },
    })
}

/// Returns whether a rank computes anything else between the `I` and the `W` of a microbatch. If a program
/// only splits a backward so that its gradient leaves earlier, the two follow each other.
fn defers_weights(program: &ValidatedProgram) -> bool {
    let waits = |rank| {
        let computed = program.row(rank).iter().filter(|action| action.is_compute());
        computed.clone().zip(computed.skip(1)).any(|(before, after)| match after {
            &Action::WeightBackward { stage, microbatch } => {
                *before != Action::InputBackward { stage, microbatch }
            }
            _ => false,
        })
    };
    program.placement().all_ranks().any(waits)
}
