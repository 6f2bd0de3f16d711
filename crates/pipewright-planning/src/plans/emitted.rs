//! The files of a plan for another system: which plan they have, where they are, and what they do not say.

use std::borrow::Cow;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use pipewright_schedule::emit::{Emission, EmitRequest, PlanScope, Release, Remark, emit};
use pipewright_schedule::plan::{Plan, PlanReport, PlanRequest, Refusal, System, plan};
use pipewright_schedule::profile::Profile;
use serde::Serialize;

use crate::failure::{Exit, Failure};
use crate::output;
use crate::plans::print::{cut_row, longer, refused, time};
use crate::screen::say;

/// The systems that execute plans, with what is written for them.
pub(crate) const SYSTEMS: [((System, Release), &str); 4] = [
    (
        (System::Torchtitan, Release::Numbered),
        "Options, the names of modules and, if it needs one, a schedule table for torchtitan 0.3.0",
    ),
    ((System::Torchtitan, Release::Main), "The same for its main branch since August 2026"),
    ((System::Megatron, Release::Numbered), "Options with a layout for Megatron-LM (Megatron Core 0.16.1)"),
    ((System::Deepspeed, Release::Numbered), "The configuration and a `PipelineModule` for DeepSpeed 0.19.8"),
];

/// Returns the name of a system's release.
pub(crate) fn system_name((system, release): (System, Release)) -> &'static str {
    match release {
        Release::Numbered => system.name(),
        Release::Main => "torchtitan@main",
    }
}

/// Where and how files are written.
#[derive(Debug, Clone)]
pub(crate) struct Target<'a> {
    pub(crate) system: System,
    pub(crate) release: Release,
    /// The folder; `None` for one with the name of the system.
    pub(crate) folder: Option<&'a Path>,
    /// The precision of the run; `None` for the profile's.
    pub(crate) precision: Option<String>,
}

impl Target<'_> {
    /// Refuses a folder that the options cannot name. Only torchtitan's options name it.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let folder = self.folder();
        let is_word = folder.to_str().is_some_and(|name| !name.contains(char::is_whitespace));
        if is_word || self.system != System::Torchtitan {
            return Ok(());
        }
        Err(Failure::input(format!(
            "--emit-dir {}: options are separated by blanks; name a folder without them",
            folder.display()
        )))
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.unwrap_or_else(|| Path::new(self.system.name()))
    }
}

/// The plan that a system executes, with its files, and how it differs from the best one. `P` is the plan.
#[derive(Debug)]
pub(crate) struct Emitted<P> {
    pub(crate) plan: P,
    emission: Emission,
    /// Why the system cannot run the best plan of all.
    refusal: Option<String>,
    /// How much longer the plan takes than the best plan, as a share.
    longer: f64,
    paths: Vec<PathBuf>,
}

/// The part of the output of `--format json` about the files. `P` is the plan.
#[derive(Serialize)]
pub(crate) struct EmittedJson<'a, P> {
    system: &'a str,
    files: Vec<Cow<'a, str>>,
    plan: P,
    /// Why the best plan cannot be run; left out if it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<&'a str>,
    longer: f64,
    remarks: &'a [Remark],
}

