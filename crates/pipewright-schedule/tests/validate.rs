//! Every rule of the validator, with a tiny program and the message that a user reads.

use pipewright_schedule::csv::{parse_program, parse_rows};
use pipewright_schedule::validate::{LoaderFormat, check_pytorch_loader};
use pipewright_schedule::{Level, Placement, Program, Rank, Slices, validate};
use serde_json::Value;

/// All violations of `program` at `level`, as text.
fn messages(program: Program, level: Level) -> Vec<String> {
    match validate(program, level) {
        Ok(_) => Vec::new(),
        Err(violations) => violations.listed().iter().map(ToString::to_string).collect(),
    }
}

fn check(level: Level, rows: &str, expected: &[&str]) {
    let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(messages(program, level), expected);
}

/// Does the same as [`check`], with the stages on given ranks and a given number of microbatches.
fn check_placed(rank_of: &[u32], microbatches: u32, rows: &[&str], expected: &[&str]) {
    let placement =
        Placement::explicit(rank_of.iter().copied().map(Rank::new).collect()).expect("a placement");
    let row = |row: &&str| row.split_whitespace().map(|cell| cell.parse().expect(cell)).collect();
    let program = Program::new(placement, microbatches, rows.iter().map(row).collect()).expect("a program");
    assert_eq!(messages(program, Level::Compute), expected);
}

#[test]
fn sound_programs_pass() {
    check(Level::Compute, "0F0,0B0\n1F0,1B0\n", &[]);
    check(Level::Compute, "0F0,0F1\n1F0,1F1\n", &[]);
    check(Level::Compute, "0F0,1F0,1I0,1W0,0B0\n", &[]);
    check(Level::Comms, "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", &[]);
    check(Level::Full, "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n", &[]);
}

#[test]
fn coverage() {
    check(Level::Compute, "0F0,0F1,0B0\n", &["rank 0, position 3: 0B1 is missing; add it to this rank"]);
    check(Level::Compute, "0F0,0I0\n", &["rank 0, position 2: 0W0 is missing; add it to this rank"]);
    check(Level::Compute, "0F0,0W0\n", &["rank 0, position 2: 0I0 is missing; add it to this rank"]);
    check(
        Level::Compute,
        "0F0,0F0,0B0\n",
        &["rank 0, position 1: 0F0 occurs a second time, first at position 0; drop one of them"],
    );
    check(
        Level::Compute,
        "0F0,0B0,0I0,0W0\n",
        &["rank 0, position 1: 0B0 and 0I0 compute the same gradients; keep one of them"],
    );
    check(
        Level::Compute,
        "0UNSHARD\n",
        &["rank 0, position 0: the program has no microbatch; use at least one"],
    );
}

#[test]
fn range_and_ownership() {
    check_placed(
        &[0, 1],
        1,
        &["0F0 1F0", "1F0"],
        &["rank 0, position 1: 1F0 belongs to rank 1, which owns its stage; move it there"],
    );
    check_placed(
        &[0],
        1,
        &["0F0 5F0"],
        &["rank 0, position 1: 5F0 names a stage above the last, 0; correct its stage"],
    );
    check_placed(
        &[0],
        1,
        &["0F0 0F7"],
        &["rank 0, position 1: 0F7 names a microbatch above the last, 0; correct its microbatch"],
    );
}

#[test]
fn tensors_that_leave_come_back() {
    check(Level::Compute, "0F0,0OFFLOAD0,0F1,0RELOAD0,0B1,0B0\n", &[]);
    check(Level::Compute, "0F0,0OFFLOAD0,0F1,0RELOAD0,0I1,0W1,0I0,0W0\n", &[]);
    check(Level::Comms, "0F0,0OFFLOAD0,0SEND_F0,0RELOAD0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", &[]);
    let mistakes = [
        (
            "0F0,0OFFLOAD0,0B0\n",
            "1: 0OFFLOAD0 has no RELOAD, and 0B0 at position 2 uses the tensors; add one before that",
        ),
        (
            "0F0,0OFFLOAD0,0B0,0RELOAD0\n",
            "2: 0B0 uses the tensors that 0OFFLOAD0 has moved away, and they come back only at position 3; move their RELOAD \
             before it",
        ),
        (
            "0F0,0B0,0RELOAD0\n",
            "2: 0RELOAD0 needs 0OFFLOAD0, which is missing; add 0OFFLOAD0 or drop 0RELOAD0",
        ),
        (
            "0F0,0RELOAD0,0OFFLOAD0,0B0\n",
            "1: 0RELOAD0 needs 0OFFLOAD0, which comes only at position 2; move one of them",
        ),
        (
            "0OFFLOAD0,0F0,0RELOAD0,0B0\n",
            "0: 0OFFLOAD0 needs 0F0, which comes only at position 1; move one of them",
        ),
        (
            "0F0,0B0,0OFFLOAD0,0RELOAD0\n",
            "2: 0OFFLOAD0 comes after 0B0 at position 1, which has used the tensors; move it between the forward and the backward",
        ),
        (
            "0F0,0OFFLOAD0,0OFFLOAD0,0RELOAD0,0B0\n",
            "2: 0OFFLOAD0 occurs a second time, first at position 1; drop one of them",
        ),
        (
            "0F0,0OFFLOAD0,0RELOAD0,0RELOAD0,0B0\n",
            "3: 0RELOAD0 occurs a second time, first at position 2; drop one of them",
        ),
        (
            "0F0,0OFFLOAD0,0RELOAD0\n",
            "1: 0OFFLOAD0 moves tensors that no backward of its stage uses; drop it and its RELOAD",
        ),
    ];
    for (rows, message) in mistakes {
        check(Level::Compute, rows, &[&format!("rank 0, position {message}")]);
    }
    check_placed(
        &[0, 1],
        1,
        &["0F0 1OFFLOAD0 0B0", "1F0 1B0"],
        &[
            "rank 0, position 1: 1OFFLOAD0 belongs to rank 1, which owns its stage; move it there",
            "rank 0, position 1: 1OFFLOAD0 needs 1F0, which comes only at position 3; move one of them",
        ],
    );
}

