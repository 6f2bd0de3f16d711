//! Skip connections, whose messages bypass the stages between two stages.

use pipewright_schedule::costs::{Link, SkipTransfer};
use pipewright_schedule::csv::parse_program;
use pipewright_schedule::simulate::timed;
use pipewright_schedule::{Costs, StageIndex};

use crate::program;

/// Costs with a skip connection from the first of three stages to the last, which occupies its link for
/// `seconds`.
fn with_skip(seconds: u64) -> Costs {
    let skip = SkipTransfer { from: StageIndex::new(0), to: StageIndex::new(2), bytes: seconds };
    Costs { skips: vec![skip], link: Link { latency: 0.0, bandwidth: 1.0 }, ..Costs::default() }
}

fn makespan(rows: &str, costs: &Costs) -> f64 {
    timed(&program(rows), costs).expect("it runs").timeline().makespan()
}

#[test]
fn a_skip_connection_delays_its_user_and_its_source() {
    let rows = "0F0,0SEND_F0,0RECV_B0,0B0\n\
                1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n\
                2RECV_F0,2F0,2B0,2SEND_B0\n";
    for t in 0..5 {
        // The last stage's forward begins when two forwards have ended and the message has arrived. The first
        // stage's backward begins when the middle stage's has ended and the gradient has arrived.
        let last_forward = f64::from(2.max(1 + t));
        let expected = last_forward + 3.0 + f64::from(2.max(t)) + 2.0;
        assert_eq!(makespan(rows, &with_skip(t as u64)), expected, "{t} seconds");
    }
}

#[test]
fn messages_of_a_skip_connection_share_their_link() {
    let forwards = |stage: u32| (0..4).map(move |m| format!("{stage}F{m}"));
    let row = |cells: Vec<String>| cells.join(",") + "\n";
    let sends = |stage: u32| forwards(stage).enumerate().map(move |(m, f)| format!("{f},{stage}SEND_F{m}"));
    let receive = |stage: u32, cells: Vec<String>| -> Vec<String> {
        cells.into_iter().enumerate().map(|(m, cell)| format!("{stage}RECV_F{m},{cell}")).collect()
    };
    let rows = row(sends(0).collect())
        + &row(receive(1, sends(1).collect()))
        + &row(receive(2, forwards(2).collect()));
    // Four messages of three seconds, one after the other, between the first forward and the last.
    assert_eq!(makespan(&rows, &with_skip(3)), 1.0 + 4.0 * 3.0 + 1.0);
}

#[test]
fn messages_of_a_skip_connection_are_in_the_timeline() {
    let rows =
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n2RECV_F0,2F0,2B0,2SEND_B0\n";
    let run = timed(&parse_program(rows).expect("a program"), &with_skip(5)).expect("no deadlock");
    let found: Vec<String> = run
        .timeline()
        .skips()
        .iter()
        .map(|skip| format!("rank {}: {}, {} to {}", skip.rank, skip.action, skip.start, skip.end))
        .collect();
    // The connection is busy for five seconds from the end of 0F0, and again from the end of 2B0.
    let expected = [
        "rank 0: 0SEND_SKIP_F0 to stage 2, 1 to 6",
        "rank 0: 0RECV_SKIP_B0 from stage 2, 9 to 14",
        "rank 2: 2RECV_SKIP_F0 from stage 0, 1 to 6",
        "rank 2: 2SEND_SKIP_B0 to stage 0, 9 to 14",
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_skip_connection_within_a_rank_takes_no_time() {
    let rows = "0F0,1F0,2F0,2B0,1B0,0B0\n";
    assert_eq!(makespan(rows, &with_skip(9)), 9.0);
}
