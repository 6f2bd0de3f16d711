//! Reads the options of torchtitan.

use crate::csv::parse_schedule;
use crate::emit::model_parts::{ModelParts, StageParts};
use crate::emit::modules::{PYTORCH, default_stages, stages_of};
use crate::emit::options::{CHECKPOINTING, GivenOption, MODULES, Options, nearest};
use crate::emit::read_error::ReadError;
use crate::emit::read_plan::{
    ReadPlan, checkpoint_remark, generate_within, replicas_of, sharing_remarks, uneven_stages, usual_order,
};
use crate::error_text::with_causes;
use crate::generate::ScheduleSpec;
use crate::mesh::Mesh;
use crate::placement::Placement;
use crate::plan::{PlanChoice, System};
use crate::profile::Profile;
use crate::recompute::StageRecompute;
use crate::schedule::Schedule;

const DEGREE: &str = "parallelism.pipeline-parallel-degree";
const SCHEDULE: &str = "parallelism.pipeline-parallel-schedule";
const TABLE: &str = "parallelism.pipeline-parallel-schedule-csv";
const ROWS: &str = "parallelism.pipeline-parallel-microbatch-size";
const FIRST: &str = "parallelism.pipeline-parallel-first-stage-less-layers";
const LAST: &str = "parallelism.pipeline-parallel-last-stage-less-layers";
const PER_STAGE: &str = "parallelism.pipeline-parallel-layers-per-stage";
const REPLICATE: &str = "parallelism.data-parallel-replicate-degree";
const SHARD: &str = "parallelism.data-parallel-shard-degree";
const TENSOR: &str = "parallelism.tensor-parallel-degree";
const CONTEXT: &str = "parallelism.context-parallel-degree";
const EXPERT: &str = "parallelism.expert-parallel-degree";
const LOCAL_BATCH: &str = "training.local-batch-size";
const GLOBAL_BATCH: &str = "training.global-batch-size";
/// The tokens of a microbatch of a replica, since August 2026.
const TOKENS: &str = "training.num-tokens-per-microbatch-per-dp-rank";
/// The tokens of a step, since August 2026.
const STEP_TOKENS: &str = "training.num-tokens-per-train-step";
/// The tokens of a row, since August 2026.
const LENGTH: &str = "training.max-context-length";
/// The microbatches of a run of the pipeline, since August 2026.
const MICROBATCHES: &str = "parallelism.num-pp-microbatches";

/// The options of `[parallelism]` in torchtitan 0.3.0 and on its main branch, and the others that are read. A flag
/// with `no-` is false.
const KNOWN: [&str; 29] = [
    DEGREE,
    SCHEDULE,
    TABLE,
    ROWS,
    MODULES,
    FIRST,
    LAST,
    PER_STAGE,
    REPLICATE,
    SHARD,
    TENSOR,
    CONTEXT,
    EXPERT,
    LOCAL_BATCH,
    GLOBAL_BATCH,
    TOKENS,
    STEP_TOKENS,
    LENGTH,
    MICROBATCHES,
    // Options of torchtitan 0.2.
    "parallelism.disable-loss-parallel",
    "parallelism.enable-async-tensor-parallel",
    "parallelism.fsdp-reshard-after-forward",
    "parallelism.enable-fsdp-symm-mem",
    "parallelism.no-enable-fsdp-symm-mem",
    "parallelism.enable-sequence-parallel",
    "parallelism.no-enable-sequence-parallel",
    "parallelism.spmd-backend",
    "parallelism.context-parallel-load-balancer",
    "parallelism.context-parallel-ptrr-mask-key",
];

/// The rows of a batch of a replica by default.
const DEFAULT_BATCH: u32 = 8;
/// The tokens of a row by default.
const DEFAULT_LENGTH: u32 = 2048;
/// The tokens of a microbatch by default, since August 2026.
const DEFAULT_TOKENS: u32 = 16384;

/// Returns whether a key is an option of torchtitan that says how the model is divided.
pub(super) fn is_torchtitan(key: &str) -> bool {
    key.starts_with("parallelism.") || [LOCAL_BATCH, TOKENS, STEP_TOKENS].contains(&key)
}

