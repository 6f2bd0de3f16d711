//! The sentence about the number of steps between checkpoints that a run has chosen.

use std::time::Duration;

use pipewright::train::CheckpointChoice;
use pipewright_schedule::words::counted;

use crate::display::figures::milliseconds;
use crate::planning::print::span;

/// Says what was chosen and why.
pub(super) fn sentence(choice: CheckpointChoice) -> String {
    let CheckpointChoice { steps, cost, step, written_in, between_failures } = choice;
    let ms = |span: Duration| milliseconds(span.as_secs_f64() * 1e3);
    let reason = if written_in > 0 && steps == written_in + 1 {
        format!(", and it is written during {}", counted(written_in, "step"))
    } else {
        String::new()
    };
    format!(
        "checkpoints: every {}: one adds {} to steps of {}, a failure is expected every {}{reason}",
        if steps == 1 { "step".to_owned() } else { counted(steps, "step") },
        ms(cost),
        ms(step),
        span(between_failures.as_secs_f64() / 86_400.0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_has_its_reasons() {
        let choice = CheckpointChoice {
            steps: 268,
            cost: Duration::from_millis(100),
            step: Duration::from_millis(100),
            written_in: 2,
            between_failures: Duration::from_secs(3600),
        };
        let expected = "checkpoints: every 268 steps: one adds 100 ms to steps of 100 ms, a failure is expected every 1.00 hours";
        assert_eq!(sentence(choice), expected);
        let slow = sentence(CheckpointChoice { steps: 8, written_in: 7, ..choice });
        assert!(slow.ends_with(", and it is written during 7 steps"), "{slow}");
        let each = sentence(CheckpointChoice { steps: 1, written_in: 0, ..choice });
        assert!(each.starts_with("checkpoints: every step: ") && !each.contains("written"), "{each}");
    }
}
