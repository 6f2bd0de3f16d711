//! Reads the options of Megatron-LM.

use crate::emit::layout::parts_of;
use crate::emit::model_parts::{ModelParts, StageParts};
use crate::emit::options::Options;
use crate::emit::read_error::ReadError;
use crate::emit::read_plan::{
    ReadPlan, checkpoint_remark, generate_within, replicas_of, sharing_remarks, uneven_stages, usual_order,
};
use crate::emit::stage_letters::{StageLetters, parse_stage_letters};
use crate::generate::ScheduleSpec;
use crate::mesh::{Mesh, MeshOrder};
use crate::plan::{PlanChoice, System};
use crate::profile::Profile;
use crate::recompute::StageRecompute;
use crate::schedule::Schedule;
use crate::words::counted;

const PIPELINE: &str = "pipeline-model-parallel-size";
const TENSOR: &str = "tensor-model-parallel-size";
const LAYOUT: &str = "pipeline-model-parallel-layout";
const LAYERS: &str = "num-layers";
const LAYERS_PER_STAGE: &str = "num-layers-per-virtual-pipeline-stage";
const STAGES_PER_RANK: &str = "num-virtual-stages-per-pipeline-rank";
const GROUP: &str = "microbatch-group-size-per-virtual-pipeline-stage";
const ROWS: &str = "micro-batch-size";
const BATCH: &str = "global-batch-size";
const FIRST: &str = "decoder-first-pipeline-num-layers";
const LAST: &str = "decoder-last-pipeline-num-layers";
const WITH_EMBEDDING: &str = "account-for-embedding-in-pipeline-split";
const WITH_HEAD: &str = "account-for-loss-in-pipeline-split";
const SELECTIVE: &str = "recompute-activations";
const GRANULARITY: &str = "recompute-granularity";
const METHOD: &str = "recompute-method";
const RECOMPUTED: &str = "recompute-num-layers";
const CONTEXT: &str = "context-parallel-size";
const EXPERT: &str = "expert-model-parallel-size";
const PREDICTORS: &str = "mtp-num-layers";
const PIPELINE_ORDER: &str = "use-tp-pp-dp-mapping";

/// The keys that are read. A key that is nearly one of them is a mistake.
const KNOWN: [&str; 21] = [
    PIPELINE,
    TENSOR,
    LAYOUT,
    LAYERS,
    LAYERS_PER_STAGE,
    STAGES_PER_RANK,
    GROUP,
    ROWS,
    BATCH,
    FIRST,
    LAST,
    WITH_EMBEDDING,
    WITH_HEAD,
    SELECTIVE,
    GRANULARITY,
    METHOD,
    RECOMPUTED,
    CONTEXT,
    EXPERT,
    PREDICTORS,
    PIPELINE_ORDER,
];

/// Returns whether a key is an option of Megatron that says how the model is divided.
pub(super) fn is_megatron(key: &str) -> bool {
    [PIPELINE, TENSOR, LAYOUT, LAYERS_PER_STAGE, STAGES_PER_RANK, ROWS, BATCH].contains(&key)
}

/// Returns whether a key is read.
pub(super) fn is_read(key: &str) -> bool {
    KNOWN.contains(&key)
}

/// Reads a plan for the layers of `profile`, on a total of `ranks` ranks.
pub(super) fn read(options: &Options, profile: &Profile, ranks: Option<u32>) -> Result<ReadPlan, ReadError> {
    options.check(System::Megatron, &KNOWN, "")?;
    let parts = ModelParts::of(profile);
    let mesh = Mesh {
        pipeline: options.number(PIPELINE, 1)?.unwrap_or(1),
        tensor: options.number(TENSOR, 1)?.unwrap_or(1),
        context: options.number(CONTEXT, 1)?.unwrap_or(1),
        ..Mesh::default()
    };
    if let Some(layers) = options.number(LAYERS, 1)?.filter(|&layers| layers as usize != parts.blocks().len())
    {
        let expected =
            format!("{}, the blocks of the profile; use the profile of this model", parts.blocks().len());
        return Err(options.wrong(LAYERS, &layers.to_string(), &expected));
    }
    let letters = megatron_stages(options, &parts, mesh.pipeline)?;
    let stages = parts_of(&letters).map_err(|error| at(options, LAYOUT, error))?;
    let boundaries = parts.boundaries(&stages).map_err(|error| at(options, LAYOUT, error))?;
    let replicas = replicas_of(mesh, ranks, None)?;
    let missing = |key| ReadError::missing_key(System::Megatron, key);
    let rows = options.number(ROWS, 1)?.ok_or_else(|| missing("--micro-batch-size"))?;
    let microbatches = microbatches(options, rows, replicas)?;
    let (schedule, schedule_name) = schedule(options, stages.len() as u32, mesh.pipeline, microbatches)?;
    let mut remarks = other_parallelism(options, mesh)?;
    let recomputes = recompute(options, &stages, &mut remarks)?;
    let order = if options.has(PIPELINE_ORDER) { MeshOrder::Pipeline } else { usual_order(profile) };
    let choice = PlanChoice {
        head_parts: Some(1),
        boundaries,
        recompute: vec![recomputes.then_some(StageRecompute::WHOLE); stages.len()],
        mesh: Mesh { data: replicas, context: 1, order, ..mesh },
        microbatch_rows: rows,
        ..PlanChoice::default()
    };
    Ok(ReadPlan { system: System::Megatron, schedule, schedule_name, choice, runs: 1, remarks })
}

