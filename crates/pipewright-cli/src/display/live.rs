//! The live display on a terminal. A separate thread draws it. A slow terminal therefore does not delay the
//! training, the clock in the display advances during a long step, and the display is redrawn after the
//! terminal is resized.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pipewright::train::Metrics;
use pipewright_planning::screen;
use pipewright_run::observer::Overview;

use crate::display::frame::{State, compose};

/// The time between two drawings.
const PAUSE: Duration = Duration::from_millis(100);

/// The display of one run.
pub(crate) struct Live {
    picture: Arc<Picture>,
    /// Dropping the sender stops the thread. `None` after the thread has stopped, or if it could not be
    /// started.
    painter: Option<(Sender<()>, JoinHandle<()>)>,
}

/// The data of the display.
struct Picture {
    state: Mutex<State>,
    began: Instant,
    has_colour: bool,
}

impl Live {
    /// Returns a display for a run of `steps` steps whose first `done` steps are finished.
    pub(super) fn new(overview: &Overview, done: u64, steps: u64) -> Self {
        let overview = overview.clone();
        let state = Mutex::new(State {
            overview,
            start: done,
            steps,
            last: None,
            before: Duration::ZERO,
            until_last: Duration::ZERO,
            losses: Vec::new(),
            validation: None,
            of_tokens: Vec::new(),
            is_final: false,
        });
        let picture = Arc::new(Picture { state, began: Instant::now(), has_colour: screen::has_colour() });
        screen::open();
        picture.draw();
        let (sender, receiver) = channel();
        let painted = picture.clone();
        let thread = std::thread::Builder::new().name("display".to_owned());
        // If the thread cannot be started, the picture is drawn after each step.
        let painter = thread.spawn(move || paint(&painted, &receiver)).ok().map(|thread| (sender, thread));
        Self { picture, painter }
    }

    /// Shows the steps that another process has finished before this display began.
    pub(super) fn recall(&mut self, steps: &[Metrics]) {
        let mut state = self.picture.state();
        steps.iter().for_each(|metrics| state.add(metrics));
        state.start = 0;
        let elapsed = state.last.as_ref().map_or(0.0, |metrics| metrics.elapsed_s);
        state.before = Duration::try_from_secs_f64(elapsed).unwrap_or_default();
        state.until_last = self.picture.elapsed(&state);
    }

    /// Shows a finished step.
    pub(super) fn step(&mut self, metrics: &Metrics) {
        let mut state = self.picture.state();
        state.add(metrics);
        state.until_last = self.picture.elapsed(&state);
        drop(state);
        if self.painter.is_none() {
            self.picture.draw();
        }
    }

    /// Shows the loss of an evaluation after an earlier step.
    pub(super) fn evaluation(&mut self, loss: Option<f64>) {
        let mut state = self.picture.state();
        state.validation = loss.or(state.validation);
    }

    /// Draws the last state and leaves it on the terminal.
    pub(super) fn finish(&mut self) {
        self.stop();
        self.picture.state().is_final = true;
        self.picture.draw();
        screen::close();
    }

    fn stop(&mut self) {
        if let Some((sender, thread)) = self.painter.take() {
            drop(sender);
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.stop();
        screen::close();
    }
}

impl Picture {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time of the steps that the display shows.
    fn elapsed(&self, state: &State) -> Duration {
        state.before + self.began.elapsed()
    }

    fn draw(&self) {
        screen::draw(|size| {
            let state = self.state();
            compose(&state, self.elapsed(&state), size, self.has_colour)
        });
    }
}

fn paint(picture: &Picture, stop: &Receiver<()>) {
    while stop.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
        picture.draw();
    }
}
