//! Expert parallelism whose all-to-all exchanges run while another microbatch computes: functions that run
//! actions in place of the runtime, under DualPipeV.
//!
//! Two replicas of the pipeline each compute one of two experts. Rows for expert 0 go to replica 0 and come
//! back, rows for expert 1 to replica 1. So each microbatch is exchanged twice in the forward of a stage and
//! twice in its backward. The functions of the hook do this before and after the block with the experts. In
//! an overlap, a forward and a backward alternate: while the rows of one are in transit, the other computes.
//!
//! ```text
//! forward    ~ exchange ~  | experts |  ~ exchange ~   | dense |
//! backward    | dense' |  ~ exchange ~  | experts' |  ~ exchange ~
//! ```
//!
//! Ranks are threads. A channel between threads takes no time, so the example lets each exchange take 2 ms.
//! It writes the timelines of its two runs to the files that are its arguments, for
//! <https://ui.perfetto.dev>.
//!
//! ```text
//! cargo run -p pipewright --example overlapped_exchange -- exchanged.json overlapped.json
//! ```

use std::error::Error;
use std::io::{Write, stdout};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::module::{Initializer, Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use pipewright::batch::{Batch, SplitRule, SplitSpec};
use pipewright::hook::{ActionHook, BackwardRun, ForwardRun, OverlapRun};
use pipewright::ids::WorldRank;
use pipewright::pipeline::{Layers, Pipeline, StepSummary};
use pipewright::stage::{StageContext, StageError, StageModule};
use pipewright::tensor::{Boundary, Values, pack, unpack};
use pipewright_schedule::Scope;

/// Ranks of a pipeline; there are as many replicas as experts.
const RANKS: usize = 2;
const EXPERTS: usize = 2;
const WIDTH: usize = 64;
/// Rows of a microbatch for each expert.
const ROWS: usize = 128;
const MICROBATCHES: u32 = 8;
/// The time that an exchange takes.
const TRANSIT: Duration = Duration::from_millis(2);

/// Rows grouped by expert, `[experts, rows, WIDTH]`, and the experts of the groups.
type Rows = (Tensor<3>, Tensor<1, Int>);

/// One matrix for all rows, or one for the rows of each expert.
#[derive(Module, Debug)]
pub(crate) enum Layer {
    Dense(Param<Tensor<2>>),
    Experts(Param<Tensor<3>>),
}

impl Layer {
    /// Each stage has experts and then a dense layer.
    fn new(place: usize) -> Self {
        let (device, small) = (Device::flex().autodiff(), Initializer::Normal { mean: 0.0, std: 0.05 });
        match place % 2 {
            0 => Self::Experts(small.init([EXPERTS, WIDTH, WIDTH], &device)),
            _ => Self::Dense(small.init([WIDTH, WIDTH], &device)),
        }
    }
}

impl StageModule for Layer {
    type Input = Rows;
    type Output = Rows;

    fn forward(&self, (rows, experts): Rows, _context: &StageContext) -> Rows {
        let product = match self {
            Self::Dense(weight) => rows.clone().matmul(weight.val().unsqueeze()),
            Self::Experts(weights) => rows.clone().matmul(weights.val().select(0, experts.clone())),
        };
        (rows + product.tanh(), experts)
    }
}

/// Rows on their way, and the time at which they arrive.
type Parcel = (Tensor<3>, Instant);

/// The start and the end of an exchange.
type Span = (Instant, Instant);

/// The exchange between one rank and the same rank of the other replica.
struct Link {
    sender: Sender<Parcel>,
    receiver: Receiver<Parcel>,
}

/// Which replica computes an expert does not change a result, so without this hook each replica computes
/// both.
pub(crate) struct ExpertParallel {
    /// By replica and rank.
    links: Vec<Mutex<Link>>,
    overlaps: bool,
}

/// Rows that were sent and whose counterpart has not been taken yet.
struct InTransit {
    /// The rows that stay here.
    kept: Tensor<3>,
    sent: Instant,
}

impl ExpertParallel {
    pub(crate) fn new(overlaps: bool) -> Self {
        let mut links: [Vec<Mutex<Link>>; EXPERTS] = Default::default();
        for _ in 0..RANKS {
            let ((to_first, from_second), (to_second, from_first)) = (channel(), channel());
            links[0].push(Mutex::new(Link { sender: to_second, receiver: from_second }));
            links[1].push(Mutex::new(Link { sender: to_first, receiver: from_first }));
        }
        Self { links: links.into_iter().flatten().collect(), overlaps }
    }

    /// Sends one of two halves of `rows` to the other replica and keeps the other.
    fn send(&self, rank: WorldRank, [kept, sent]: [Tensor<3>; 2]) -> Result<InTransit, StageError> {
        let link = self.links[rank.index()].lock().map_err(StageError::function)?;
        let now = Instant::now();
        link.sender.send((sent, now + TRANSIT)).map_err(StageError::function)?;
        Ok(InTransit { kept, sent: now })
    }

    /// Takes the half that the other replica has sent, and the time of its arrival.
    fn receive(&self, rank: WorldRank) -> Result<Parcel, StageError> {
        let link = self.links[rank.index()].lock().map_err(StageError::function)?;
        let (rows, arrival) =
            link.receiver.recv_timeout(Duration::from_secs(10)).map_err(StageError::function)?;
        std::thread::sleep(arrival.saturating_duration_since(Instant::now()));
        Ok((rows, arrival))
    }

    /// Sends rows to where their expert is (`gathers`), or back to where they came from.
    fn begin(&self, rank: WorldRank, rows: Tensor<3>, gathers: bool) -> Result<InTransit, StageError> {
        let along = if gathers { 0 } else { 1 };
        let [first, second] = halves(rows, along);
        self.send(rank, if replica(rank) == 0 { [first, second] } else { [second, first] })
    }

    /// Returns the rows at the end of an exchange, of both replicas for one expert or of both experts for
    /// this replica, and the time in which both halves were in transit.
    fn end(&self, rank: WorldRank, begun: InTransit, gathers: bool) -> Result<(Tensor<3>, Span), StageError> {
        let (other, arrival) = self.receive(rank)?;
        let both = if replica(rank) == 0 { vec![begun.kept, other] } else { vec![other, begun.kept] };
        let start = begun.sent.max(arrival - TRANSIT);
        Ok((Tensor::cat(both, if gathers { 1 } else { 0 }), (start, arrival.max(start))))
    }

    fn begin_forward(&self, run: &ForwardRun<'_>, gathers: bool) -> Result<InTransit, StageError> {
        let (rows, _): Rows = tensors(run.values().clone())?;
        self.begin(run.rank(), rows, gathers)
    }

    fn end_forward(
        &self,
        run: &mut ForwardRun<'_>,
        begun: InTransit,
        gathers: bool,
    ) -> Result<(), StageError> {
        let rank = run.rank();
        let (rows, (start, end)) = self.end(rank, begun, gathers)?;
        run.scope(&format!("exchange of {}", run.action()), start, end);
        let experts: Vec<i64> =
            if gathers { vec![replica(rank) as i64] } else { (0..EXPERTS as i64).collect() };
        let experts = Tensor::<1, Int>::from_data(TensorData::from(experts.as_slice()), &rows.device());
        run.set_values(&pack((rows, experts)));
        Ok(())
    }

    /// Gradients take the way of their rows back: what gathered rows scatters their gradients.
    fn begin_backward(&self, run: &BackwardRun<'_>, gathers: bool) -> Result<InTransit, StageError> {
        let gradients: Values = run.gradients().iter().flatten().cloned().collect();
        self.begin(run.rank(), tensors(gradients)?, gathers)
    }

    fn end_backward(
        &self,
        run: &mut BackwardRun<'_>,
        begun: InTransit,
        gathers: bool,
    ) -> Result<(), StageError> {
        let (rows, (start, end)) = self.end(run.rank(), begun, gathers)?;
        run.scope(&format!("exchange of {}", run.action()), start, end);
        // The list of experts has no gradient.
        run.set_gradients(pack(rows).into_iter().map(Some).chain([None]).collect());
        Ok(())
    }
}

/// Runs the next block of a forward, with its span in the timeline.
fn compute_forward(run: &mut ForwardRun<'_>) -> Result<(), StageError> {
    let start = Instant::now();
    run.run_block()?;
    run.scope(&format!("computation of {}", run.action()), start, Instant::now());
    Ok(())
}

fn compute_backward(run: &mut BackwardRun<'_>) -> Result<(), StageError> {
    let start = Instant::now();
    run.run_block()?;
    run.run_weights()?;
    run.scope(&format!("computation of {}", run.action()), start, Instant::now());
    Ok(())
}

impl ActionHook for ExpertParallel {
    fn runs_overlaps(&self) -> bool {
        self.overlaps
    }

    fn forward(&self, run: &mut ForwardRun<'_>) -> Result<(), StageError> {
        for gathers in [true, false] {
            let begun = self.begin_forward(run, gathers)?;
            self.end_forward(run, begun, gathers)?;
            compute_forward(run)?;
        }
        Ok(())
    }

    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        for gathers in [true, false] {
            compute_backward(run)?;
            let begun = self.begin_backward(run, gathers)?;
            self.end_backward(run, begun, gathers)?;
        }
        Ok(())
    }

    fn overlap(&self, run: &mut OverlapRun<'_>) -> Result<(), StageError> {
        for gathers in [true, false] {
            let forward = self.begin_forward(&run.forward(), gathers)?;
            compute_backward(&mut run.backward())?;
            let backward = self.begin_backward(&run.backward(), gathers)?;
            self.end_forward(&mut run.forward(), forward, gathers)?;
            compute_forward(&mut run.forward())?;
            self.end_backward(&mut run.backward(), backward, gathers)?;
        }
        Ok(())
    }
}

