//! The change of the learning rate where a run resumes with another number of steps. A rate that falls over
//! the whole run is computed again for the new length, so it jumps.

use pipewright::train::{Decay, LearningRate};
use pipewright_document::text::{quoted, set_flags};

use crate::settings::Settings;

/// The smallest ratio of two rates that counts as a jump.
const JUMP: f64 = 1.1;

/// Returns the learning rates of a run.
pub(crate) fn rates(settings: &Settings) -> LearningRate {
    let optimizer = &settings.optimizer;
    LearningRate {
        peak: optimizer.learning_rate,
        lowest: optimizer.min_learning_rate.unwrap_or(0.0),
        decay: optimizer.schedule,
        warmup_steps: optimizer.warmup_steps,
        decay_steps: optimizer.decay_steps,
        restart_at: optimizer.restart_at,
        steps: settings.run.steps,
    }
}

/// Returns a sentence about the jump of the learning rate after step `done`, with a command for each way
/// to continue. `set` are the arguments that change the settings from `before` to `after`. Returns
/// `None` if the rate does not jump, or if the arguments change the rate itself.
pub(crate) fn note(before: &Settings, after: &Settings, done: u64, set: &[String]) -> Option<String> {
    let (old, new) = (rates(before), rates(after));
    let is_new_length = LearningRate { steps: new.steps, ..old } == new;
    if done == 0 || !is_new_length {
        return None;
    }
    let (last, planned, next) = (old.at(done - 1), old.at(done), new.at(done));
    // A rate that the run would have had anyway is not a jump. After the last step, the old schedule has no
    // rate.
    let expected = if done < old.steps { planned } else { last };
    let ratio = if next > expected { next / expected } else { expected / next };
    if ratio.is_nan() || ratio <= JUMP {
        return None;
    }
    Some(format!(
        "note: the learning rate changes from {last:.1e} in step {done} to {next:.1e} in step {}, because `schedule = \"{}\"` \
         is computed over {} steps instead of {}: {}",
        done + 1,
        new.decay.name(),
        new.steps,
        old.steps,
        ways(after, [done, new.steps], last, set)
    ))
}

/// Returns the commands that train a finished run on until step `steps`. If the rate falls over the run, they are those
/// for a schedule over the new length, for a schedule that begins again, and for the last rate.
pub(crate) fn continuations(settings: &Settings, steps: u64) -> String {
    let rate = rates(settings);
    let set = [format!("run.steps={steps}")];
    match rate.decay {
        Decay::Constant | Decay::InverseSqrt => command(settings, &set),
        Decay::Cosine | Decay::Linear | Decay::Wsd => {
            ways(settings, [rate.steps, steps], rate.at(rate.steps.saturating_sub(1)), &set)
        }
    }
}

/// Returns the commands of the ways to continue after `done` of `steps` steps. The schedule cannot begin again if its
/// warm-up and its decay are longer than the rest of the run.
fn ways(settings: &Settings, [done, steps]: [u64; 2], last: f64, set: &[String]) -> String {
    let rate = rates(settings);
    let phases = rate.warmup_steps.saturating_add(rate.decay_steps.unwrap_or(0));
    let again = if phases <= steps.saturating_sub(done) {
        let again = command(settings, &[set, &[format!("optimizer.restart_at={done}")]].concat());
        format!("; to begin it again: {again}")
    } else {
        String::new()
    };
    let constant = [r"optimizer.schedule=constant".to_owned(), format!("optimizer.learning_rate={last:e}")];
    let at_last = command(settings, &[set, &constant].concat());
    let groups = settings.optimizer.groups.iter().any(|group| group.learning_rate.is_some());
    let groups = if groups { " (and lower the rates of the groups)" } else { "" };
    format!(
        "for this schedule over the new length: {}{again}; to continue at the last rate: {at_last}{groups}",
        command(settings, set)
    )
}