/// Returns an error about an option, with its line if it is given.
fn at(options: &Options, key: &str, error: ReadError) -> ReadError {
    match options.find(key) {
        Some(entry) => error.at(entry.line),
        None => error,
    }
}

/// Returns the stages of a pipeline of `ranks` ranks: of the layout, or of an even cut.
///
/// # Errors
/// When the options do not cut a model with these parts.
pub fn megatron_stages(
    options: &Options,
    parts: &ModelParts,
    ranks: u32,
) -> Result<Vec<StageLetters>, ReadError> {
    let Some((layout, line)) = options.word(LAYOUT)? else { return split(options, parts, ranks) };
    if let Some(column) = layout.chars().position(char::is_whitespace) {
        let column = column + 1;
        let what =
            format!("the layout has a blank at character {column}, which Megatron does not take; delete it");
        return Err(ReadError::new(what).at(line));
    }
    let stages = parse_stage_letters(layout).map_err(|error| error.at(line))?;
    let others = [LAYERS_PER_STAGE, STAGES_PER_RANK, FIRST, LAST, WITH_EMBEDDING, WITH_HEAD];
    if let Some(other) = others.into_iter().find(|key| options.has(key)) {
        let what = format!("`--{LAYOUT}` and `--{other}` both cut the model; give one of them");
        return Err(ReadError::new(what).at(line));
    }
    if !stages.len().is_multiple_of(ranks as usize) {
        return Err(uneven_stages(stages.len(), ranks).at(line));
    }
    Ok(stages)
}

/// Cuts the model evenly, as Megatron does without a layout.
fn split(options: &Options, parts: &ModelParts, ranks: u32) -> Result<Vec<StageLetters>, ReadError> {
    let ends = [usize::from(options.has(WITH_EMBEDDING)), usize::from(options.has(WITH_HEAD))];
    let counted_layers = parts.blocks().len() + ends[0] + ends[1];
    let fixed = [options.number(FIRST, 1)?, options.number(LAST, 1)?];
    let per_rank = chunks(options, counted_layers, ranks)?;
    let stages = (ranks as usize).saturating_mul(per_rank);
    if stages > counted_layers {
        let layers = counted(counted_layers, "layer");
        let what =
            format!("{stages} stages cannot share {layers}; use fewer stages, or the profile of this model");
        return Err(ReadError::new(what));
    }
    let mut sizes = vec![0; stages];
    if fixed != [None, None] {
        if per_rank > 1 {
            let what =
                format!("`--{FIRST}` and `--{LAST}` are read for one stage per rank; give `--{LAYOUT}`");
            return Err(ReadError::new(what));
        }
        let taken: usize = fixed.iter().flatten().map(|&layers| layers as usize).sum();
        let all = parts.blocks().len();
        match (stages.checked_sub(fixed.iter().flatten().count()), all.checked_sub(taken)) {
            (Some(0), Some(0)) => {}
            (Some(others), Some(rest)) => sizes.fill(even(rest, others, all)?),
            _ => return Err(uneven(all)),
        }
        for (place, size) in [(0, fixed[0]), (stages - 1, fixed[1])] {
            if let Some(size) = size {
                sizes[place] = size as usize;
            }
        }
    } else {
        sizes.fill(even(counted_layers, stages, counted_layers)?);
        sizes[0] -= ends[0];
        sizes[stages - 1] = sizes[stages - 1].saturating_sub(ends[1]);
    }
    let stage = |(index, blocks): (usize, usize)| StageLetters {
        embedding: index == 0,
        blocks: blocks as u32,
        predictors: 0,
        head: index + 1 == stages,
    };
    Ok(sizes.into_iter().enumerate().map(stage).collect())
}

/// Returns the number of stages of a rank.
fn chunks(options: &Options, layers: usize, ranks: u32) -> Result<usize, ReadError> {
    match (options.number(STAGES_PER_RANK, 1)?, options.number(LAYERS_PER_STAGE, 1)?) {
        (Some(chunks), _) => Ok(chunks as usize),
        (None, Some(each)) => {
            let own = even(layers, ranks as usize, layers)?;
            even(own, each as usize, layers)
        }
        (None, None) => Ok(1),
    }
}

