//! The examples run to their end, and print what they promise.

#![expect(dead_code, reason = "each example has a `main`, which the tests do not call")]

mod from_pytorch;

#[path = "../../examples/auxiliary_losses.rs"]
mod auxiliary_losses;
#[path = "../../examples/dropout.rs"]
mod dropout;
#[path = "../../examples/own_module.rs"]
mod own_module;
#[path = "../../examples/own_optimizer.rs"]
mod own_optimizer;
#[path = "../../examples/overlapped_exchange.rs"]
mod overlapped_exchange;
#[path = "../../examples/own_schedule.rs"]
mod own_schedule;
#[path = "../../examples/own_weight_gradients.rs"]
mod own_weight_gradients;
#[path = "../../examples/processes.rs"]
mod processes;
#[path = "../../examples/skip_connections.rs"]
mod skip_connections;
#[path = "../../examples/training_loop.rs"]
mod training_loop;
#[path = "../../examples/transformer.rs"]
mod transformer;
#[path = "../../examples/two_stages.rs"]
mod two_stages;

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

/// Keeps examples from running at the same time: the generator of random numbers belongs to the whole
/// process.
static ALONE: Mutex<()> = Mutex::new(());

/// Returns the text that an example prints.
fn printed(run: impl Fn(&mut Vec<u8>) -> Result<(), Box<dyn Error>>) -> String {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut out = Vec::new();
    run(&mut out).expect("it runs to its end");
    String::from_utf8(out).expect("text")
}

/// Returns the numbers that follow `word`, in the order of the lines.
fn numbers(text: &str, word: &str) -> Vec<f64> {
    let after = text.split(word).skip(1);
    after.filter_map(|rest| rest.trim_start().split([' ', ',', '\n']).next()?.parse().ok()).collect()
}

fn learns(losses: &[f64]) -> bool {
    losses.len() > 1 && losses.last() < losses.first()
}

#[test]
fn own_module() {
    let text = printed(own_module::run);
    assert!(learns(&numbers(&text, "loss")), "{text}");
    assert!(text.contains("stage 0 has layers.0.linear.weight"), "{text}");
    assert!(text.contains("stage 1 has layers.7.linear.weight"), "{text}");
}

#[test]
fn training_loop() {
    let text = printed(training_loop::run);
    assert!(text.contains("from the checkpoint of step 6:"), "{text}");
    assert!(text.ends_with("the last losses differ by 0\n"), "{text}");
}

#[test]
fn dropout() {
    let text = printed(dropout::run);
    let losses: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once("losses ")?.1)).collect();
    assert!(losses.len() == 3 && losses.iter().all(|line| *line == losses[0]), "{text}");
}

#[test]
fn two_stages() {
    let text = printed(two_stages::run);
    assert!(learns(&numbers(&text, "loss")), "{text}");
}

#[test]
fn transformer() {
    let folder = tempfile::tempdir().expect("a folder");
    let [whole, stopped] = ["whole", "stopped"].map(|name| folder.path().join(name));
    let train = |run: &Path, ranks, schedule, steps| {
        printed(|out| transformer::run(out, run, ranks, schedule, steps))
    };
    let text = train(&whole, 2, "1f1b", 20);
    assert!(learns(&numbers(&text, "loss")) && learns(&numbers(&text, "validation")), "{text}");
    train(&stopped, 2, "1f1b", 10);
    // Other ranks and another schedule continue the run with the same bits.
    let resumed = train(&stopped, 3, "zbvzerobubble", 20);
    assert_eq!(resumed.lines().last(), text.lines().last());
    let metrics = std::fs::read_to_string(stopped.join("metrics.jsonl")).expect("a log");
    assert_eq!((metrics.lines().count(), metrics.matches("validation_loss").count()), (20, 2), "{metrics}");
    assert!(stopped.join("timeline.json").exists());
}

