//! Prints plans as text.

use std::fmt::Write;
use std::ops::Range;

use pipewright_schedule::mesh::{Mesh, MeshOrder};
use pipewright_schedule::picture::TimeUnit;
use pipewright_schedule::plan::{
    MachineUse, Outcome, OutcomeKind, Plan, PlanError, PlanMesh, PlanReport, PlanRequest, PlanStream,
};
use pipewright_schedule::profile::Profile;
use pipewright_schedule::words::counted;
use pipewright_schedule::{Placement, Rank, Recompute};

use crate::failure::{Exit, Failure};
use crate::numbers::bytes;
use crate::schedules::simulation_text::list;

/// Returns the number of stages of the rank with the most.
pub fn stages_per_rank(placement: &Placement) -> u32 {
    placement.all_ranks().map(|rank| placement.stages_of(rank).len() as u32).max().unwrap_or(1)
}

/// Returns whether a plan has more axes than its pipeline.
pub fn is_mesh(plan: &Plan) -> bool {
    plan.mesh.data > 1 || plan.mesh.tensor > 1
}

/// Returns the axes of the mesh, the axis of neighbouring ranks first.
pub fn rank_order(plan: &Plan) -> [&'static str; 3] {
    match plan.mesh.order {
        MeshOrder::Replicas => ["tensor", "data", "pipeline"],
        MeshOrder::Pipeline => ["tensor", "pipeline", "data"],
    }
}

/// Returns the failure for an error of the planner.
pub fn refused(error: PlanError) -> Failure {
    match error {
        PlanError::DoesNotFit { .. } | PlanError::Stopped => Failure::new(Exit::CheckFailed, error),
        error => Failure::input(error),
    }
}

/// Returns the report as text, with a note about what the plan cannot keep of the configuration.
pub fn text(
    report: &PlanReport,
    request: &PlanRequest,
    seconds: f64,
    profile: &Profile,
    note: Option<&str>,
) -> String {
    let mut text = String::new();
    let mut line = |words: String| writeln!(text, "{words}").expect("a string takes all text");
    for (index, plan) in report.plans.iter().enumerate() {
        let (step, bubble) = (time(plan.step_s), plan.bubble_fraction * 100.0);
        line(format!("{}  {}  {step} per step, bubble {bubble:.1}%", title_word(index), title_of(plan)));
        if index == 0 {
            details(plan).into_iter().for_each(&mut line);
            machine_rows(report).into_iter().for_each(&mut line);
        }
    }
    let stopped = if report.stopped { ", stopped by the time limit" } else { "" };
    line(format!(
        "within {:.1}% of the best possible ({}); {} plans simulated in {seconds:.1} s{stopped}",
        report.gap() * 100.0,
        time(report.lower_bound_s),
        report.simulated
    ));
    if let Some(best) = report.plans.first() {
        let others = report.outcomes.iter().filter(|outcome| outcome.name != best.name);
        for outcome in others {
            // A searched order has a name of its own.
            let plan = report.plans.iter().find(|plan| plan.name == outcome.name);
            let name = plan.map_or_else(|| outcome.name.to_owned(), Plan::title);
            line(format!("lost  {name}: {}", reason(outcome, best)));
        }
    }
    if let Some(note) = note {
        line(note.to_owned());
    }
    if request.memory.is_none() && profile.ranks.iter().all(|rank| rank.memory_bytes.is_none()) {
        line("memory is not limited; --memory limits it".to_owned());
    }
    if profile.node.is_some() {
        line(
            "assumed, not measured: tensor-parallel ranks share all work of a layer evenly, and collectives run on rings"
                .to_owned(),
        );
    }
    let streams = report.plans.iter().any(|plan| plan.stream.is_some());
    if streams && profile.link.read_bytes_per_s.is_none() {
        line("assumed, not measured: the rate of the disk (link.read_bytes_per_s)".to_owned());
    }
    if !profile.assumed.is_empty() {
        line(format!("assumed, not measured: {}", profile.assumed.join(", ")));
    }
    text
}

