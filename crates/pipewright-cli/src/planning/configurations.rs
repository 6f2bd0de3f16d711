//! Reads configurations for training, for the plans of `pipewright plan`.

use std::path::Path;

use pipewright::ids::WorldRank;
use pipewright::mesh::DataParallelMode;
use pipewright_models::CutModel;
use pipewright_models::hf;
use pipewright_models::training_memory::ExpertShare;
use pipewright_planning::clusters::model::of_model;
use pipewright_planning::configurations::{Base, Configurations, FixedRanks, PlannedModel, PlannedRun};
use pipewright_planning::failure::Failure;
use pipewright_planning::screen::say;
use pipewright_run::settings::mesh::MeshSettings;
use pipewright_run::settings::model::ModelSettings;
use pipewright_run::settings::profile::read_for;
use pipewright_run::settings::{Settings, generator};
use pipewright_run::training::load::load_settings;
use pipewright_run::training::model::{described, given_labels, model_notes, read_model};
use pipewright_run::training::optimizer::state_rule;
use pipewright_schedule::analytic::estimate;
use pipewright_schedule::plan::{Plan, TrainingState};
use pipewright_schedule::profile::Profile;
use pipewright_shapes::reader;
use toml::{Table, Value};

use crate::planning::adapters;
use crate::planning::measure::{profiled_run, workload};
use crate::planning::rates::{assumed_link, assumed_rates};
use crate::planning::request::{add_reads, training_state, tried_head_parts};

/// The reader of the binary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrainingConfigurations;

/// A run with its model.
struct ConfiguredRun {
    settings: Settings,
    model: CutModel,
}

impl Configurations for TrainingConfigurations {
    fn run(
        &self,
        file: Option<&Path>,
        set: &[String],
        fixed: FixedRanks,
    ) -> Result<Box<dyn PlannedRun>, Failure> {
        let mut settings = load_settings(file, set)?.settings;
        if let Some(reason) = replicas_with_all_experts(fixed, &settings.mesh) {
            say(&format!(
                "note: each replica of the plan holds all experts, and `mesh.expert_parallel` is 1 instead of {}: {reason}",
                settings.mesh.expert_parallel
            ));
            settings.mesh.expert_parallel = 1;
        }
        let model = read_model(&settings)?;
        model_notes(&settings)?.iter().for_each(|note| say(note));
        Ok(Box::new(ConfiguredRun { settings, model }))
    }

    /// A model of `model.from` may be of a family that `train` does not know.
    fn model(&self, file: Option<&Path>, set: &[String]) -> Result<PlannedModel, Failure> {
        let settings = load_settings(file, set)?.settings;
        let mut described = match &settings.model {
            ModelSettings::From { from, .. } => of_model(from, "correct model.from")?,
            ModelSettings::Fresh(model) => {
                let keys = model.config().to_json().to_string();
                reader::read(&keys).map_err(|error| Failure::input(format!("[model]: {error}")))?
            }
        };
        if let Some(labels) = given_labels(&settings) {
            let model = &mut described.model;
            (model.labels, model.tied, model.caps_logits) = (Some(labels as u64), false, false);
        }
        let rows = settings.pipeline.rows();
        let batch = u32::try_from(rows).map_err(|_| {
            Failure::input(format!("the step of the configuration has {rows} rows; use at most {}", u32::MAX))
        })?;
        let adapters = match (&settings.model, &settings.adapter) {
            (ModelSettings::From { from, .. }, Some(adapter)) => {
                let folder = hf::resolve(from).map_err(Failure::input)?;
                Some(adapters::read(&folder, &settings, adapter)?)
            }
            _ => None,
        };
        Ok(PlannedModel { described, sequence: Some(settings.data.seq_len), batch: Some(batch), adapters })
    }
}

/// Returns why no replicas of a plan hold the experts together, although the configuration has such a `mesh`;
/// `None` if they do, or if the configuration does not ask for it.
fn replicas_with_all_experts(fixed: FixedRanks, mesh: &MeshSettings) -> Option<String> {
    let tensor = fixed.tensor_parallel.filter(|ranks| *ranks > 1);
    let tensor =
        tensor.map(|ranks| format!("plans with --tensor-parallel {ranks} have no exchanges of tokens"));
    let replicas = fixed.data_parallel.filter(|replicas| *replicas != mesh.data_parallel);
    let replicas = replicas.map(|replicas| {
        format!(
            "--data-parallel {replicas} is not the number of replicas that the configuration has, {}",
            mesh.data_parallel
        )
    });
    tensor.or(replicas).filter(|_| mesh.expert_parallel > 1)
}

impl PlannedRun for ConfiguredRun {
    /// Without a file, the profile is an estimate at assumed rates. Its layers have the optimizer's state.
    fn profile(&self, file: Option<&Path>) -> Result<Profile, Failure> {
        let Self { settings, model } = self;
        let layers = described(settings, model);
        let workload = workload(settings, &layers);
        let mut profile = match file {
            None => estimate(&workload, assumed_rates(settings), assumed_link(settings)),
            Some(file) => read_for(file, &profiled_run(settings, workload))?,
        };
        let rule = state_rule(settings);
        rule.add_to(&mut profile, model).map_err(Failure::input)?;
        let experts = ExpertShare {
            ranks: settings.mesh.expert_parallel,
            tokens: settings.data.seq_len,
            link: profile.link,
            shards: settings.mesh.shards(),
        };
        experts.add_to(&mut profile, &rule, model).map_err(Failure::input)?;
        add_reads(&mut profile, settings, model)?;
        Ok(profile)
    }