#[test]
fn own_optimizer() {
    let text = printed(own_optimizer::run);
    assert!(learns(&numbers(&text, "loss")), "{text}");
    let rates = numbers(&text, "learning rate");
    assert!(rates[0] < rates[2] && rates.last() < rates.get(2), "{text}");
}

#[test]
fn skip_connections() {
    let text = printed(skip_connections::run);
    let outcomes: Vec<_> =
        text.lines().filter_map(|line| line.split_once(": ")).map(|(_, loss)| loss).collect();
    assert!(outcomes.len() == 3 && outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{text}");
    assert!(numbers(&text, "then")[0] < numbers(&text, "loss")[0], "{text}");
}

#[test]
fn auxiliary_losses() {
    let text = printed(auxiliary_losses::run);
    assert!(learns(&numbers(&text, "loss")), "{text}");
    assert_eq!(numbers(&text, "activations").len(), 3, "{text}");
    assert!(text.ends_with("4 microbatches of outputs make [32, 8]\n"), "{text}");
}

#[test]
fn processes() {
    let text = printed(processes::run);
    assert!(text.contains("mpirun -n 2"), "{text}");
    assert!(learns(&numbers(&text, "loss")), "{text}");
}

#[test]
fn own_weight_gradients() {
    let text = printed(own_weight_gradients::run);
    assert!(learns(&numbers(&text, "loss")), "{text}");
    assert!(text.contains("\n0 parameters whose gradients cannot wait\n"), "{text}");
}

#[test]
fn own_schedule() {
    let text = printed(own_schedule::run);
    assert!(learns(&numbers(&text, "loss")), "{text}");
    assert!(text.contains("0SEND_F0") && text.contains("1I0"), "{text}");
    assert!(
        text.contains("another is refused: the schedule cannot be run: unsound program, 1 violation"),
        "{text}"
    );
}

#[test]
fn overlapped_exchange() {
    use overlapped_exchange::{ExpertParallel, hidden_share, train};
    let text = printed(|out| overlapped_exchange::run(out, &[]));
    assert_eq!(text.matches("losses").count(), 3, "{text}");
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let [plain, exchanged, overlapped] = [None, Some(false), Some(true)].map(|overlaps| {
        train(overlaps.map(|overlaps| Arc::new(ExpertParallel::new(overlaps)))).expect("it trains")
    });
    for ((plain, exchanged), overlapped) in plain.iter().zip(&exchanged).zip(&overlapped) {
        assert_eq!(
            (&exchanged.losses, exchanged.gradient_norm),
            (&overlapped.losses, overlapped.gradient_norm)
        );
        assert!(
            (plain.loss() - exchanged.loss()).abs() < 1e-5 * plain.loss(),
            "{} {}",
            plain.loss(),
            exchanged.loss()
        );
    }
    assert!(learns(&plain.iter().map(pipewright::pipeline::StepSummary::loss).collect::<Vec<_>>()));
    // A rank that waits for each exchange computes in none of them.
    assert_eq!(exchanged.iter().map(hidden_share).sum::<f64>(), 0.0);
    assert!(overlapped.iter().all(|step| hidden_share(step) > 0.0));
    let trace = overlapped[2].timeline.chrome_trace();
    assert!(trace.contains("\"name\":\"exchange of "), "{trace}");
}

/// Runs an example that fails, in a process of its own, as a program whose `main` returns the error.
#[test]
fn an_error_reaches_people_as_its_message() -> Result<(), Box<dyn Error>> {
    const FAILS: &str = "PIPEWRIGHT_TEST_EXAMPLE_FAILS";
    if std::env::var_os(FAILS).is_some() {
        // Nine ranks cannot share six layers.
        return transformer::run(&mut Vec::new(), Path::new("unused"), 9, "1f1b", 1);
    }
    let mut program = Command::new(std::env::current_exe()?);
    let name = "an_error_reaches_people_as_its_message";
    let output = program.args(["--exact", name, "--nocapture"]).env(FAILS, "1").output()?;
    let text =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("Error: ") && !text.contains("BuildError") && !text.contains(" { "), "{text}");
    Ok(())
}
