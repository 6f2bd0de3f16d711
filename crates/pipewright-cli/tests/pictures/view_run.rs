//! Tests of `view` for the folder of a run: a short training, and folders that are not complete.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::browser::Browser;
use crate::simulation::same_memory;

#[path = "../scratch/mod.rs"]
mod scratch;

fn pipewright(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    command.current_dir(folder).args(arguments).output().expect("the binary starts")
}

/// Trains a small model on two ranks.
pub(crate) fn trained(set: &[&str]) -> TempDir {
    let folder = scratch::folder(&scratch::small(2, 4, 12));
    let set = set.iter().flat_map(|set| ["--set", set]);
    let output =
        pipewright(folder.path(), &["train", "small.toml"].into_iter().chain(set).collect::<Vec<_>>());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}

fn check_error(folder: &Path, arguments: &[&str], expected: &str) {
    let output = pipewright(folder, arguments);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {words}");
    assert!(words.contains(expected), "{words}");
}

#[test]
fn a_run_keeps_timelines_and_its_page_shows_them() {
    let folder = trained(&["run.timelines=3"]);
    let kept: Vec<String> = fs::read_dir(folder.path().join("out/timelines"))
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    for step in ["step-00000001.json", "step-00000004.json", "step-00000008.json", "step-00000012.json"] {
        assert!(kept.contains(&step.to_owned()), "{kept:?}");
    }
    let output = pipewright(folder.path(), &["view", "out", "-o", "view.html"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Some(mut browser) = Browser::open(&folder.path().join("view.html"), 1400, 900) else { return };
    assert!(browser.requests().is_empty());
    let texts = browser.texts();
    assert!(
        texts.iter().any(|text| text == "measured") && texts.iter().any(|text| text == "predicted"),
        "{texts:?}"
    );
    assert!(browser.holds(
        "ranks.length === 4 && data.view.steps.at(-1).step === 12 && stepAt === data.view.steps.length - 1"
    ));
    // No message of a measured step arrives before it is sent, and the prediction has the measured costs.
    assert!(browser.holds("data.unit === 'bytes' && peak > 100"), "memory is counted in bytes");
    let ratio = browser.number("predictedSource.end / measuredSource().end");
    assert!(ratio > 0.02 && ratio < 50.0, "{ratio}");
    assert!(browser.text("#figures").contains("step 12 "), "{}", browser.text("#figures"));
    // The page says which steps its medians are from, and of what each figure is a part.
    let why = browser.text("#why");
    for about in [
        "The program of a step lasts from its first action to its last one",
        "The time per step lasts from the end of a step to the end of the next one",
        "The program of a slow step can take longer",
        "The bubble is the share of the program in which a rank computes nothing",
        "Shares below a bar are parts of the chain of causes",
    ] {
        assert!(why.contains(about), "{about}: {why}");
    }
    assert!(
        browser.text("#whatif").contains("Times are medians over all recorded steps but the first."),
        "{}",
        browser.text("#whatif")
    );
    assert!(
        browser.holds("slowActions(measuredSource()).length === 0")
            || browser.text("#why").contains("longer than the median of its stage in this step")
    );
    assert!(browser.text("#bar").contains("memory, computed"));
    let tips = "[0, 1].map((index) => describe({ rank: ranks[index], time: whole / 2 })[1])";
    assert!(browser.holds(&format!(
        "{tips}[0].endsWith(', computed for activations only') && !{tips}[1].includes('computed')"
    )));
    assert!(browser.holds("!document.getElementById('help-steps').hidden"));
    browser.key("[", "[");
    assert!(browser.holds("measuredSource().step === data.view.steps.at(-2).step"));
    browser.enter("#step", "0");
    assert!(browser.text("#step-name").starts_with("step 1 (1 of "), "{}", browser.text("#step-name"));
    browser.click_on("#show-predicted");
    assert!(browser.holds("ranks.length === 2 && ranks.every(({ tag }) => tag === 'measured')"));
    // A receive that waits is drawn as waiting until its message is sent.
    let waits = "ranks.flatMap(({ bars }) => bars.kind.map((_, at) => ({ name: data.kinds[bars.kind[at]][0], start: bars.start[at], sent: bars.sent[at], end: bars.end[at] })))
        .filter(({ start, sent }) => sent > start)";
    assert!(browser.number(&format!("{waits}.length")) >= 2.0, "ranks wait for their first messages");
    assert!(browser.holds(&format!(
        "{waits}.every(({{ name, sent, end }}) => name.startsWith('RECV_') && sent <= end)"
    )));
    assert!(browser.text("#legend").contains("waits for a message"), "{}", browser.text("#legend"));
    let painted = "(() => { const lane = ranks.find(({ bars }) => bars.sent.some((sent, at) => sent - bars.start[at] > whole / 50));
        const at = lane.bars.sent.findIndex((sent, at) => sent - lane.bars.start[at] > whole / 50), y = axisHeight + rowOf(lane.index).bottom - 1;
        const colour = (time) => packed([...paint.getImageData(Math.round(gutter + xOf(time)), Math.floor(y), 1, 1).data]);
        const message = theme.lit[messageSort][0].pixel, { start, sent, end } = { start: lane.bars.start[at], sent: lane.bars.sent[at], end: lane.bars.end[at] };
        hovered = null, draw();
        return [colour((start + sent) / 2) === message, describe({ rank: lane, time: start, events: lane.bars, at, parts: partsOf(lane, lane.bars, at) }).join()]; })()";
    let painted = browser.value(painted);
    assert_eq!(painted[0], false, "the time before the message is sent is not the time of the message");
    assert!(painted[1].as_str().expect("a tip").contains("until the message is sent"), "{painted}");
    // The schedule is known from the configuration, so other numbers of microbatches can be simulated.
    browser.enter("#whatif-microbatches", "8");
    assert!(browser.holds("whatIfSource.end > predictedSource.end"));
    let path = "criticalPath(measuredSource())";
    assert!(browser.holds(&format!("{path}.length > 3 && {path}.at(-1).cause.via === 'start'")));
}

