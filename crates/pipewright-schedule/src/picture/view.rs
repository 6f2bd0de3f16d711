//! The page that compares a predicted step with measured ones and explains both.
//!
//! It draws like [`super::html()`], with a lane for each timeline of a rank. In addition it names the cause
//! of every bubble, highlights the critical path, shows recorded steps with a slider, and simulates the
//! schedule again for other costs or numbers of microbatches. Its scripts, in the folder `view_page`,
//! continue the scripts of `page`. [`crate::causes`] finds the causes of the timelines, and
//! [`crate::simulate::dependencies()`] says what each time depends on. The scripts find the causes of the timeline at
//! other costs themselves, from the times that won (`dependencies.js`).

use std::collections::HashMap;

use serde::Serialize;

use crate::causes::{Cause, Causes, Cell, Wait, causes};
use crate::communicator::Streams;
use crate::costs::{Costs, StageCosts};
use crate::ids::Rank;
use crate::picture::buffers::buffers;
use crate::picture::chunks::Chunks;
use crate::picture::html::{self, legend, table, variables};
use crate::picture::page_data::{Clock, PageData, RankData, page, ranks};
use crate::picture::palette::{DARK, LIGHT, Sort, occurring};
use crate::picture::settings::{PictureSettings, escaped};
use crate::picture::what_if::{COLUMNS, ProgramData, program_data};
use crate::schedule::Program;
use crate::simulate::{Tensor, dependencies};
use crate::timeline::{QueueWait, Timeline};

/// The scripts that follow the page's, in the order in which they use each other.
const SCRIPTS: [&str; 9] = [
    include_str!("view_page/causes.js"),
    include_str!("view_page/sources.js"),
    include_str!("view_page/path.js"),
    include_str!("view_page/range.js"),
    include_str!("view_page/panel.js"),
    include_str!("view_page/dependencies.js"),
    include_str!("view_page/whatif.js"),
    include_str!("view_page/search.js"),
    include_str!("view_page/start.js"),
];

/// The width of the names of ranks in CSS pixels.
const GUTTER: u32 = 84;

/// A measured step.
#[derive(Debug, Clone)]
pub struct RecordedStep {
    /// The number of the step, from 1.
    pub step: u64,
    /// The number of steps before it that the timeline shows too, on one time axis.
    pub before: u64,
    /// The events of its ranks, on one clock. Several replicas have consecutive ranks.
    pub timeline: Timeline,
}

/// The time of whole steps of a run, each with its program and the update after it, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WholeStep {
    /// The median of the steps.
    pub measured: f64,
    /// The prediction of the run.
    pub predicted: Option<f64>,
}

/// The content of the page.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The title, the sizes and the memory lane.
    pub settings: PictureSettings<'a>,
    /// The prediction: the simulation of `program` at `costs`.
    pub predicted: &'a Timeline,
    /// The program of one replica.
    pub program: &'a Program,
    /// The costs of the prediction.
    pub costs: &'a Costs,
    /// The measured steps in their order; none for a schedule that has not run.
    pub steps: &'a [RecordedStep],
    /// The number of measured steps that are not in `steps` because they ran another program. The page
    /// mentions them.
    pub left_out: usize,
    /// The time of whole steps; `None` for a schedule that has not run.
    pub whole_step: Option<WholeStep>,
    /// The same schedule for other numbers of microbatches, which the page can simulate.
    pub other_programs: &'a [Program],
    /// Whether `UNSHARD` reads a frozen base from its file, also with replicas that sum gradients.
    pub reads_base: bool,
}

#[derive(Serialize)]
struct ViewData {
    #[serde(flatten)]
    page: PageData,
    gutter: u32,
    view: Contents,
}

#[derive(Serialize)]
struct Contents {
    /// The numbers of ranks and stages of one replica.
    ranks: u32,
    stages: u32,
    predicted: Source,
    steps: Vec<Source>,
    #[serde(rename = "wholeStep")]
    whole_step: Option<WholeStep>,
    #[serde(rename = "readsBase")]
    reads_base: bool,
    /// The program, and then the programs of other numbers of microbatches; none if tokens are exchanged inside
    /// actions, because their times at other costs are not known then.
    programs: Vec<ProgramData>,
    /// The columns of the references of a kind of action in the programs ([`COLUMNS`]).
    columns: i64,
    /// The names of the tensors that messages carry.
    tensors: [&'static str; 3],
    /// The number of microbatches.
    microbatches: u32,
    /// The seconds of each stage's `F`, `B`, `I` and `W`.
    costs: Vec<[f64; 4]>,
    /// The time of a message between ranks that have no link of their own.
    latency: f64,
}

/// A timeline with its own quantum of time.
#[derive(Serialize)]
struct Source {
    step: Option<u64>,
    /// The number of steps before it that are shown too.
    before: u64,
    quantum: f64,
    /// In seconds.
    makespan: f64,
    /// How well the clocks of several processes agree, in seconds.
    uncertainty: Option<f64>,
    /// The waits in line: the rank, the operation, the operation in front of it, and the start and the end
    /// in seconds.
    waits: Vec<(u32, String, String, f64, f64)>,
    causes: CausesData,
    ranks: Vec<RankData>,
}

/// The causes of a timeline.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CausesData {
    slack: f64,
    /// The causes of each rank's computations after a gap, with their indices.
    causes: Vec<Vec<(usize, CauseData)>>,
    /// The wait of each rank after its last computation.
    ends: Vec<Option<WaitData>>,
    last: Option<CellData>,
    last_wait: Option<WaitData>,
}