#[test]
fn order_on_a_rank() {
    check(
        Level::Compute,
        "0B0,0F0\n",
        &["rank 0, position 0: 0B0 needs 0F0, which comes only at position 1; move one of them"],
    );
    check(
        Level::Compute,
        "0F0,0W0,0I0\n",
        &["rank 0, position 1: 0W0 needs 0I0, which comes only at position 2; move one of them"],
    );
    check(
        Level::Compute,
        "1F0,0F0\n",
        &["rank 0, position 0: 1F0 needs 0F0, which comes only at position 1; move one of them"],
    );
    // The halves of an overlap start together.
    check(
        Level::Compute,
        "(0F0;0B0)OVERLAP_F_B\n",
        &["rank 0, position 0: 0B0 needs 0F0, which comes only at position 0; move one of them"],
    );
}

#[test]
fn order_of_messages() {
    check(
        Level::Comms,
        "0SEND_F0,0F0\n1RECV_F0,1F0\n",
        &["rank 0, position 0: 0SEND_F0 needs 0F0, which comes only at position 1; move one of them"],
    );
    check(
        Level::Comms,
        "0F0,0SEND_F0\n1F0,1RECV_F0\n",
        &["rank 1, position 0: 1F0 needs 1RECV_F0, which comes only at position 1; move one of them"],
    );
    check(
        Level::Comms,
        "0F0,0WAIT_SEND_F0,0SEND_F0\n1RECV_F0,1F0\n",
        &[
            "rank 0, position 1: 0WAIT_SEND_F0 needs 0SEND_F0, which comes only at position 2; move one of them",
            "rank 0, position 1: deadlock: rank 0 at position 1 (0WAIT_SEND_F0) waits for rank 1, \
             rank 1 at position 0 (1RECV_F0) waits for rank 0; break the cycle",
        ],
    );
}

#[test]
fn waits_have_starts() {
    check(
        Level::Compute,
        "0F0,0B0,0WAIT_REDUCE_GRAD\n",
        &[
            "rank 0, position 2: 0WAIT_REDUCE_GRAD needs 0REDUCE_GRAD, which is missing; add 0REDUCE_GRAD or drop 0WAIT_REDUCE_GRAD",
        ],
    );
}

#[test]
fn messages_have_two_ends() {
    check(
        Level::Comms,
        "0F0,0SEND_F0\n1F0\n",
        &["rank 0, position 1: 0SEND_F0 is never received; add 1RECV_F0 to rank 1"],
    );
    check(
        Level::Comms,
        "0F0\n1RECV_F0,1F0\n",
        &["rank 1, position 0: 1RECV_F0 has no send; add 0SEND_F0 to rank 0"],
    );
    check(
        Level::Comms,
        "0F0\n1F0\n",
        &[
            "rank 0, position 1: 0SEND_F0 is missing; add it to this rank",
            "rank 1, position 1: 1RECV_F0 is missing; add it to this rank",
        ],
    );
    check(
        Level::Comms,
        "0F0,0SEND_F0,1F0\n",
        &["rank 0, position 1: 0SEND_F0 has no peer on another rank; drop it"],
    );
    check(
        Level::Compute,
        "0F0,0SEND_F0\n1F0\n",
        &["rank 0, position 1: 0SEND_F0 communicates, which the level `compute` does not; \
           validate at the level `comms` or `full`"],
    );
}

