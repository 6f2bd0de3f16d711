//! Tests that names and configurations are shown as they are, and never run as a part of a page.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::browser::Browser;
use crate::view_run::trained;

/// A name that would run a script if it became a part of a page.
const NAME: &str = "<img src=x onerror=hack()><script>hack()<b>'\"&{{data}}";
/// A text that would end the script of a page and begin another one.
const TEXT: &str = "</script><script>hack()</script><!--<script>";

fn pipewright(folder: &Path, arguments: &[&str]) {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
    let output = command.current_dir(folder).args(arguments).output().expect("the binary starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Opens a page, and checks that it has nothing that a name has added.
fn open(page: &Path) -> Option<Browser> {
    let mut browser = Browser::open(page, 1200, 800)?;
    let added = "document.querySelectorAll('img, b b, [onerror]').length + document.scripts.length";
    let expected = f64::from(u8::from(page.extension().is_some_and(|extension| extension == "html")));
    assert_eq!(browser.number(added), expected, "{}", page.display());
    assert!(browser.requests().is_empty(), "{}", page.display());
    Some(browser)
}

#[test]
fn names_of_runs_and_texts_of_configurations_are_escaped() {
    let folder = trained(&[]);
    let run = folder.path().join(NAME);
    fs::rename(folder.path().join("out"), &run).expect("a name");
    let config = fs::read_to_string(run.join("config.toml")).expect("a configuration");
    fs::write(run.join("config.toml"), format!("# {TEXT}\n{config}")).expect("a file");
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let auxiliary = serde_json::json!({ TEXT: 1.5 });
    let metrics = metrics.replace("{\"step\":", &format!("{{\"auxiliary\":{auxiliary},\"step\":"));
    fs::write(run.join("metrics.jsonl"), metrics).expect("a file");
    for arguments in [&["report", NAME][..], &["report", NAME, NAME], &["view", NAME]] {
        pipewright(folder.path(), &[arguments, &["-o", "page.html"]].concat());
        let Some(mut browser) = open(&folder.path().join("page.html")) else { return };
        assert!(browser.holds(&format!("document.body.textContent.includes({NAME:?})")), "{arguments:?}");
        if arguments[0] == "report" {
            for text in [TEXT.to_owned(), format!("Auxiliary loss {TEXT}")] {
                assert!(browser.holds(&format!("document.body.textContent.includes({text:?})")), "{text}");
            }
        }
    }
}

#[test]
fn names_of_schedules_are_escaped() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = format!("{NAME}.csv");
    fs::write(folder.path().join(&file), "0F0,0B0\n").expect("a file");
    for (arguments, page) in [
        (vec!["view", &file], "page.html"),
        (vec!["simulate", "--csv", &file, "--format", "html"], "page.html"),
        (vec!["simulate", "--csv", &file, "--format", "svg"], "page.svg"),
    ] {
        pipewright(folder.path(), &[&arguments[..], &["-o", page]].concat());
        let Some(mut browser) = open(&folder.path().join(page)) else { return };
        assert!(browser.holds(&format!("document.documentElement.textContent.includes({NAME:?})")), "{page}");
    }
}
