//! Tables of the state machine: each row has a state, an event and the decision.

use super::*;
use crate::fault::Fault;
use crate::launch::answer::Refusal;
use crate::launch::watch::Seen;
use pipewright_schedule::Rank;
use pipewright_schedule::slow_ranks::SpeedChange;

/// Returns hosts whose names are letters, with two slots each.
fn hosts(letters: &str) -> Vec<Host> {
    letters.chars().map(|letter| Host { name: letter.to_string(), slots: 2 }).collect()
}

/// Events, each with the decision after it.
type Steps = Vec<(Event, &'static str)>;

/// A launch of four processes on hosts whose names are letters.
struct Launched {
    machine: Machine,
    all: String,
    at: Moment,
}

impl Launched {
    fn new(all: &str, restarts: u64) -> Self {
        Self::of_kind(HostKind::Shared, all, restarts)
    }

    fn of_kind(kind: HostKind, all: &str, restarts: u64) -> Self {
        let (folder, deadline) = (PathBuf::from("out"), Duration::from_secs(10));
        let rules = Rules { folder, deadline, restarts, kind };
        let machine = Machine::new(rules, hosts(all), 4);
        Self { machine, all: all.to_owned(), at: Moment::default() }
    }

    /// Returns a launch whose first attempt runs on the hosts `a` and `b`.
    fn running(all: &str, restarts: u64) -> Self {
        Self::new(all, restarts).run(all)
    }

    /// Starts the first attempt, on the first two hosts.
    fn run(mut self, all: &str) -> Self {
        let launched = &mut self;
        launched.check(Event::Launched, "ask all, which meet");
        let first = launched.answers(all);
        launched.check(first, "prepare 0 on ab");
        launched.check(Event::Prepared(Ok(())), "start 0 on ab");
        launched.check(looked(true), "wait");
        self
    }

    /// Returns the answers of the hosts `answering`.
    fn answers(&self, answering: &str) -> Event {
        let answer = |host| if answering.contains(host) { Ok(()) } else { Err(Refusal::Silent) };
        Event::Answered(Ok(self.all.chars().map(answer).collect()))
    }

    /// Checks the decision after an event, which is a second after the one before.
    fn check(&mut self, event: Event, expected: &str) {
        self.at.time += Duration::from_secs(1);
        let shown = format!("{event:?}");
        let decision = show(self.machine.on(event, &self.at));
        assert!(decision.starts_with(expected) && !expected.is_empty(), "{decision}\nafter {shown}");
    }

    /// Checks the decisions after further events.
    fn check_all(&mut self, rows: impl IntoIterator<Item = (Event, &'static str)>) {
        rows.into_iter().for_each(|(event, expected)| self.check(event, expected));
    }
}

/// Returns the words of a decision.
fn show(decision: Decision) -> String {
    let names = |hosts: &[Host]| names_of(hosts, |_| true).concat();
    let on = |start: Start| format!("{} on {}", start.record.number(), names(&start.hosts));
    match decision {
        Decision::Ask(Patience::First) => "ask all, which meet".to_owned(),
        Decision::Ask(Patience::Once) => "ask once".to_owned(),
        Decision::Ask(Patience::UntilOneAnswers) => "ask until one answers".to_owned(),
        Decision::AskAside(hosts) => format!("ask {} aside", names(&hosts)),
        Decision::Fit(slots) => format!("fit {slots}"),
        Decision::AwaitSpace(space) => format!("await {space} bytes"),
        Decision::Prepare(start) => format!("prepare {}", on(start)),
        Decision::Start(start) => format!("start {}", on(start)),
        Decision::Launcher(Order::Wait) => "wait".to_owned(),
        Decision::Launcher(Order::Save) => "save".to_owned(),
        Decision::Launcher(order) => format!("{order:?}"),
        Decision::RequestGrowth(hosts) => format!("request growth onto {}", hosts.concat()),
        Decision::KeepSlow => "keep slow".to_owned(),
        Decision::End(Ok(())) => "success".to_owned(),
        Decision::End(Err(error)) => format!("{:?}: {}", error.kind, error.full_text()),
    }
}

fn looked(has_joined: bool) -> Event {
    Event::Looked(Look { seen: Seen { has_joined, ..Seen::default() }, ..Look::default() })
}

/// Returns a look that finds rank 2 slow, which is on the second host.
fn slow() -> Event {
    slow_rank(2)
}

fn slow_rank(rank: u32) -> Event {
    let change = SpeedChange { rank: Rank::new(rank), is_slow: true, slowdown: 3.0 };
    Event::Looked(Look { slow: vec![SlowRank::after(7, &change, 1)], ..Look::default() })
}

fn returned(letters: &str) -> Event {
    let returned = Some(Returned { hosts: hosts(letters), refusal: None });
    Event::Looked(Look { returned, ..Look::default() })
}

/// Returns the end of processes with an exit code that have resumed the run.
fn code(code: i32) -> Ended {
    let status = format!("exit status: {code}");
    Ended { code: Some(code), status, is_second: true, has_resumed: true, ..Ended::default() }
}

/// Returns the end of processes that have left a fault in a step.
fn fault(step: u64) -> Ended {
    let (cause, summary) = ("NaN".to_owned(), format!("step {step}: NaN"));
    let fault = Fault { step, cause, summary: summary.clone(), ..Fault::default() };
    Ended { fault: Some((fault, summary)), is_second: false, ..code(4) }
}

/// Starts the attempt of this number on `ab` again.
fn restart(launched: &mut Launched, number: u64) {
    let answers = launched.answers("ab");
    launched.check(answers, "fit 4");
    launched.check(Event::Fitted(Ok(4)), &format!("prepare {number} on ab"));
    launched.check(Event::Prepared(Ok(())), &format!("start {number} on ab"));
}

#[test]
fn the_first_attempt_needs_all_hosts() {
    let rows: [(&str, &str, &str); 4] = [
        ("abc", "abc", "prepare 0 on ab"),
        ("abc", "ab", "WrongInput: the host c does not answer"),
        ("a", "a", "WrongInput: the run needs 4 processes, and the hosts take 2"),
        ("", "", "prepare 0 on "),
    ];
    for (all, answering, expected) in rows {
        let mut launched = Launched::new(all, 3);
        launched.check(Event::Launched, "ask all, which meet");
        let answers = launched.answers(answering);
        launched.check(answers, expected);
    }
    let mut launched = Launched::new("ab", 3);
    launched.check(Event::Launched, "ask all, which meet");
    launched.check(Event::Answered(Err(RunError::input("no file"))), "WrongInput: no file");
}

/// Each row has the end of an attempt, whether a signal has asked for it, whether the folder is lost, and the decision.
#[test]
fn an_end_is_judged() {
    let unresumed = Ended { has_resumed: false, ..code(2) };
    let second = Ended { is_second: true, ..fault(7) };
    let rows: [(Ended, bool, bool, &str); 19] = [
        (code(0), false, false, "success"),
        (code(0), true, true, "success"),
        (code(2), false, false, "WrongInput: "),
        (code(3), false, false, "CheckFailed: "),
        (code(4), false, false, "ask until one answers"),
        (code(5), false, false, "Interrupted: "),
        (code(5), true, false, "Interrupted: "),
        (code(70), false, false, "Bug: "),
        (code(137), false, false, "ask until one answers"),
        (
            code(4),
            true,
            false,
            "Interrupted: stopped by a signal before the processes had saved a checkpoint",
        ),
        (fault(7), false, false, "ask until one answers"),
        (fault(7), true, false, "RankFailed: step 7: NaN"),
        (second, false, false, "ask until one answers"),
        (unresumed, false, false, "WrongInput: the processes ended before they had resumed the run"),
        (Ended { is_slow: true, ..code(5) }, true, false, "Interrupted: stopped by a signal; resume with: "),
        (code(4), false, true, "RankFailed: out: gone"),
        (code(5), false, true, "RankFailed: out: gone"),
        (code(5), true, true, "Interrupted: "),
        (code(70), false, true, "Bug: "),
    ];
    for (ended, is_asked, is_lost, expected) in rows {
        let mut launched = Launched::running("ab", 3);
        launched.at.is_asked = is_asked;
        launched.at.loss = is_lost.then(|| "out: gone".to_owned());
        launched.check(Event::Ended(ended), expected);
    }
    Launched::running("ab", 0).check(Event::Ended(fault(7)), "RankFailed: step 7: NaN");
    Launched::running("ab", 3).check(Event::Failed(RunError::input("no mpirun")), "WrongInput: no mpirun");
}

#[test]
fn a_run_continues_until_its_restarts_are_used_or_a_fault_repeats() {
    let mut launched = Launched::running("ab", 2);
    for number in [1, 2] {
        launched.check(Event::Ended(fault(7 + number)), "ask until one answers");
        restart(&mut launched, number);
    }
    launched.check(Event::Ended(fault(10)), "RankFailed: the run has used its 2 restarts");
    let mut launched = Launched::running("ab", 2);
    launched.check(Event::Ended(fault(7)), "ask until one answers");
    restart(&mut launched, 1);
    launched.check(Event::Ended(fault(7)), "RankFailed: the first failure:\nstep 7: NaN");
}

/// Each row has the hosts that answer after a fault, whether the folder is lost then, and what follows.
#[test]
fn the_next_attempt_is_prepared_or_refused() {
    let none = || Event::Fitted(Err(None));
    let error = || RunError::input("it is in use");
    let refused = "WrongInput: the run failed:\nstep 7: NaN\nand it cannot be resumed:\nit is in use";
    let rows: [(&str, bool, Steps); 5] = [
        (
            "a",
            false,
            vec![(Event::Fitted(Ok(2)), "prepare 1 on a"), (Event::Prepared(Ok(())), "start 1 on a")],
        ),
        ("", false, vec![(none(), "RankFailed: the run failed:\nstep 7")]),
        ("", true, vec![(none(), "RankFailed: out: gone")]),
        (
            "ac",
            false,
            vec![(Event::Fitted(Ok(4)), "prepare 1 on ac"), (Event::Prepared(Err(error())), refused)],
        ),
        (
            "ac",
            true,
            vec![
                (Event::Fitted(Ok(4)), "prepare 1 on ac"),
                (Event::Prepared(Ok(())), "RankFailed: out: gone"),
            ],
        ),
    ];
    for (answering, is_lost, events) in rows {
        let mut launched = Launched::running("abc", 3);
        launched.check(Event::Ended(fault(7)), "ask until one answers");
        launched.at.loss = is_lost.then(|| "out: gone".to_owned());
        let answers = launched.answers(answering);
        launched.check(answers, &format!("fit {}", 2 * answering.len()));
        launched.check_all(events);
    }
}

#[test]
fn a_signal_after_a_fault_ends_the_run_with_the_fault() {
    for event in [Event::Prepared(Ok(())), Event::Prepared(Err(RunError::input("stopped")))] {
        let mut launched = Launched::running("ab", 3);
        launched.check(Event::Ended(fault(7)), "ask until one answers");
        let answers = launched.answers("ab");
        launched.check_all([(answers, "fit 4"), (Event::Fitted(Ok(4)), "prepare 1 on ab")]);
        launched.at.is_asked = true;
        launched.check(event, "RankFailed: step 7: NaN");
    }
}

/// Each row says whether the disk has space after the wait, whether a signal came, and the decision.
#[test]
fn a_run_whose_disk_is_full_waits_for_space() {
    let rows = [
        (true, false, "ask until one answers"),
        (true, true, "RankFailed: step 1: the disk is full"),
        (false, false, "RankFailed: the disk did not have the 9 B"),
    ];
    for (has_space, is_asked, expected) in rows {
        let mut launched = Launched::running("ab", 3);
        launched.check(Event::Ended(Ended { space: Some(9), ..code(4) }), "await 9 bytes");
        let note = "step 1: the disk is full; the run waits for space on the disk";
        assert_eq!(launched.machine.notes, [note]);
        launched.at.is_asked = is_asked;
        launched.check(Event::Space(has_space), expected);
    }
}

#[test]
fn a_signal_is_passed_on_once() {
    let mut launched = Launched::running("ab", 3);
    launched.at.is_asked = true;
    launched.check_all([
        (looked(true), "save"),
        (looked(true), "wait"),
        (Event::Ended(code(5)), "Interrupted: "),
    ]);
}

/// Each row has the hosts that answer the question about a slow one, and what follows.
#[test]
fn slow_hosts_are_replaced_if_others_answer() {
    let mut launched = Launched::running("abc", 3);
    launched.check(slow(), "ask once");
    let answers = launched.answers("ac");
    launched.check_all([
        (answers, "wait"),
        (slow(), "save"),
        (slow(), "wait"),
        (Event::Ended(code(5)), "ask until one answers"),
    ]);
    let answers = launched.answers("abc");
    let next =
        [(answers, "fit 4"), (Event::Fitted(Ok(4)), "prepare 1 on ac"), (Event::Prepared(Ok(())), "start 1")];
    launched.check_all(next);

    let mut launched = Launched::running("abc", 3);
    let answers = launched.answers("ab");
    launched.check_all([(slow(), "ask once"), (answers, "keep slow"), (looked(true), "wait")]);
    // A record that cannot be removed hides neither the launcher nor a signal.
    let mut launched = Launched::running("ab", 3);
    launched.check_all([(slow(), "keep slow"), (slow(), "wait"), (slow(), "wait")]);
    launched.at.is_asked = true;
    launched.check(slow(), "save");
    Launched::running("abc", 0).check(slow(), "keep slow");
    // A fault while the processes save a checkpoint is a fault.
    let mut launched = Launched::running("abc", 3);
    let answers = launched.answers("abc");
    launched.check_all([
        (slow(), "ask once"),
        (answers, "wait"),
        (Event::Ended(fault(7)), "ask until one answers"),
    ]);
    let answers = launched.answers("abc");
    launched.check_all([(answers, "fit 4"), (Event::Fitted(Ok(4)), "prepare 1 on ac")]);
}

/// Returns a run that continues with two of its four processes on the host `a` after the loss of `b`.
fn smaller() -> Launched {
    let mut launched = Launched::running("ab", 3);
    launched.check(Event::Ended(fault(7)), "ask until one answers");
    launched.machine.note_mesh(4, Some(4));
    let answers = launched.answers("a");
    launched.check_all([
        (answers, "fit 2"),
        (Event::Fitted(Ok(2)), "prepare 1 on a"),
        (Event::Prepared(Ok(())), "start 1 on a"),
        (looked(true), "wait"),
    ]);
    launched
}

#[test]
fn a_smaller_run_grows_again() {
    let mut launched = smaller();
    launched.at.time += Duration::from_secs(10);
    launched.check_all([
        (looked(true), "ask b aside"),
        (looked(true), "wait"),
        (returned(""), "wait"),
        (looked(true), "wait"),
    ]);
    launched.at.time += Duration::from_secs(10);
    launched.check_all([
        (looked(true), "ask b aside"),
        (returned("b"), "fit 4"),
        (Event::Fitted(Ok(4)), "request growth onto b"),
        (Event::GrowthRequested(true), "wait"),
        (returned("b"), "wait"),
        (Event::Ended(code(5)), "ask until one answers"),
    ]);
    let answers = launched.answers("ab");
    launched.check_all([
        (answers, "fit 4"),
        (Event::Fitted(Ok(4)), "prepare 2 on ab"),
        (Event::Prepared(Ok(())), "start 2 on ab"),
    ]);
    // The processes there fail before the run has resumed, so it continues without `b`, which is left out then.
    let unresumed = Ended { has_resumed: false, ..code(2) };
    launched.check(Event::Ended(unresumed), "ask until one answers");
    let answers = launched.answers("ab");
    launched.check_all([
        (answers, "fit 2"),
        (Event::Fitted(Ok(2)), "prepare 3 on a"),
        (Event::Prepared(Ok(())), "start 3 on a"),
    ]);
    launched.at.time += Duration::from_secs(12);
    launched.check(looked(true), "wait");
}

/// Each row has the events after hosts have returned.
#[test]
fn a_run_does_not_grow_onto_hosts_that_do_not_help() {
    let rows: [Steps; 2] = [
        vec![(Event::Fitted(Ok(2)), "wait")],
        vec![(Event::Fitted(Ok(4)), "request growth onto b"), (Event::GrowthRequested(false), "wait")],
    ];
    for events in rows {
        let mut launched = smaller();
        launched.at.time += Duration::from_secs(10);
        launched.check_all([(looked(true), "ask b aside"), (returned("b"), "fit 4")]);
        launched.check_all(events);
        launched.check(returned("b"), "wait");
        launched.check(Event::Ended(code(5)), "Interrupted: ");
    }
}

#[test]
fn processes_that_are_late_are_ended_and_start_again() {
    let mut launched = Launched::running("ab", 3);
    launched.check(Event::Ended(code(4)), "ask until one answers");
    restart(&mut launched, 1);
    // The first start took no time.
    for _ in 0..21 {
        launched.check(looked(false), "wait");
    }
    launched.check(looked(false), "End");
    let ended = Ended { code: None, ..Ended { has_resumed: false, ..code(0) } };
    launched.check(Event::Ended(ended), "ask until one answers");
}

#[test]
fn an_event_of_another_state_is_a_bug() {
    Launched::new("ab", 3).check(looked(true), "Bug: a launch does not expect");
    Launched::running("ab", 3).check(Event::Space(true), "Bug: a launch does not expect");
}

#[test]
fn a_run_whose_hosts_share_no_folder_continues_only_with_its_first_host() {
    let apart = |restarts| {
        let mut launched = Launched::of_kind(HostKind::Apart, "abc", restarts).run("abc");
        launched.check(Event::Ended(fault(7)), "ask until one answers");
        launched
    };
    let mut launched = apart(3);
    let answers = launched.answers("ac");
    launched.check_all([(answers, "fit 4"), (Event::Fitted(Ok(4)), "prepare 1 on ac")]);
    let mut launched = apart(3);
    let answers = launched.answers("bc");
    let refusal =
        "RankFailed: the run failed:\nstep 7: NaN\nand it cannot be resumed:\nthe host a has the files of";
    launched.check(answers, refusal);

    // A first host that is slow keeps the files.
    let mut launched = Launched::of_kind(HostKind::Apart, "abc", 3).run("abc");
    let answers = launched.answers("abc");
    launched.check_all([(slow_rank(0), "ask once"), (answers, "keep slow")]);
    let mut launched = Launched::of_kind(HostKind::Apart, "abc", 3).run("abc");
    let answers = launched.answers("abc");
    launched.check_all([(slow(), "ask once"), (answers, "wait")]);
}