    fn ranks(&self) -> u32 {
        self.settings.mesh.ranks(self.settings.pipeline.ranks)
    }

    fn microbatches(&self) -> u32 {
        self.settings.pipeline.microbatches
    }

    fn microbatch_rows(&self) -> u32 {
        self.settings.pipeline.microbatch_size
    }

    fn training_state(&self) -> Result<TrainingState, Failure> {
        training_state(&self.settings, &self.model)
    }

    fn replicas_with_experts(&self) -> Option<u32> {
        let mesh = &self.settings.mesh;
        (mesh.expert_parallel > 1).then_some(mesh.data_parallel)
    }

    fn always_streams(&self) -> bool {
        self.model.streams()
    }

    fn head_parts(&self, profile: &Profile, ranks: u32) -> Vec<u32> {
        tried_head_parts(&self.settings, &self.model, profile, ranks)
    }

    fn precision(&self) -> String {
        self.settings.run.precision.to_string()
    }

    /// All replicas of a plan form one group, if the groups of the configuration do not divide their number.
    fn note_on_groups(&self, replicas: u32) -> Option<String> {
        let mode = self.settings.mesh.data_parallel_mode;
        let DataParallelMode::Hybrid { shards } = mode else { return None };
        (mode.shards_that_divide(replicas) != shards).then(|| {
            format!(
                "mesh.data_parallel: groups of {shards} do not divide the number of replicas of the plan, {replicas}, so all \
                 replicas form one group"
            )
        })
    }

    fn base(&self, plan: &Plan) -> Base {
        let mut settings = self.settings.clone();
        if !plan.machines.is_empty() {
            // The numbers of the ranks in the configuration, which is for all ranks of the profile.
            let ranks = || plan.machines.iter().map(|machine| WorldRank::new(machine.get()));
            let pipeline = &mut settings.pipeline;
            pipeline.threads_per_rank = pipeline.threads_per_rank.of_ranks(ranks());
            pipeline.profile_ranks = ranks().map(|rank| pipeline.profile_rank(rank) as u32).collect();
            settings.run.devices = settings.run.devices.of_ranks(ranks());
        }
        let mut keys = Table::try_from(&settings).expect("settings are tables of plain values");
        if let Some(Value::Table(pipeline)) = keys.get_mut("pipeline") {
            for key in ["boundaries", "layout"].into_iter().chain(generator::KEYS.map(|(key, _)| key)) {
                pipeline.remove(key);
            }
        }
        if let Some(Value::Table(run)) = keys.get_mut("run") {
            // A plan for other settings may have written it.
            run.remove("planned_step_ms");
        }
        let replicas = self.settings.mesh.with_replicas(plan.mesh.data);
        Base { keys, replicas, batches: self.settings.run.accumulate.get() }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use pipewright_cluster::layout::{Layout, Precision};
    use pipewright_cluster::memory::whole_block_activations;
    use pipewright_models::{ModelConfig, ROUTER_CORRECTION};
    use serde_json::{Value, json};

    use super::*;

    /// Returns values of keys that change the parameters of some families.
    fn changes() -> Value {
        json!({
            "tie_word_embeddings": true, "attention_bias": true, "mlp_bias": true, "use_bias": true, "use_conv_bias": false,
            "head_dim": 32, "num_key_value_heads": null, "sliding_window": 8, "mlp_only_layers": [0], "decoder_sparse_step": 2,
            "first_k_dense_replace": 2, "n_shared_experts": 2, "shared_expert_intermediate_size": 24, "q_lora_rank": null,
            "num_nextn_predict_layers": 1, "moe_latent_size": 24, "mtp_loss_weight": 0.3, "mtp_depth": 2, "mtp_block": "M",
            "mod_layers": [0, 1], "embed_norm": "rms", "window_sizes": [], "num_experts": 0,
        })
    }

    /// Returns a configuration, and the same without each of its keys, with each flag changed, with each number
    /// doubled, and with each of [`changes`].
    fn variations(config: &Value) -> Vec<(String, Value)> {
        let mut variations = vec![("as it is".to_owned(), config.clone())];
        let mut add = |key: &str, value: Option<Value>| {
            let (name, mut varied) = (format!("{key}: {value:?}"), config.clone());
            let object = varied.as_object_mut().expect("an object");
            match value {
                Some(value) => drop(object.insert(key.to_owned(), value)),
                None => drop(object.remove(key)),
            }
            variations.push((name, varied));
        };
        for (key, value) in config.as_object().expect("an object") {
            // All files have these keys; a plan assumes no family, no table of positions and no experts.
            if !["model_type", "architectures", "n_positions", "num_local_experts"].contains(&key.as_str()) {
                add(key, None);
            }
            if let Some(flag) = value.as_bool() {
                add(key, Some(json!(!flag)));
            }
            if let Some(number) = value.as_u64() {
                add(key, Some(json!(2 * number)));
            }
        }
        for (key, value) in changes().as_object().expect("an object") {
            add(key, Some(value.clone()));
        }
        variations
    }

    /// Returns the parameters with a gradient that `train` builds for a model. The table of a tied head is
    /// listed twice.
    fn built(model: &ModelConfig) -> u64 {
        let mut specs = model.parameters().expect("a model");
        specs.retain(|spec| !spec.path.ends_with(ROUTER_CORRECTION));
        specs.sort_by(|one, other| one.path.cmp(&other.path));
        specs.dedup_by(|one, other| one.path == other.path);
        specs.iter().map(|spec| spec.shape.iter().product::<usize>() as u64).sum()
    }

    #[test]
    fn both_readers_count_the_parameters_that_are_built() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipewright-models/tests/data");
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let file = scratch.path().join("config.json");
        let (mut families, mut wrong) = (Vec::new(), Vec::new());
        for model in fs::read_dir(models).expect("the test models") {
            let config = model.expect("a folder").path().join("config.json");
            let Ok(text) = fs::read_to_string(&config) else { continue };
            let config: Value = serde_json::from_str(&text).expect("JSON");
            let family = config["model_type"].as_str().expect("a family").to_owned();
            for (name, varied) in variations(&config) {
                let text = varied.to_string();
                fs::write(&file, &text).expect("the scratch folder takes files");
                // `train` may refuse what has costs.
                let Ok(trained) = ModelConfig::read(&file) else { continue };
                let described: u64 = trained.describe(1).layers.iter().map(|layer| layer.parameters).sum();
                let planned = reader::read(&text).map(|described| described.model.own_parameters());
                let planned = planned.map_err(|error| error.to_string());
                // A plan refuses more dense blocks than the model has, and a hybrid's predictors in other families.
                let is_refused =
                    |error: &String| error.contains("use at most") || error.contains("key `mtp_");
                if planned.as_ref().is_err_and(is_refused) {
                    continue;
                }
                let is_built = name != "as it is" || built(&trained) == described;
                if planned != Ok(described.into()) || !is_built {
                    wrong.push(format!("{family}, {name}: {described} by check, {planned:?} by plan"));
                }
            }
            families.push(family);
        }
        let is_tested = |family: &&str| families.iter().any(|tested| tested == *family);
        let all = ModelConfig::MODEL_TYPES.iter().copied();
        assert_eq!(all.filter(|family| !is_tested(family)).collect::<Vec<_>>(), [""; 0]);
        assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
    }

