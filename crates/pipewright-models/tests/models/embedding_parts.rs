//! Models whose embedding is cut into parts, compared with a whole embedding: the bits of losses, gradients and
//! updates, checkpoints, and the layers and shards of the parts.

use burn::optim::SgdConfig;
use pipewright::nn::TensorParallel;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::tensor::TensorRank;
use pipewright_models::{CutModel, ModelConfig};
use pipewright_schedule::EMBEDDING_PART;
use serde_json::{Value, json};

use crate::head_parts::{SEQUENCE, batch, check_handed_over, joined, launch_with, model, step};

fn cut(model: &ModelConfig, head_parts: u32, embedding_parts: u32) -> CutModel {
    let model = CutModel::new(model.clone(), head_parts).expect("it can be cut");
    model.with_embedding_parts(embedding_parts).expect("it can be cut")
}

fn launch(model: &CutModel, schedule: &str, ranks: u32) -> Pipeline {
    let config = PipelineConfig { optimizer: Some(SgdConfig::new().init()), ..PipelineConfig::default() };
    launch_with(model, schedule, ranks, config)
}

/// Returns a pipeline with an optimizer that has a state, and a norm that clips.
fn launch_with_state(model: &CutModel, schedule: &str, ranks: u32) -> Pipeline {
    let adam = AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1 };
    let config = PipelineConfig { optimizer: Some(adam.init()), ..PipelineConfig::default() };
    launch_with(model, schedule, ranks, config)
}

/// Compares losses, parameters and gradients to the bit, and the parameters after further updates.
fn check(family: &str, keys: &Value, head_parts: u32, cuts: &[u32]) {
    let model = model(family, keys);
    let whole = cut(&model, head_parts, 1);
    let expected = step(&mut launch(&whole, "gpipe", 1));
    let steps = |pipeline: &mut Pipeline| {
        let losses = [0, 1, 2].map(|_| pipeline.step_batch(batch(), 0.1).expect("a step").loss());
        (losses, joined(pipeline.parameters().expect("the parameters")))
    };
    let after = steps(&mut launch_with_state(&whole, "gpipe", 1));
    for &parts in cuts {
        let cut = cut(&model, head_parts, parts);
        for (schedule, ranks) in [("gpipe", 1), ("1f1b", 3), ("interleaved1f1b", 2), ("zb-h1", 2)] {
            let what = format!("{family} in {parts} parts, {schedule}");
            assert_eq!(step(&mut launch(&cut, schedule, ranks)), expected, "{what}");
            assert_eq!(steps(&mut launch_with_state(&cut, schedule, ranks)), after, "{what}");
        }
    }
}

#[test]
fn decoders_have_the_bits_of_a_whole_embedding() {
    check("llama", &json!({}), 1, &[2, 3, 10]);
    check("llama", &json!({"tie_word_embeddings": true}), 3, &[3]);
    check("gpt2", &json!({"tie_word_embeddings": false}), 2, &[3]);
    check("gpt2", &json!({}), 2, &[2]);
    check("gemma2", &json!({"tie_word_embeddings": false}), 1, &[4]);
}

#[test]
fn a_hybrid_of_mamba_and_attention_has_the_bits_of_a_whole_embedding() {
    check("nemotron_h", &json!({"hybrid_override_pattern": "M*-M", "ssm_state_size": 16}), 1, &[3]);
}

#[test]
fn predictions_share_the_shards_of_the_embedding() {
    let keys = json!({"pattern": "ADAD", "mod_layers": [2], "mtp_loss_weight": 0.3, "mtp_depth": 2,
        "ngram_orders": [2], "ngram_buckets": 11, "num_relations": 2, "embed_norm": "rms"});
    check("hybrid", &keys, 1, &[3]);
    let mut tied = keys;
    tied["tie_word_embeddings"] = true.into();
    check("hybrid", &tied, 3, &[3]);
}

/// The state goes to other numbers of parts and back, with the numbers of the optimizer, which the next step
/// shows.
#[test]
fn checkpoints_have_the_same_bits_under_any_number_of_parts() {
    let untied = [(3, 1), (1, 5), (1, 1), (3, 4)];
    let tied = [(3, 3), (5, 5), (1, 1), (3, 1)];
    for (is_tied, numbers) in [(false, untied), (true, tied)] {
        let model = model("llama", &json!({"tie_word_embeddings": is_tied}));
        let start = |(head, embedding), schedule, ranks| {
            launch_with_state(&cut(&model, head, embedding), schedule, ranks)
        };
        let cuts = [
            start(numbers[1], "zb-h1", 4),
            start(numbers[2], "gpipe", 1),
            start(numbers[3], "interleaved1f1b", 2),
        ];
        check_handed_over(start(numbers[0], "1f1b", 2), cuts);
    }
}

