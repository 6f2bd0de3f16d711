//! Mixtures of sources through the command line: the losses are the same under every mesh and after a resume.

use std::fs;

use serde_json::Value;

use super::command_line::folder;
use crate::run::Run;

const MIX: &str = "data.mix=[{ path = \"text.txt\", weight = 2 }, { path = \"chats.jsonl\", weight = 1.5 }, \
                   { path = \"more.pwtok\", weight = 0.5 }]";

/// Makes a folder with the sources of [`MIX`].
fn sources() -> Run {
    let folder = folder();
    let chat = |number: usize| {
        let answer = "a number ".repeat(number % 3 + 1);
        format!("{{\"prompt\": \"{number} is \", \"completion\": \"{answer}\"}}\n")
    };
    folder.write("chats.jsonl", (0..7).map(chat).collect::<String>());
    folder.write("more.txt", "Everything is in its place. ".repeat(2));
    folder.print(&["tokenize", "more.txt", "--tokenizer", "bytes", "-o", "more.pwtok"]);
    folder
}

/// The keys of every run.
const COMMON: [&str; 4] = [MIX, "data.long_records=cut", "run.steps=6", "run.checkpoint_every=2"];

/// Returns the losses, gradient norms and rows of the sources of the run in the folder, as they are written.
fn figures(folder: &Run) -> Vec<[String; 3]> {
    let figures = |step: &Value| ["loss", "grad_norm", "source_rows"].map(|key| step[key].to_string());
    folder.steps().iter().map(figures).collect()
}

fn train(folder: &Run, set: &[&str]) -> Vec<[String; 3]> {
    let _ = fs::remove_dir_all(folder.out());
    folder.train(&[&COMMON[..], set].concat());
    figures(folder)
}

#[test]
fn every_mesh_has_the_losses_of_one_rank_and_a_run_resumes_under_another() {
    let folder = sources();
    let four = "pipeline.microbatches=4";
    let expected = train(&folder, &["pipeline.ranks=1", four]);
    let rows: Vec<&str> = expected.iter().map(|step| step[2].as_str()).collect();
    // Each step takes four rows: two of the text, one or two completions, and every other step one of the
    // last source.
    assert_eq!(rows, ["[2,2,0]", "[4,3,1]", "[6,5,1]", "[8,6,2]", "[10,8,2]", "[12,9,3]"]);
    for set in [&["pipeline.ranks=2", four][..], &["pipeline.ranks=2", "pipeline.schedule=zb-h1", four]] {
        assert_eq!(train(&folder, set), expected, "{set:?}");
    }
    for step in [4, 6] {
        let checkpoint = format!("out/checkpoints/step-{step:08}");
        fs::remove_dir_all(folder.path(&checkpoint)).expect("a checkpoint");
    }
    folder.resume(&["pipeline.ranks=1", "pipeline.schedule=gpipe"]);
    assert_eq!(figures(&folder), expected);
    let other = MIX.replace("weight = 2", "weight = 3");
    let absolute = other.replace("path = \"", &format!("path = \"{}/", folder.root().display()));
    folder.refuse(
        &["resume", "out"],
        &[&absolute, "run.steps=8"],
        "the checkpoint is of another model, of other adapters or of other data, so the run cannot resume from it: data.mix was",
    );
}

/// Replicas, and batches with different numbers of targets, add gradients in an order of their own.
#[test]
fn replicas_and_accumulated_batches_take_the_same_rows() {
    let folder = sources();
    let two = ["pipeline.microbatches=2", "run.accumulate=2"];
    let expected = train(&folder, &["pipeline.microbatches=4"]);
    for set in [&["mesh.data_parallel=2", "pipeline.microbatches=4"][..], &two] {
        let found = train(&folder, set);
        for ([loss, _, rows], [expected, _, expected_rows]) in found.iter().zip(&expected) {
            let number = |loss: &String| loss.parse::<f64>().expect("a number");
            assert!((number(loss) - number(expected)).abs() < 1e-6, "{set:?}: {loss}, {expected}");
            assert_eq!(rows, expected_rows, "{set:?}");
        }
    }
    let texts = "data.mix=[{ path = \"text.txt\", weight = 2 }, { path = \"more.pwtok\", weight = 1 }]";
    let expected = train(&folder, &[texts, "pipeline.microbatches=4"]);
    assert_eq!(train(&folder, &[&two[..], &[texts]].concat()), expected, "all targets count");
}

/// Shares of the batch are for training. The losses of sources need microbatches of equal size.
#[test]
fn shares_of_the_batch_do_not_change_the_validation_of_sources() {
    let folder = folder();
    folder.write("one.txt", "One of two texts is here. ".repeat(40));
    folder.write("two.txt", "Another one is longer. ".repeat(60));
    let mix = "data.mix=[{ path = \"one.txt\", weight = 1 }, { path = \"two.txt\", weight = 2 }]";
    let common = [
        mix,
        "data.validation_share=0.5",
        "run.steps=2",
        "run.eval_every=1",
        "mesh.data_parallel=2",
        "pipeline.microbatches=2",
        "pipeline.microbatch_size=2",
    ];
    let losses = |set: &[&str]| -> Vec<f64> {
        let _ = fs::remove_dir_all(folder.out());
        folder.train(&[&common[..], set].concat());
        let steps = folder.steps();
        let sources = steps.iter().filter_map(|step| step["validation_sources"].as_array()).flatten();
        sources.filter_map(|source| source["loss"].as_f64()).collect()
    };
    let (equal, shared) = (losses(&[]), losses(&["mesh.batch_shares=[3, 1]"]));
    assert_eq!((equal.len(), shared.len()), (4, 4), "two sources after two steps");
    for (equal, shared) in equal.iter().zip(&shared) {
        assert!((equal - shared).abs() < 1e-5, "{equal} and {shared}");
    }
}

