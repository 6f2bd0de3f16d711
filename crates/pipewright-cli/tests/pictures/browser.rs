//! Controls headless Chromium over its DevTools protocol. The tests send input events instead of calling the
//! page's own functions.
//!
//! The protocol uses two pipes, which are descriptors 3 and 4 of Chromium. Messages are JSON, each followed
//! by a zero byte.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// The longest time that a test waits for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Held while Chromium runs. Chromium needs much memory, so only one instance runs at a time.
static TURN: Mutex<()> = Mutex::new(());

const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// The protocol's numbers of modifier keys.
pub(crate) const CTRL: u32 = 2;
pub(crate) const SHIFT: u32 = 8;

/// One page in its own browser.
pub(crate) struct Browser {
    child: Child,
    requests: ChildStdin,
    answers: Receiver<Value>,
    last_id: u64,
    session: Option<String>,
    /// The errors of the page.
    exceptions: Vec<String>,
    /// The modifier keys that are held while the mouse is used.
    pub(crate) held: u32,
    _profile: TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Browser {
    /// Opens a file in a window of this size. Returns `None` if Chromium is neither installed nor required.
    pub(crate) fn open(file: &Path, width: u32, height: u32) -> Option<Self> {
        let program = program()?;
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let profile = tempfile::tempdir().expect("a scratch folder");
        let mut child = start(program, profile.path());
        let requests = child.stdin.take().expect("a pipe to Chromium");
        let answers = listen(child.stdout.take().expect("a pipe from Chromium"));
        let mut browser = Self {
            child,
            requests,
            answers,
            last_id: 0,
            session: None,
            exceptions: Vec::new(),
            held: 0,
            _profile: profile,
            _turn: turn,
        };
        browser.attach();
        browser.resize(width, height);
        browser.navigate(file);
        Some(browser)
    }

    fn attach(&mut self) {
        let targets = self.call("Target.getTargets", json!({}));
        let target = targets["targetInfos"].as_array().expect("targets").iter();
        let page = target.clone().find(|target| target["type"] == "page").expect("a page").clone();
        let attached =
            self.call("Target.attachToTarget", json!({"targetId": page["targetId"], "flatten": true}));
        self.session = attached["sessionId"].as_str().map(str::to_owned);
        self.call("Runtime.enable", json!({}));
        self.call("Page.enable", json!({}));
        // A canvas cannot return its texts, so the texts are recorded when they are drawn.
        let record = "const write = CanvasRenderingContext2D.prototype.fillText; window.texts = [];
            CanvasRenderingContext2D.prototype.fillText = function (text, ...at) { texts.push(text); write.call(this, text, ...at); };";
        self.call("Page.addScriptToEvaluateOnNewDocument", json!({"source": record}));
    }

    pub(crate) fn resize(&mut self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
    }

    /// Sets the preferred colour scheme that the browser reports to the page.
    pub(crate) fn prefer(&mut self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features);
        self.frame();
    }

    /// Shows the page as on paper, for a reader who prefers dark colours.
    pub(crate) fn emulate_paper(&mut self) {
        let features = json!([{"name": "prefers-color-scheme", "value": "dark"}]);
        self.call("Emulation.setEmulatedMedia", json!({"media": "print", "features": features}));
        self.frame();
    }

    fn navigate(&mut self, file: &Path) {
        self.call("Page.navigate", json!({"url": format!("file://{}", file.display())}));
        let start = Instant::now();
        while self.value("document.readyState + (location.protocol === 'file:')") != json!("completetrue") {
            assert!(start.elapsed() < PATIENCE, "the page does not load");
            thread::sleep(Duration::from_millis(20));
        }
        self.frame();
    }

    /// Prints the page, as a person would.
    pub(crate) fn print(&mut self) {
        self.call("Page.printToPDF", json!({}));
    }

    /// Waits until an expression holds, also while the page loads itself again.
    pub(crate) fn wait_until(&mut self, expression: &str) {
        let start = Instant::now();
        let settings = json!({"expression": expression, "returnByValue": true});
        while self.call("Runtime.evaluate", settings.clone())["result"]["value"] != json!(true) {
            assert!(start.elapsed() < PATIENCE, "{expression} does not become true");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the page has drawn the requested state.
    pub(crate) fn frame(&mut self) {
        self.value(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))",
        );
    }

