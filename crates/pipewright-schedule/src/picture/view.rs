//! The page that compares a predicted step with measured ones and explains both.
//!
//! It draws like [`super::html()`], with a lane for each timeline of a rank. In addition it names the cause
//! of every bubble, highlights the critical path, shows recorded steps with a slider, and simulates the
//! schedule again for other costs or numbers of microbatches. Its scripts, in the folder `view_page`,
//! continue the scripts of `page`. The simulation in the page has the rules of [`crate::simulate::timed()`];
//! a test in a browser compares all their times.

use serde::Serialize;

use crate::action::Action;
use crate::communicator::{Communicator, Groups, Streams};
use crate::costs::{Costs, Link};
use crate::csv::print_program;
use crate::ids::{Microbatch, StageIndex};
use crate::picture::buffers::buffers;
use crate::picture::chunks::Chunks;
use crate::picture::html::{self, legend, table, variables};
use crate::picture::page_data::{Clock, PageData, RankData, page, ranks};
use crate::picture::palette::{DARK, LIGHT, Sort, occurring};
use crate::picture::settings::{PictureSettings, escaped};
use crate::schedule::Program;
use crate::slices::Slices;
use crate::timeline::{QueueWait, Timeline};

/// The scripts that follow the page's, in the order in which they use each other.
const SCRIPTS: [&str; 12] = [
    include_str!("view_page/sources.js"),
    include_str!("view_page/causes.js"),
    include_str!("view_page/waits.js"),
    include_str!("view_page/blocking.js"),
    include_str!("view_page/path.js"),
    include_str!("view_page/range.js"),
    include_str!("view_page/panel.js"),
    include_str!("view_page/queues.js"),
    include_str!("view_page/simulation.js"),
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
    /// The program, and then the programs of other numbers of microbatches.
    programs: Vec<SizedProgram>,
    costs: CostsData,
    /// The communicator of the prediction; `None` if messages are buffered.
    transport: Option<TransportData>,
    /// The bytes or units of each stage's activation, stash, gradient, and keys and values, for one
    /// microbatch or slice.
    sizes: Vec<[u64; 4]>,
}

/// A timeline with its own quantum of time.
#[derive(Serialize)]
struct Source {
    step: Option<u64>,
    quantum: f64,
    /// In seconds.
    makespan: f64,
    /// How well the clocks of several processes agree, in seconds.
    uncertainty: Option<f64>,
    /// What waited in line: the rank, the operation, the operation in front of it, and the start and the end
    /// in seconds.
    waits: Vec<(u32, String, String, f64, f64)>,
    ranks: Vec<RankData>,
}

#[derive(Serialize)]
struct SizedProgram {
    microbatches: u32,
    /// The rows as CSV.
    program: String,
}

#[derive(Serialize)]
struct TransportData {
    name: &'static str,
    grouped: bool,
    /// Whether a message between each stage and the next one is sent at once.
    eager: Vec<bool>,
}

#[derive(Serialize)]
struct CostsData {
    stages: Vec<StageData>,
    outputs: Vec<u64>,
    #[serde(flatten)]
    link: LinkData,
    /// The skip connections: the stages from which and to which they lead, and the bytes.
    skips: Vec<(u32, u32, u64)>,
    /// The links that differ, by sender and receiver with a space between them.
    links: std::collections::BTreeMap<String, LinkData>,
    /// The share of attention, which grows from slice to slice.
    attention: f64,
    /// The seconds of each `OFFLOAD` and of each `RELOAD` of each stage.
    transfers: Vec<[f64; 2]>,
    /// Whether tokens are exchanged inside actions. The page does not simulate that, so nothing can be
    /// changed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    exchanges: bool,
}

#[derive(Serialize)]
struct StageData {
    #[serde(rename = "F")]
    forward: f64,
    #[serde(rename = "I")]
    input_backward: f64,
    #[serde(rename = "W")]
    weight_backward: f64,
    #[serde(rename = "B")]
    backward: f64,
    unshard: f64,
    reduce: f64,
}

