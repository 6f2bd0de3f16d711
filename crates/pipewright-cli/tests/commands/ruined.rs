//! Tests of updates that ruin the parameters: the run ends, the last good checkpoint stays, and checkpoints
//! of other programs are not called sound.

use std::fs;

use safetensors::SafeTensors;

use crate::run::Run;
use crate::scratch;

/// Runs a command, which must end with `code`, and returns both outputs.
fn check(run: &Run, arguments: &[&str], set: &[&str], expected: i32) -> (String, String) {
    let (code, out, said) = run.call(arguments, set);
    assert_eq!(code, Some(expected), "{arguments:?}: {said}");
    (out, said)
}

#[test]
fn a_ruined_model_does_not_replace_the_last_good_one() {
    let run = Run::new();
    run.train(&["run.steps=2", "run.keep_checkpoints=1", "optimizer.schedule=constant"]);
    let ruin = ["run.steps=3", "optimizer.learning_rate=3e38", "optimizer.weight_decay=1e30"];
    let (_, words) = check(&run, &["resume", "out"], &ruin, 4);
    assert!(words.contains("the checkpoint of step 3 is not written"), "{words}");
    assert!(words.contains("the parameter `"), "{words}");
    assert!(
        words.contains("resume with other settings of [optimizer] (`--set`): pipewright resume"),
        "{words}"
    );
    assert_eq!(run.checkpoints(), ["step-00000002"]);
    check(&run, &["inspect", "out"], &[], 0);
}

#[test]
fn the_first_layer_whose_output_overflows_is_named() {
    let run = Run::of(&scratch::small(4, 4, 2));
    run.train(&[]);
    run.succeed(&["export", "out", "model"], &[]);
    let path = run.path("model/model.safetensors");
    let mut bytes = fs::read(&path).expect("weights");
    let file = SafeTensors::deserialize(&bytes).expect("a sound file");
    let weights = file.tensor("model.layers.2.mlp.up_proj.weight").expect("a weight").data();
    let (start, length) = (weights.as_ptr().addr() - bytes.as_ptr().addr(), weights.len());
    let largest = f32::MAX.to_le_bytes();
    bytes[start..start + length].chunks_exact_mut(4).for_each(|number| number.copy_from_slice(&largest));
    fs::write(&path, bytes).expect("a file");
    let (_, words) = check(&run, &["train", "small.toml"], &["model.from=model", "run.out=again"], 4);
    let first = "the step was computed again with checks: `model.layers.2.mlp` is the first layer with a value that is not \
                 finite: its output, in microbatch 0 of stage";
    assert!(words.contains(first), "{words}");
}

/// Puts NaN into a parameter of the newest checkpoint.
fn ruin_newest(run: &Run) {
    run.change_checkpoint("step-00000002", |bytes| {
        let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        let data = 8 + usize::try_from(header).expect("a length");
        bytes[data..data + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
}

#[test]
fn a_ruined_checkpoint_of_another_program_is_named() {
    let run = Run::new();
    run.train(&["run.steps=2"]);
    ruin_newest(&run);
    const FLAW: &str = "has 1 element that is NaN";
    let (text, words) = check(&run, &["inspect", "out"], &[], 3);
    assert!(text.contains(FLAW) && words.contains("the model is ruined"), "{text}{words}");
    let (json, _) = check(&run, &["inspect", "out", "--format", "json"], &[], 3);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["not_finite"][0]["nan"], 1);
    let (_, words) = check(&run, &["export", "out", "exported"], &[], 0);
    assert!(words.contains("warning") && words.contains(FLAW), "{words}");
    let (_, words) = check(&run, &["resume", "out", "--set", "run.steps=3"], &[], 2);
    assert!(words.contains(FLAW) && words.contains("use an earlier checkpoint"), "{words}");
}