    /// Returns the value of a JavaScript expression. Exceptions in the page fail the test.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let settings = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", settings);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        assert!(self.exceptions.is_empty(), "the page failed: {:?}", self.exceptions);
        answer["result"]["value"].clone()
    }

    pub(crate) fn number(&mut self, expression: &str) -> f64 {
        self.value(expression).as_f64().unwrap_or_else(|| panic!("{expression} is not a number"))
    }

    pub(crate) fn holds(&mut self, expression: &str) -> bool {
        self.value(expression) == json!(true)
    }

    /// Returns the texts of all canvases in the last drawing.
    pub(crate) fn texts(&mut self) -> Vec<String> {
        let texts = self.value("window.texts = [], draw(), window.texts");
        texts.as_array().expect("a list").iter().filter_map(Value::as_str).map(str::to_owned).collect()
    }

    /// Turns the mouse wheel over a point of the window.
    pub(crate) fn wheel(&mut self, [x, y]: [f64; 2], [across, down]: [f64; 2], modifiers: u32) {
        let wheel = json!({"type": "mouseWheel", "x": x, "y": y, "deltaX": across, "deltaY": down, "modifiers": modifiers});
        self.call("Input.dispatchMouseEvent", wheel);
        self.frame();
    }

    pub(crate) fn mouse(&mut self, kind: &str, [x, y]: [f64; 2], pressed: bool, clicks: u32) {
        let button = if kind == "mouseMoved" && !pressed { "none" } else { "left" };
        let buttons = u32::from(pressed);
        let event = json!({
            "type": kind, "x": x, "y": y, "button": button, "buttons": buttons, "clickCount": clicks,
            "modifiers": self.held
        });
        self.call("Input.dispatchMouseEvent", event);
    }

    /// Drags with the mouse.
    pub(crate) fn drag(&mut self, from: [f64; 2], to: [f64; 2]) {
        self.mouse("mousePressed", from, true, 1);
        let middle = [0, 1].map(|at| (from[at] + to[at]) / 2.0);
        self.mouse("mouseMoved", middle, true, 0);
        self.mouse("mouseMoved", to, true, 0);
        self.mouse("mouseReleased", to, false, 1);
        self.frame();
    }

    pub(crate) fn click(&mut self, at: [f64; 2], times: u32) {
        for count in 1..=times {
            self.mouse("mousePressed", at, true, count);
            self.mouse("mouseReleased", at, false, count);
        }
        self.frame();
    }

    /// Puts fingers on the window, moves them in steps, and lifts them.
    pub(crate) fn touch(&mut self, from: &[[f64; 2]], to: &[[f64; 2]]) {
        self.call("Emulation.setTouchEmulationEnabled", json!({"enabled": true, "maxTouchPoints": 2}));
        let steps = 4;
        for step in 0..=steps {
            let share = f64::from(step) / f64::from(steps);
            let at = |(from, to): (&[f64; 2], &[f64; 2])| json!({"x": from[0] + (to[0] - from[0]) * share, "y": from[1] + (to[1] - from[1]) * share});
            let points: Vec<Value> = from.iter().zip(to).map(at).collect();
            let kind = if step == 0 { "touchStart" } else { "touchMove" };
            self.call("Input.dispatchTouchEvent", json!({"type": kind, "touchPoints": points}));
        }
        self.call("Input.dispatchTouchEvent", json!({"type": "touchEnd", "touchPoints": []}));
        self.frame();
    }

    /// Presses a key. `text` is the text that the key types.
    pub(crate) fn key(&mut self, key: &str, text: &str) {
        let press =
            json!({"type": if text.is_empty() { "rawKeyDown" } else { "keyDown" }, "key": key, "text": text});
        self.call("Input.dispatchKeyEvent", press);
        self.call("Input.dispatchKeyEvent", json!({"type": "keyUp", "key": key}));
        self.frame();
    }

    /// Clicks in the middle of the element that a CSS selector finds, and scrolls to it if necessary.
    pub(crate) fn click_on(&mut self, selector: &str) {
        let of = |side: &str| {
            format!(
                "(() => {{ const box = document.querySelector({selector:?}).getBoundingClientRect(); return {side}; }})()"
            )
        };
        self.value(&format!("document.querySelector({selector:?}).scrollIntoView({{ block: 'nearest' }})"));
        let at = ["box.x + box.width / 2", "box.y + box.height / 2"].map(|side| self.number(&of(side)));
        self.click(at, 1);
    }

    /// Sets the value of an input as if the reader had typed it.
    pub(crate) fn enter(&mut self, selector: &str, value: &str) {
        self.value(&format!(
            "(() => {{ const input = document.querySelector({selector:?}); input.value = {value:?};
               input.dispatchEvent(new Event('input', {{ bubbles: true }}));
               input.dispatchEvent(new Event('change', {{ bubbles: true }})); }})()"
        ));
        self.frame();
    }

    /// Returns the visible text of the element that a CSS selector finds.
    pub(crate) fn text(&mut self, selector: &str) -> String {
        let text = self.value(&format!("document.querySelector({selector:?}).innerText"));
        text.as_str().expect("a text").to_owned()
    }

    /// Returns the requests that the page has made, apart from the page itself.
    pub(crate) fn requests(&mut self) -> Vec<String> {
        let names = self.value("performance.getEntriesByType('resource').map(({ name }) => name)");
        names.as_array().expect("a list").iter().filter_map(Value::as_str).map(str::to_owned).collect()
    }

    /// Returns the roles and names that a screen reader finds.
    pub(crate) fn accessible(&mut self) -> Vec<(String, String)> {
        let tree = self.call("Accessibility.getFullAXTree", json!({}));
        let nodes = tree["nodes"].as_array().expect("nodes").iter().filter(|node| node["ignored"] != true);
        let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
        nodes.map(|node| (text(&node["role"]), text(&node["name"]))).collect()
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let id = self.last_id;
        let mut request = json!({"id": id, "method": method, "params": params});
        if let Some(session) = &self.session {
            request["sessionId"] = json!(session);
        }
        write!(self.requests, "{request}\0").expect("Chromium listens");
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = self.answers.recv_timeout(left).unwrap_or_else(|_| panic!("no answer to {method}"));
            if answer["method"] == "Runtime.exceptionThrown" {
                self.exceptions.push(answer["params"]["exceptionDetails"].to_string());
            }
            if answer["id"] == id {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Chromium ends on request. If it does not, it is killed.
        let _closed = write!(self.requests, "{}\0", json!({"id": 0, "method": "Browser.close"}));
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(20));
        }
        let _killed = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// Returns the name of an installed Chromium.
