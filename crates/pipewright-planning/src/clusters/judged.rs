//! `pipewright plan --cluster --check`: a configuration of another system on a cluster, and what is better.

use std::fmt::Write;
use std::path::Path;

use pipewright_cluster::accuracy::Accuracy;
use pipewright_cluster::judge::{ChangedOption, GivenRun, Judgement, RunContext, judge};
use pipewright_cluster::search::{ClusterPlan, Request, Shares};
use serde::Serialize;

use crate::clusters::plan::{PlannedFor, planned_for};
use crate::clusters::plan_json::{PlanJson, plan_json};
use crate::clusters::plan_text::{details, figures, title};
use crate::clusters::request::PlanOptions;
use crate::failure::{Exit, Failure, sentence};
use crate::numbers::bytes;
use crate::plans::given_file::{GivenFile, wrong};
use crate::plans::print::time;

/// A judged file.
#[derive(Debug)]
pub(crate) struct Judged<'a> {
    file: &'a Path,
    run: GivenRun,
    request: Request,
    verdict: Judgement,
    /// Assumptions about the model and the machine.
    assumed: Vec<String>,
}

#[derive(Serialize)]
struct JudgedJson<'a> {
    file: String,
    system: &'static str,
    fits: bool,
    memory_limit_bytes: u64,
    /// The bytes that the largest rank lacks.
    missing_bytes: u64,
    plan: PlanJson<'a>,
    /// The fastest plan that the system runs; left out if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    best: Option<PlanJson<'a>>,
    /// The reason why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_best: Option<&'a str>,
    /// By how much the best plan is faster, as a share.
    gain: Option<f64>,
    /// How well predictions of this kind were judged.
    accuracy: &'a Accuracy,
    changes: &'a [ChangedOption],
    notes: &'a [String],
    unused: &'a [String],
    assumed: &'a [String],
}

/// Reads and predicts a file, and searches for the best plan of its system.
pub(crate) fn read<'a>(options: &PlanOptions<'_>, file: &'a Path) -> Result<Judged<'a>, Failure> {
    options.check()?;
    if !options.machines.further.is_empty() {
        let cluster = options.machines.argument;
        return Err(Failure::input(format!("--check: --cluster {cluster} has several machines; give one")));
    }
    let PlannedFor { model, machine, sequence, assumed, .. } = planned_for(options)?;
    let GivenFile { configuration, table } = GivenFile::read(file)?;
    let gpus = options
        .gpus(&machine)?
        .ok_or_else(|| Failure::input("--nodes is missing; give it, such as --nodes 4"))?;
    let (batch, precision) = (options.cluster.global_batch, options.cluster.precision);
    let place = RunContext { model: &model, gpus, sequence, batch, precision };
    let run = configuration.run(&place, table.as_deref());
    let mut run = run.map_err(|error| wrong(file, sentence(&error)))?;
    run.layout.implementation = options.cluster.with_load(run.layout.implementation);
    let request = run.request(machine, gpus).map_err(|error| wrong(file, sentence(&error)))?;
    let request =
        Request { memory: options.memory.map(|bytes| bytes as f64), names: options.names(), ..request };
    let verdict = judge(&request, &run).map_err(|error| wrong(file, sentence(&error)))?;
    Ok(Judged { file, run, request, verdict, assumed })
}

