//! Builds the page once, and opens it at a fragment.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::chromium::Chromium;

/// Returns the file of the page; `None` if this machine cannot build it and need not.
pub(crate) fn file() -> Option<&'static Path> {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    FILE.get_or_init(built).as_deref()
}

fn built() -> Option<PathBuf> {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("schedules.html");
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/page");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the folder of the builds");
    let output = Command::new("python3").arg(tool).arg(&file).env("CARGO_TARGET_DIR", target).output();
    let failure = match output {
        Ok(output) if output.status.success() => return Some(file),
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    let required = std::env::var("PIPEWRIGHT_REQUIRE_CHROMIUM").is_ok_and(|value| value == "1");
    assert!(!required, "{failure}");
    // The test harness hides what `eprintln!` prints of a test that passes.
    let _said = writeln!(std::io::stderr(), "SKIPPED: the page cannot be built: {failure}");
    None
}

/// Opens the page at a fragment, such as `schedule=gpipe&ranks=2`, and waits for its figures.
pub(crate) fn open(fragment: &str, width: u32) -> Option<Browser> {
    let _running: Arc<Chromium> = Chromium::shared()?;
    let file = file()?.display().to_string();
    let mut browser = Browser::open(Path::new(&format!("{file}#{fragment}")), width, 900)?;
    settle(&mut browser);
    Some(browser)
}

/// Waits until the page shows the result of its controls.
pub(crate) fn settle(browser: &mut Browser) {
    browser.wait_until("document.body?.ariaBusy === 'false'");
}

/// Goes to another fragment, as a reader who follows a link in the same window.
pub(crate) fn follow(browser: &mut Browser, fragment: &str) {
    browser.value(&format!("document.body.ariaBusy = 'true', location.hash = {fragment:?}, 0"));
    settle(browser);
}

/// Changes the text of a control, and waits for the result.
pub(crate) fn enter(browser: &mut Browser, control: &str, text: &str) {
    browser.enter(control, text);
    settle(browser);
}

/// Returns the answer of the native library for a setup.
pub(crate) fn predicted(setup: Value) -> Value {
    let request = json!({ "do": "simulate", "setup": setup });
    serde_json::from_str(&pipewright_page::answer(&request.to_string())).expect("JSON")
}