    /// Nemotron 3 Super has 120.7B parameters, and a token uses 12.8B of them.
    #[test]
    fn both_readers_count_experts_in_a_narrower_width() {
        let pattern =
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME";
        let config = json!({
            "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": pattern,
            "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
            "vocab_size": 131_072, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
            "conv_kernel": 4, "chunk_size": 128, "n_routed_experts": 512, "num_experts_per_tok": 22,
            "n_shared_experts": 1, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
            "moe_latent_size": 1024, "n_group": 1, "topk_group": 1, "mlp_hidden_act": "relu2",
            "tie_word_embeddings": false
        });
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let file = scratch.path().join("config.json");
        fs::write(&file, config.to_string()).expect("the scratch folder takes files");
        let trained = ModelConfig::read(&file).expect("a model");
        let described: u64 = trained.describe(1).layers.iter().map(|layer| layer.parameters).sum();
        let planned = reader::read(&config.to_string()).expect("a model").model;
        assert_eq!([built(&trained), described, planned.parameters() as u64], [120_668_687_360; 3]);
        assert_eq!((planned.blocks.len(), planned.active_parameters()), (88, 12_770_216_960));
    }

    /// Training counts scales of norms and normalisers of attention too; a plan leaves them out.
    #[test]
    fn both_count_the_same_tensors_of_a_block() {
        let layout = Layout::on_one_gpu(8, Precision::Half);
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipewright-models/tests/data");
        // The scales of two norms, or of one before a Mamba-2 mixer, and of heads, their norms, latents or groups.
        let references = [
            ("llama-tiny", 2 + 4),
            ("qwen3-tiny", 2 + 4 + (4 + 2)),
            ("olmo2-tiny", 2 + 2 + 2),
            ("deepseek-v3-tiny", 2 + 2 + 2),
            ("nemotron-h-tiny", 1 + 2),
        ];
        for (name, scales) in references {
            let folder = models.join(name);
            let trained = ModelConfig::read(&folder).expect("a model").describe(8);
            let text = fs::read_to_string(folder.join("config.json")).expect("a file");
            let planned = reader::read(&text).expect("a model").model;
            let bytes = whole_block_activations(&planned.blocks[0], &planned, &layout);
            // Numbers of 4 bytes in training, and of 2 bytes in the plan, of 8 tokens.
            let found = trained.layers[1].activation_bytes / (8 * 4) - scales;
            assert_eq!(found as f64, bytes / (8.0 * 2.0), "{name}");
        }
    }
}
