//! The answers have the figures of the library, for the arguments of the command that they name.

use pipewright_schedule::generate::{Generator, PerStage, catalogue, find};
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::simulate::summarize;
use pipewright_schedule::{Costs, LowerConfig, ScheduleSpec, Slices};
use serde_json::{Value, json};

fn asked(request: &Value) -> Value {
    serde_json::from_str(&pipewright_page::answer(&request.to_string())).expect("JSON")
}

/// Asks for the prediction of a schedule with these texts, such as `ranks=4 F=1,2`.
fn simulated(name: &str, texts: &str) -> Value {
    let mut setup = json!({ "schedule": name });
    for (key, text) in texts.split(' ').filter_map(|text| text.split_once('=')) {
        setup[key] = json!(text);
    }
    asked(&json!({ "do": "simulate", "setup": setup }))
}

/// Returns what `pipewright simulate --format json` says of a program, by the arguments of the command.
fn summary_of(command: &str) -> Value {
    let mut words = command.strip_prefix("pipewright simulate ").expect("the command").split(' ');
    let generator = find(words.next().expect("a name")).expect("a schedule");
    let (mut spec, mut costs) = (ScheduleSpec::default(), None);
    while let Some(flag) = words.next() {
        let mut number = || words.next().expect("a value").parse::<u32>().expect("a number");
        match flag {
            "--ranks" => spec.ranks = number(),
            "--microbatches" => spec.microbatches = number(),
            "--stages-per-rank" => spec.stages_per_rank = Some(number()),
            "--group-size" => spec.group_size = Some(number()),
            "--slices" => spec.slices = Slices::new(number()),
            "--wide-warmup" => spec.wide_warmup = true,
            "--overlap" => spec.overlap = true,
            "--memory-limit" => {
                let limits =
                    words.next().expect("a list").split(',').map(|limit| limit.parse().expect("a number"));
                spec.memory_limit = Some(PerStage::Each(limits.collect()));
            }
            "--cost" => costs = Some(words.next().expect("costs").parse::<Costs>().expect("costs")),
            flag => panic!("{flag}"),
        }
    }
    if generator.settings.contains(&pipewright_schedule::generate::Setting::Costs) {
        spec.costs.clone_from(&costs);
    }
    let costs = costs.unwrap_or_default();
    let program = ProgramSource::Named(generator.name.to_owned(), Box::new(spec));
    let program = program.program(&LowerConfig::training_at(&costs)).expect("a program");
    let summary = summarize(program.as_program(), &costs).expect("it runs");
    // As text, because reading a number rounds it.
    serde_json::from_str(&serde_json::to_string(&summary).expect("JSON")).expect("JSON")
}

/// Checks the figures for these texts against the figures of the command that the page shows, and returns its arguments.
fn compared(name: &str, texts: &str) -> String {
    let answer = simulated(name, texts);
    let command = answer["command"].as_str().unwrap_or_else(|| panic!("{name} {texts}: {answer}"));
    let mut summary = answer["summary"].clone();
    // The command line does not know the memory of activations.
    summary.as_object_mut().expect("figures").remove("peak_bytes");
    assert_eq!(summary, summary_of(command), "{command}");
    let picture = answer["picture"].as_str().expect("a page");
    assert!(picture.starts_with("<!DOCTYPE html>") && !picture.contains("{{"), "{name}");
    command.strip_prefix(&format!("pipewright simulate {name} ")).expect("the name").to_owned()
}

fn check(name: &str, texts: &str, arguments: &str) {
    assert_eq!(compared(name, texts), arguments, "{name} {texts}");
}

fn check_refused(name: &str, texts: &str, sentence: &str) {
    assert_eq!(simulated(name, texts)["error"], sentence, "{name} {texts}");
}

fn names() -> impl Iterator<Item = &'static str> {
    catalogue().iter().map(|generator: &Generator| generator.name)
}

#[test]
fn every_schedule_has_the_figures_of_its_command() {
    for name in names() {
        assert!(compared(name, "").starts_with("--ranks 4 --microbatches 8"));
        let costs = "F=1.3 B=2.9 I=1.7 hop=0.37";
        for size in
            ["ranks=3 microbatches=9 activation=100MiB", "ranks=1 microbatches=3", "ranks=8 microbatches=32"]
        {
            compared(name, &format!("{size} {costs}"));
        }
    }
}

#[test]
fn settings_belong_to_their_schedules() {
    let size = "--ranks 4 --microbatches 8";
    let shared = |time: &str| format!("--cost F={time},I={time},W={time}");
    check(
        "interleaved1f1b",
        "stages_per_rank=4 group_size=8",
        &format!("{size} --stages-per-rank 4 --group-size 8 {}", shared("0.25")),
    );
    check("interleaved-zb-h1", "wide_warmup=1", &format!("{size} --wide-warmup {}", shared("0.5")));
    check("zb-greedy", "memory_limit=4,3,3,2", &format!("{size} --memory-limit 4,3,3,2"));
    check(
        "seq1f1b",
        "slices=4 attention=0.3",
        &format!("{size} --slices 4 --cost F=1,I=1,W=1,attention=0.3"),
    );
    check("1f1b", "F=1,1,2,1", &format!("{size} --cost F=1:1:2:1,I=1,W=1"));
    // The page hides them for other schedules, and keeps them for when the reader returns.
    check("1f1b", "stages_per_rank=4 slices=3 overlap=1", size);
}

