//! The report of one or more runs: a page with charts and tables, in one file that loads no other file, or the
//! figures as JSON or CSV.
//!
//! The charts are drawn in the browser from the data of this module. A run may have millions of steps, so
//! steps are joined to groups with their means and ranges. The markup, the style and the scripts are in the
//! folder `page`.

mod data;
mod differences;
mod figures_table;
mod goodput;
mod groups;

use std::time::Duration;

use data::ReportData;
pub use data::{RunLinks, RunSource};
pub use figures_table::{csv, json};

/// The scripts, in the order in which they use each other.
const SCRIPTS: [&str; 6] = [
    include_str!("page/runs.js"),
    include_str!("page/zoom.js"),
    include_str!("page/chart.js"),
    include_str!("page/tables.js"),
    include_str!("page/state.js"),
    include_str!("page/start.js"),
];

/// Makes the page of some runs. The page loads itself again at the interval, if there is one.
pub fn page(runs: &[RunSource], interval: Option<Duration>) -> String {
    let data = serde_json::to_string(&ReportData::of(runs, interval)).expect("numbers and texts are JSON");
    // A text in the data, such as a path, may contain the end of a script.
    let data = data.replace('<', "\\u003c");
    include_str!("page/report.html")
        .replace("{{style}}", include_str!("page/report.css"))
        .replace("{{script}}", &SCRIPTS.concat().replace("\"{{data}}\"", &data))
}
