//! Tests of `[model]`.

use pipewright_models::{KeyUse, ModelConfig};

use super::{check, check_set, load};
use crate::settings::keys::keys_of;
use crate::settings::model::ModelSettings;

#[test]
fn every_model_family_can_be_asked_for() {
    for family in ModelConfig::MODEL_TYPES {
        let settings = load(None, &[&format!("model.architecture={family}")]).expect(family);
        let ModelSettings::Fresh(model) = settings.model else { panic!("no folder was named") };
        assert_eq!(model.config().to_json()["model_type"], *family);
    }
}

/// The keys of the table are keys of the families' tables.
#[test]
fn every_key_is_computed_by_a_family() {
    let keys = keys_of("model").expect("the section exists");
    for key in keys
        .iter()
        .map(|key| key.name)
        .filter(|key| !["from", "add_tokens", "stream", "stream_window", "architecture"].contains(key))
    {
        let is_computed = |family: &&str| ModelConfig::key_use(family, key) == Some(KeyUse::Computes);
        assert!(ModelConfig::MODEL_TYPES.iter().any(is_computed), "{key}");
    }
}

#[test]
fn a_family_has_keys_of_its_own() {
    let text = "\
[model]
architecture = \"qwen3_moe\"
hidden_size = 64
num_attention_heads = 4
head_dim = 24
num_experts = 6
num_experts_per_tok = 3
mlp_only_layers = [0]
output_router_logits = true
rope_scaling = { rope_type = \"llama3\", factor = 8, low_freq_factor = 1.0, high_freq_factor = 4.0, \
                 original_max_position_embeddings = 64 }
";
    let settings = load(Some(text), &[]).expect("it is sound");
    let ModelSettings::Fresh(model) = &settings.model else { panic!("no folder was named") };
    let json = model.config().to_json();
    let found = ["head_dim", "num_experts", "num_experts_per_tok", "mlp_only_layers", "output_router_logits"]
        .map(|key| json[key].to_string());
    assert_eq!(found, ["24", "6", "3", "[0]", "true"]);
    assert_eq!(json["rope_parameters"]["rope_type"], "llama3");
    assert_eq!(load(Some(&settings.to_toml()), &[]), Ok(settings));
}

#[test]
fn keys_of_a_family_are_checked_where_they_are_written() {
    let check = |keys: &str, problem: &str| {
        // The place is where the value is.
        let column = keys.find("= ").expect("a key with a value") + 3;
        let text = format!("[model]\narchitecture = \"qwen3_moe\"\n{keys}\n");
        check(&text, &[&format!("a.toml:3:{column}: {problem}")]);
    };
    check(
        "num_experts_per_tok = 9",
        "`num_experts_per_tok = 9` is out of range: it must be from 1 to the number of experts",
    );
    check("num_experts = 0", "`num_experts = 0` is out of range: it must be from 1 to 16384");
    check(
        "rope_scaling = { rope_type = \"ntk\" }",
        "`rope_scaling.rope_type = ntk` is not supported: only default, linear, dynamic, yarn, longrope or llama3 is",
    );
    // The check of the model does not know which of the two tables is written.
    check(
        "rope_parameters = { rope_type = \"longrope\", short_factor = [1.0], long_factor = [1.0], factor = 2.0, \
         original_max_position_embeddings = 4 }",
        "`rope_scaling.short_factor` has 1 number: it must have 32, one for each pair of rotated elements",
    );
    check("num_experts = \"many\"", "the value of `num_experts` cannot be used");
    check_set(
        &["model.num_experts=4"],
        &[
            "--set model.num_experts=4: `num_experts` is not a key of `llama`: only qwen3_moe, qwen2_moe, qwen3_next, qwen3_5_moe_text, mixtral, gpt_oss, hybrid have it",
        ],
    );
}

#[test]
fn the_model_from_a_folder() {
    let file = "[model]\nhidden_size = 8\n";
    assert!(load(Some(file), &["model.from=m"]).is_ok(), "an argument replaces the file's section");
    check(
        "[model]\nfrom = \"m\"\nhidden_size = 8\n",
        &[
            "a.toml:3:15: `hidden_size` is written next to `from`, and with `from` the model follows from its config.json",
        ],
    );
}
