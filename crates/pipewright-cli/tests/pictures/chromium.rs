//! The headless Chromium that all tests of this program share, and its DevTools protocol.
//!
//! Each page has a browser context of its own, so the tests share neither storage nor windows. The protocol
//! uses two pipes, which are descriptors 3 and 4 of Chromium. Messages are JSON, each followed by a zero
//! byte.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// The longest time that a test waits for an answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// The Chromium that runs. It starts with the first page and ends with the process.
static RUNNING: Mutex<Option<Arc<Chromium>>> = Mutex::new(None);

/// The channels of the sessions by their names; messages of no session belong to the name "".
type Sessions = Arc<Mutex<HashMap<String, Sender<Value>>>>;

/// A running Chromium.
pub(crate) struct Chromium {
    child: Mutex<Child>,
    requests: Mutex<ChildStdin>,
    last_id: AtomicU64,
    sessions: Sessions,
    /// The answers to requests of no session. They are made one at a time.
    answers: Mutex<Receiver<Value>>,
    _profile: TempDir,
}

/// A page in a browser context of its own.
pub(crate) struct Session {
    chromium: Arc<Chromium>,
    name: String,
    context: String,
    messages: Receiver<Value>,
}

impl Chromium {
    /// Returns the Chromium that runs, or starts one. Returns `None` if it is neither installed nor required.
    pub(crate) fn shared() -> Option<Arc<Self>> {
        let program = program()?;
        let mut running = lock(&RUNNING);
        let chromium = running.get_or_insert_with(|| {
            // SAFETY: the function unwinds nowhere, and it is part of the program, which is never unloaded.
            let registered = unsafe { libc::atexit(end) };
            assert_eq!(registered, 0, "the system calls the function at the end of the process");
            Arc::new(Self::start(program))
        });
        Some(Arc::clone(chromium))
    }

    fn start(program: &str) -> Self {
        let profile = tempfile::tempdir().expect("a scratch folder");
        let mut child = start(program, profile.path());
        let requests = child.stdin.take().expect("a pipe to Chromium");
        let (sender, answers) = channel();
        let sessions = Sessions::default();
        lock(&sessions).insert(String::new(), sender);
        listen(child.stdout.take().expect("a pipe from Chromium"), Arc::clone(&sessions));
        Self {
            child: Mutex::new(child),
            requests: Mutex::new(requests),
            last_id: AtomicU64::new(0),
            sessions,
            answers: Mutex::new(answers),
            _profile: profile,
        }
    }

    /// Opens an empty page.
    pub(crate) fn page(self: Arc<Self>) -> Session {
        let text = |value: &Value| value.as_str().expect("a name").to_owned();
        let context = text(&self.call("Target.createBrowserContext", json!({}))["browserContextId"]);
        let wanted = json!({"url": "about:blank", "browserContextId": context, "newWindow": true});
        let target = self.call("Target.createTarget", wanted)["targetId"].clone();
        let attached = self.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        let name = text(&attached["sessionId"]);
        let (sender, messages) = channel();
        lock(&self.sessions).insert(name.clone(), sender);
        Session { chromium: self, name, context, messages }
    }

    /// Sends a request that belongs to no session and returns its result.
    fn call(&self, method: &str, params: Value) -> Value {
        let answers = lock(&self.answers);
        let id = self.send(json!({"method": method, "params": params}));
        answer(&answers, method, id, |_| {}).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// Sends a request and returns its number.
    fn send(&self, mut request: Value) -> u64 {
        let id = 1 + self.last_id.fetch_add(1, Ordering::Relaxed);
        request["id"] = json!(id);
        write!(lock(&self.requests), "{request}\0").expect("Chromium listens");
        id
    }
}

impl Session {
    /// Sends a request and returns its result or its error. `on_event` gets the other messages that arrive
    /// before it.
    pub(crate) fn call(
        &self,
        method: &str,
        params: Value,
        on_event: impl FnMut(&Value),
    ) -> Result<Value, Value> {
        let id = self.chromium.send(json!({"method": method, "params": params, "sessionId": self.name}));
        answer(&self.messages, method, id, on_event)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        lock(&self.chromium.sessions).remove(&self.name);
        // Nobody waits for the answer: a test that fails may have lost Chromium.
        let close = json!({
            "id": 0, "method": "Target.disposeBrowserContext", "params": {"browserContextId": self.context}
        });
        let _closed = write!(lock(&self.chromium.requests), "{close}\0");
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        // Chromium ends on request. If it does not, it is killed.
        let _closed = write!(lock(&self.requests), "{}\0", json!({"id": 0, "method": "Browser.close"}));
        let mut child = lock(&self.child);
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline && matches!(child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(20));
        }
        let _killed = child.kill();
        let _ended = child.wait();
    }
}

/// Ends Chromium and deletes its profile: the harness drops nothing that is static.
extern "C" fn end() {
    drop(lock(&RUNNING).take());
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the answer to a request. Returns its result or its error.
fn answer(
    from: &Receiver<Value>,
    method: &str,
    id: u64,
    mut on_event: impl FnMut(&Value),
) -> Result<Value, Value> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let message = from.recv_timeout(left).unwrap_or_else(|_| panic!("no answer to {method}"));
        if message["id"] == id {
            let error = &message["error"];
            return if error.is_null() { Ok(message["result"].clone()) } else { Err(error.clone()) };
        }
        on_event(&message);
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

/// Hands the messages to their sessions on a separate thread, so that waiting for a message can have a
/// deadline.
fn listen(from: ChildStdout, sessions: Sessions) {
    thread::spawn(move || {
        for message in BufReader::new(from).split(0).map_while(Result::ok) {
            let Ok(message) = serde_json::from_slice::<Value>(&message) else { break };
            let session = message["sessionId"].as_str().unwrap_or_default();
            let sender = lock(&sessions).get(session).cloned();
            // A page that is being closed no longer listens.
            let _heard = sender.map(|sender| sender.send(message));
        }
        // A pending request fails at once.
        lock(&sessions).clear();
    });
}