/// Returns the lines about the best plan.
fn details(plan: &Plan) -> Vec<String> {
    let mut lines = vec![cut_row(&plan.boundaries)];
    if let recompute @ Recompute::Stages(_) = Recompute::of_stages(&plan.recompute) {
        lines.push(format!("      stages that recompute {recompute}"));
    }
    lines.push(memory_row(&plan.peak_bytes));
    if let Some(PlanStream { window, step_bytes, read_s, bytes_per_s }) = plan.stream {
        lines.push(format!(
            "      the base stays in its files (model.stream): at most {} of a rank in memory; a step reads {}, in {} of a rank's \
             disk at {:.2} GB/s",
            counted(window.get(), "stage"),
            bytes(step_bytes),
            time(read_s),
            bytes_per_s * 1e-9
        ));
    }
    if is_mesh(plan) {
        lines.push(format!("      ranks are numbered by {}", rank_order(plan).join(", then by ")));
        lines.push(format!(
            "      assumed collectives: {} in sums over tensor-parallel ranks, {} in sums over replicas",
            time(plan.collectives.tensor_s),
            time(plan.collectives.replicas_s)
        ));
    }
    lines
}

/// Returns the lines about unlike ranks: the stages of each one, and the estimated steps with and without it.
fn machine_rows(report: &PlanReport) -> Vec<String> {
    let best = report.plans.first();
    let replicas = best.filter(|plan| plan.mesh.data > 1);
    let rows = |used: &MachineUse| {
        let estimate = |without: &str| {
            let faster = time(used.step_if_twice_as_fast_s);
            format!("        estimated step: {faster} if it were twice as fast{without}")
        };
        let Some(rank) = used.rank else {
            let reason = match replicas {
                Some(_) => "the replicas have equally many ranks",
                None => "no faster plan with it was found",
            };
            return [
                format!("      rank {} of the profile is left out: {reason}", used.machine),
                estimate(""),
            ];
        };
        let stages =
            used.stages.iter().map(|(stage, layers)| format!("stage {stage} ({})", range_of(layers)));
        let stages: Vec<String> = stages.collect();
        let of_plan = if rank == used.machine { String::new() } else { format!(", rank {rank} of the plan") };
        let number = match replicas {
            Some(plan) => format!("{of_plan}, {}", place_in_replica(plan, rank)),
            None => of_plan,
        };
        let without = used.step_without_s.map_or_else(|| "no plan".to_owned(), time);
        let without = if replicas.is_some() { String::new() } else { format!(", {without} without it") };
        let (machine, stages) = (used.machine, stages.join(", "));
        let (busy, idle) = (time(used.busy_s), time(used.idle_s));
        [
            format!("      rank {machine} of the profile{number}: {stages}, busy {busy}, idle {idle}"),
            estimate(&without),
        ]
    };
    report.machines.iter().flat_map(rows).collect()
}

/// Describes the replica of a rank of a plan.
fn place_in_replica(plan: &Plan, rank: Rank) -> String {
    let ranks = plan.schedule.ranks().max(1);
    let (replica, place) = (rank.get() / ranks, rank.get() % ranks);
    let rows = plan.rows_of_replicas().get(replica as usize).copied().unwrap_or(plan.microbatch_rows);
    format!("rank {place} of replica {replica} with {} of each microbatch", counted(rows, "row"))
}

/// Describes the layers of a stage.
fn range_of(layers: &Range<usize>) -> String {
    match layers.len() {
        1 => format!("layer {}", layers.start),
        _ => format!("layers {} to {}", layers.start, layers.end.saturating_sub(1)),
    }
}

/// Formats a time in the unit that suits it.
pub fn time(seconds: f64) -> String {
    TimeUnit::Seconds.format(seconds, seconds)
}

/// Writes a number of days in days, hours or a smaller unit.
pub fn span(days: f64) -> String {
    let hours = 24.0 * days;
    match hours {
        24.0.. => format!("{} days", significant(days)),
        1.0.. => format!("{} hours", significant(hours)),
        _ => time(3600.0 * hours),
    }
}

/// Writes a number with at least three digits, and millions as such.
pub fn significant(number: f64) -> String {
    if number >= 1e6 {
        return format!("{} million", significant(number / 1e6));
    }
    let decimals = (2.0 - number.abs().max(1e-3).log10().floor()).clamp(0.0, 5.0) as usize;
    format!("{number:.decimals$}")
}

/// Formats how much longer something takes, as a share.
pub fn longer(share: f64) -> String {
    if share < 0.0 {
        format!("{:.1}% less time", -share * 100.0)
    } else {
        format!("{:.1}% longer", share * 100.0)
    }
}