/// The rank and the index of a computation.
type CellData = (u32, usize);

/// A wait: the rank, the kind of its action, the stage, the end in seconds, and what led to it.
type WaitData = (u32, usize, u32, f64, Option<CellData>);

/// A cause. The page tells the kinds apart by their lengths.
#[derive(Serialize)]
#[serde(untagged)]
enum CauseData {
    /// The rank and the index of the maker, the tensor, and the index of a wait in line or `None`.
    Message(u32, usize, usize, Option<usize>),
    Wait(WaitData),
    Delay,
}

/// Makes the page.
pub fn view(view: &View<'_>) -> String {
    let chunks = Chunks::of(view.predicted);
    let style = include_str!("page/page.css")
        .replace("{{light}}", &variables(&LIGHT, chunks.most()))
        .replace("{{dark}}", &variables(&DARK, chunks.most()))
        + include_str!("view_page/view.css");
    let data = serde_json::to_string(&data(view, &chunks)).expect("numbers and texts are JSON");
    let script = (html::SCRIPTS.concat() + &SCRIPTS.concat()).replace("\"{{data}}\"", &data);
    let measured = view.steps.last().map_or(view.predicted, |step| &step.timeline);
    let bubble = "<li><i class=\"bubble\"></i>bubble</li>";
    // The prediction of a run has the exchanges that the run has.
    let exchange = html::exchange(view.predicted);
    let shown = view.steps.iter().map(|step| &step.timeline).chain([view.predicted]);
    // The simulation in the page may have messages that take time even if the shown timelines have none.
    let sorts = shown.flat_map(occurring).chain([Sort::Message]).collect();
    include_str!("view_page/view.html")
        .replace("{{style}}", &style)
        .replace("{{legend}}", &(legend(&sorts, &chunks) + bubble + exchange))
        .replace("{{note}}", &(note(view) + &transport_note(view)))
        .replace("{{buffers}}", &buffers(view.program))
        .replace("{{table}}", &table(measured, &Chunks::of(measured), &view.settings))
        .replace("{{title}}", &escaped(view.settings.title).replace('{', "&#123;"))
        .replace("{{script}}", &script)
}

/// Returns the sentence about the communicator of the prediction; nothing if messages are buffered.
fn transport_note(view: &View<'_>) -> String {
    match view.predicted.communicator().streams {
        Streams::Buffered => String::new(),
        streams => format!(
            "<p id=\"transport\">The prediction runs on the transport {streams}: {}.</p>\n",
            escaped(streams.assumption())
        ),
    }
}

/// Returns the sentence about the steps that are left out; nothing if the page shows all.
fn note(view: &View<'_>) -> String {
    // Several steps on one time axis are recorded as single steps too.
    let single = view.steps.iter().filter(|step| step.before == 0).count();
    let (number, all) = (view.left_out, view.left_out + single);
    let (verb, subject) = if number == 1 { ("is", "it") } else { ("are", "they") };
    match number {
        0 => String::new(),
        _ => format!(
            "<p id=\"note\">{number} of {all} recorded steps {verb} left out: {subject} ran another program than the last \
             step, for example before the run was resumed with another cut.</p>\n"
        ),
    }
}

fn data(view: &View<'_>, chunks: &Chunks) -> ViewData {
    let predicted = source(None, view.predicted, view);
    let step = |step: &RecordedStep| source(Some(step), &step.timeline, view);
    let mut page = page(&Timeline::new(0, Vec::new()), chunks, &view.settings);
    (page.quantum, page.slices) = (predicted.quantum, view.predicted.slices().get());
    let stage =
        |stage: &StageCosts| [stage.forward, stage.backward, stage.input_backward, stage.weight_backward];
    ViewData {
        page,
        gutter: GUTTER,
        view: Contents {
            ranks: view.program.ranks(),
            stages: view.program.placement().stages(),
            steps: view.steps.iter().map(step).collect(),
            whole_step: view.whole_step,
            reads_base: view.reads_base,
            programs: programs(view),
            columns: COLUMNS,
            tensors: Tensor::ALL.map(Tensor::name),
            microbatches: view.program.microbatches() / view.program.slices().get(),
            costs: view.costs.stages.iter().map(stage).collect(),
            latency: view.costs.link.latency,
            predicted,
        },
    }
}

