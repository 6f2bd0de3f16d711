//! The part of the page of `view` that lists the buffers for activations on each rank, and what each holds
//! when.

use crate::action::Action;
use crate::picture::names::Named;
use crate::schedule::Program;
use crate::simulate::{LifetimeOf, Lifetimes, LiveRange, all_lifetimes};

/// The most live ranges that are listed.
const MOST_LISTED: usize = 5000;

/// Returns the part as HTML.
pub(super) fn buffers(program: &Program) -> String {
    let ranks = all_lifetimes(program, LifetimeOf::StageAndMicrobatch);
    let slots: Vec<String> = ranks.iter().map(|rank| rank.slots().to_string()).collect();
    let all: usize = ranks.iter().map(|rank| rank.ranges().len()).sum();
    let list = if all <= MOST_LISTED { table(program, &ranks) } else { String::new() };
    let advice = if all <= MOST_LISTED {
        "A forward's activations are in its buffer until the backward of the same stage and microbatch."
    } else {
        "They hold too many activations to list here; <code>simulate --format json</code> lists them."
    };
    format!(
        "<details id=\"buffers\"><summary>Buffers for activations, by rank: {}</summary><p>{advice}</p>{list}</details>",
        slots.join(" ")
    )
}

/// Returns a row for each buffer of each rank, with its activations in order.
fn table(program: &Program, ranks: &[Lifetimes]) -> String {
    let mut rows = String::new();
    for (rank, lifetimes) in ranks.iter().enumerate() {
        for slot in 0..lifetimes.slots() {
            let held = lifetimes.ranges().iter().filter(|range| range.slot == slot);
            let held: Vec<String> = held.map(|range| name(program, range)).collect();
            rows.push_str(&format!(
                "<tr><th scope=\"row\">{rank}</th><td>{slot}</td><td>{}</td></tr>",
                held.join(" ")
            ));
        }
    }
    format!(
        "<table><thead><tr><th scope=\"col\">rank</th><th scope=\"col\">buffer</th><th scope=\"col\">holds</th></tr></thead>\
         <tbody>{rows}</tbody></table>"
    )
}

/// Returns the forward whose activations are held; the title has the positions of the first and last use.
fn name(program: &Program, range: &LiveRange) -> String {
    let Some(stage) = range.stage else { return String::new() };
    let forward = Named(Action::Forward { stage, microbatch: range.microbatch }, program.slices());
    format!("<span title=\"actions {} to {} of the rank\">{forward}</span>", range.first, range.last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;

    #[test]
    fn each_buffer_lists_what_it_holds() {
        let part = buffers(&parse_program("0F0,0F1,0B0,0F2,0B1,0B2\n").expect("rows"));
        assert!(part.contains("by rank: 2<"), "{part}");
        let held = "<tr><th scope=\"row\">0</th><td>0</td><td><span title=\"actions 0 to 2 of the rank\">0F0</span> \
                    <span title=\"actions 3 to 5 of the rank\">0F2</span></td></tr>";
        assert!(part.contains(held), "{part}");
    }

    #[test]
    fn very_many_are_counted_only() {
        let row: Vec<String> = (0..6000).map(|microbatch| format!("0F{microbatch}")).collect();
        let part = buffers(&parse_program(&row.join(",")).expect("rows"));
        assert!(part.contains("by rank: 1<") && !part.contains("<table>"), "{}", part.len());
    }
}
