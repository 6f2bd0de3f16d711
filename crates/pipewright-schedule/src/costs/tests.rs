//! Tests of the text form of costs, and of their checks.

use super::*;

fn check(text: &str, [forward, input, weight, full, hop]: [f64; 5]) {
    let costs: Costs = text.parse().expect(text);
    let stage = costs.stages[0];
    let found =
        [stage.forward, stage.input_backward, stage.weight_backward, stage.backward, costs.link.latency];
    assert_eq!(found, [forward, input, weight, full, hop], "{text}");
}

fn check_error(text: &str, message: &str) {
    assert_eq!(text.parse::<Costs>().expect_err(text).to_string(), message);
}

fn check_refusal(costs: &Costs, stages: u32, message: &str) {
    assert_eq!(costs.check(stages).expect_err(message).to_string(), message);
}

#[test]
fn what_is_left_out_has_a_default() {
    check("", [1.0, 1.0, 1.0, 2.0, 0.0]);
    check("F=1,I=1,W=1,hop=0.1", [1.0, 1.0, 1.0, 2.0, 0.1]);
    check(" w = 3 , B=1e-3", [1.0, 0.0, 3.0, 1e-3, 0.0]);
}

#[test]
fn the_halves_of_a_backward_follow_from_it() {
    check("B=4", [1.0, 2.0, 2.0, 4.0, 0.0]);
    check("B=4,I=1", [1.0, 1.0, 3.0, 4.0, 0.0]);
    check("W=0.5,B=4", [1.0, 3.5, 0.5, 4.0, 0.0]);
    check("I=1,W=1,B=1.5", [1.0, 1.0, 1.0, 1.5, 0.0]);
}

#[test]
fn each_stage_may_have_its_own() {
    let costs: Costs = "F=1:2:3,W=0.5,B=4:5:6".parse().expect("three stages");
    let found: Vec<_> = costs.stages.iter().map(|stage| (stage.forward, stage.backward)).collect();
    assert_eq!(found, [(1.0, 4.0), (2.0, 5.0), (3.0, 6.0)]);
    let halves: Vec<_> =
        costs.stages.iter().map(|stage| (stage.input_backward, stage.weight_backward)).collect();
    assert_eq!(halves, [(3.5, 0.5), (4.5, 0.5), (5.5, 0.5)]);
    check_error("F=1:2,I=1:2:3", "2 entries for the costs of 3 stages; give one for all, or one each");
}

#[test]
fn attention_is_a_share() {
    assert_eq!("F=2,attention=0.25".parse::<Costs>().map(|costs| costs.attention), Ok(0.25));
    check_error("attention=1.5", "the cost `attention` is 1.5; use a share of `F` and `I` from 0 to 1");
    check_error("attention=nan", "the cost `attention` is NaN; use a share of `F` and `I` from 0 to 1");
}

#[test]
fn exchanges_are_in_forwards_and_backwards() {
    let exchanges = |text: &str| {
        text.parse::<Costs>().expect(text).stages.iter().map(|stage| stage.exchanges).collect::<Vec<_>>()
    };
    let both = |count, seconds| StageExchanges::both(Exchanges::new(count, seconds));
    assert_eq!(exchanges("F=2"), [StageExchanges::default()]);
    assert_eq!(exchanges("exchange=0.5"), [both(2, 0.5)]);
    assert_eq!(exchanges("exchange=0:0.5,exchanges=8"), [StageExchanges::default(), both(8, 0.5)]);
    check_error("exchange=-1", "the cost `exchange` is -1; use a number of seconds from 0 to 1e12");
    for count in ["501", "1.5", "0", "-1", "NaN"] {
        let message = format!("an action has {count} exchanges; use a whole number from 1 to 500");
        check_error(&format!("exchange=1,exchanges={count}"), &message);
    }
    assert_eq!(exchanges("exchange=1,exchanges=500"), [both(500, 1.0)]);
    check_error(
        "exchanges=8",
        "`exchanges` is the number of exchanges in an action, and nothing says how long they take; add their time, such as \
         `exchange=0.5`, or leave `exchanges` out",
    );
    let many = StageCosts { exchanges: both(501, 1.0), ..StageCosts::new(1.0, 1.0, 1.0) };
    let costs = Costs { stages: vec![many], ..Costs::default() };
    check_refusal(&costs, 1, "an action has 501 exchanges; use a whole number from 1 to 500");
}

