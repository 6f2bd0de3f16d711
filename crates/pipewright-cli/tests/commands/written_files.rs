//! Tests of the files that commands write: their paths are printed, and pages are opened.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::scratch;

/// The costs of four equal layers.
const PROFILE: &str = "\
[link]
latency_s = 5e-6
bytes_per_s = 1e10
[[layers]]
kind = \"a\"
count = 4
forward_s = 1e-3
input_backward_s = 1e-3
weight_backward_s = 1e-3
optimizer_s = 1e-4
output_bytes = 1024
parameter_bytes = 1024
activation_bytes = 1024
";

const SIZE: &[&str] = &["1f1b", "--ranks", "2", "--microbatches", "2"];

/// Runs the command in a folder, without a desktop and with this value of `BROWSER`.
fn pipewright(folder: &Path, arguments: &[&str], browser: Option<&str>) -> Output {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    command.current_dir(folder).args(arguments);
    for variable in ["BROWSER", "DISPLAY", "WAYLAND_DISPLAY"] {
        command.env_remove(variable);
    }
    command.envs(browser.map(|browser| ("BROWSER", browser))).output().expect("the binary starts")
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns a folder with the results of a short run in `out`.
fn trained() -> TempDir {
    let folder = scratch::folder(&scratch::small(2, 2, 2));
    let output = pipewright(folder.path(), &["train", "small.toml"], None);
    assert!(output.status.success(), "{}", words(&output));
    folder
}

/// Writes a program that records its arguments, and returns its path.
#[cfg(unix)]
fn browser(folder: &Path, code: i32) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = folder.join(format!("browser {code}"));
    fs::write(&path, format!("#!/bin/sh\necho \"$@\" >> '{}/opened'\nexit {code}\n", folder.display()))
        .expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is ours");
    path.display().to_string()
}

#[test]
fn every_command_says_which_file_it_has_written() {
    let folder = trained();
    fs::write(folder.path().join("zb.csv"), "0F0,0B0\n").expect("a file");
    fs::write(folder.path().join("profile.toml"), PROFILE).expect("a file");
    let check = |arguments: &[&str], file: &str| {
        let output = pipewright(folder.path(), arguments, None);
        assert!(output.status.success(), "{arguments:?}: {}", words(&output));
        assert!(words(&output).contains("wrote ") && words(&output).contains(file), "{}", words(&output));
        assert!(folder.path().join(file).exists(), "{arguments:?}");
        let quiet = pipewright(folder.path(), &[&["--quiet"], arguments].concat(), None);
        assert!(quiet.stderr.is_empty() || !quiet.status.success(), "{arguments:?}: {}", words(&quiet));
    };
    let with = |first: &str, rest: &[&str]| -> Vec<String> {
        [&[first], SIZE, rest].concat().into_iter().map(str::to_owned).collect()
    };
    for (command, rest) in [
        ("schedule", &["-o", "a.csv"][..]),
        ("simulate", &["-o", "a.txt"]),
        ("simulate", &["--format", "html", "-o", "a.html"]),
        ("view", &["-o", "b.html"]),
    ] {
        let arguments = with(command, rest);
        check(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), rest[rest.len() - 1]);
    }
    check(&["lower", "zb.csv", "--pass", "reduce-grad", "-o", "c.csv"], "c.csv");
    check(&["report", "out", "-o", "report.html"], "report.html");
    check(&["view", "out", "-o", "view.html"], "view.html");
    check(&["init", "new.toml"], "new.toml");
    check(&["export", "out", "model"], "model");
    check(&["completions", "bash", "-o", "complete.bash"], "complete.bash");
    check(&["devices", "-o", "devices.txt"], "devices.txt");
    check(&["vpp", "--ranks", "2", "--chunks", "2", "--microbatches", "2", "-o", "vpp.txt"], "vpp.txt");
    let plan =
        ["plan", "--profile", "profile.toml", "--ranks", "2", "--microbatches", "2", "--time-limit", "1s"];
    check(&[&plan[..], &["-o", "plan.toml"]].concat(), "plan.toml");
}

#[test]
fn what_goes_to_standard_output_is_not_called_a_file() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    for rest in [&[][..], &["-o", "-"]] {
        let output = pipewright(folder.path(), &[&["schedule"], SIZE, rest].concat(), None);
        assert!(output.status.success() && output.stderr.is_empty(), "{}", words(&output));
        assert!(!output.stdout.is_empty());
    }
}