#[test]
fn slices_of_a_run_have_names_and_memory() {
    let folder = trained(&["pipeline.schedule=seq1f1b", "pipeline.slices=4"]);
    let output = pipewright(folder.path(), &["view", "out", "-o", "view.html"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Some(mut browser) = Browser::open(&folder.path().join("view.html"), 1400, 900) else { return };
    for (query, matches) in [("0F3.3", 2), ("0F15", 0), ("1F3", 8)] {
        assert!(browser.holds(&format!("findMatches('{query}').length === {matches}")), "{query}");
    }
    assert!(browser.holds(&same_memory(4)));
    // Other numbers of microbatches have as many slices.
    browser.enter("#whatif-microbatches", "8");
    assert!(browser.holds("whatIfSource.end > predictedSource.end"));
}

/// The rows of such a run have second forwards.
#[test]
fn a_run_that_recomputes_can_be_simulated_at_other_costs() {
    let folder = trained(&["pipeline.recompute=stage"]);
    let output = pipewright(folder.path(), &["view", "out", "-o", "view.html"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Some(mut browser) = Browser::open(&folder.path().join("view.html"), 1400, 900) else { return };
    assert!(browser.holds(&same_memory(4)));
    browser.enter("#whatif-F", "200");
    assert!(browser.holds("whatIfSource.end > predictedSource.end"));
}

#[test]
fn the_exchanges_of_a_run_are_costs_of_their_own() {
    for schedule in
        [&["pipeline.schedule=dualpipev"][..], &["pipeline.schedule=zbvzerobubble", "pipeline.overlap=true"]]
    {
        check_exchanges(schedule);
    }
}

fn check_exchanges(schedule: &[&str]) {
    let size = [
        "model.architecture=qwen3_moe",
        "model.num_experts=4",
        "model.num_experts_per_tok=2",
        // A block for each stage.
        "model.num_hidden_layers=6",
        "pipeline.partition=even",
        "pipeline.ranks=2",
        "pipeline.microbatches=12",
        "mesh.data_parallel=2",
        "mesh.expert_parallel=2",
    ];
    let folder = trained(&[&size[..], schedule].concat());
    let output = pipewright(folder.path(), &["view", "out", "-o", "view.html"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = fs::read_to_string(folder.path().join("view.html")).expect("a page");
    assert!(page.contains("OVERLAP_F_B") && page.contains("\"programs\":[]"), "the costs have exchanges");
    let Some(mut browser) = Browser::open(&folder.path().join("view.html"), 1400, 900) else { return };
    for source in ["measuredSource()", "predictedSource"] {
        assert!(
            browser.holds(&format!("{source}.lanes.every(({{ exchanges }}) => exchanges.start.length > 0)")),
            "{source}"
        );
    }
    assert_eq!(browser.value("getComputedStyle(document.getElementById('whatif')).display"), "none");
}

#[test]
fn replicas_share_the_prediction() {
    let folder = trained(&["mesh.data_parallel=2"]);
    let output = pipewright(folder.path(), &["view", "out", "-o", "view.html"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Some(mut browser) = Browser::open(&folder.path().join("view.html"), 1000, 900) else { return };
    assert!(browser.holds("ranks.length === 6 && measuredSource().lanes.length === 4"));
    assert!(browser.holds("measuredSource().lanes.map(({ replica }) => replica).join() === '0,0,1,1'"));
    assert!(browser.holds("criticalPath(measuredSource()).length > 3"));
    // The step ends when the gradients are summed, as in the metrics. This is after the last computation.
    let metrics = fs::read_to_string(folder.path().join("out/metrics.jsonl")).expect("metrics");
    let last: serde_json::Value =
        serde_json::from_str(metrics.lines().last().expect("a line")).expect("metrics");
    let bubble = last["bubble_fraction"].as_f64().expect("a number");
    let shown = browser.number("bubbleShare(measuredSource())");
    assert!((shown - bubble).abs() < 1e-3, "{shown}, not {bubble}");
    // Gaps of a measured step that are too short to have a cause are in no part of its path.
    for (source, tolerance) in [("measuredSource()", 0.1), ("predictedSource", 1e-6)] {
        let ends = format!(
            "Math.max(...{source}.lanes.flatMap(({{ bars }}) => bars.end)) <= {source}.end * (1 + 1e-6)"
        );
        assert!(browser.holds(&ends), "{source}");
        let sum = format!(
            "[...timesOfStep({source}).values()].reduce((sum, time) => sum + time, 0) / {source}.end"
        );
        let sum = browser.number(&sum);
        assert!((sum - 1.0).abs() < tolerance, "{source}: {sum}");
    }
    let waits = "predictedSource.lanes.some(({ bars }) => bars.kind.some((kind) => data.kinds[kind][0] === 'WAIT_REDUCE_GRAD'))";
    assert!(browser.holds(waits));
    assert!(browser.text("#legend").contains("gather, reduce"), "{}", browser.text("#legend"));
}

#[test]
fn steps_before_another_cut_are_left_out() {
    let folder = trained(&["run.timelines=3", "run.checkpoint_every=12"]);
    let resumed = ["resume", "out", "--set", "pipeline.ranks=1", "--set", "run.steps=16"];
    let output = pipewright(folder.path(), &resumed);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = pipewright(folder.path(), &["view", "out", "-o", "view.html"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Some(mut browser) = Browser::open(&folder.path().join("view.html"), 1400, 900) else { return };
    assert!(browser.holds("data.view.steps.length > 0 && data.view.steps.every(({ step, ranks }) => step > 12 && ranks.length === 1)"));
    let (note, shown) = (browser.text("#note"), browser.number("data.view.steps.length"));
    let numbers: Vec<f64> = note.split(' ').filter_map(|word| word.parse().ok()).collect();
    assert!(
        note.contains("recorded steps are left out: they ran another program than the last step"),
        "{note}"
    );
    assert!(numbers.len() == 2 && numbers[0] >= 4.0 && numbers[1] == numbers[0] + shown, "{note}");
}

#[test]
fn folders_that_are_no_complete_run_are_refused() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let out = folder.path().join("out");
    fs::create_dir(&out).expect("a folder");
    for command in ["view", "report"] {
        check_error(
            folder.path(),
            &[command, "out"],
            "out: not the folder of a run: it has neither metrics.jsonl",
        );
    }
    fs::write(out.join("metrics.jsonl"), "{\"step\":1,\"loss\":2.0}\n").expect("a file");
    check_error(folder.path(), &["view", "out"], "out: the run has no timeline: timeline.json is missing");
    fs::write(out.join("timeline.json"), "{\"traceEvents\":[\n{\"ph\":}]}").expect("a file");
    check_error(
        folder.path(),
        &["view", "out"],
        "out/timeline.json: not a trace of Pipewright: expected value at line 2",
    );
    fs::write(out.join("metrics.jsonl"), "{\"step\":1}\n{\"step\":2,\"loss\":oops}\n").expect("a file");
    check_error(
        folder.path(),
        &["report", "out"],
        "out/metrics.jsonl:2: not the metrics of a step: expected value",
    );
    check_error(folder.path(), &["report", "nowhere"], "nowhere: not the folder of a run");
    check_error(folder.path(), &["view", "some/where"], "some/where: not a folder; name the folder of a run");
    fs::create_dir_all(folder.path().join("runs/sample")).expect("a folder");
    fs::write(folder.path().join("zb.csv"), "0F0,0B0\n").expect("a file");
    let neither = "neither the folder of a run, nor a file, nor a schedule; ";
    let suggested = |target: &str, words: &str| check_error(folder.path(), &["view", target], words);
    suggested("runs/sampel", "runs/sampel: not a folder; did you mean `runs/sample`?");
    suggested("sampel", &format!("sampel: {neither}did you mean `runs/sample`?"));
    suggested("ouut", &format!("ouut: {neither}did you mean `out`?"));
    suggested("gpip", &format!("gpip: {neither}did you mean `gpipe`?"));
    suggested("nosuch", &format!("nosuch: {neither}check the path, or see the schedules with "));
    check_error(
        folder.path(),
        &["view", "out", "--ranks", "2"],
        "--ranks is for schedules, and a run has its own",
    );
    check_error(folder.path(), &["view", "1f1b"], "--ranks is missing");
}
