//! No text makes the engine panic or hang: any text is parsed, lowered, validated, simulated and drawn.
//!
//! A test run tries some thousand inputs. For a long run, give a number of iterations, best in a release
//! build:
//!
//! ```text
//! BOLERO_RANDOM_ITERATIONS=10000000 cargo test --release -p pipewright-schedule --test fuzz_csv
//! ```
//!
//! With `cargo install cargo-bolero` the same targets run under a fuzzer that is guided by coverage:
//! `cargo bolero test -p pipewright-schedule --test fuzz_csv any_rows_go_through_the_engine`.

use bolero::{TypeGenerator, check};
use pipewright_schedule::Costs;
use pipewright_schedule::csv::{parse_program, parse_rows, parse_schedule, print_program, print_rows};
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::lower::{Messages, Pass, PassInput, apply};
use pipewright_schedule::simulate::{LifetimeOf, UNIT, lifetimes, logical, peak_memory, timed};
use pipewright_schedule::{
    Level, LowerConfig, Program, Rank, ScheduleSpec, Slices, generate, lower, picture, validate,
};

/// A cell, or a text that resembles one.
#[derive(Debug, TypeGenerator)]
enum Cell {
    Empty,
    /// A kind, by its place in the list, with a small stage and microbatch.
    Action(u8, #[generator(0..4u8)] u8, #[generator(0..4u8)] u8),
    Overlap(
        #[generator(0..4u8)] u8,
        #[generator(0..4u8)] u8,
        #[generator(0..4u8)] u8,
        #[generator(0..4u8)] u8,
    ),
    /// The same as `Action`, with any numbers.
    Far(u8, u32, u32),
    /// The same as `Overlap`, with any numbers.
    FarOverlap(u32, u32, u32, u32),
    /// A sound cell with one byte changed.
    Mutated(u8, u8, u8),
    Blank,
    NewRow,
}

const KINDS: [&str; 14] = [
    "F",
    "I",
    "W",
    "B",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "WAIT_SEND_F",
    "WAIT_SEND_B",
    "UNSHARD",
    "RESHARD",
    "REDUCE_GRAD",
    "WAIT_REDUCE_GRAD",
];

fn action(kind: u8, stage: u32, microbatch: u32) -> String {
    let kind = KINDS[kind as usize % KINDS.len()];
    let of_stage = ["UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"].contains(&kind);
    if of_stage { format!("{stage}{kind}") } else { format!("{stage}{kind}{microbatch}") }
}

/// The text of `cells`, in order.
fn text(cells: &[Cell]) -> String {
    let mut text = String::new();
    for cell in cells {
        match cell {
            Cell::Empty => {}
            Cell::Action(kind, stage, microbatch) => {
                text.push_str(&action(*kind, (*stage).into(), (*microbatch).into()));
            }
            Cell::Overlap(stage, microbatch, other, on) => {
                text.push_str(&format!("({stage}F{microbatch};{other}B{on})OVERLAP_F_B"));
            }
            Cell::FarOverlap(stage, microbatch, other, on) => {
                text.push_str(&format!("({stage}F{microbatch};{other}B{on})OVERLAP_F_B"));
            }
            Cell::Far(kind, stage, microbatch) => text.push_str(&action(*kind, *stage, *microbatch)),
            Cell::Mutated(kind, at, byte) => {
                let mut cell = action(*kind, 1, 2).into_bytes();
                let at = *at as usize % cell.len();
                cell[at] = *byte;
                text.push_str(&String::from_utf8_lossy(&cell));
            }
            Cell::Blank => text.push_str(" \t"),
            Cell::NewRow => {
                text.push('\n');
                continue;
            }
        }
        text.push(',');
    }
    text
}

/// The text of the actions among `cells`, each in the row of the rank that owns its stage, so that most texts
/// are programs.
fn placed(cells: &[Cell]) -> String {
    let ranks = 1 + cells.iter().filter(|cell| matches!(cell, Cell::NewRow)).count() as u8 % 3;
    let mut rows: Vec<String> = (0..ranks).map(|stage| format!("{stage}F0")).collect();
    let mut push = |stage: u8, cell: String| {
        let row = &mut rows[(stage % ranks) as usize];
        row.push(',');
        row.push_str(&cell);
    };
    for cell in cells {
        match *cell {
            Cell::Action(kind, stage, microbatch) => {
                let stage = stage % ranks;
                push(stage, action(kind, stage.into(), microbatch.into()));
            }
            Cell::Overlap(stage, microbatch, _, on) => {
                let stage = stage % ranks;
                push(stage, format!("({stage}F{microbatch};{stage}B{on})OVERLAP_F_B"));
            }
            Cell::Empty => push(0, String::new()),
            _ => {}
        }
    }
    rows.join("\n")
}

/// A sound program, and mutations of it.
#[derive(Debug, TypeGenerator)]
struct Mutant {
    generator: u8,
    #[generator(1..5u8)]
    ranks: u8,
    #[generator(0..5u8)]
    more: u8,
    level: u8,
    /// For each mutation: its kind, the rank, the cell, and a second place in the row.
    mutations: Vec<(u8, u8, u16, u16)>,
}

impl Mutant {
    /// The rows of the mutant as text.
    fn text(&self) -> Option<String> {
        let generator = &catalogue()[self.generator as usize % catalogue().len()];
        let ranks = u32::from(self.ranks);
        let spec =
            ScheduleSpec { ranks, microbatches: ranks + u32::from(self.more), ..ScheduleSpec::default() };
        let level = [Level::Compute, Level::Comms, Level::Full][self.level as usize % 3];
        let program = lower(&generate(generator.name, &spec).ok()?, &LowerConfig::from(level)).ok()?;
        let mut rows = program.rows().to_vec();
        for &(what, rank, at, to) in self.mutations.iter().take(8) {
            let row = &mut rows[rank as usize % program.rows().len()];
            if row.is_empty() {
                continue;
            }
            let (at, to) = (at as usize % row.len(), to as usize % row.len());
            match what % 3 {
                0 => row.swap(at, to),
                1 => drop(row.remove(at)),
                _ => row.insert(to, row[at]),
            }
        }
        Some(print_rows(rows.into_iter().map(|row| row.into_iter().map(Some))))
    }
}

/// Runs every operation on the rows of a file.
fn exercise(text: &str) {
    let Ok(rows) = parse_rows(text) else { return };
    let printed = print_rows(rows.iter().map(|row| row.iter().copied()));
    assert_eq!(parse_rows(&printed).as_ref(), Ok(&rows), "printed rows read back as they were");
    if let Ok(schedule) = parse_schedule(text) {
        let messages = Messages::Waited { defer_recv: true, budget: None };
        for config in [
            LowerConfig::from(Level::Full),
            LowerConfig { communicate: Some(messages), ..Level::Full.into() },
        ] {
            let _lowered = lower(&schedule, &config);
        }
    }
    for passes in [
        "merge-bw,unshard=2:3,reduce-grad,send-recv,wait-send=1,defer-recv",
        "unshard=2:3,reduce-grad,send-early,send-recv",
        "send-recv",
        "defer-recv,wait-send,reduce-grad=at-end,send-early",
    ] {
        let input = PassInput { rows: rows.clone(), stage_to_rank: None, microbatches: None };
        let _program = apply(input, &Pass::parse_list(passes).expect("passes"));
    }
    if let Ok(program) = parse_program(text) {
        exercise_program(&program);
    }
}

fn exercise_program(program: &Program) {
    for slices in (1..4).filter_map(Slices::new) {
        if let Ok(cut) = program.clone().with_slices(slices) {
            exercise_slices(&cut);
        }
    }
}

fn exercise_slices(program: &Program) {
    for level in [Level::Compute, Level::Comms, Level::Full] {
        let verdict = validate(program.clone(), level);
        if level != Level::Compute && verdict.is_ok() {
            assert!(logical(program).is_ok(), "a sound program ends: {}", print_program(program));
        }
        let _message = verdict.map_err(|violations| violations.to_string());
    }
    let _run = logical(program).map(|run| run.timeline(1.0).chrome_trace());
    if let Ok(run) = timed(program, &Costs::default()) {
        assert_eq!(peak_memory(run.timeline(), &[UNIT]).len(), program.ranks() as usize);
        let settings = picture::PictureSettings { memory_lane: true, ..picture::PictureSettings::default() };
        let _picture = (picture::svg(run.timeline(), &settings), picture::html(run.timeline(), &settings));
    }
    for rank in (0..program.ranks()).map(Rank::new) {
        let _slots = lifetimes(program, rank, LifetimeOf::Microbatch).slots();
    }
}

#[test]
fn any_text_is_read_or_refused() {
    check!().with_type::<String>().for_each(|text| exercise(text));
}

#[test]
fn any_cells_are_read_or_refused() {
    check!().with_type::<Vec<Cell>>().for_each(|cells| exercise(&text(cells)));
}

#[test]
fn any_rows_go_through_the_engine() {
    check!().with_type::<Vec<Cell>>().for_each(|cells| exercise(&placed(cells)));
}

#[test]
fn mutants_go_through_the_engine() {
    check!().with_type::<Mutant>().for_each(|mutant| exercise(&mutant.text().unwrap_or_default()));
}