#[test]
fn weight_gradients_of_parts_wait() {
    let model = cut(&model("llama", &json!({})), 1, 3);
    let summary = launch(&model, "zb-h1", 2).step_batch(batch(), 0.0).expect("a step");
    let undeferred: Vec<&str> = summary.undeferred.iter().map(|found| &*found.path).collect();
    assert!(!undeferred.contains(&"model.embed_tokens.weight"), "{undeferred:?}");
}

#[test]
fn the_parts_are_the_whole_embedding() {
    let positions = 64 * 32;
    for (family, head_parts, more) in [("llama", 1, 0), ("gpt2", 3, positions), ("hybrid", 1, 0)] {
        let model = model(family, &if family == "gpt2" { json!({"n_positions": 64}) } else { json!({}) });
        let (whole, cut) = (cut(&model, head_parts, 1), cut(&model, head_parts, 3));
        let (whole, layers) = (whole.describe(SEQUENCE).layers, cut.describe(SEQUENCE).layers);
        assert_eq!(layers[3..], whole[1..], "{family}: the other layers");
        let (whole, parts) = (&whole[0], &layers[..3]);
        assert!(parts.iter().all(|part| part.kind == EMBEDDING_PART), "{parts:?}");
        assert_eq!([0, 1, 2].map(|part| parts[part].parameters), [17 * 32, 17 * 32, 16 * 32 + more]);
        assert_eq!(parts[1].path, format!("{} 2/3", whole.path));
        let ids = 8 * SEQUENCE as u64;
        let outputs = [0, 1, 2].map(|part| parts[part].output_bytes - whole.output_bytes);
        assert_eq!(outputs, [ids, ids, 0]);
        assert_eq!(cut.with_parts(head_parts).expect("the same parts").describe(SEQUENCE).layers, layers);
    }
}

#[test]
fn each_part_has_one_shard_of_the_table() {
    let keys = json!({"pattern": "ADAD", "mtp_loss_weight": 0.3});
    let cut = cut(&model("hybrid", &keys), 1, 3);
    let shapes = |layers| {
        let specs = cut.outline(layers, &TensorParallel::default()).expect("the layers exist");
        let table = specs.into_iter().filter(|spec| spec.path == "model.embed_tokens.weight");
        table.map(|spec| spec.shape).collect::<Vec<_>>()
    };
    let rows = [[17, 32], [17, 32], [16, 32]];
    assert_eq!([0, 1, 2].map(|part| shapes(part..part + 1)), rows.map(|rows| vec![rows.to_vec()]));
    // The prediction has a copy of each.
    assert_eq!(shapes(7..8), rows);
    assert!(shapes(3..7).is_empty() && shapes(8..9).is_empty());
}

#[test]
fn embeddings_that_cannot_be_cut_are_refused() {
    let whole = CutModel::from(model("llama", &json!({})));
    for parts in [0, 49, 51] {
        let error = whole.with_embedding_parts(parts).expect_err("a part without a token").to_string();
        assert!(error.contains(&format!("{parts} parts of a vocabulary of 50 tokens")), "{error}");
    }
    assert!(whole.with_embedding_parts(50).is_ok());
    let rank = TensorParallel::unconnected(TensorRank { index: 0, of: 2 });
    let cut = whole.with_embedding_parts(2).expect("it can be cut");
    let error = cut.outline(0..5, &rank).expect_err("both split the vocabulary");
    assert!(
        error.to_string().starts_with("the embedding is cut into 2 parts, and 2 tensor ranks"),
        "{error}"
    );
    let tied =
        CutModel::new(model("llama", &json!({"tie_word_embeddings": true})), 2).expect("it can be cut");
    let error = tied.with_embedding_parts(3).expect_err("the head has 2 parts");
    assert!(error.to_string().contains("one table, which cannot have 3 parts and 2"), "{error}");
    let both = tied.with_embedding_parts(2).expect("as many");
    assert!(both.with_parts(1).is_err() && tied.with_embedding_parts(1).is_ok());
    assert_eq!((both.parts(), both.embedding_parts()), (2, 2));
}
