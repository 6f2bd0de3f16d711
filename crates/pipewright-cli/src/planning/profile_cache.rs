//! The profile that a run with `pipeline.schedule = "auto"` keeps in its folder, under a name with a hash of
//! everything that its figures depend on. A run in the same folder reads it instead of measuring again.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use pipewright_models::CutModel;
use pipewright_run::run_folder::PROFILE;
use pipewright_run::settings::Settings;
use pipewright_run::settings::profile::read_for;
use pipewright_run::training::model::described;
use pipewright_schedule::profile::Profile;
use pipewright_system::bounded_file::{SMALL_TEXT, read_regular_text};
use serde_json::json;

use crate::planning::measure::{profiled_run, workload};
use crate::planning::rates::device_name;

/// Returns the name of the profile's file, with a hash of the model, the device, and the settings that change
/// the times of a layer.
pub(crate) fn profile_file(settings: &Settings, model: &CutModel) -> String {
    const KEYS: [&str; 16] = [
        "data.bos_id",
        "data.packed",
        "data.restart_positions",
        "data.seq_len",
        "data.side",
        "pipeline.microbatch_size",
        "pipeline.threads_per_rank",
        "pipeline.transport",
        "pipeline.head_parts",
        "pipeline.embedding_parts",
        "optimizer.momentum",
        "optimizer.name",
        "run.device",
        "run.devices",
        "run.exact",
        "run.precision",
    ];
    let mut hasher = DefaultHasher::new();
    model.model().to_json().to_string().hash(&mut hasher);
    model.adapter().map(|adapter| json!(adapter.lora).to_string()).hash(&mut hasher);
    let by_key = settings.by_key();
    KEYS.map(|key| by_key.get(key)).hash(&mut hasher);
    settings.mesh.ranks(settings.pipeline.ranks).hash(&mut hasher);
    device_name(settings).hash(&mut hasher);
    (env!("CARGO_PKG_VERSION"), cfg!(debug_assertions)).hash(&mut hasher);
    let [beginning, ending] = PROFILE;
    format!("{beginning}{:016x}{ending}", hasher.finish())
}

/// Reads a profile that an earlier run has left, with its text. A profile that cannot be used is measured
/// again.
pub(crate) fn read_profile(settings: &Settings, model: &CutModel, file: &Path) -> Option<(Profile, String)> {
    let text = read_regular_text(file, SMALL_TEXT).ok()?;
    let layers = described(settings, model);
    let run = profiled_run(settings, workload(settings, &layers));
    Some((read_for(file, &run).ok()?, text))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use pipewright_run::run_folder::is_profile;
    use pipewright_run::training::load::load_settings;
    use pipewright_run::training::model::read_model;

    #[test]
    fn a_profile_is_of_the_settings_that_change_its_figures() {
        let file = |set: &[&str]| {
            let set: Vec<String> = set.iter().map(|&set| set.to_owned()).collect();
            let settings = load_settings(None, &set).expect("the sample").settings;
            profile_file(&settings, &read_model(&settings).expect("the model of the sample"))
        };
        let plain = file(&[]);
        assert!(is_profile(Path::new(&plain)) && !is_profile(Path::new("config.toml")));
        assert_eq!(file(&["run.seed=7", "run.steps=5"]), plain);
        let documents = file(&["data.bos_id=1"]);
        let packed = file(&["data.bos_id=1", "data.packed=true"]);
        let kept = file(&["data.bos_id=1", "data.packed=true", "data.restart_positions=true"]);
        let side = file(&["data.side=side.safetensors"]);
        let half = file(&["run.precision=bf16"]);
        let names = [plain, documents, packed, kept, side, half];
        let different: HashSet<&String> = names.iter().collect();
        assert_eq!(different.len(), names.len(), "{names:?}");
    }
}
