//! Tests of `plan --emit` and `plan --check` through the binary.

use std::fs;

use serde_json::Value;

use crate::plans::PROFILE;
use crate::{folder, refuse, run, succeed, text, write};

fn json(output: &str) -> Value {
    serde_json::from_str(output).expect("JSON")
}

/// Emits a plan for `system` and checks its file. Returns both outputs.
fn emit_and_check(system: &str, file: &str, size: &[&str]) -> (Value, Value) {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let json_of = |arguments: &[&str]| {
        let base = ["plan", "--profile", "p.toml", "--format", "json"];
        json(&succeed(&folder, &[&base, arguments].concat()))
    };
    let emitted = json_of(&[size, &["--emit", system, "--emit-dir", "out/x"]].concat());
    let written = emitted["emit"]["files"].as_array().expect("files");
    assert!(written.iter().all(|path| folder.path().join(path.as_str().expect("a path")).exists()));
    let checked = json_of(&["--check", &format!("out/x/{file}"), "--ranks", size[1]]);
    (emitted, checked)
}

#[test]
fn a_file_is_predicted_as_its_plan() {
    let files =
        [("torchtitan", "torchtitan.args"), ("megatron", "megatron.args"), ("deepspeed", "deepspeed.json")];
    for (system, file) in files {
        for size in [["--ranks", "2", "--microbatches", "4"], ["--ranks", "4", "--microbatches", "8"]] {
            let (emitted, checked) = emit_and_check(system, file, &size);
            let plan = &emitted["emit"]["plan"];
            for key in ["predicted_step_s", "peak_bytes", "boundaries", "microbatches", "data_parallel"] {
                assert_eq!(checked[key], plan[key], "{system} {size:?} {key}");
            }
            assert_eq!(checked["system"], system);
            let longer = emitted["emit"]["longer"].as_f64().expect("a share");
            let best = emitted["plans"][0]["predicted_step_s"].as_f64().expect("a time");
            let own = plan["predicted_step_s"].as_f64().expect("a time");
            assert!((own / best - 1.0 - longer).abs() < 1e-9, "{system} {longer}");
            assert_eq!(emitted["emit"]["refusal"].is_null(), longer == 0.0, "{system} {longer}");
        }
    }
}

const SIZE: [&str; 8] =
    ["--profile", "p.toml", "--ranks", "4", "--microbatches", "8", "--data-parallel", "1"];

#[test]
fn the_files_have_the_options_of_the_system() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE.replace("[device]\n", "tokens = 64\n[device]\nprecision = \"bf16\"\n"));
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).expect(name);
    let plan = |system| succeed(&folder, &[&["plan"], &SIZE[..], &["--emit", system]].concat());
    let said = plan("megatron");
    assert!(
        said.contains("\nMegatron cannot run the best plan: Megatron does not run this schedule; it runs"),
        "{said}"
    );
    assert!(said.contains("\nthe best that Megatron runs takes ") && said.contains("% longer: "), "{said}");
    assert_eq!(
        read("megatron/megatron.args"),
        "\
--num-layers 8
--seq-length 64
--tensor-model-parallel-size 1
--pipeline-model-parallel-size 4
--pipeline-model-parallel-layout Ett|ttt|ttt|L
--micro-batch-size 1
--global-batch-size 8
--bf16
"
    );
    assert!(read("megatron/mapping.md").contains("| 2 | 2 | 6 to 8 | `ttt` |\n| 3 | 3 | 9 | `L` |\n"));
    plan("deepspeed");
    let config = json(&read("deepspeed/deepspeed.json"));
    assert_eq!(config["pipeline"]["parts"], serde_json::json!([0, 3, 6, 9, 10]));
    assert_eq!(config["bf16"]["enabled"], true);
    assert!(read("deepspeed/planned_pipeline.py").contains("class PlannedPipelineModule(PipelineModule)"));
    let said = plan("torchtitan");
    let options = read("torchtitan/torchtitan.args");
    assert!(
        options.contains("--parallelism.pipeline_parallel_schedule_csv torchtitan/schedule.csv\n"),
        "{options}"
    );
    assert!(options.contains(" tok_embeddings,layers.0") && options.contains(" norm,lm_head\n"), "{options}");
    assert!(options.ends_with("activation-checkpoint:none\n"), "{options}");
    assert!(said.contains("      schedule "), "{said}");
    succeed(&folder, &["validate", "torchtitan/schedule.csv"]);
}

#[test]
fn a_check_names_the_stage_that_limits() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let layout = |layout: &str| {
        format!(
            "torchrun pretrain_gpt.py \\\n  --pipeline-model-parallel-size 4 \\\n  --micro-batch-size 1 \\\n  \
             --global-batch-size 8 \\\n  --pipeline-model-parallel-layout \"{layout}\" --recompute-activations\n"
        )
    };
    let check = |words: &str| {
        write(&folder, "run.sh", layout(words));
        succeed(&folder, &["plan", "--profile", "p.toml", "--check", "run.sh"])
    };
    let even = check("E(tt|)*3ttL");
    assert!(even.contains("run.sh: Megatron, 1f1b: 4 ranks, 4 stages, 8 microbatches of 1 row: "), "{even}");
    assert!(
        even.contains("\nyour layout takes ")
            && even.contains(
                "% longer than the best we know: stage 3 is the limit, most of it the head: rank 3 computes "
            ),
        "{even}"
    );
    assert!(
        even.contains("\nbest we know  ") && even.contains("\nbest that Megatron runs  1f1b: "),
        "{even}"
    );
    let good = check("Ett|ttt|ttt|L");
    assert!(good.contains("than the best we know: "), "{good}");
    let tight = ["plan", "--profile", "p.toml", "--check", "run.sh", "--memory", "80MiB"];
    let output = run(&folder, &tight);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
}

