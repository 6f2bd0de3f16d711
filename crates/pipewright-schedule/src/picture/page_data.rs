//! The timeline as a compact JavaScript value.
//!
//! Times are whole multiples of one quantum, each relative to the previous one. Each property of a rank's
//! events is a separate list, so that no name is repeated. The script `page/data.js` reads it.

use serde::Serialize;

use crate::action::{Action, ActionKind};
use crate::divisor::greatest_common_divisor;
use crate::ids::{Microbatch, Rank};
use crate::picture::chunks::Chunks;
use crate::picture::palette::{DARK, LIGHT, Theme};
use crate::picture::palette::{Sort, ink_on};
use crate::picture::settings::{PictureSettings, TimeUnit};
use crate::simulate::memory_curve;
use crate::skip_event::{SkipAction, SkipEvent};
use crate::timeline::{Event, Timeline};

/// The precision of times, as a share of the makespan.
const RESOLUTION: f64 = 1e-9;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PageData {
    /// The name, the meaning, and the sort of each kind of action.
    kinds: Vec<(&'static str, &'static str, u8)>,
    /// The number of slices of each microbatch.
    pub(super) slices: u32,
    themes: [ThemeData; 2],
    /// The quantum of times.
    pub(super) quantum: f64,
    /// Whether times are in seconds; otherwise they have no unit.
    seconds: bool,
    makespan: u64,
    /// The unit of memory.
    unit: &'static str,
    memory_lane: bool,
    pub(super) ranks: Vec<RankData>,
}

