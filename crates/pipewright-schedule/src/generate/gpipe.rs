//! GPipe: all forwards, then all backwards, each in ascending microbatch order.
//!
//! Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019. There is one
//! stage a rank.
//!
//! With `p` ranks, `m` microbatches, and forward and backward of equal length on every stage, the bubble is
//! `(p - 1) / (m + p - 1)`, as for 1F1B. Every stage holds the activations of all `m` microbatches at once, while 1F1B
//! holds at most `p`.

use crate::action::Action;
use crate::generate::error::GenerateError;
use crate::generate::generator::Generator;
use crate::generate::spec::ScheduleSpec;
use crate::ids::{Microbatch, StageIndex};
use crate::schedule::Schedule;

const NAME: &str = "gpipe";

pub(super) const GENERATOR: Generator = Generator {
    name: NAME,
    summary: "all forwards, then all backwards; simple, memory grows with microbatches",
    settings: &[],
    aliases: &[],
    generate,
};

fn generate(spec: &ScheduleSpec) -> Result<Schedule, GenerateError> {
    let placement = spec.one_stage_a_rank(NAME)?;
    spec.check_fills(NAME, &placement)?;
    let rows = placement.all_stages().map(|stage| row(stage, spec.microbatches)).collect();
    Ok(Schedule::generated(placement, spec.microbatches, rows))
}

fn row(stage: StageIndex, microbatches: u32) -> Vec<Option<Action>> {
    let all = || (0..microbatches).map(Microbatch::new);
    let forwards = all().map(|microbatch| Some(Action::Forward { stage, microbatch }));
    let backwards = all().map(|microbatch| Some(Action::Backward { stage, microbatch }));
    forwards.chain(backwards).collect()
}