impl Judged<'_> {
    /// Returns an error if a rank has too little memory.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        let (rank, memory) = self.verdict.plan.prediction.largest_rank();
        let limit = self.verdict.memory_limit;
        if self.verdict.fits() {
            return Ok(());
        }
        Err(Failure::new(
            Exit::CheckFailed,
            format!(
                "{}: does not fit: rank {rank} needs {} and has {}; recompute more, divide the model among more ranks, or take \
                 smaller microbatches",
                self.file.display(),
                bytes(memory.total() as u64),
                bytes(limit as u64)
            ),
        ))
    }

    /// Returns the result as text.
    pub(crate) fn text(&self) -> String {
        let Self { run, verdict, request, .. } = self;
        let mut text = String::new();
        let mut line = |words: String| {
            writeln!(text, "{}", words.replace('\n', "\\n")).expect("a string takes all text");
        };
        line(title(request));
        let plan = |plan: &ClusterPlan| [plan.layout.text(&request.model), figures(plan)];
        let [layout, own] = plan(&verdict.plan);
        line(format!("{}: {}: {layout}", self.file.display(), run.system));
        line(format!("      {own}"));
        details(&verdict.plan).into_iter().for_each(&mut line);
        line(format!("      accuracy: {}", verdict.accuracy));
        line(self.fit());
        match &verdict.best {
            Ok(best) => {
                let [layout, figures] = plan(best);
                line(self.better(best));
                if verdict.is_beaten() {
                    line(format!("      {layout}"));
                    line(format!("      {figures}"));
                    for ChangedOption { option, from, to } in &verdict.changes {
                        line(format!("      {option}  {from} -> {to}"));
                    }
                }
            }
            Err(error) => line(format!("no plan of {} to compare with: {error}", run.system)),
        }
        run.notes.iter().for_each(|note| line(format!("note  {note}")));
        let lists = [("not used", &run.unused), ("assumed", &self.assumed)];
        for (what, items) in lists.into_iter().filter(|(_, items)| !items.is_empty()) {
            line(format!("{what}: {}", items.join("; ")));
        }
        text
    }

    /// Says whether the run fits into memory.
    fn fit(&self) -> String {
        let Judgement { plan, memory_limit, .. } = &self.verdict;
        let (needed, limit) = (plan.prediction.peak_memory(), *memory_limit);
        let (verdict, size) =
            if self.verdict.fits() { ("fits", "free") } else { ("does not fit", "too much") };
        format!(
            "{verdict}: the largest rank needs {} of {}, {} {size}",
            bytes(needed as u64),
            bytes(limit as u64),
            bytes((needed - limit).abs() as u64)
        )
    }

    /// Says what the best plan gains.
    fn better(&self, best: &ClusterPlan) -> String {
        let gain = self.verdict.gain().unwrap_or_default();
        let step = time(best.prediction.seconds);
        if !self.verdict.is_beaten() && gain > 0.0 {
            format!(
                "no plan of the search is better by more than the mean error of such predictions, {:.1}%: the best one is {:.1}% \
                 faster",
                self.verdict.accuracy.mean * 100.0,
                gain * 100.0
            )
        } else if !self.verdict.is_beaten() {
            "no plan of the search is better".to_owned()
        } else if self.verdict.fits() {
            let ratio = best.prediction.seconds / self.verdict.plan.prediction.seconds;
            let saved = Shares::savings(&self.verdict.plan.shares, &best.shares, ratio);
            let saved = saved.iter().map(|(name, share)| format!("{name} {:.1}%", share * 100.0));
            let saved = saved.collect::<Vec<_>>().join(", ");
            format!(
                "a better layout: {step} per step, {:.1}% faster; it saves, of the step: {saved}",
                gain * 100.0
            )
        } else {
            format!("a layout that fits: {step} per step")
        }
    }

    /// Returns the result as JSON.
    pub(crate) fn json(&self) -> String {
        let Self { run, verdict, .. } = self;
        let best = verdict.best.as_ref();
        let needed = verdict.plan.prediction.peak_memory();
        let json = JudgedJson {
            file: self.file.to_string_lossy().into_owned(),
            system: run.system.name(),
            fits: verdict.fits(),
            memory_limit_bytes: verdict.memory_limit as u64,
            missing_bytes: (needed - verdict.memory_limit).max(0.0) as u64,
            plan: plan_json(&verdict.plan, &run.model),
            best: best.ok().map(|best| plan_json(best, &run.model)),
            no_best: best.err().map(|error| error.reason.as_str()),
            gain: verdict.gain(),
            accuracy: &verdict.accuracy,
            changes: &verdict.changes,
            notes: &run.notes,
            unused: &run.unused,
            assumed: &self.assumed,
        };
        serde_json::to_string(&json).expect("numbers can be written as JSON") + "\n"
    }
}
