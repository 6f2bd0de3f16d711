//! `pipewright train`: prepares a run, then takes one step after another and shows and writes what came of each.

use pipewright::trainer::{Metrics, Trainer};
use pipewright_schedule::Timeline;

use crate::arguments::RunArguments;
use crate::commands::crew::Crew;
use crate::commands::launch::{failure, launch};
use crate::commands::prepare::{identity, prepare};
use crate::display::{self, Display};
use crate::failure::Failure;
use crate::run_folder::{self, RunFolder};

/// Runs the command.
pub(crate) fn run(arguments: &RunArguments) -> Result<(), Failure> {
    let mut crew = Crew::gather()?;
    let outcome = run_with(arguments, &mut crew);
    crew.settle(outcome)
}

fn run_with(arguments: &RunArguments, crew: &mut Crew) -> Result<(), Failure> {
    let prepared = prepare(arguments).and_then(|prepared| {
        if crew.speaks() {
            run_folder::probe(&prepared.settings.run.out).map_err(Failure::input)?;
        }
        Ok(prepared)
    });
    let prepared = crew.agree(prepared, identity)?;
    let settings = prepared.settings.clone();
    // The folder comes last: a run that cannot start leaves the one before it where it is.
    let mut trainer = launch(prepared, crew)?;
    if !crew.speaks() {
        return follow(&mut trainer, settings.run.steps, crew);
    }
    let mut folder = RunFolder::create(&settings.run.out, &settings.to_toml()).map_err(Failure::input)?;
    if let Some(aside) = folder.moved_aside() {
        display::say(&format!("moved the earlier run to {}", aside.display()));
    }
    let (timeline, outcome) = train(&mut trainer, settings.run.steps, &mut folder, crew);
    let outcome = crew.settle(outcome);
    if let Some(timeline) = timeline {
        folder.write_timeline(&timeline.chrome_trace()).map_err(Failure::input)?;
    }
    let (first, last) = outcome?;
    display::say(&format!(
        "trained {} steps: loss {:.4} at the first, {:.4} at the last; results in {}",
        last.step,
        first.loss,
        last.loss,
        settings.run.out.display()
    ));
    Ok(())
}

/// Takes all steps together with the process that speaks.
fn follow(trainer: &mut Trainer, steps: u64, crew: &mut Crew) -> Result<(), Failure> {
    for _ in 0..steps {
        if let Err(error) = trainer.step() {
            crew.take_over(&error);
            return crew.settle(Err(failure(&error)));
        }
    }
    Ok(())
}

/// Takes all steps. The timeline is that of the last step that succeeded, whatever came after it.
fn train(
    trainer: &mut Trainer,
    steps: u64,
    folder: &mut RunFolder,
    crew: &mut Crew,
) -> (Option<Timeline>, Result<(Metrics, Metrics), Failure>) {
    let mut display = Display::new(steps);
    let (mut timeline, mut first, mut last) = (None, None, None);
    for _ in 0..steps {
        let (metrics, report) = match trainer.step() {
            Ok(done) => done,
            Err(error) => {
                crew.take_over(&error);
                return (timeline, Err(failure(&error)));
            }
        };
        timeline = Some(report.timeline);
        if let Err(error) = folder.write_metrics(&metrics) {
            return (timeline, Err(Failure::input(error)));
        }
        display.step(&metrics);
        first.get_or_insert_with(|| metrics.clone());
        last = Some(metrics);
    }
    display.finish();
    (timeline, Ok(first.zip(last).expect("settings ask for at least one step")))
}