/// The colours of a theme.
#[derive(Serialize)]
pub(super) struct ThemeData {
    #[serde(flatten)]
    colours: &'static Theme,
    /// The fill and the ink of each chunk, for each sort.
    fills: Vec<Vec<(String, &'static str)>>,
}

/// The events and the memory of a rank.
#[derive(Serialize)]
pub(super) struct RankData {
    stages: Vec<u32>,
    /// The kind of each event, as a letter from `A`.
    kinds: String,
    /// The start of each event, relative to the start of the previous event.
    starts: Vec<u64>,
    lengths: Vec<u64>,
    /// The chunk of each event; empty if the rank has one chunk.
    chunks: Vec<usize>,
    /// The microbatch or the slice of each event, or -1.
    microbatches: Vec<i64>,
    /// The chunk and the microbatch of the backward of each overlap.
    backwards: Vec<(usize, i64)>,
    /// The other end of each message of a skip connection.
    peers: Vec<String>,
    /// The exchanges of tokens: the start since the start of the previous one, and the length.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    exchanges: Vec<(u64, u64)>,
    /// The changes of the rank's memory: the time since the previous change, and the amount.
    memory: Vec<(u64, u64)>,
}

/// Returns the data of the page. It has only numbers and texts of this program, so nothing in it can end the
/// script.
pub(super) fn page_data(timeline: &Timeline, chunks: &Chunks, settings: &PictureSettings<'_>) -> String {
    serde_json::to_string(&page(timeline, chunks, settings)).expect("numbers and texts are JSON")
}

/// Returns the same data before it is written.
pub(super) fn page(timeline: &Timeline, chunks: &Chunks, settings: &PictureSettings<'_>) -> PageData {
    let clock = Clock::of(timeline);
    PageData {
        kinds: kinds(),
        slices: timeline.slices().get(),
        themes: [theme_data(&LIGHT, chunks), theme_data(&DARK, chunks)],
        quantum: clock.quantum(),
        seconds: settings.unit == TimeUnit::Seconds,
        makespan: clock.quanta(timeline.start() + timeline.makespan()),
        unit: if settings.sizes.is_empty() { "activations" } else { "bytes" },
        memory_lane: settings.memory_lane,
        ranks: ranks(timeline, chunks, &clock, settings),
    }
}

/// Returns the data of every rank.
pub(super) fn ranks(
    timeline: &Timeline,
    chunks: &Chunks,
    clock: &Clock,
    settings: &PictureSettings<'_>,
) -> Vec<RankData> {
    let all = (0..timeline.ranks()).map(Rank::new);
    all.map(|rank| rank_data(timeline, rank, chunks, clock, settings)).collect()
}

/// Returns the kinds of actions, and after them the messages of skip connections.
fn kinds() -> Vec<(&'static str, &'static str, u8)> {
    let actions = ActionKind::ALL.map(|kind| (kind.name(), Sort::of(kind).meaning(), Sort::of(kind) as u8));
    let skips = SkipAction::NAMES.map(|name| (name, "skip connection", Sort::Message as u8));
    actions.into_iter().chain(skips).collect()
}

fn theme_data(colours: &'static Theme, chunks: &Chunks) -> ThemeData {
    let with_ink = |fill: String| {
        let ink = ink_on(&fill);
        (fill, ink)
    };
    let fills = |&sort: &Sort| colours.shades(sort, chunks.most()).into_iter().map(with_ink).collect();
    ThemeData { colours, fills: Sort::ALL.iter().map(fills).collect() }
}

fn rank_data(
    timeline: &Timeline,
    rank: Rank,
    chunks: &Chunks,
    clock: &Clock,
    settings: &PictureSettings<'_>,
) -> RankData {
    let drawn = drawn(timeline, rank, chunks);
    let starts: Vec<u64> = drawn.iter().map(|event| clock.quanta(event.start)).collect();
    let lengths = drawn.iter().zip(&starts).map(|(event, start)| clock.quanta(event.end) - start);
    let memory = memory_curve(timeline, rank, settings.counted_sizes());
    let changes: Vec<u64> = memory.iter().map(|step| clock.quanta(step.time)).collect();
    let held = memory.iter().map(|step| step.held);
    let exchanges = timeline.scopes_of(rank).iter().filter(|scope| scope.is_exchange());
    let exchanges: Vec<[u64; 2]> =
        exchanges.map(|scope| [clock.quanta(scope.start), clock.quanta(scope.end)]).collect();
    let exchange_starts: Vec<u64> = exchanges.iter().map(|[start, _]| *start).collect();
    RankData {
        stages: chunks.stages_of(rank).iter().map(|stage| stage.get()).collect(),
        kinds: drawn.iter().map(|event| char::from(b'A' + event.kind as u8)).collect(),
        lengths: lengths.collect(),
        chunks: match chunks.stages_of(rank).len() {
            0 | 1 => Vec::new(),
            _ => drawn.iter().map(|event| event.place.0).collect(),
        },
        microbatches: drawn.iter().map(|event| event.place.1).collect(),
        backwards: drawn.iter().filter_map(|event| event.backward).collect(),
        peers: drawn.iter().filter_map(|event| event.peer.clone()).collect(),
        exchanges: differences(&exchange_starts)
            .into_iter()
            .zip(exchanges.iter().map(|[start, end]| end - start))
            .collect(),
        memory: differences(&changes).into_iter().zip(held).collect(),
        starts: differences(&starts),
    }
}

/// An event as the page shows it.
struct Drawn {
    /// The place of its kind among [`kinds`].
    kind: usize,
    start: f64,
    end: f64,
    /// Its chunk and its microbatch, or -1.
    place: (usize, i64),
    /// The place of an overlap's backward.
    backward: Option<(usize, i64)>,
    /// The other end of a message of a skip connection.
    peer: Option<String>,
}

/// Returns the events of a rank that can be seen, by start: computation, and what takes time.
fn drawn(timeline: &Timeline, rank: Rank, chunks: &Chunks) -> Vec<Drawn> {
    let place = |stage, microbatch: Option<Microbatch>| {
        (chunks.chunk(rank, stage), microbatch.map_or(-1, |microbatch| i64::from(microbatch.get())))
    };
    let of_part = |part: Action| place(part.stage(), part.microbatch());
    let events =
        timeline.events_of(rank).iter().filter(|event| event.action.is_compute() || event.end > event.start);
    let events = events.map(|&Event { action, start, end, .. }| Drawn {
        kind: action.kind() as usize,
        start,
        end,
        place: of_part(action),
        backward: action.parts().nth(1).map(of_part),
        peer: None,
    });
    let skips = timeline.skips_of(rank).iter().filter(|skip| skip.end > skip.start);
    let skips = skips.map(|&SkipEvent { action, start, end, .. }| Drawn {
        kind: ActionKind::ALL.len() + action.name_index(),
        start,
        end,
        place: place(action.stage(), Some(action.message().microbatch)),
        backward: None,
        peer: Some(action.peer()),
    });
    let mut drawn: Vec<Drawn> = events.chain(skips).collect();
    drawn.sort_by(|a, b| a.start.total_cmp(&b.start));
    drawn
}

/// Returns the difference of each number from the previous one; the numbers ascend.
fn differences(ascending: &[u64]) -> Vec<u64> {
    let before = std::iter::once(0).chain(ascending.iter().copied());
    before.zip(ascending).map(|(before, &number)| number.saturating_sub(before)).collect()
}

/// Converts times to multiples of a quantum since the start of a timeline. The quantum is the largest that
/// divides all times.
pub(super) struct Clock {
    start: f64,
    tick: f64,
    ticks_of_quantum: u64,
}

impl Clock {
    pub(super) fn of(timeline: &Timeline) -> Self {
        let makespan = timeline.makespan();
        let tick = if makespan > 0.0 { 10f64.powf((makespan * RESOLUTION).log10().floor()) } else { 1.0 };
        let mut clock = Self { start: timeline.start(), tick, ticks_of_quantum: 1 };
        let times = timeline.events().iter().flat_map(|event| [event.start, event.end]);
        let divisor = times.map(|time| clock.quanta(time)).fold(0, greatest_common_divisor);
        clock.ticks_of_quantum = divisor.max(1);
        clock
    }