/// Returns whether a key is read.
pub(super) fn is_read(key: &str) -> bool {
    KNOWN.contains(&key) || key.starts_with(CHECKPOINTING)
}

/// Returns the path of the table of computations, if the options name one.
pub(super) fn table_of(options: &Options) -> Option<&str> {
    let path = options.known(TABLE).ok()??.values.first()?;
    Some(path.as_str()).filter(|path| !path.is_empty() && *path != "None")
}

/// Reads a plan for the layers of `profile`, on a total of `ranks` ranks. `table` is the content of the file that
/// [`table_of`] names.
pub(super) fn read(
    options: &Options,
    profile: &Profile,
    table: Option<&str>,
    ranks: Option<u32>,
) -> Result<ReadPlan, ReadError> {
    options.check(System::Torchtitan, &KNOWN, "parallelism.")?;
    options.known(TABLE)?;
    let parts = ModelParts::of(profile);
    let degree = options.number(DEGREE, 1)?.unwrap_or(1);
    let mesh = Mesh {
        pipeline: degree,
        tensor: options.number(TENSOR, 1)?.unwrap_or(1),
        context: options.number(CONTEXT, 1)?.unwrap_or(1),
        ..Mesh::default()
    };
    let (name, line) = options.word(SCHEDULE)?.unwrap_or(("1F1B", 1));
    let known = PYTORCH.iter().find(|(_, pytorch)| pytorch.eq_ignore_ascii_case(name));
    let &(own, pytorch) = known.ok_or_else(|| {
        let names = PYTORCH.map(|(_, pytorch)| pytorch);
        let nearest = nearest(name, &names).map_or(String::new(), |name| format!("; did you mean `{name}`?"));
        options.wrong(SCHEDULE, name, &format!("one of {}{nearest}", names.join(", "))).at(line)
    })?;
    let stages = stages(options, &parts, own, degree)?;
    let data = replicas(options, mesh, ranks)?;
    let Batch { microbatch_rows, microbatches, runs } = Batch::read(options, degree, data)?;
    let schedule = match table {
        Some(table) => read_table(table, own, stages.len(), microbatches, degree)?,
        None => {
            let spec = ScheduleSpec {
                ranks: degree,
                stages_per_rank: Some(stages.len() as u32 / degree),
                microbatches,
                ..ScheduleSpec::default()
            };
            generate_within(own, &spec)?
        }
    };
    let (recomputes, mut remarks) = remarks(options, mesh, &stages)?;
    remarks.extend(accumulation(runs));
    let choice = PlanChoice {
        head_parts: Some(1),
        boundaries: parts.boundaries(&stages)?,
        recompute: vec![recomputes.then_some(StageRecompute::WHOLE); stages.len()],
        mesh: Mesh { data, context: 1, order: usual_order(profile), ..mesh },
        microbatch_rows,
        ..PlanChoice::default()
    };
    let schedule_name = if table.is_some() { "the table".to_owned() } else { pytorch.to_owned() };
    Ok(ReadPlan { system: System::Torchtitan, schedule, schedule_name, choice, runs, remarks })
}

/// Returns the number of replicas. The shard degree is `-1` by default, so that the ranks are divided among
/// the replicated ones; without a number of ranks, it counts as 1.
fn replicas(options: &Options, mesh: Mesh, ranks: Option<u32>) -> Result<u32, ReadError> {
    let replicated = options.number(REPLICATE, 1)?.unwrap_or(1);
    if options.word(SHARD)?.is_some_and(|(shards, _)| shards != "-1") {
        let stated = replicated.saturating_mul(options.number(SHARD, 1)?.unwrap_or(1));
        return replicas_of(mesh, ranks, Some(stated));
    }
    let Some(ranks) = ranks else { return Ok(replicated) };
    let replicas = replicas_of(mesh, Some(ranks), None)?;
    if !replicas.is_multiple_of(replicated) {
        let expected = format!("a divisor of {replicas}, the replicas on {ranks} ranks");
        return Err(options.wrong(REPLICATE, &replicated.to_string(), &expected));
    }
    Ok(replicas)
}