fn replica(rank: WorldRank) -> usize {
    rank.index() / RANKS
}

fn halves(rows: Tensor<3>, along: usize) -> [Tensor<3>; 2] {
    let half = rows.dims()[along] / 2;
    [rows.clone().narrow(along, 0, half), rows.narrow(along, half, half)]
}

fn tensors<T: Boundary>(values: Values) -> Result<T, StageError> {
    unpack(values).map_err(StageError::Input)
}

/// Trains with the hook and returns its steps.
pub(crate) fn train(hook: Option<Arc<ExpertParallel>>) -> Result<Vec<StepSummary>, Box<dyn Error>> {
    // DualPipeV has two stages on each rank, of two layers each.
    let layers = Layers::new(2 * 2 * RANKS, Layer::new);
    let mut builder = Pipeline::builder(layers)
        .schedule("dualpipev")
        .ranks(RANKS as u32)
        .data_parallel(EXPERTS as u32)
        .microbatches(EXPERTS as u32 * MICROBATCHES)
        .loss(|(rows, _): Rows, target: Tensor<3>| (rows - target).square().mean())
        .optimizer(SgdConfig::new().init());
    if let Some(hook) = hook {
        builder = builder.hook(hook);
    }
    let mut pipeline = builder.launch()?;

    let device = Device::flex();
    let shape = [EXPERTS, ROWS * EXPERTS * MICROBATCHES as usize, WIDTH];
    device.seed(1);
    let (rows, target) =
        (Tensor::<3>::random(shape, Distribution::Default, &device), Tensor::<3>::zeros(shape, &device));
    let experts = Tensor::<1, Int>::arange(0..EXPERTS as i64, &device);
    let rule = SplitRule::equal(EXPERTS as u32 * MICROBATCHES)
        .inputs((SplitSpec::Along(1), SplitSpec::Replicate))
        .targets(SplitSpec::Along(1));
    let batch = Batch::split((rows, experts), target, rule)?;
    (0..3).map(|_| Ok(pipeline.step_batch(batch.clone(), 0.5)?)).collect()
}

