//! The prediction of a training step: its time, its parts, and the memory of each rank.

use pipewright_schedule::costs::{Link, StageCosts, StageSizes};
use thiserror::Error;

use crate::collective::Group;
use crate::cut::cut;
use crate::layout::{LayoutError, Sharding};
use crate::memory::{
    RankMemory, block_activations, block_parameters, logits, predictor_parameters, state, table_parameters,
    whole_block_activations,
};
use crate::operations::AttentionCount;
use crate::parts::Parts;
use crate::pipeline::{PipelineCosts, PipelineError, PipelineRun, Programs};
use crate::setting::Setting;
use crate::stage_time::StageTime;

/// Bytes of a parameter that AdamW reads and writes: the gradient twice (norm and update), its copy of 4
/// bytes and two moments, each read and written, and the parameter.
const OPTIMIZER_TRAFFIC: f64 = 34.0;

/// A predicted step.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// Seconds of a step.
    pub seconds: f64,
    /// Seconds of the busiest rank by what they are spent on.
    pub parts: Parts,
    /// Seconds of the busiest rank that compute a forward again. They are also in `parts`.
    pub again: f64,
    /// Seconds in which the busiest rank waits for other ranks of its pipeline.
    pub bubble: f64,
    /// Seconds of the optimizer.
    pub optimizer: f64,
    /// The memory of each rank of a pipeline.
    pub memory: Vec<RankMemory>,
    /// Tokens per second of each GPU.
    pub tokens_per_gpu: f64,
    /// Operations of the model per second on each GPU, with the pairs of attention that are used.
    pub operations_per_gpu: f64,
}

impl Prediction {
    /// Returns the bytes of the rank that needs most.
    pub fn peak_memory(&self) -> f64 {
        self.memory.iter().map(RankMemory::total).fold(0.0, f64::max)
    }
}

/// The errors of predictions.
#[derive(Clone, PartialEq, Error)]
pub enum PredictError {
    /// The layout does not fit.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The pipeline cannot be simulated.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
}

pipewright_schedule::message_as_debug!(PredictError);

/// The stages of a pipeline and what they need.
struct Stages {
    times: Vec<StageTime>,
    sizes: Vec<StageSizes>,
    parameters: Vec<f64>,
    largest_block: f64,
}

/// Predicts a step.
///
/// # Errors
/// When the layout does not fit the model, or its schedule does not exist in its size.
pub fn predict(setting: &Setting<'_>, programs: &mut Programs) -> Result<Prediction, PredictError> {
    let layout = setting.layout;
    layout.check(setting.model)?;
    let stages = stages(setting);
    let run = programs.run(layout, &pipeline_costs(setting, &stages))?;
    let of_rank = |rank: &Vec<usize>| {
        rank.iter().fold(StageTime::default(), |mut sum, &stage| {
            sum += stages.times[stage];
            sum
        })
    };
    let ranks: Vec<StageTime> = run.stages_of_rank.iter().map(of_rank).collect();
    let busy = |time: &StageTime| (time.forward + time.backward + time.again).total();
    let Some(busiest) = ranks.iter().max_by(|one, other| busy(one).total_cmp(&busy(other))) else {
        return Err(LayoutError::Zero { name: "pp" }.into());
    };
    let parameters = |rank: &Vec<usize>| rank.iter().map(|&stage| stages.parameters[stage]).sum::<f64>();
    let most = run.stages_of_rank.iter().map(parameters).fold(0.0, f64::max);
    let data = exposed_data(setting, most, busiest);
    let optimizer = optimizer_seconds(setting, most);
    let microbatches = f64::from(layout.microbatches());
    let again = busiest.again.total() * microbatches;
    let mut parts = (busiest.forward + busiest.backward + busiest.again) * microbatches;
    let bubble = run.makespan - parts.total();
    parts.data = data;
    let seconds = run.makespan + data + optimizer;
    let tokens_per_gpu = layout.step_tokens() / seconds / f64::from(layout.gpus);
    let sequence = u64::from(layout.sequence);
    let operations = setting.model.operations_per_token(sequence, AttentionCount::Causal);
    let memory = memory(setting, &stages, &run);
    let operations_per_gpu = operations * tokens_per_gpu;
    Ok(Prediction { seconds, parts, again, bubble, optimizer, memory, tokens_per_gpu, operations_per_gpu })
}