impl Emitted<Plan> {
    /// Makes the files for the best plan of a report. If the system cannot run it, searches the best one that
    /// it can run.
    pub(crate) fn of(
        report: &PlanReport,
        profile: &Profile,
        request: &PlanRequest,
        target: &Target<'_>,
        keep_going: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Failure> {
        let best = report.plans.first().ok_or_else(|| Failure::input("there is no plan to write"))?;
        let emit = |plan: &Plan| {
            let own = EmitRequest::new(profile);
            let request = EmitRequest {
                precision: target.precision.as_deref().unwrap_or(own.precision),
                scope: PlanScope::Profile { shards: request.state.groups.shards_that_divide(plan.mesh.data) },
                folder: &target.folder().to_string_lossy(),
                release: target.release,
                ..own
            };
            emit(target.system, plan, &request)
        };
        let other = |_: &str| best_of_system(target.system, profile, request, keep_going);
        Self::new(best, target, best.refusal(target.system, profile), other, emit, |plan| plan.step_s)
    }
}

impl<P: Clone> Emitted<P> {
    /// Makes the files for the best plan, or, if the system refuses that, for the best `other` that it runs.
    pub(crate) fn new(
        best: &P,
        target: &Target<'_>,
        refusal: Option<Refusal>,
        other: impl FnOnce(&str) -> Result<P, Failure>,
        emit: impl FnOnce(&P) -> Result<Emission, Refusal>,
        step_s: fn(&P) -> f64,
    ) -> Result<Self, Failure> {
        let refusal = refusal.map(|refusal| refusal.to_string());
        let plan = refusal.as_deref().map_or_else(|| Ok(best.clone()), other)?;
        let emission = emit(&plan).map_err(|error| Failure::new(Exit::Bug, error))?;
        let longer = step_s(&plan) / step_s(best) - 1.0;
        let paths = emission.files.iter().map(|file| target.folder().join(file.name)).collect();
        Ok(Self { plan, emission, refusal, longer, paths })
    }
}

impl<P> Emitted<P> {
    /// Writes the files.
    pub(crate) fn write(&self) -> Result<(), Failure> {
        for (path, file) in self.paths.iter().zip(&self.emission.files) {
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder).map_err(|error| {
                    Failure::input(format!(
                        "{}: cannot be made: {error}; choose another --emit-dir",
                        folder.display()
                    ))
                })?;
            }
            output::write_file(path, &file.text)?;
            say(&format!("wrote {}", path.display()));
        }
        Ok(())
    }

    /// Returns what is written, as text, for a plan with this title, seconds of a step, and starts of its stages.
    pub(crate) fn text(&self, title: &str, step_s: f64, boundaries: &[usize]) -> String {
        let system = self.emission.system;
        let mut text = String::new();
        let mut line = |words: String| writeln!(text, "{words}").expect("a string takes all text");
        let step = time(step_s);
        match &self.refusal {
            None => line(format!("{system} runs the best plan: {title}: {step} per step")),
            Some(refusal) => {
                line(format!("{system} cannot run the best plan: {refusal}"));
                line(format!(
                    "the best that {system} runs takes {}: {title}: {step} per step",
                    longer(self.longer)
                ));
                line(cut_row(boundaries));
            }
        }
        let remarks = &self.emission.remarks;
        let width = remarks.iter().map(|remark| remark.subject.len()).max().unwrap_or(0);
        if !remarks.is_empty() {
            line(format!(
                "the files for {system} express these parts of the plan differently, or leave them out:"
            ));
        }
        for remark in remarks {
            line(format!("      {:width$}  {}", remark.subject, remark.text));
        }
        text
    }

    /// Returns the same for JSON.
    pub(crate) fn json<J>(&self, plan: J) -> EmittedJson<'_, J> {
        EmittedJson {
            system: self.emission.system.name(),
            files: self.paths.iter().map(|path| path.to_string_lossy()).collect(),
            plan,
            refusal: self.refusal.as_deref(),
            longer: self.longer,
            remarks: &self.emission.remarks,
        }
    }
}

/// Searches the best plan that a system can run.
pub(crate) fn best_of_system(
    system: System,
    profile: &Profile,
    request: &PlanRequest,
    keep_going: &mut dyn FnMut() -> bool,
) -> Result<Plan, Failure> {
    let request = PlanRequest { system: Some(system), plans: 1, ..request.clone() };
    let context = || format!("among the plans that {system} runs:\n");
    let report = plan(profile, &request, keep_going).map_err(|error| refused(error).below(context()))?;
    report.plans.into_iter().next().ok_or_else(|| Failure::input("there is no plan to write"))
}