fn program() -> Option<&'static str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_installed = |name: &&&str| std::env::split_paths(&path).any(|folder| folder.join(name).is_file());
    let found = NAMES.iter().find(is_installed).copied();
    if found.is_none() {
        let required = std::env::var("PIPEWRIGHT_REQUIRE_CHROMIUM").is_ok_and(|value| value == "1");
        assert!(!required, "none of {NAMES:?} is installed; install chromium");
        // The test harness hides what `eprintln!` prints of a test that passes.
        let _said = writeln!(std::io::stderr(), "SKIPPED: no Chromium to open the page in; install chromium");
    }
    found
}

/// Starts Chromium. A shell sets its pipes to descriptors 3 and 4, because `Command` cannot do that.
fn start(program: &str, profile: &Path) -> Child {
    let script = "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null";
    Command::new("sh")
        .args(["-c", script, "sh", program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"])
        .args(["--no-first-run", "--disable-background-networking", "--disable-component-update"])
        .args([
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--force-color-profile=srgb",
            "--remote-debugging-pipe",
        ])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg("about:blank")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell starts")
}

/// Reads messages on a separate thread, so that waiting for a message can have a deadline.
fn listen(from: ChildStdout) -> Receiver<Value> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for message in BufReader::new(from).split(0).map_while(Result::ok) {
            let Ok(message) = serde_json::from_slice(&message) else { return };
            if sender.send(message).is_err() {
                return;
            }
        }
    });
    receiver
}