/// Divides layers evenly.
fn even(layers: usize, parts: usize, all: usize) -> Result<usize, ReadError> {
    if parts == 0 || layers == 0 || !layers.is_multiple_of(parts) {
        return Err(uneven(all));
    }
    Ok(layers / parts)
}

fn uneven(layers: usize) -> ReadError {
    let what = format!(
        "Megatron divides {} evenly, and these options do not; give `--{LAYOUT}` or other numbers",
        counted(layers, "layer")
    );
    ReadError::new(what)
}

/// Returns the microbatches of a replica.
fn microbatches(options: &Options, rows: u32, replicas: u32) -> Result<u32, ReadError> {
    let each = rows.saturating_mul(replicas);
    let batch = options.number(BATCH, 1)?.unwrap_or(each);
    if !batch.is_multiple_of(each) {
        let expected = format!("a multiple of {each}, the rows of a microbatch times the replicas");
        return Err(options.wrong(BATCH, &batch.to_string(), &expected));
    }
    Ok(batch / each)
}

fn schedule(
    options: &Options,
    stages: u32,
    ranks: u32,
    microbatches: u32,
) -> Result<(Schedule, String), ReadError> {
    let group = options.number(GROUP, 1)?;
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    if stages == ranks || ranks == 1 {
        let stages_per_rank = Some(stages / ranks);
        let name = if stages == ranks { "1f1b" } else { "interleaved1f1b" };
        let schedule = generate_within(name, &ScheduleSpec { stages_per_rank, ..spec })?;
        return Ok((schedule, name.to_owned()));
    }
    if microbatches < ranks {
        let what = format!(
            "interleaved 1F1B needs at least {ranks} microbatches, and there are {microbatches}; increase `--{BATCH}`"
        );
        return Err(at(options, BATCH, ReadError::new(what)));
    }
    let size = group.unwrap_or(ranks);
    let last = microbatches % size;
    if size < ranks || size > microbatches || (last > 0 && last < ranks) {
        let expected = format!(
            "a number from {ranks}, the ranks, to {microbatches}, the microbatches, whose last group has no fewer than {ranks}"
        );
        return Err(options.wrong(GROUP, &size.to_string(), &expected));
    }
    let spec = ScheduleSpec { stages_per_rank: Some(stages / ranks), group_size: Some(size), ..spec };
    let schedule = generate_within("interleaved1f1b", &spec)?;
    Ok((schedule, "interleaved1f1b".to_owned()))
}

/// Returns whether all stages recompute.
fn recompute(options: &Options, stages: &[StageParts], remarks: &mut Vec<String>) -> Result<bool, ReadError> {
    let granularity = options.word(GRANULARITY)?;
    // Megatron lets the older flag decide if both are given.
    if options.has(SELECTIVE) || granularity.is_some_and(|(granularity, _)| granularity == "selective") {
        remarks
            .push("selective recomputation is not predicted; the prediction has no recomputation".to_owned());
        return Ok(false);
    }
    let Some((granularity, line)) = granularity else { return Ok(false) };
    if granularity != "full" {
        return Err(options.wrong(GRANULARITY, granularity, "full or selective"));
    }
    let layers = options.number(RECOMPUTED, 1)?.unwrap_or(1) as usize;
    let most = stages.iter().map(|stage| stage.blocks.len()).max().unwrap_or(0);
    match options.word(METHOD)? {
        Some(("uniform", _)) => {
            remarks.extend(checkpoint_remark(layers as u64, most as u64));
            Ok(true)
        }
        // Each block has a checkpoint of its own.
        Some(("block", _)) if layers >= most => {
            remarks.extend(checkpoint_remark(1, most as u64));
            Ok(true)
        }
        Some(("block", _)) => {
            remarks.push(format!(
                "{} of each stage recompute; the prediction has no recomputation",
                counted(layers, "block")
            ));
            Ok(false)
        }
        Some((other, _)) => Err(options.wrong(METHOD, other, "uniform or block")),
        None => Err(ReadError::missing_key(System::Megatron, "--recompute-method").at(line)),
    }
}

fn other_parallelism(options: &Options, mesh: Mesh) -> Result<Vec<String>, ReadError> {
    let mut remarks = sharing_remarks(mesh, CONTEXT, (EXPERT, options.number(EXPERT, 1)?));
    if let Some(blocks) = options.number(PREDICTORS, 0)?.filter(|&blocks| blocks > 0) {
        remarks.push(format!(
            "`--{PREDICTORS} {blocks}`: the head of the profile is taken to have the costs of these blocks"
        ));
    }
    Ok(remarks)
}