/// The division of a batch.
struct Batch {
    microbatch_rows: u32,
    /// The microbatches of a run of the pipeline.
    microbatches: u32,
    /// How often a step runs the pipeline.
    runs: u32,
}

impl Batch {
    fn read(options: &Options, degree: u32, replicas: u32) -> Result<Self, ReadError> {
        let of_main =
            [TOKENS, STEP_TOKENS, LENGTH, MICROBATCHES].into_iter().find_map(|key| options.find(key));
        let of_release = [LOCAL_BATCH, GLOBAL_BATCH, ROWS].into_iter().find_map(|key| options.find(key));
        let batch = match (of_main, of_release) {
            (None, _) => Self::of_rows(options, degree, replicas),
            (Some(_), None) => Self::of_tokens(options, degree, replicas),
            (Some(main), Some(release)) => {
                let (main, name) = (&main.name, &release.name);
                let what = format!(
                    "`{name}` is an option of torchtitan 0.3, and `{main}` of versions since August 2026"
                );
                Err(ReadError::new(what + "; use one version's").at(release.line))
            }
        }?;
        // Without a pipeline, torchtitan runs one local batch after another, which is the order of the microbatches.
        Ok(match degree {
            1 => Self { microbatches: batch.runs, runs: 1, ..batch },
            _ => batch,
        })
    }

    fn of_rows(options: &Options, degree: u32, replicas: u32) -> Result<Self, ReadError> {
        let rows = options.number(ROWS, 1)?.unwrap_or(1);
        let batch = options.number(LOCAL_BATCH, 1)?.unwrap_or(DEFAULT_BATCH);
        if degree > 1 && !batch.is_multiple_of(rows) {
            let expected = format!("a multiple of the rows of a microbatch, {rows}");
            return Err(options.wrong(LOCAL_BATCH, &batch.to_string(), &expected));
        }
        let (microbatch_rows, microbatches) = if degree == 1 { (batch, 1) } else { (rows, batch / rows) };
        let runs = runs(options, GLOBAL_BATCH, u64::from(batch) * u64::from(replicas), "rows")?;
        Ok(Self { microbatch_rows, microbatches, runs })
    }

    fn of_tokens(options: &Options, degree: u32, replicas: u32) -> Result<Self, ReadError> {
        let length = options.number(LENGTH, 1)?.unwrap_or(DEFAULT_LENGTH);
        let tokens = options.number(TOKENS, 1)?.unwrap_or(DEFAULT_TOKENS);
        if !tokens.is_multiple_of(length) {
            let expected = format!("a multiple of {length}, the tokens of a row");
            return Err(options.wrong(TOKENS, &tokens.to_string(), &expected));
        }
        let microbatches = if degree == 1 { 1 } else { options.number(MICROBATCHES, 1)?.unwrap_or(1) };
        let each = u64::from(tokens) * u64::from(microbatches) * u64::from(replicas);
        let runs = runs(options, STEP_TOKENS, each, "tokens")?;
        Ok(Self { microbatch_rows: tokens / length, microbatches, runs })
    }
}

/// Returns how often a step runs the pipeline, by the batch of a step. `each` is the batch of a run of all replicas.
fn runs(options: &Options, key: &str, each: u64, unit: &str) -> Result<u32, ReadError> {
    let Some((value, _)) = options.word(key)?.filter(|(batch, _)| *batch != "-1") else { return Ok(1) };
    let batch = value.parse::<u64>().ok().filter(|batch| *batch > 0 && batch.is_multiple_of(each));
    let runs = batch.and_then(|batch| u32::try_from(batch / each).ok());
    runs.ok_or_else(|| {
        let expected = format!("-1, or a multiple of {each}, the {unit} of a batch of all replicas");
        options.wrong(key, value, &expected)
    })
}

/// Returns the remark about steps that run the pipeline several times.
fn accumulation(runs: u32) -> Option<String> {
    (runs > 1).then(|| {
        format!(
            "a step accumulates the gradients of {runs} runs of the pipeline, and the prediction is for one"
        )
    })
}

