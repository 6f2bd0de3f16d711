//! Tests of the files that commands write: their paths are printed, and pages are opened.

use std::fs;
use std::path::Path;

use crate::run::{Run, finished, in_one_line};
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

/// Runs the command without a desktop and with this value of `BROWSER`. Returns its exit code, standard output and
/// standard error.
fn pipewright(folder: &Run, arguments: &[&str], browser: Option<&str>) -> (Option<i32>, String, String) {
    let mut command = folder.binary();
    for variable in ["BROWSER", "DISPLAY", "WAYLAND_DISPLAY"] {
        command.env_remove(variable);
    }
    finished(command.args(arguments).envs(browser.map(|browser| ("BROWSER", browser))))
}

/// Returns a folder with the results of a short run in `out`.
fn trained() -> Run {
    let folder = Run::of(&scratch::small(2, 2, 2));
    folder.train(&[]);
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
    folder.write("zb.csv", "0F0,0B0\n");
    folder.write("profile.toml", PROFILE);
    let check = |arguments: &[&str], file: &str| {
        let (code, _, said) = pipewright(&folder, arguments, None);
        assert_eq!(code, Some(0), "{arguments:?}: {said}");
        assert!(said.contains("wrote ") && said.contains(file), "{said}");
        assert!(folder.path(file).exists(), "{arguments:?}");
        let (code, _, said) = pipewright(&folder, &[&["--quiet"], arguments].concat(), None);
        assert!(said.is_empty() || code != Some(0), "{arguments:?}: {said}");
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
    let folder = Run::empty();
    for rest in [&[][..], &["-o", "-"]] {
        let (code, out, said) = pipewright(&folder, &[&["schedule"], SIZE, rest].concat(), None);
        assert!(code == Some(0) && said.is_empty() && !out.is_empty(), "{said}");
    }
}

#[cfg(unix)]
#[test]
fn pages_are_opened() {
    let folder = trained();
    let browser = browser(folder.root(), 0);
    let check = |arguments: &[&str], file: &str| {
        let opened = folder.path("opened");
        let _absent = fs::remove_file(&opened);
        let (code, out, said) = pipewright(&folder, &[arguments, &["--open"]].concat(), Some(&browser));
        assert_eq!(code, Some(0), "{arguments:?}: {said}");
        assert!(said.contains(&format!("wrote {file}\n")) && out.is_empty(), "{said}");
        let opened = fs::read_to_string(opened).expect("the browser ran");
        let path = folder.path(file);
        assert_eq!(opened.trim_end(), path.canonicalize().expect("a page").display().to_string());
        assert!(fs::read_to_string(path).expect("a page").starts_with(['<']), "{arguments:?}");
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
    let folder = Run::empty();
    let failing = browser(folder.root(), 7);
    let check = |browser: Option<&str>, expected: &str| {
        let page = folder.path("page.html");
        let arguments = [&["view"], SIZE, &["-o", "page.html", "--open"]].concat();
        let (code, _, said) = pipewright(&folder, &arguments, browser);
        assert_eq!(code, Some(2), "{said}");
        let said = in_one_line(&said);
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
    let folder = Run::empty();
    let check = |rest: &[&str], expected: &str| {
        let (code, _, said) = pipewright(&folder, &[&["simulate"], SIZE, rest].concat(), Some("true"));
        assert!(code == Some(2) && said.contains(expected), "{said}");
    };
    check(&["--open"], "--open is for drawings; add --format html");
    check(&["--open", "--format", "csv"], "--open is for drawings; add --format html");
    check(&["--open", "--format", "html", "-o", "-"], "--open needs a file");
}

#[test]
fn a_report_follows_its_run() {
    let folder = trained();
    let config = folder.read("out/config.toml");
    folder.write("out/config.toml", config.replace("steps = 2", "steps = 3"));
    let mut command = folder.binary();
    command.args(["report", "out", "-o", "page.html", "--follow=100ms"]);
    let mut following = command.spawn().expect("the binary starts");
    let page = || fs::read_to_string(folder.path("page.html")).unwrap_or_default();
    folder.wait_until(|| page().contains("\"reload\":100.0"));
    assert!(following.try_wait().expect("it is ours").is_none(), "the run has a step to go");
    let metrics = folder.read("out/metrics.jsonl");
    let last = metrics.lines().last().expect("a line").replace("\"step\":2", "\"step\":3");
    folder.write("out/metrics.jsonl", format!("{metrics}{last}\n"));
    folder.wait_until(|| page().contains("\"reload\":null"));
    assert!(following.wait().expect("it ends").success());
    assert!(page().contains("\"steps\":[1,2,3]"));
    assert!(!folder.path("page.html.part").exists());
    // A complete run needs no file.
    folder.print(&["report", "out", "--follow"]);
}