fn stages(setting: &Setting<'_>) -> Stages {
    let (model, layout) = (setting.model, setting.layout);
    let ranges = cut(model.blocks.len(), layout.stages() as usize);
    let last = ranges.len() - 1;
    let table = table_parameters(model, layout);
    let mut stages =
        Stages { times: Vec::new(), sizes: Vec::new(), parameters: Vec::new(), largest_block: 0.0 };
    for (stage, range) in ranges.into_iter().enumerate() {
        let (mut time, mut parameters, mut activation) = (StageTime::default(), 0.0, 0.0);
        for block in &model.blocks[range] {
            time += setting.block(block);
            let own = block_parameters(block, model, layout);
            parameters += own;
            stages.largest_block = stages.largest_block.max(own);
            activation += block_activations(block, model, layout);
        }
        if stage == 0 {
            time += setting.embedding();
            parameters += table;
        }
        if stage == last {
            let block = model.blocks.last().map_or(0.0, |block| block_activations(block, model, layout));
            activation += f64::from(model.predictors) * block;
            time += setting.head();
            (0..model.predictors).for_each(|_| time += setting.predictor());
            parameters += f64::from(model.predictors) * predictor_parameters(model, layout);
            parameters += if model.tied && last == 0 { 0.0 } else { table };
        }
        // With sequence parallelism, or a scattered message, each rank of a tensor group sends its share.
        let output = setting.hidden_bytes() / f64::from(layout.tensor);
        stages.times.push(time);
        stages.parameters.push(parameters);
        stages.sizes.push(StageSizes {
            output: output as u64,
            activation: activation as u64,
            ..StageSizes::default()
        });
    }
    stages
}

fn pipeline_costs(setting: &Setting<'_>, stages: &Stages) -> PipelineCosts {
    let (layout, machine) = (setting.layout, setting.machine);
    let costs = |time: &StageTime| {
        let backward = (time.backward + time.again).total();
        StageCosts { backward, ..StageCosts::new(time.forward.total(), backward / 2.0, backward / 2.0) }
    };
    let inside = layout.gpus <= machine.gpus_per_node;
    let bandwidth = if inside { machine.node_bandwidth } else { machine.network_bandwidth };
    let latency = if inside { machine.node_latency } else { machine.network_latency };
    PipelineCosts {
        stages: stages.times.iter().map(costs).collect(),
        sizes: stages.sizes.clone(),
        link: Link { latency, bandwidth: bandwidth * machine.constants.link },
    }
}

/// The seconds of gathers and reductions of replicas that computation does not hide. Gradients are reduced
/// while the last microbatch's backward runs. Parameters are gathered while the first forward runs, if the
/// optimizer is sharded. If parameters are sharded and there is no pipeline, each microbatch gathers them
/// before its forward and its backward, and reduces its gradients.
fn exposed_data(setting: &Setting<'_>, parameters: f64, busiest: &StageTime) -> f64 {
    let layout = setting.layout;
    let group = Group { ranks: layout.data() * layout.context, stride: layout.tensor };
    let gather = group.gather(setting.machine, 2.0 * parameters);
    let reduce = group.gather(setting.machine, 4.0 * parameters);
    let (forward, backward) = (busiest.forward.total(), (busiest.backward + busiest.again).total());
    let exposed = |communication: f64, computation: f64| (communication - computation).max(0.0);
    match layout.sharding {
        Sharding::Replicated => exposed(2.0 * reduce, backward),
        Sharding::Optimizer => exposed(gather, forward) + exposed(reduce, backward),
        Sharding::Parameters if layout.pipeline > 1 => exposed(gather, forward) + exposed(reduce, backward),
        Sharding::Parameters => {
            let microbatch = exposed(gather, forward) + exposed(gather + reduce, backward);
            microbatch * f64::from(layout.microbatches())
        }
    }
}

fn optimizer_seconds(setting: &Setting<'_>, parameters: f64) -> f64 {
    let layout = setting.layout;
    let shards = match layout.sharding {
        Sharding::Replicated => 1.0,
        Sharding::Optimizer | Sharding::Parameters => f64::from(layout.data() * layout.context),
    };
    OPTIMIZER_TRAFFIC * parameters / shards / setting.machine.kernel_bandwidth()
}

fn memory(setting: &Setting<'_>, stages: &Stages, run: &PipelineRun) -> Vec<RankMemory> {
    let (model, layout) = (setting.model, setting.layout);
    let last = stages.times.len() - 1;
    let again = |rank: &Vec<usize>| {
        let of_block =
            |block| whole_block_activations(block, model, layout) - block_activations(block, model, layout);
        let largest = model.blocks.iter().map(of_block).fold(0.0, f64::max);
        if rank.is_empty() { 0.0 } else { largest.max(0.0) }
    };
    let of_rank = |(rank, activations): (&Vec<usize>, &u64)| {
        let parameters = rank.iter().map(|&stage| stages.parameters[stage]).sum();
        let head = if rank.contains(&last) { logits(model, layout) } else { 0.0 };
        RankMemory {
            activations: *activations as f64,
            temporary: head.max(again(rank)),
            ..state(parameters, stages.largest_block, layout)
        }
    };
    run.stages_of_rank.iter().zip(&run.activations).map(of_rank).collect()
}