#[test]
fn costs_are_those_of_a_rank() {
    check("zbvzerobubble", "F=3", "--ranks 4 --microbatches 8 --cost F=1.5,I=0.5,W=0.5");
    check(
        "interleaved1f1b",
        "overlap=1 exchange=1",
        "--ranks 4 --microbatches 8 --overlap --cost F=0.5,I=0.5,W=0.5,exchange=0.5,exchanges=1",
    );
    let peaks = |name: &str| simulated(name, "activation=100MiB")["summary"]["peak_bytes"].clone();
    assert_eq!(peaks("1f1b"), json!([400 << 20, 300 << 20, 200 << 20, 100 << 20]));
    assert_eq!(peaks("zbvzerobubble"), json!([400 << 20, 400 << 20, 400 << 20, 400 << 20]));
}

#[test]
fn mistakes_are_sentences() {
    check_refused("1f1b", "ranks=0", "0 ranks with 1 stage each have no stage; use 1 rank");
    check_refused("1f1b", "ranks=four", "ranks: `four` is not a whole number; write one such as 4");
    check_refused(
        "1f1b",
        "activation=much",
        "memory: `much`: write a size such as 16GiB, 500MB or a number of bytes",
    );
    check_refused("gpip", "", "unknown schedule `gpip`; did you mean `gpipe`?");
    let wrong = [
        ("interleaved1f1b", "ranks=4 microbatches=9", "`interleaved1f1b` "),
        ("1f1b", "F=1,2", "2 entries for the costs of 4 stages"),
        ("1f1b", "F=-1", "the cost `F` is -1"),
        ("1f1b", "F=x", "`F=x` is not a cost"),
        ("1f1b", "F=1e400", "the cost `F` is "),
        ("1f1b", "microbatches=1000000", "a schedule with up to "),
        ("1f1b", "ranks=4294967295 microbatches=4294967295", ""),
        ("seq1f1b", "slices=0", "slices: use at least 1"),
        ("1f1b", "activation=1e17", "memory: use at most 4.0 TiB"),
    ];
    for (name, texts, start) in wrong {
        let answer = simulated(name, texts);
        assert!(
            answer["error"].as_str().is_some_and(|error| error.starts_with(start)),
            "{name} {texts}: {answer}"
        );
    }
    for request in [
        "",
        "[]",
        "{\"do\": \"dance\"}",
        "{\"do\": \"simulate\"}",
        "{\"do\": \"simulate\", \"setup\": {\"ranks\": 4}}",
    ] {
        let answer = pipewright_page::answer(request);
        assert!(answer.starts_with("{\"error\":\"the request cannot be read: "), "{request}: {answer}");
    }
}

#[test]
fn a_comparison_has_all_schedules_at_one_cost_of_a_rank() {
    let setup = json!({ "schedule": "1f1b", "microbatches": "9", "stages_per_rank": "4", "hop": "0.1" });
    let names: Vec<&str> = names().collect();
    let answer = asked(&json!({ "do": "compare", "setup": setup, "names": names }));
    let rows = answer["rows"].as_array().expect("rows");
    for (row, name) in rows.iter().zip(names) {
        let alone = simulated(name, "microbatches=9 stages_per_rank=4 hop=0.1");
        assert_eq!((&row["name"], &row["error"]), (&json!(name), &alone["error"]));
        for key in ["makespan", "bubble_fraction", "peak_activations"] {
            assert_eq!(row[key], alone["summary"][key], "{name}: {key}");
        }
    }
    let refused = rows.iter().filter(|row| !row["error"].is_null()).count();
    assert!(
        refused > 0
            && answer["picture"].as_str().expect("a page").matches("<svg ").count() == rows.len() - refused
    );
}

#[test]
fn large_comparisons_have_no_pictures() {
    let asked = |names: &[&str], microbatches: &str| {
        asked(&json!({ "do": "compare", "setup": { "microbatches": microbatches }, "names": names }))
    };
    let large = asked(&["gpipe", "1f1b", "zb-h1"], "3000");
    assert!(large["note"].as_str().is_some_and(|note| note.starts_with("Pictures of ")), "{}", large["note"]);
    assert!(large["picture"].is_null() && large["rows"][2]["makespan"].is_number());
    assert_eq!(asked(&[], "8"), json!({ "rows": [], "picture": null, "note": null }));
    assert!(asked(&["1f1b"; 33], "8")["error"].is_string());
}

#[test]
fn the_catalogue_describes_all_schedules() {
    let catalogue = asked(&json!({ "do": "catalogue" }));
    let listed = catalogue["schedules"].as_array().expect("schedules");
    assert!(listed.iter().map(|it| it["name"].as_str().expect("a name")).eq(names()));
    let keys: Vec<&Value> =
        catalogue["fields"].as_array().expect("fields").iter().map(|it| &it["key"]).collect();
    assert!(
        listed.iter().flat_map(|it| it["fields"].as_array().expect("keys")).all(|key| keys.contains(&key))
    );
    for key in keys {
        assert!(listed.iter().any(|it| it["fields"].as_array().expect("keys").contains(key)), "{key}");
    }
}