#[test]
fn peers_agree_on_an_order() {
    check(
        Level::Comms,
        "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n",
        &[
            "rank 1, position 0: 1RECV_F1 is in the place of the receive of 0SEND_F0, which rank 0 sends first; receive in the order of the sends",
            "rank 0, position 1: deadlock: rank 0 at position 1 (0SEND_F0) waits for rank 1, \
             rank 1 at position 0 (1RECV_F1) waits for rank 0; break the cycle",
        ],
    );
}

#[test]
fn circles_of_computation() {
    check(
        Level::Compute,
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        &["rank 0, position 1: deadlock: rank 0 at position 1 (0B0) waits for rank 1, \
           rank 1 at position 1 (1F1) waits for rank 0; break the cycle"],
    );
}

#[test]
fn circles_of_unbuffered_sends() {
    // Each rank sends before it receives: fine with buffers, a deadlock without.
    check(
        Level::Comms,
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
         1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
        &["rank 0, position 3: deadlock: rank 0 at position 3 (0SEND_F1) waits for rank 1, \
           rank 1 at position 3 (1SEND_B0) waits for rank 0; break the cycle"],
    );
    // A send with a later wait does not block.
    check(
        Level::Comms,
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F1,0RECV_B1,0B1\n\
         1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
        &[],
    );
    // But its wait does.
    check(
        Level::Comms,
        "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
         1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
        &["rank 0, position 4: deadlock: rank 0 at position 4 (0WAIT_SEND_F1) waits for rank 1, \
           rank 1 at position 3 (1SEND_B0) waits for rank 0; break the cycle"],
    );
}

#[test]
fn gathering() {
    let lacks = "needs parameters that are not gathered; put 0UNSHARD before it";
    check(Level::Compute, "0F0,0UNSHARD,0RESHARD\n", &[&format!("rank 0, position 0: 0F0 {lacks}")]);
    check(Level::Compute, "0UNSHARD,0F0,0RESHARD,0B0\n", &[&format!("rank 0, position 3: 0B0 {lacks}")]);
    check(Level::Compute, "0RESHARD,0UNSHARD,0F0\n", &[&format!("rank 0, position 0: 0RESHARD {lacks}")]);
    check(
        Level::Compute,
        "0UNSHARD,0UNSHARD,0F0\n",
        &["rank 0, position 1: 0UNSHARD gathers parameters that are already gathered; drop it, \
           or put 0RESHARD before it"],
    );
    check(Level::Full, "0F0\n", &[&format!("rank 0, position 0: 0F0 {lacks}")]);
}

#[test]
fn reduction() {
    check(
        Level::Compute,
        "0F0,0F1,0B0,0REDUCE_GRAD,0B1\n",
        &["rank 0, position 4: 0B1 adds to gradients that are already reduced; put 0REDUCE_GRAD after it"],
    );
    check(
        Level::Full,
        "0UNSHARD,0F0,0B0\n",
        &[
            "rank 0, position 3: 0REDUCE_GRAD is missing; add it to this rank",
            "rank 0, position 3: 0WAIT_REDUCE_GRAD is missing; add it to this rank",
        ],
    );
    check(Level::Full, "0UNSHARD,0F0\n", &[]);
}

#[test]
fn all_violations_are_reported_and_absurd_numbers_are_counted() {
    check(
        Level::Compute,
        "0F0,0F0,0B1,0F1\n",
        &[
            "rank 0, position 1: 0F0 occurs a second time, first at position 0; drop one of them",
            "rank 0, position 4: 0B0 is missing; add it to this rank",
            "rank 0, position 2: 0B1 needs 0F1, which comes only at position 3; move one of them",
        ],
    );
    let program = parse_program(&vec!["0F0"; 5001].join(",")).expect("a program");
    let violations = validate(program, Level::Compute).expect_err("5,000 duplicates");
    assert_eq!((violations.listed().len(), violations.omitted()), (1000, 4000));
    assert!(
        violations
            .to_string()
            .starts_with("unsound program, 5000 violations; the first: rank 0, position 1: ")
    );
    assert_eq!(violations.into_program().row(Rank::new(0)).len(), 5001);
}

/// Checks the violations of a program whose microbatches have `slices` slices.
fn check_slices(slices: u32, rows: &str, expected: &[&str]) {
    let program = parse_program(rows).unwrap_or_else(|error| panic!("{error}"));
    let program = program.with_slices(Slices::new(slices).expect("not 0")).expect("whole microbatches");
    assert_eq!(messages(program, Level::Compute), expected);
}