    pub(super) fn quantum(&self) -> f64 {
        self.tick * self.ticks_of_quantum as f64
    }

    fn quanta(&self, time: f64) -> u64 {
        ((time - self.start) / self.tick).round() as u64 / self.ticks_of_quantum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;
    use crate::ids::StageIndex;
    use crate::simulate::logical;
    use crate::skip_event::SkipMessage;

    fn data(rows: &str, tick: f64) -> serde_json::Value {
        let program = parse_program(rows).expect("a program");
        let timeline = logical(&program).expect("no deadlock").timeline(tick);
        let text = page_data(&timeline, &Chunks::of(&timeline), &PictureSettings::default());
        serde_json::from_str(&text).expect("JSON")
    }

    #[test]
    fn the_data_hold_events_and_memory() {
        let data = data("0F0,(0F1;0B0)OVERLAP_F_B,0B1,0UNSHARD\n", 1.0);
        let rank = &data["ranks"][0];
        let expected = serde_json::json!({
            "stages": [0], "kinds": "AODE", "starts": [0, 1, 1, 1], "lengths": [1, 1, 1, 1], "chunks": [],
            "microbatches": [0, 1, 1, -1], "backwards": [[0, 0]], "peers": [],
            "memory": [[0, 1], [1, 2], [1, 1], [1, 0]],
        });
        assert_eq!(*rank, expected);
        assert_eq!(
            (data["kinds"][14][0].as_str(), data["makespan"].as_u64()),
            (Some("OVERLAP_F_B"), Some(4))
        );
    }

    #[test]
    fn messages_of_skip_connections_are_among_the_events() {
        let message = SkipMessage { from: StageIndex::new(0), to: StageIndex::new(2), microbatch: 5.into() };
        let skip = SkipEvent { rank: 0.into(), action: SkipAction::Send(message), start: 1.0, end: 1.5 };
        let event = |action: &str, start: f64| Event {
            rank: 0.into(),
            action: action.parse().expect("an action"),
            start,
            end: start + 1.0,
        };
        let timeline = Timeline::new(1, vec![event("0F5", 0.0), event("0F6", 1.25)]).with_skips(vec![skip]);
        let text = page_data(&timeline, &Chunks::of(&timeline), &PictureSettings::default());
        let data: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let rank = &data["ranks"][0];
        assert_eq!((&rank["kinds"], &rank["peers"]), (&"ARA".into(), &serde_json::json!([" to stage 2"])));
        assert_eq!(data["kinds"]["ARA".as_bytes()[1] as usize - 65][0], "SEND_SKIP_F");
    }

    #[test]
    fn the_quantum_is_as_large_as_it_can_be() {
        for tick in [1.0, 0.1, 0.25, 3e-6] {
            let data = data("0F0,0F1,0B0,0B1\n", tick);
            assert_eq!(data["makespan"], 4, "{tick}");
            assert!((data["quantum"].as_f64().expect("a number") / tick - 1.0).abs() < 1e-9, "{tick}");
        }
    }

    #[test]
    fn uneven_times_are_exact_enough() {
        let action: Action = "0F0".parse().expect("an action");
        let event = |start, end| Event { rank: Rank::new(0), action, start, end };
        let timeline = Timeline::new(1, vec![event(5.0, 5.1234567), event(5.2, 6.3)]);
        let clock = Clock::of(&timeline);
        let error = clock.quanta(5.1234567) as f64 * clock.quantum() - 0.1234567;
        assert!(error.abs() < 2e-9, "{error}");
    }
}