/// Returns the command that resumes the run with these arguments.
fn command(settings: &Settings, set: &[String]) -> String {
    let out = quoted(&settings.run.out.to_string_lossy());
    format!("pipewright resume {out}{}", set_flags(set))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::training::load::load_settings;

    fn settings(set: &[&str]) -> Settings {
        let set: Vec<String> = ["optimizer.learning_rate=1e-3", "optimizer.warmup_steps=0", "run.out=/out"]
            .iter()
            .chain(set)
            .map(|&set| set.to_owned())
            .collect();
        load_settings(None, &set).expect("settings").settings
    }

    fn check(before: &[&str], after: &[&str], done: u64, expected: &[&str]) {
        let set: Vec<String> = after.iter().map(|&set| set.to_owned()).collect();
        let found = note(&settings(before), &settings(&[before, after].concat()), done, &set);
        assert_eq!(found.is_some(), !expected.is_empty(), "{found:?}");
        let found = found.unwrap_or_default();
        assert!(expected.iter().all(|part| found.contains(part)), "{found}");
    }

    #[test]
    fn a_jump_is_noted_with_three_commands() {
        const COSINE: &[&str] = &["optimizer.schedule=cosine", "run.steps=100"];
        let jump = [
            "changes from 2.5e-7 in step 100 to 2.5e-4 in step 101",
            "`schedule = \"cosine\"` is computed over 150 steps instead of 100",
            "over the new length: pipewright resume /out --set run.steps=150;",
            "begin it again: pipewright resume /out --set run.steps=150 --set optimizer.restart_at=100;",
            "at the last rate: pipewright resume /out --set run.steps=150 --set optimizer.schedule=constant --set \
             optimizer.learning_rate=2.467",
        ];
        check(COSINE, &["run.steps=150"], 100, &jump);
        check(COSINE, &["run.steps=150"], 50, &["changes from 5.2e-4 in step 50 to 7.5e-4 in step 51"]);
        check(COSINE, &["run.steps=60"], 50, &["changes from 5.2e-4 in step 50 to 6.7e-5 in step 51"]);
        check(
            &["optimizer.schedule=wsd", "run.steps=100"],
            &["run.steps=150"],
            100,
            &["to 1.0e-3 in step 101"],
        );
        check(
            &["optimizer.schedule=linear", "run.steps=10"],
            &["run.steps=20"],
            10,
            &["to 5.0e-4 in step 11"],
        );
    }

    #[test]
    fn a_rate_that_goes_on_is_not_noted() {
        const COSINE: &[&str] = &["optimizer.schedule=cosine", "run.steps=100"];
        check(COSINE, &[], 50, &[]);
        check(COSINE, &["run.checkpoint_every=5"], 99, &[]);
        check(COSINE, &["run.steps=101"], 10, &[]);
        check(COSINE, &["run.steps=150"], 0, &[]);
        check(&["optimizer.schedule=constant", "run.steps=100"], &["run.steps=150"], 100, &[]);
        check(&["optimizer.schedule=inverse_sqrt", "run.steps=100"], &["run.steps=150"], 100, &[]);
        // WSD has not begun to fall.
        check(&["optimizer.schedule=wsd", "run.steps=100"], &["run.steps=150"], 90, &[]);
        // The user has asked for another rate.
        check(COSINE, &["run.steps=150", "optimizer.schedule=constant"], 100, &[]);
        check(COSINE, &["run.steps=150", "optimizer.learning_rate=1e-5"], 100, &[]);
        check(COSINE, &["run.steps=150", "optimizer.restart_at=100"], 100, &[]);
    }

    #[test]
    fn a_finished_run_has_a_command_for_each_way() {
        let falls = continuations(&settings(&["optimizer.schedule=linear", "run.steps=10"]), 20);
        assert!(falls.contains("--set run.steps=20 --set optimizer.schedule=constant"), "{falls}");
        assert!(falls.contains("--set run.steps=20 --set optimizer.restart_at=10;"), "{falls}");
        // The second warm-up would not end.
        let set = ["optimizer.schedule=linear", "run.steps=10", "optimizer.warmup_steps=9"];
        let short = continuations(&settings(&set), 15);
        assert!(short.contains("run.steps=15;") && !short.contains("restart_at"), "{short}");
        let stays = continuations(&settings(&["optimizer.schedule=constant", "run.steps=10"]), 20);
        assert_eq!(stays, "pipewright resume /out --set run.steps=20");
    }
}