fn stages(
    options: &Options,
    parts: &ModelParts,
    schedule: &str,
    degree: u32,
) -> Result<Vec<StageParts>, ReadError> {
    let blocks = parts.blocks().len();
    if let Some(GivenOption { values, line, .. }) = options.known(MODULES)? {
        let modules: Vec<Vec<String>> = values
            .iter()
            .map(|stage| stage.split(',').map(|name| name.trim().to_owned()).collect())
            .collect();
        if modules.is_empty() || !modules.len().is_multiple_of(degree as usize) {
            return Err(uneven_stages(modules.len(), degree).at(*line));
        }
        return stages_of(&modules).map_err(|error| error.at(*line));
    }
    let counted_as = |key| options.number(key, 0).map(|blocks| blocks.unwrap_or(1) as usize);
    let (first, last) = (counted_as(FIRST)?, counted_as(LAST)?);
    let count = match options.number(PER_STAGE, 1)? {
        Some(each) => (blocks + first + last).div_ceil(each as usize),
        None if ["1f1b", "gpipe"].contains(&schedule) => degree as usize,
        None => 2 * degree as usize,
    };
    if !count.is_multiple_of(degree as usize) {
        return Err(uneven_stages(count, degree));
    }
    default_stages(count, blocks, first, last)
}

/// Reads a table, and checks that torchtitan places the stages as it does.
fn read_table(
    table: &str,
    schedule: &str,
    stages: usize,
    microbatches: u32,
    degree: u32,
) -> Result<Schedule, ReadError> {
    let read = parse_schedule(table).map_err(|error| {
        ReadError::new(format!("the table of actions cannot be read: {}", with_causes(&error)))
    })?;
    let wrong = |what: String| Err(ReadError::new(what));
    if read.placement().stages() as usize != stages || read.ranks() != degree {
        return wrong(format!(
            "the table has {} stages on {} ranks, and the options {stages} on {degree}; make them equal",
            read.placement().stages(),
            read.ranks()
        ));
    }
    if read.microbatches() != microbatches {
        return wrong(format!(
            "the table has {} microbatches, and the options {microbatches}; make them equal",
            read.microbatches()
        ));
    }
    let is_v = ["zbvzerobubble", "dualpipev"].contains(&schedule);
    let chunks = stages as u32 / degree;
    let placement = if is_v { Placement::v(degree, chunks) } else { Placement::looped(degree, chunks) };
    let placement = placement.map_err(|error| ReadError::new(with_causes(&error)))?;
    let differs =
        placement.all_stages().find(|&stage| placement.rank_of(stage) != read.placement().rank_of(stage));
    match differs {
        Some(stage) => wrong(format!(
            "the table has stage {stage} on rank {}, and torchtitan makes it on rank {} for the schedule of the options; \
             name a schedule with the same placement",
            read.placement().rank_of(stage),
            placement.rank_of(stage)
        )),
        None => Ok(read),
    }
}

/// Returns whether all stages recompute, and what is not predicted.
fn remarks(options: &Options, mesh: Mesh, stages: &[StageParts]) -> Result<(bool, Vec<String>), ReadError> {
    let mut remarks = sharing_remarks(mesh, CONTEXT, (EXPERT, options.number(EXPERT, 1)?));
    let chosen = options.list.iter().rev().find(|entry| entry.key.starts_with(CHECKPOINTING));
    let recomputes = match chosen.map(|entry| (&entry.key[CHECKPOINTING.len()..], entry.line)) {
        Some(("full", _)) => {
            // Each block has a checkpoint of its own.
            let most = stages.iter().map(|stage| stage.blocks.len() as u64).max().unwrap_or(0);
            remarks.extend(checkpoint_remark(1, most));
            true
        }
        Some(("none", _)) => false,
        Some((other @ ("selective" | "memory-budget"), _)) => {
            remarks.push(format!(
                "the checkpointing `{other}` is not predicted; the prediction has no recomputation"
            ));
            false
        }
        Some((other, line)) => {
            let key = CHECKPOINTING.trim_end_matches(':');
            let expected = "full, selective, memory-budget or none";
            return Err(ReadError::value(key, other, expected).at(line));
        }
        None => {
            remarks
                .push("no `activation-checkpoint:` is given; the prediction has no recomputation".to_owned());
            false
        }
    };
    Ok((recomputes, remarks))
}
