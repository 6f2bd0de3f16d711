//! A plan of another system, read from its file, predicted, and compared with the best plans.

use std::cell::Cell;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use pipewright_schedule::emit::{Limit, ReadPlan, limit_of};
use pipewright_schedule::footprint::Use;
use pipewright_schedule::plan::{
    Plan, PlanChoice, PlanError, PlanRequest, Prediction, System, TrainingState, plan, predict,
};
use pipewright_schedule::profile::Profile;
use pipewright_schedule::words::counted;
use pipewright_system::schedule_memory::check_schedule;

use crate::failure::{Exit, Failure, sentence};
use crate::numbers::bytes;
use crate::plans::emitted::best_of_system;
use crate::plans::given_file::{GivenFile, wrong};
use crate::plans::plan_json::{CheckJson, check_json, plan_json};
use crate::plans::print::{cut_row, longer, memory_row, refused, time, title_of};

/// The share by which a plan may take longer than another one and still be as good.
const AS_GOOD: f64 = 0.01;

/// The file to check, and the costs and limits by which it is judged.
pub(crate) struct Check<'a> {
    pub(crate) file: &'a Path,
    pub(crate) profile: &'a Profile,
    /// The number of ranks, over all replicas; `None` for the number in the file.
    pub(crate) ranks: Option<u32>,
    /// Returns the memory of each of so many ranks in bytes, if it is limited.
    pub(crate) memory_of: &'a dyn Fn(u32) -> Option<u64>,
    pub(crate) state: TrainingState,
    /// Returns the parts of the head that the best plan of all may have on so many ranks.
    pub(crate) head_parts_of: &'a dyn Fn(u32) -> Vec<u32>,
    /// The longest search of each of the two plans to compare with.
    pub(crate) time_limit: Duration,
}

/// A checked file.
pub(crate) struct Checked<'a> {
    file: &'a Path,
    read: ReadPlan,
    prediction: Prediction,
    limit: Limit,
    memory: Option<u64>,
    /// The plans to compare with, or why there are none.
    others: Result<Others, Failure>,
}

/// The plans to compare a file with, for the same mesh and batch.
struct Others {
    /// The best plan of all.
    best: Plan,
    /// The best one that the system can run.
    best_of_system: Plan,
}

impl<'a> Checked<'a> {
    /// Reads and predicts the file, and searches the plans to compare it with.
    pub(crate) fn of(check: Check<'a>) -> Result<Self, Failure> {
        let Check { file, profile, ranks, memory_of, state, head_parts_of, time_limit } = check;
        let GivenFile { configuration, table } = GivenFile::read(file)?;
        let read = configuration.file().plan(profile, table.as_deref(), ranks);
        let mut read = read.map_err(|error| wrong(file, sentence(&error)))?;
        // Covers the searches too, whose smallest schedule is 1F1B on the same ranks.
        check_schedule(&read.schedule, Use::Plan)?;
        read.choice = PlanChoice { state, ..read.choice };
        let prediction = predict(profile, &read.schedule, &read.choice);
        let prediction = prediction.map_err(|error| wrong(file, sentence(&error)))?;
        let memory = memory_of(read.ranks());
        let limit = limit_of(profile, &read.choice, &prediction);
        let request = PlanRequest {
            ranks: read.ranks(),
            microbatches: read.microbatches(),
            microbatch_rows: read.choice.microbatch_rows,
            memory,
            state,
            data_parallel: Some(read.choice.mesh.data),
            tensor_parallel: Some(read.choice.mesh.tensor),
            larger_microbatches: false,
            head_parts: head_parts_of(read.ranks()),
            ..PlanRequest::default()
        };
        let others = Others::search(read.system, profile, &request, time_limit);
        // Nothing is printed for wrong input.
        let others = match others {
            Err(failure) if failure.kind == Exit::WrongInput => return Err(failure),
            others => others,
        };
        Ok(Self { file, read, prediction, limit, memory, others })
    }