#[derive(Serialize)]
struct LinkData {
    latency: f64,
    /// `None` if the size of a message does not matter. JSON has no infinity.
    bandwidth: Option<f64>,
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
    let (number, all) = (view.left_out, view.left_out + view.steps.len());
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
    let predicted = source(None, view.predicted, &view.settings);
    let step = |step: &RecordedStep| source(Some(step.step), &step.timeline, &view.settings);
    let all_programs = std::iter::once(view.program).chain(view.other_programs);
    let program = |program: &Program| SizedProgram {
        microbatches: program.microbatches() / program.slices().get(),
        program: print_program(program),
    };
    let sizes = view.settings.counted_sizes().iter().map(|sizes| sizes.for_slice(view.predicted.slices()));
    let mut page = page(&Timeline::new(0, Vec::new()), chunks, &view.settings);
    (page.quantum, page.slices) = (predicted.quantum, view.predicted.slices().get());
    ViewData {
        page,
        gutter: GUTTER,
        view: Contents {
            ranks: view.program.ranks(),
            stages: view.program.placement().stages(),
            steps: view.steps.iter().map(step).collect(),
            whole_step: view.whole_step,
            programs: all_programs.map(program).collect(),
            costs: costs_data(view.costs, view.predicted.slices()),
            transport: transport_data(view.predicted.communicator(), view.program),
            sizes: sizes
                .map(|sizes| [sizes.activation, sizes.stash, sizes.gradient, sizes.keys_values])
                .collect(),
            predicted,
        },
    }
}

fn source(step: Option<u64>, timeline: &Timeline, settings: &PictureSettings<'_>) -> Source {
    let clock = Clock::of(timeline);
    let ranks = ranks(timeline, &Chunks::of(timeline), &clock, settings);
    let uncertainty = timeline.clock_skew().map(|skew| skew.uncertainty);
    let waits = timeline.queue_waits().iter().map(|QueueWait { rank, action, behind, from, until }| {
        (rank.get(), action.to_string(), behind.to_string(), *from, *until)
    });
    let (quantum, makespan, waits) = (clock.quantum(), timeline.makespan(), waits.collect());
    Source { step, quantum, makespan, uncertainty, waits, ranks }
}

fn transport_data(communicator: &Communicator, program: &Program) -> Option<TransportData> {
    let Communicator { streams, sends, groups } = communicator;
    let is_eager = |stage| sends.sends_at_once(Action::SendForward { stage, microbatch: Microbatch::new(0) });
    (*streams != Streams::Buffered).then(|| TransportData {
        name: streams.name(),
        grouped: *groups == Groups::Consecutive,
        eager: program.placement().all_stages().map(is_eager).collect(),
    })
}

fn costs_data(costs: &Costs, slices: Slices) -> CostsData {
    let link = |link: &Link| LinkData {
        latency: link.latency,
        bandwidth: Some(link.bandwidth).filter(|bandwidth| bandwidth.is_finite()),
    };
    let stage = |stage: &crate::costs::StageCosts| StageData {
        forward: stage.forward,
        input_backward: stage.input_backward,
        weight_backward: stage.weight_backward,
        backward: stage.backward,
        unshard: stage.unshard,
        reduce: stage.reduce_grad,
    };
    CostsData {
        stages: costs.stages.iter().map(stage).collect(),
        outputs: costs.sizes.iter().map(|sizes| sizes.output).collect(),
        link: link(&costs.link),
        skips: costs.skips.iter().map(|skip| (skip.from.get(), skip.to.get(), skip.bytes)).collect(),
        attention: costs.attention,
        transfers: (0..costs.sizes.len().max(costs.stages.len()) as u32)
            .map(|stage| costs.transfer_seconds(StageIndex::new(stage), slices))
            .collect(),
        exchanges: costs.has_exchanges(),
        links: costs.links.iter().map(|((from, to), other)| (format!("{from} {to}"), link(other))).collect(),
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
            steps: &[RecordedStep { step: 7, timeline: run.timeline().clone() }],
            left_out: 2,
            whole_step: None,
            other_programs: &[],
        });
        for reference in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!page.contains(reference), "{reference}");
        }
        assert!(!page.contains("{{"), "a place in the page is not filled");
        assert_eq!(page.matches("</script>").count(), 1);
        assert!(page.contains("\"bandwidth\":null") && page.contains("\"step\":7,"), "{page}");
        assert!(page.contains("1RECV_F0,1F0,1B0,1SEND_B0\\n"));
        assert!(page.contains(">2 of 3 recorded steps are left out: they ran another program"), "{page}");
        // The costs have messages that take no time, and the reader may change that.
        assert!(page.contains("</i>message</li>"), "{page}");
    }
}
