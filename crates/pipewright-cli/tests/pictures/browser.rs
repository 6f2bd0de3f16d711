//! A page in headless Chromium. The tests send input events instead of calling the page's own functions.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::chromium::{Chromium, PATIENCE, Session};
use crate::turns::SharedTurn;

/// The protocol's numbers of modifier keys.
pub(crate) const CTRL: u32 = 2;
pub(crate) const SHIFT: u32 = 8;

/// The messages of an expression whose page loads itself again before the value is known.
const RELOADED: [&str; 2] = ["Inspected target navigated or closed", "Execution context was destroyed."];

/// One page in a window of its own.
pub(crate) struct Browser {
    page: Session,
    /// The errors of the page.
    exceptions: Vec<String>,
    /// The modifier keys that are held while the mouse is used.
    pub(crate) held: u32,
    _turn: SharedTurn,
}

impl Browser {
    /// Opens a file in a window of this size. Returns `None` if Chromium is neither installed nor required.
    pub(crate) fn open(file: &Path, width: u32, height: u32) -> Option<Self> {
        let turn = SharedTurn::begin();
        let page = Chromium::shared()?.page();
        let mut browser = Self { page, exceptions: Vec::new(), held: 0, _turn: turn };
        browser.enable();
        browser.resize(width, height);
        browser.navigate(file);
        Some(browser)
    }

    fn enable(&mut self) {
        self.call("Runtime.enable", json!({}));
        self.call("Page.enable", json!({}));
        // Times are processor times of the page's thread, which other programs do not change.
        self.call("Performance.enable", json!({"timeDomain": "threadTicks"}));
        // Pages of other tests do not take the focus away.
        self.call("Emulation.setFocusEmulationEnabled", json!({"enabled": true}));
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
        while self.evaluate(expression)["result"]["value"] != json!(true) {
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
        let answer = self.evaluate(expression);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        assert!(self.exceptions.is_empty(), "the page failed: {:?}", self.exceptions);
        answer["result"]["value"].clone()
    }

    /// Evaluates a JavaScript expression, once more if the page loads itself again meanwhile.
    fn evaluate(&mut self, expression: &str) -> Value {
        let settings = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let start = Instant::now();
        loop {
            let error = match self.request("Runtime.evaluate", settings.clone()) {
                Ok(answer) => return answer,
                Err(error) => error,
            };
            let is_reloaded = RELOADED.iter().any(|&message| error["message"] == message);
            assert!(is_reloaded && start.elapsed() < PATIENCE, "{expression}: {error}");
        }
    }

    /// Returns the milliseconds in which the page's thread has used a processor for its callbacks.
    pub(crate) fn script_ms(&mut self) -> f64 {
        let metrics = self.call("Performance.getMetrics", json!({}));
        let mut metrics = metrics["metrics"].as_array().expect("metrics").iter();
        let duration = metrics.find(|metric| metric["name"] == "ScriptDuration").expect("a metric");
        duration["value"].as_f64().expect("seconds") * 1000.0
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
        self.request(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    fn request(&mut self, method: &str, params: Value) -> Result<Value, Value> {
        let exceptions = &mut self.exceptions;
        self.page.call(method, params, |event| {
            if event["method"] == "Runtime.exceptionThrown" {
                exceptions.push(event["params"]["exceptionDetails"].to_string());
            }
        })
    }
}