    /// Returns an error if there are no plans to compare with, or if the plan does not fit into the memory.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        let fits = self.fits();
        self.others.and(fits)
    }

    fn fits(&self) -> Result<(), Failure> {
        let Some(memory) = self.memory else { return Ok(()) };
        let peaks = self.prediction.peak_bytes.iter().enumerate();
        match peaks.max_by_key(|(_, peak)| **peak).filter(|(_, peak)| **peak > memory) {
            None => Ok(()),
            Some((rank, &peak)) => Err(Failure::new(
                Exit::CheckFailed,
                format!(
                    "{}: rank {rank} needs {} and has {}; recompute, use more ranks, or give it fewer layers",
                    self.file.display(),
                    bytes(peak),
                    bytes(memory)
                ),
            )),
        }
    }

    /// Returns how much longer the plan takes than another one, as a share.
    fn longer_than(&self, other: &Plan) -> f64 {
        self.prediction.step_s() / other.step_s - 1.0
    }

    /// Returns the result as text.
    pub(crate) fn text(&self) -> String {
        let Self { read, prediction, .. } = self;
        let mut text = String::new();
        let mut line = |words: String| writeln!(text, "{words}").expect("a string takes all text");
        line(format!(
            "{}: {}, {}: {}, {}, {} of {}: {} per step, bubble {:.1}%",
            self.file.display(),
            read.system,
            read.schedule_name,
            counted(read.ranks(), "rank"),
            counted(read.schedule.placement().stages(), "stage"),
            counted(read.microbatches(), "microbatch"),
            counted(read.choice.microbatch_rows, "row"),
            time(prediction.step_s()),
            prediction.run.timeline().bubble_fraction() * 100.0
        ));
        line(cut_row(&read.choice.boundaries));
        line(memory_row(&prediction.peak_bytes));
        if let Ok(others) = &self.others {
            self.comparison(others).into_iter().for_each(&mut line);
        }
        for remark in &read.remarks {
            line(format!("note  {remark}"));
        }
        text
    }

    /// Returns the lines that compare the plan with the best ones.
    fn comparison(&self, Others { best, best_of_system }: &Others) -> Vec<String> {
        let mut lines = vec![
            self.verdict(best),
            format!("best we know  {}: {} per step", title_of(best), time(best.step_s)),
            cut_row(&best.boundaries),
        ];
        if best_of_system.step_s > best.step_s {
            lines.push(format!(
                "best that {} runs  {}: {} per step; yours takes {}",
                self.read.system,
                title_of(best_of_system),
                time(best_of_system.step_s),
                longer(self.longer_than(best_of_system))
            ));
            lines.push(cut_row(&best_of_system.boundaries));
        }
        lines
    }

    /// Returns how much longer the plan takes than the best one, and the stage that limits it.
    fn verdict(&self, best: &Plan) -> String {
        let share = self.longer_than(best);
        if share <= AS_GOOD {
            return format!("your layout is as good as the best we know: it takes {}", longer(share));
        }
        let Limit { rank, stage, kind, .. } = &self.limit;
        let reason = if self.limit.is_balanced() {
            "all ranks compute about equally long, so the order of the computations or the messages limit it"
                .to_owned()
        } else {
            format!(
                "stage {stage} is the limit, most of it the {kind}: rank {rank} computes {}, {:.1}% more than the mean of the ranks",
                time(self.limit.busy_s),
                self.limit.excess() * 100.0
            )
        };
        format!("your layout takes {} than the best we know: {reason}", longer(share))
    }

    /// Returns the result as JSON.
    pub(crate) fn json(&self) -> String {
        let others = self.others.as_ref().ok();
        let json = CheckJson {
            file: self.file.to_string_lossy(),
            longer: others.map(|others| self.longer_than(&others.best)),
            best: others.map(|others| plan_json(&others.best)),
            best_of_system: others.map(|others| plan_json(&others.best_of_system)),
            ..check_json(&self.read, &self.prediction, &self.limit)
        };
        serde_json::to_string(&json).expect("numbers can be written as JSON") + "\n"
    }
}

impl Others {
    /// Searches both plans, each for at most `time_limit`.
    fn search(
        system: System,
        profile: &Profile,
        request: &PlanRequest,
        time_limit: Duration,
    ) -> Result<Self, Failure> {
        let is_stopped = Cell::new(false);
        let limited = || {
            let (start, is_stopped) = (Instant::now(), &is_stopped);
            move || {
                let goes_on = start.elapsed() < time_limit;
                is_stopped.set(is_stopped.get() || !goes_on);
                goes_on
            }
        };
        // A search that was stopped may also report that it tried no schedule.
        let reason = |failure: Failure| if is_stopped.get() { refused(PlanError::Stopped) } else { failure };
        let best_of_system = best_of_system(system, profile, request, &mut limited()).map_err(reason)?;
        let report = plan(profile, request, &mut limited()).map_err(|error| reason(refused(error)))?;
        let best = report.plans.into_iter().next().filter(|best| best.step_s <= best_of_system.step_s);
        let best = best.unwrap_or_else(|| best_of_system.clone());
        Ok(Self { best, best_of_system })
    }
}