/// Returns the programs that the page can run at other costs.
fn programs(view: &View<'_>) -> Vec<ProgramData> {
    if view.costs.has_exchanges() {
        return Vec::new();
    }
    let data = |program: &Program| {
        let slices = program.slices();
        let dependencies = dependencies(program, view.costs, view.predicted.communicator()).ok()?;
        let microbatches = program.microbatches() / slices.get();
        Some(program_data(microbatches, &dependencies, slices, view.settings.counted_sizes()))
    };
    // Without its own program, the page has no panel.
    let own = data(view.program);
    own.map_or_else(Vec::new, |own| {
        std::iter::once(own).chain(view.other_programs.iter().filter_map(data)).collect()
    })
}

fn source(step: Option<&RecordedStep>, timeline: &Timeline, view: &View<'_>) -> Source {
    let clock = Clock::of(timeline);
    let ranks = ranks(timeline, &Chunks::of(timeline), &clock, &view.settings);
    let uncertainty = timeline.clock_skew().map(|skew| skew.uncertainty);
    let waits = timeline.queue_waits().iter().map(|QueueWait { rank, action, behind, from, until }| {
        (rank.get(), action.to_string(), behind.to_string(), *from, *until)
    });
    let (quantum, makespan, waits) = (clock.quantum(), timeline.makespan(), waits.collect());
    let causes = causes(timeline, view.program.ranks(), view.costs, step.is_some());
    let before = step.map_or(0, |step| step.before);
    let step = step.map(|step| step.step);
    Source {
        step,
        before,
        quantum,
        makespan,
        uncertainty,
        waits,
        causes: causes_data(&causes, timeline),
        ranks,
    }
}

fn causes_data(causes: &Causes, timeline: &Timeline) -> CausesData {
    let cell = |cell: Cell| (cell.rank.get(), cell.index);
    let wait = |wait: Wait| {
        let (kind, stage) = (wait.action.kind() as usize, wait.action.stage().get());
        (wait.rank.get(), kind, stage, wait.until - timeline.start(), wait.after.map(cell))
    };
    let waits = timeline.queue_waits().iter().enumerate();
    let waits: HashMap<_, _> = waits.map(|(index, wait)| ((wait.rank, wait.action), index)).collect();
    let cause = |(index, cause): (usize, &Cause)| {
        let data = match cause {
            Cause::Start | Cause::Order => return None,
            Cause::Delay => CauseData::Delay,
            Cause::Wait(own) => CauseData::Wait(wait(*own)),
            Cause::Message { from, tensor, in_line: own } => {
                let line = own.as_ref().and_then(|wait| waits.get(&(wait.rank, wait.action)).copied());
                CauseData::Message(from.rank.get(), from.index, *tensor as usize, line)
            }
        };
        Some((index, data))
    };
    let all = || (0..timeline.ranks()).map(Rank::new);
    CausesData {
        slack: causes.slack(),
        causes: all()
            .map(|rank| causes.of_rank(rank).iter().enumerate().filter_map(cause).collect())
            .collect(),
        ends: all().map(|rank| causes.wait_at_end(rank).map(wait)).collect(),
        last: causes.last().map(cell),
        last_wait: causes.last_wait().map(wait),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;
    use crate::simulate::timed;

    #[test]
    fn the_page_is_complete_and_loads_nothing() {
        let program =
            parse_program("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n").expect("a program");
        let costs = Costs::default();
        let run = timed(&program, &costs).expect("no deadlock");
        let page = view(&View {
            settings: PictureSettings { title: "</script>{{data}}", ..PictureSettings::default() },
            predicted: run.timeline(),
            program: &program,
            costs: &costs,
            steps: &[0, 2].map(|before| RecordedStep { step: 7, before, timeline: run.timeline().clone() }),
            left_out: 2,
            whole_step: None,
            other_programs: &[],
            reads_base: true,
        });
        assert!(page.contains("\"readsBase\":true,"), "{page}");
        for reference in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!page.contains(reference), "{reference}");
        }
        assert!(!page.contains("{{"), "a place in the page is not filled");
        assert_eq!(page.matches("</script>").count(), 1);
        assert!(page.contains("\"step\":7,\"before\":0,"), "{page}");
        assert!(page.contains(">2 of 3 recorded steps are left out: they ran another program"), "{page}");
        // The costs have messages that take no time, and the reader may change that.
        assert!(page.contains("</i>message</li>"), "{page}");
    }
}