#[test]
fn mistakes_are_refused() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let check = |text: &str, words: &str| {
        write(&folder, "x.args", text);
        refuse(&folder, &["plan", "--profile", "p.toml", "--check", "x.args"], 2, &format!("error: {words}"));
    };
    check("[model]\n", "x.args: read `[model]`, and expected options of torchtitan");
    check("0F0,0B0\n", "x.args: read a table of actions, which does not say the layers of its stages");
    check(
        "--pipeline-model-parallel-size 2\n--micro-batch-size 1\n--pipeline-model-parallel-layout Et|ttL",
        "x.args: line 3: the stages have 3 blocks, and the profile has 8",
    );
    check(
        "--parallelism.pipeline_parallel_schedule_csv nowhere.csv",
        "nowhere.csv: cannot read the schedule: ",
    );
    refuse(
        &folder,
        &["plan", "--profile", "p.toml", "--check", "none.args"],
        2,
        "error: none.args: cannot be read: ",
    );
    // No plan fits so little memory, so that the folder's name is refused before the search.
    let blanks = ["--memory", "1KiB", "--emit", "torchtitan", "--emit-dir", "a b"];
    let blanks = [&["plan"], &SIZE[..], &blanks].concat();
    refuse(&folder, &blanks, 2, "error: --emit-dir a b: options are separated by blanks; name a folder");
    succeed(&folder, &[&["plan"], &SIZE[..], &["--emit", "megatron", "--emit-dir", "a b"]].concat());
    let without = [&["plan"], &SIZE[..], &["--emit-dir", "a"]].concat();
    refuse(&folder, &without, 2, "error: the following required arguments were not provided");
}

const FOUR_STAGES: &str = "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8";

#[cfg(unix)]
#[test]
fn names_need_not_be_text() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    let name = OsStr::from_bytes(b"x\xff.args");
    fs::write(folder.path().join(name), FOUR_STAGES).expect("the scratch folder takes files");
    let plan = |arguments: &[&OsStr]| {
        let mut command = assert_cmd::Command::cargo_bin("pipewright").expect("the binary is built");
        command.current_dir(folder.path()).args(["plan", "--profile", "p.toml", "--format", "json"]);
        let output = command.args(arguments).output().expect("the binary starts");
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        json(&text(&output.stdout))
    };
    assert_eq!(plan(&["--check".as_ref(), name])["file"], "x\u{fffd}.args");
    let size = ["--ranks", "4", "--microbatches", "8", "--emit", "megatron", "--emit-dir"];
    let emitted = plan(&[&size.map(OsStr::new)[..], &[OsStr::from_bytes(b"y\xff")]].concat());
    assert_eq!(emitted["emit"]["files"][0], "y\u{fffd}/megatron.args");
}

#[test]
fn a_file_is_predicted_even_if_no_plan_is_found() {
    let folder = folder();
    write(&folder, "p.toml", PROFILE);
    write(&folder, "x.args", FOUR_STAGES);
    let arguments = ["plan", "--profile", "p.toml", "--check", "x.args", "--memory", "1MiB"];
    let output = run(&folder, &arguments);
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stdout.starts_with("x.args: Megatron, 1f1b: 4 ranks, 4 stages, "), "{stdout}");
    assert!(stdout.contains("\n      memory by rank ") && !stdout.contains("best we know"), "{stdout}");
    assert!(stderr.contains("among the plans that Megatron runs:\n"), "{stderr}");
    let output = run(&folder, &[&arguments[..], &["--format", "json"]].concat());
    let checked = json(&text(&output.stdout));
    assert_eq!(checked["peak_bytes"].as_array().map(Vec::len), Some(4), "{checked}");
    assert!(checked["best"].is_null() && checked["longer"].is_null(), "{checked}");
    let output = run(&folder, &[&arguments[..5], &["--time-limit", "0s"]].concat());
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("x.args: Megatron, 1f1b: "), "{}", text(&output.stdout));
    // Nothing is printed for wrong input.
    refuse(&folder, &[&arguments[..5], &["--head-parts", "0"]].concat(), 2, "among the plans that Megatron");
}

#[test]
fn the_head_of_a_configuration_is_cut() {
    let folder = folder();
    write(
        &folder,
        "x.json",
        "{\"train_micro_batch_size_per_gpu\": 1, \"gradient_accumulation_steps\": 8, \
                              \"pipeline\": {\"stages\": 4, \"partition\": \"uniform\"}}",
    );
    let set = ["plan", "--set", "model.vocab_size=16384", "--format", "json"];
    let checked = json(&succeed(&folder, &[&set[..], &["--check", "x.json"]].concat()));
    assert!(checked["best"]["head_parts"].as_u64() > Some(1), "{checked}");
}
