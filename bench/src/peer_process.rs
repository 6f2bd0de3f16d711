//! The process in which PyTorch trains a model with transformers (`peer/families.py`): it runs a step for
//! each line of its input, in turn with the steps of a bench.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peer/families.py");
use crate::harness::Outcome;

/// How much the losses of two sides may differ, relative to the loss, in single precision.
pub(crate) const TOLERANCE: f64 = 1e-4;
/// The same for a loss in bfloat16 and one in single precision.
pub(crate) const HALF_TOLERANCE: f64 = 5e-3;
/// The learning rate. The sides round differently, and the first steps of AdamW turn a gradient near zero
/// into a whole step in either direction. So at higher rates some tokens soon choose other experts on one
/// side.
pub(crate) const RATE: f64 = 3e-5;

/// A process that trains the model with PyTorch.
pub(crate) struct PeerProcess {
    process: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// The first line of its output: settings and sizes.
    pub(crate) settings: Value,
}

/// A step of another side.
#[derive(Debug, PartialEq)]
pub(crate) struct PeerStep {
    pub(crate) loss: f64,
    pub(crate) seconds: f64,
}

impl PeerProcess {
    /// Starts PyTorch on the model in `folder` with further arguments. `cut` is the number of blocks of the
    /// first of two ranks. If `cut` is `None`, one rank is started.
    pub(crate) fn start(
        python: &Path,
        folder: &Path,
        arguments: &[String],
        cut: Option<usize>,
    ) -> Outcome<Self> {
        let mut process = Command::new(python)
            .arg(SCRIPT)
            .arg(folder)
            .arg(format!("--rate={RATE}"))
            .args(arguments)
            .args(cut.into_iter().flat_map(|cut| ["--ranks=2".into(), format!("--cut={cut}")]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}; run bench/peer/setup.sh first", python.display()))?;
        let (Some(requests), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            unreachable!("both are pipes")
        };
        let mut peer = Self { process, requests, answers: BufReader::new(answers), settings: Value::Null };
        peer.settings = serde_json::from_str(&peer.answer()?)?;
        Ok(peer)
    }

    pub(crate) fn step(&mut self) -> Outcome<PeerStep> {
        self.requests.write_all(b"step\n")?;
        Ok(parse_step(&self.answer()?)?)
    }

    /// Returns a line of the process's output.
    fn answer(&mut self) -> Outcome<String> {
        let mut line = String::new();
        match self.answers.read_line(&mut line)? {
            0 => Err("PyTorch's process has ended; its message is above".into()),
            _ => Ok(line),
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // Both fail only if the process has ended. The process of its first rank ends with it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns an error if the losses of two sides differ by more than `tolerance`, relative to `other`.
pub(crate) fn require_same_loss(own: f64, other: f64, tolerance: f64) -> Result<(), String> {
    // A loss that is not a number is not near.
    if (own - other).abs() <= tolerance * other.abs() {
        Ok(())
    } else {
        Err(format!("the losses differ, so the models do: {own} and {other}"))
    }
}

fn parse_step(line: &str) -> Result<PeerStep, String> {
    let figures: Value = serde_json::from_str(line).map_err(|error| format!("{error} in {line}"))?;
    let figure = |name: &str| figures[name].as_f64().ok_or_else(|| format!("no `{name}` in {figures}"));
    Ok(PeerStep { loss: figure("loss")?, seconds: figure("seconds")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_the_peer_is_read() {
        let line = r#"{"loss": 5.5, "grad_norm": 1.0, "seconds": 2}"#;
        assert_eq!(parse_step(line), Ok(PeerStep { loss: 5.5, seconds: 2.0 }));
        let lacking = parse_step(r#"{"loss": 5.5}"#).expect_err("a figure is missing");
        assert!(lacking.starts_with("no `seconds` in"), "{lacking}");
        assert!(parse_step("Traceback").is_err());
    }

    #[test]
    fn losses_that_differ_are_refused() {
        assert_eq!(require_same_loss(5.0, 5.0004, TOLERANCE), Ok(()));
        assert!(require_same_loss(5.0, 5.0006, TOLERANCE).is_err());
        assert!(require_same_loss(f64::NAN, 5.0, HALF_TOLERANCE).is_err());
    }
}