#[cfg(unix)]
#[test]
fn pages_are_opened() {
    let folder = trained();
    let browser = browser(folder.path(), 0);
    let check = |arguments: &[&str], file: &str| {
        let opened = folder.path().join("opened");
        let _absent = fs::remove_file(&opened);
        let output = pipewright(folder.path(), &[arguments, &["--open"]].concat(), Some(&browser));
        assert!(output.status.success(), "{arguments:?}: {}", words(&output));
        assert!(words(&output).contains(&format!("wrote {file}\n")), "{}", words(&output));
        let opened = fs::read_to_string(opened).expect("the browser ran");
        let path = folder.path().join(file);
        assert_eq!(opened.trim_end(), path.canonicalize().expect("a page").display().to_string());
        assert!(fs::read_to_string(path).expect("a page").starts_with(['<']), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    };
    check(&["report", "out"], "out/report.html");
    check(&["report", "out", "-o", "page.html"], "page.html");
    check(&["report", "out", "out"], "pipewright-report.html");
    check(&["view", "out"], "out/view.html");
    check(&[&["view"], SIZE].concat(), "pipewright-1f1b.html");
    for command in ["schedule", "simulate"] {
        check(&[&[command], SIZE, &["--format", "html", "-o", "s.html"]].concat(), "s.html");
        check(&[&[command], SIZE, &["--format", "svg"]].concat(), "pipewright-1f1b.svg");
    }
}

#[cfg(unix)]
#[test]
fn pages_that_cannot_be_opened_are_written() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let failing = browser(folder.path(), 7);
    let check = |browser: Option<&str>, expected: &str| {
        let page = folder.path().join("page.html");
        let arguments = [&["view"], SIZE, &["-o", "page.html", "--open"]].concat();
        let output = pipewright(folder.path(), &arguments, browser);
        assert_eq!(output.status.code(), Some(2), "{}", words(&output));
        let said = words(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains("page.html: is written, but cannot be opened: "), "{said}");
        assert!(said.contains(expected) && said.contains("set BROWSER to a command"), "{said}");
        fs::remove_file(page).expect("the page is written");
    };
    check(None, "neither DISPLAY nor WAYLAND_DISPLAY is set");
    check(Some("no-such-browser"), "no-such-browser cannot be started");
    check(Some(&failing), "failed (exit status: 7)");
}

#[test]
fn what_cannot_be_opened_is_refused() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let check = |rest: &[&str], expected: &str| {
        let output = pipewright(folder.path(), &[&["simulate"], SIZE, rest].concat(), Some("true"));
        assert_eq!(output.status.code(), Some(2), "{}", words(&output));
        assert!(words(&output).contains(expected), "{}", words(&output));
    };
    check(&["--open"], "--open is for drawings; add --format html");
    check(&["--open", "--format", "csv"], "--open is for drawings; add --format html");
    check(&["--open", "--format", "html", "-o", "-"], "--open needs a file");
}

#[test]
fn a_report_follows_its_run() {
    let folder = trained();
    let path = |name: &str| folder.path().join(name);
    let config = fs::read_to_string(path("out/config.toml")).expect("a configuration");
    fs::write(path("out/config.toml"), config.replace("steps = 2", "steps = 3")).expect("a file");
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    command.current_dir(folder.path()).args(["report", "out", "-o", "page.html", "--follow=100ms"]);
    let mut following = command.spawn().expect("the binary starts");
    let page = || fs::read_to_string(path("page.html")).unwrap_or_default();
    let wait_until = |is_so: &dyn Fn() -> bool| {
        let start = std::time::Instant::now();
        while !is_so() {
            assert!(start.elapsed() < std::time::Duration::from_secs(60), "the page does not follow");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    };
    wait_until(&|| page().contains("\"reload\":100.0"));
    assert!(following.try_wait().expect("it is ours").is_none(), "the run has a step to go");
    let metrics = fs::read_to_string(path("out/metrics.jsonl")).expect("metrics");
    let last = metrics.lines().last().expect("a line").replace("\"step\":2", "\"step\":3");
    fs::write(path("out/metrics.jsonl"), format!("{metrics}{last}\n")).expect("a file");
    wait_until(&|| page().contains("\"reload\":null"));
    assert!(following.wait().expect("it ends").success());
    assert!(page().contains("\"steps\":[1,2,3]"));
    assert!(!path("page.html.part").exists());
    let output = pipewright(folder.path(), &["report", "out", "--follow"], None);
    assert!(output.status.success(), "a complete run needs no file: {}", words(&output));
}