/// Returns the share of the exchanges' time in which their rank computed.
pub(crate) fn hidden_share(step: &StepSummary) -> f64 {
    let (mut hidden, mut all) = (0.0, 0.0);
    let scopes = step.timeline.scopes();
    let begins = |scope: &Scope, text| scope.kind.to_string().starts_with(text);
    for exchange in scopes.iter().filter(|scope| begins(scope, "exchange")) {
        all += exchange.end - exchange.start;
        let computes = scopes.iter().filter(|scope| scope.rank == exchange.rank && begins(scope, "comp"));
        let both = computes.map(|scope| scope.end.min(exchange.end) - scope.start.max(exchange.start));
        hidden += both.filter(|both| *both > 0.0).sum::<f64>();
    }
    if all > 0.0 { hidden / all } else { 0.0 }
}

pub(crate) fn run(out: &mut impl Write, traces: &[String]) -> Result<(), Box<dyn Error>> {
    writeln!(out, "each replica computes both experts: losses {}", losses(&train(None)?))?;
    for (place, (name, overlaps)) in [("exchanged", false), ("overlapped", true)].into_iter().enumerate() {
        let steps = train(Some(Arc::new(ExpertParallel::new(overlaps))))?;
        let last = &steps[steps.len() - 1];
        let (milliseconds, share) = (last.wall.as_secs_f64() * 1e3, 100.0 * hidden_share(last));
        writeln!(out, "{name}: losses {}", losses(&steps))?;
        writeln!(
            out,
            "  a step takes {milliseconds:.0} ms; ranks compute in {share:.0} % of the exchanges' time"
        )?;
        if let Some(path) = traces.get(place) {
            std::fs::write(path, last.timeline.chrome_trace())?;
        }
    }
    Ok(())
}

fn losses(steps: &[StepSummary]) -> String {
    let losses: Vec<String> = steps.iter().map(|step| format!("{:.6}", step.loss())).collect();
    losses.join(", ")
}

fn main() -> Result<(), Box<dyn Error>> {
    let traces: Vec<String> = std::env::args().skip(1).collect();
    run(&mut stdout(), &traces)
}
