//! Writes the configuration of a plan, for `train`.

use std::path::Path;

use pipewright_schedule::Recompute;
use pipewright_schedule::csv::print_schedule;
use pipewright_schedule::generate::depends_on_costs;
use pipewright_schedule::plan::{Plan, PlanSettings, SEARCHED};
use toml::{Table, Value};

use crate::failure::Failure;
use crate::output;
use crate::planning::print::stages_per_rank;
use pipewright_run::settings::Settings;
use pipewright_run::settings::generator;

/// Writes the configuration of `plan` to `file`: the settings with the choices of the plan, or without
/// settings the choices alone. A schedule without a name, or with settings, is written to a CSV file in the
/// same folder.
pub(crate) fn write_plan(file: &Path, plan: &Plan, settings: Option<&Settings>) -> Result<(), Failure> {
    let mut config = match settings {
        Some(settings) => Table::try_from(settings).expect("settings are tables of plain values"),
        None => Table::new(),
    };
    let schedule = if is_named(plan) {
        plan.name.to_owned()
    } else {
        let csv = file.with_extension("csv");
        output::write(Some(&csv), &print_schedule(&plan.schedule))?;
        csv.file_name().map_or_else(|| "schedule.csv".to_owned(), |name| name.to_string_lossy().into_owned())
    };
    let number = |number: u32| Value::Integer(i64::from(number));
    let mut pipeline = vec![
        ("ranks", number(plan.schedule.ranks())),
        ("stages_per_rank", number(stages_per_rank(plan.schedule.placement()))),
        ("schedule", Value::String(schedule)),
        ("microbatches", number(plan.microbatches())),
        ("microbatch_size", number(plan.microbatch_rows)),
    ];
    if plan.boundaries.is_empty() {
        pipeline.push(("partition", Value::String("even".to_owned())));
    } else {
        let boundaries = plan.boundaries.iter().map(|&layer| Value::Integer(layer as i64)).collect();
        pipeline.push(("partition", Value::String("explicit".to_owned())));
        pipeline.push(("boundaries", Value::Array(boundaries)));
    }
    let says_parts = config.get("pipeline").is_some_and(|pipeline| pipeline.get("head_parts").is_some());
    if plan.head_parts > 1 || says_parts {
        pipeline.push(("head_parts", number(plan.head_parts)));
    }
    let recompute = Value::try_from(Recompute::of_stages(&plan.recompute));
    pipeline.push(("recompute", recompute.expect("words, numbers and tables are values")));
    set(&mut config, "pipeline", pipeline);
    let replicas = settings.map(|settings| settings.mesh.with_replicas(plan.mesh.data));
    let mut mesh = vec![("data_parallel", replicas.unwrap_or_else(|| number(plan.mesh.data)))];
    if plan.mesh.tensor > 1 || settings.is_some() {
        mesh.push(("tensor_parallel", number(plan.mesh.tensor)));
    }
    set(&mut config, "mesh", mesh);
    let planned = plan_milliseconds(plan.step_s, settings);
    set(
        &mut config,
        "run",
        planned.map(|planned| ("planned_step_ms", Value::Float(planned))).into_iter().collect(),
    );
    let text = toml::to_string(&config).expect("a table of plain values can be written as TOML");
    output::write(Some(file), &text)
}

/// Returns the milliseconds of a step that takes as long as planned. A plan is of one batch, so there are
/// none for steps of several batches.
pub(crate) fn plan_milliseconds(step_s: f64, settings: Option<&Settings>) -> Option<f64> {
    let batches = settings.map_or(1, |settings| settings.run.accumulate.get());
    (batches == 1).then_some(step_s * 1e3)
}

/// Returns whether the configuration of a plan names its schedule: it has a name, and it depends on its size
/// alone.
pub(crate) fn is_named(plan: &Plan) -> bool {
    // The stages of a schedule with a name are on the ranks in order.
    let visits_in_order = plan.machines.is_empty();
    plan.name != SEARCHED
        && !depends_on_costs(plan.name)
        && plan.settings == PlanSettings::default()
        && visits_in_order
}

/// Sets keys of a section.
fn set(config: &mut Table, section: &str, keys: Vec<(&str, Value)>) {
    let section = config.entry(section).or_insert_with(|| Value::Table(Table::new()));
    if let Value::Table(table) = section {
        if keys.iter().any(|(key, _)| *key == "partition") {
            // The plan has chosen these.
            for key in ["boundaries", "layout"].into_iter().chain(generator::KEYS.map(|(key, _)| key)) {
                table.remove(key);
            }
        }
        // A plan for other settings may have written it.
        table.remove("planned_step_ms");
        table.extend(keys.into_iter().map(|(key, value)| (key.to_owned(), value)));
    }
}