/// Describes a plan in a few words.
pub fn title_of(plan: &Plan) -> String {
    let PlanMesh { microbatches, microbatch_rows: rows, head_parts, .. } = plan.division();
    let head = match head_parts {
        1 => String::new(),
        parts => format!(", head in {parts} parts"),
    };
    let recompute = match Recompute::of_stages(&plan.recompute) {
        Recompute::None => "",
        Recompute::Stage | Recompute::Block => ", all stages recompute",
        Recompute::Parts => ", all stages recompute parts of layers",
        Recompute::Stages(_) => ", some stages recompute",
    };
    let overlaps = if plan.settings.overlap { " with overlaps" } else { "" };
    let (name, ranks) = (plan.title(), ranks_of(plan.mesh));
    let stages = counted(plan.schedule.placement().stages(), "stage");
    let (microbatches, rows) = (counted(microbatches, "microbatch"), counted(rows, "row"));
    format!("{name}{overlaps}: {ranks}, {stages}{head}, {microbatches} of {rows}{recompute}")
}

/// Describes the ranks of a mesh.
fn ranks_of(mesh: Mesh) -> String {
    let replicas = match mesh.data {
        1 => String::new(),
        replicas => format!("{replicas} replicas of "),
    };
    let tensor = match mesh.tensor {
        1 => String::new(),
        ranks => format!(" times {ranks} tensor-parallel ones"),
    };
    format!("{replicas}{}{tensor}", counted(mesh.pipeline, "rank"))
}

/// Describes a mesh that differs from `best` by what differs.
fn difference(mesh: PlanMesh, best: PlanMesh) -> String {
    let mut words = Vec::new();
    if ranks_of(mesh.mesh) != ranks_of(best.mesh) {
        words.push(ranks_of(mesh.mesh));
    }
    if mesh.microbatch_rows != best.microbatch_rows {
        let (microbatches, rows) =
            (counted(mesh.microbatches, "microbatch"), counted(mesh.microbatch_rows, "row"));
        words.push(format!("{microbatches} of {rows}"));
    }
    if mesh.head_parts != best.head_parts {
        words.push(format!("a head in {} parts", mesh.head_parts));
    }
    words.join(", ")
}

/// Returns why a schedule is not the best: its time on the mesh of the best plan, and on its own best mesh.
fn reason(outcome: &Outcome, best: &Plan) -> String {
    let longer = |found: f64| {
        let more = (found / best.step_s - 1.0) * 100.0;
        // A plan that reads less from files comes before one that is hardly faster.
        let word = if more < 0.0 { "shorter" } else { "longer" };
        format!("{}, {:.1}% {word}", time(found), more.abs())
    };
    let elsewhere =
        outcome.mesh.filter(|&mesh| mesh != best.division()).map(|mesh| difference(mesh, best.division()));
    match (&outcome.result, outcome.on_best_mesh_s, elsewhere) {
        (OutcomeKind::Takes(found), Some(here), Some(mesh)) if *found < here * (1.0 - 1e-6) => {
            format!("{} on the same mesh; with {mesh} {}", longer(here), longer(*found))
        }
        (OutcomeKind::Takes(_), Some(here), _) => format!("{} on the same mesh", longer(here)),
        (OutcomeKind::Takes(found), None, Some(mesh)) => {
            format!("{} with {mesh}; none was tried on the mesh of the best", longer(*found))
        }
        (OutcomeKind::Takes(found), None, None) => longer(*found),
        (OutcomeKind::TooLarge(shortage), ..) => format!(
            "rank {} needs {} of {}, {} too much",
            shortage.rank,
            bytes(shortage.needed),
            bytes(shortage.memory),
            bytes(shortage.needed - shortage.memory)
        ),
        (OutcomeKind::Refused(reason), ..) => reason.clone(),
    }
}

/// Returns the word before the plan with this index among plans that are sorted by their time.
pub fn title_word(index: usize) -> &'static str {
    if index == 0 { "best" } else { "then" }
}

/// Returns the row with the cut of a plan.
pub fn cut_row(boundaries: &[usize]) -> String {
    format!("      boundaries {boundaries:?}")
}

/// Returns the row with the bytes of the ranks. A long list is shortened.
pub fn memory_row(peaks: &[u64]) -> String {
    format!("      memory by rank {}", list(peaks.iter().map(|&peak| bytes(peak)), "  "))
}