#[test]
fn the_sources_are_shown() {
    let folder = sources();
    let summary = folder.succeed(&["check", "small.toml"], &COMMON).0;
    let place = folder.root().display().to_string();
    let source = format!(
        "data      50.0% of the rows, 0.19 passes in the run, from {place}/text.txt: 264 tokens, 32 rows\n"
    );
    assert!(summary.contains(&source), "{summary}");
    let json = folder.json(&["check", "small.toml"], &COMMON);
    let shares: Vec<f64> = json["data"]["mix"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|source| source["share"].as_f64())
        .collect();
    assert_eq!(shares, [0.5, 0.375, 0.125]);
    let shown = folder.succeed(&["data", "show", "small.toml", "--rows", "4"], &COMMON).0;
    let lines: Vec<&str> = shown.lines().filter(|line| line.starts_with("row ")).collect();
    let sources = ["source 1 (", "source 2 (", "source 1 (", "source 2 ("];
    assert!(lines.iter().zip(sources).all(|(line, source)| line.contains(source)), "{shown}");
}

#[test]
fn each_source_gives_its_share_to_the_validation() {
    let folder = sources();
    let set = [&COMMON[..], &["data.validation_share=0.3", "run.eval_every=2"]].concat();
    let json = folder.json(&["check", "small.toml"], &set);
    // 264 and 56 ids, and 7 records.
    assert_eq!(
        (&json["data"]["rows"], &json["validation"]["rows"]),
        (&Value::from(23 + 5 + 4), &Value::from(9 + 2 + 2))
    );
    let expected = train(&folder, &set[COMMON.len()..]);
    assert_eq!(train(&folder, &[&set[COMMON.len()..], &["pipeline.ranks=1"]].concat()), expected);
}

/// With parameters that stay as they are, a source has the loss that a run on it alone has.
#[test]
fn the_validation_loss_of_each_source_is_reported() {
    let folder = sources();
    let common = [
        "pipeline.ranks=1",
        "pipeline.microbatches=1",
        "pipeline.microbatch_size=1",
        "run.eval_every=1",
        "run.steps=1",
        "optimizer.learning_rate=1e-30",
        "optimizer.weight_decay=0",
        "data.validation_share=0.3",
    ];
    let evaluated = |set: &[&str]| -> Value {
        let _ = fs::remove_dir_all(folder.out());
        folder.train(&[&common[..], set].concat());
        folder.steps().pop().expect("one step")
    };
    let number = |value: &Value| value.as_f64().expect("a number");
    let near = |one: f64, other: f64| assert!((one - other).abs() < 1e-6, "{one}, not {other}");
    let texts = "data.mix=[{ path = \"text.txt\", weight = 2 }, { path = \"more.pwtok\", weight = 0.5 }]";
    let found = evaluated(&[texts]);
    let of_source = |index: usize| number(&found["validation_sources"][index]["loss"]);
    let alone = ["text.txt", "more.pwtok"]
        .map(|path| number(&evaluated(&[&format!("data.path={path}")])["validation_loss"]));
    near(of_source(0), alone[0]);
    near(of_source(1), alone[1]);
    near(number(&found["validation_loss"]), (9.0 * alone[0] + 2.0 * alone[1]) / 11.0);
    let name = found["validation_sources"][0]["name"].as_str().expect("a name");
    assert!(name.ends_with("text.txt"), "{name}");
    assert!(evaluated(&["data.path=text.txt"]).get("validation_sources").is_none());

    // The last source has two of thirteen rows, and no microbatch of four rows for itself.
    let set = [MIX, "data.long_records=cut", "pipeline.microbatch_size=4"];
    let mixed = evaluated(&set);
    let losses = mixed["validation_sources"].as_array().expect("a list");
    assert!(losses.len() == 3 && losses[0]["loss"].is_number() && losses[2]["loss"].is_null(), "{mixed}");
    let page = folder.print(&["report", "out", "-o", "-"]);
    let series = |source: &Value| {
        let name = format!("validation {}", source["name"].as_str().expect("a name"));
        page.contains(&format!("{}:", Value::from(name)))
    };
    assert_eq!(losses.iter().map(series).collect::<Vec<_>>(), [true, losses[1]["loss"].is_number(), false]);
}

#[test]
fn sources_that_cannot_be_used() {
    let folder = sources();
    let check = |set: &[&str], part: &str| {
        folder.refuse(&["check", "small.toml"], &[&["data.long_records=cut"], set].concat(), part);
    };
    check(
        &["data.path=text.txt", "data.mix=[{ path = \"text.txt\", weight = 1 }]"],
        "`path` and `mix` both name the training data\n  help: remove `path`, or make it a source of `mix`",
    );
    check(
        &["data.mix=[{ path = \"text.txt\", weight = 1 }, { path = \"*.txt\", weight = 1 }]"],
        "text.txt: the file is in two sources of `mix`",
    );
}