#[test]
fn slices_run_forward_in_order_and_backward_in_reverse() {
    check_slices(2, "0F0,0F1,0B1,0B0\n", &[]);
    check_slices(2, "0F0,0F1,0F2,0I1,0F3,0B3,0I0,0W1,0W0,0B2\n", &[]);
    check_slices(1, "0F1,0F0,0B0,0B1\n", &[]);
    // The order of whole microbatches is free.
    check_slices(2, "0F2,0F0,0F3,0B3,0F1,0B1,0B0,0B2\n", &[]);
    check_slices(
        3,
        "0F3,0F4,0F5,0F1,0F0,0F2,0B5,0B4,0B3,0B2,0B1,0B0\n",
        &[
            "rank 0, position 3: 0F1 needs 0F0, which comes only at position 4: at stage 0, slice 1 of microbatch 0 \
           attends to the keys and values of slice 0; move one of them",
        ],
    );
    check_slices(
        2,
        "0F0,0F1,0F2,0F3,0B1,0B0,0I2,0B3,0W2\n",
        &[
            "rank 0, position 6: 0I2 needs 0B3, which comes only at position 7: at stage 0, slice 1 of microbatch 1 adds \
           to the gradients of the keys and values of slice 0; move one of them",
        ],
    );
    // Both halves of an overlap start together.
    check_slices(2, "0F0,0F1,0F2,0B1,(0F3;0B0)OVERLAP_F_B,0B3,0B2\n", &[]);
    // A slice that is missing is reported once.
    check_slices(
        2,
        "0F0,0F1,0F3,0B1,0B0,0B3,0B2\n",
        &["rank 0, position 7: 0F2 is missing; add it to this rank"],
    );
}

#[test]
fn slices_make_whole_microbatches() {
    let program = parse_program("0F0,0F1,0F2\n").expect("a program");
    let error = program.with_slices(Slices::new(2).expect("not 0")).expect_err("a slice is missing");
    let message =
        "the actions number 3 slices, which do not make microbatches of 2; use a number that divides 3";
    assert_eq!(error.to_string(), message);
}

/// Returns the format in which PyTorch loads rows, or why it does not.
fn loaded(rows: &str) -> Result<LoaderFormat, Vec<String>> {
    let (program, cells) = (parse_program(rows).expect("a program"), parse_rows(rows).expect("rows"));
    check_pytorch_loader(&program, &cells)
        .map_err(|refused| refused.listed().iter().map(ToString::to_string).collect())
}

/// What PyTorch's `_load_csv` reads, and what it refuses although it is sound.
#[test]
fn the_verdict_of_the_loader_agrees() {
    let golden: Value =
        serde_json::from_str(include_str!("golden/loader_2_15.json")).expect("golden data is JSON");
    let cases = golden.as_array().expect("a list of cases");
    assert_eq!(cases.len(), 19);
    for case in cases {
        let found = loaded(case["rows"].as_str().expect("rows"));
        assert_eq!(found.is_ok(), case["pytorch"] == "read", "{}: {found:?}", case["name"]);
    }
}

#[test]
fn what_pytorch_does_not_load_is_explained() {
    let refuse =
        |rows: &str, expected: &[&str]| assert_eq!(loaded(rows).expect_err("it is refused"), expected);
    refuse(
        "0F0,0SEND_F0,0F1,0SEND_F1,,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
        &[
            "rank 0, position 4: PyTorch takes no empty cell in rows that do more than compute; remove it",
            "rank 0, position 1: PyTorch does not load a send without a wait, nor 1 more in this row; run the pass wait-send",
            "rank 1, position 3: PyTorch does not load a send without a wait, nor 1 more in this row; run the pass wait-send",
        ],
    );
    refuse(
        "0F0,0OFFLOAD0,0RELOAD0,0B0\n",
        &[
            "rank 0, position 1: PyTorch does not know this action, nor 1 more in this row; lower the schedule without the pass \
           offload",
        ],
    );
    refuse(
        "0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD,1WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD\n",
        &[
            "rank 0, position 5: 0REDUCE_GRAD starts while the reduction of stage 1 is pending, and PyTorch allows one for a \
           rank; use reduce-grad=deferred",
        ],
    );
    refuse(
        "0F0,0F1\n1F0,1I0,1F1,1B1\n",
        &[
            "rank 0, position 2: stage 0 has 0 backwards, and PyTorch needs one for each of 2 microbatches",
            "rank 1, position 4: stage 1 has 1 I and 0 W, and PyTorch needs as many of both",
        ],
    );
    refuse(
        "0F0,0B0,0REDUCE_GRAD\n",
        &["rank 0, position 2: 0REDUCE_GRAD has no wait, which PyTorch needs; add 0WAIT_REDUCE_GRAD"],
    );
    assert_eq!(loaded("0F0,,0B0\n"), Ok(LoaderFormat::ComputeOnly));
    assert_eq!(loaded("0UNSHARD,0F0,0B0,0RESHARD\n"), Ok(LoaderFormat::ComputeComms));
}