#[test]
fn stages_have_times_of_their_gathering() {
    let times = |text: &str| {
        let costs: Costs = text.parse().expect("costs");
        costs.stages.iter().map(|stage| stage.unshard).collect::<Vec<_>>()
    };
    assert_eq!(times("F=2"), [0.0]);
    assert_eq!(times("unshard=0.3:0.1"), [0.3, 0.1]);
    check_error("unshard=-1", "the cost `UNSHARD` is -1; use a number of seconds from 0 to 1e12");
}

#[test]
fn mistakes_are_named() {
    let usage = "write `F=1,I=1,W=1,B=2,hop=0.1,exchange=0.5,exchanges=8,offload=0.2,unshard=0.3`, and leave out what is not needed";
    check_error("F=1,X=2", &format!("`X=2` is not a cost; {usage}"));
    check_error("F", &format!("`F` is not a cost; {usage}"));
    check_error("F=1,F=2", "the cost `f` is given twice; leave one out");
    check_error("hop=1,w=2,HOP=1", "the cost `hop` is given twice; leave one out");
    check_error("hop=1:2", &format!("`hop=1:2` is not a cost; {usage}"));
    check_error("F=1:", &format!("`F=1:` is not a cost; {usage}"));
    check_error("F=one", &format!("`F=one` is not a cost; {usage}"));
    let range = "use a number of seconds from 0 to 1e12";
    check_error("F=-1", &format!("the cost `F` is -1; {range}"));
    check_error("hop=inf", &format!("the cost `hop` is inf; {range}"));
    check_error("W=nan", &format!("the cost `W` is NaN; {range}"));
    check_error("F=1e308", &format!("the cost `F` is 1e308; {range}"));
    check_error("B=1e13", &format!("the cost `B` is 10000000000000; {range}"));
}

#[test]
fn a_link_must_move() {
    let costs = Costs { link: Link { latency: 0.0, bandwidth: 0.0 }, ..Costs::default() };
    check_refusal(&costs, 1, "a link's bandwidth is 0; use at least 1 byte a second");
}

#[test]
fn a_skip_connection_leads_to_a_later_stage() {
    let check = |from, to| {
        let (from, to) = (StageIndex::new(from), StageIndex::new(to));
        let skips = vec![SkipTransfer { from, to, bytes: 1 }];
        Costs { skips, ..Costs::default() }.check(3).map_err(|error| error.to_string())
    };
    assert_eq!(check(0, 2), Ok(()));
    let message = |from, to| {
        format!(
            "a skip connection from stage {from} to stage {to} of 3; let it lead to a later stage that exists"
        )
    };
    assert_eq!(check(1, 1), Err(message(1, 1)));
    assert_eq!(check(0, 3), Err(message(0, 3)));
}

#[test]
fn a_stage_has_its_part_of_the_costs_of_a_rank() {
    let check = |of_rank: &str, stages, expected: &str| {
        let costs = |text: &str| text.parse::<Costs>().expect(text);
        assert_eq!(costs(of_rank).shared(stages), costs(expected), "{of_rank} for {stages} stages");
    };
    check("F=1,B=3,hop=0.5", 2, "F=0.5,B=1.5,hop=0.5");
    check("F=4,I=2,W=1,B=5,attention=0.5", 4, "F=1,I=0.5,W=0.25,B=1.25,attention=0.5");
    check("exchange=1,exchanges=4", 2, "F=0.5,I=0.5,W=0.5,exchange=0.5,exchanges=2");
    check("F=1:2", 2, "F=1:2");
    check("F=1", 0, "F=1");
}

#[test]
fn entries_are_for_all_stages_or_one_each() {
    let costs = Costs { stages: vec![StageCosts::new(1.0, 1.0, 1.0); 3], ..Costs::default() };
    assert_eq!(costs.check(3), Ok(()));
    check_refusal(&costs, 4, "3 entries for the costs of 4 stages; give one for all, or one each");
}
