//! Tests of `[pipeline]`: schedules and cuts.

use pipewright::ids::WorldRank;
use pipewright_schedule::generate::PerStage;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::{ScheduleSpec, generate};

use super::{check_set, load, load_all};
use crate::settings::pipeline::PartitionChoice;

#[test]
fn habitual_names_of_schedules_become_their_own() {
    let settings = load(None, &["pipeline.schedule=ZB-V"]).expect("an alias");
    assert_eq!(settings.pipeline.schedule.to_string(), "zbvzerobubble");
    assert_eq!(settings.pipeline.stages_per_rank, 2);
}

#[test]
fn boundaries() {
    let refuse = |arguments: &[&str], message: &str| {
        let culprit = arguments[arguments.len() - 1];
        check_set(arguments, &[&format!("--set {culprit}: {message}")]);
    };
    let explicit = "pipeline.partition=explicit";
    refuse(&[explicit], "`partition` is \"explicit\", and there are no `boundaries`");
    refuse(
        &["pipeline.boundaries=[4]"],
        "`boundaries` are given, and `partition` is not \"explicit\" or \"blocks\"",
    );
    refuse(&[explicit, "pipeline.boundaries=[2, 4]"], "2 boundaries cannot make 2 stages; give 1 boundary");
    refuse(
        &[explicit, "pipeline.ranks=3", "pipeline.boundaries=[4, 4]"],
        "boundary 4 does not come after 4; every stage needs a layer, so boundaries ascend from 1",
    );
    refuse(
        &[explicit, "pipeline.boundaries=[10]"],
        "boundary 10 is above the last of 10 layers; use one below 10",
    );
    let blocks = "pipeline.partition=blocks";
    refuse(&[blocks, "pipeline.ranks=9"], "8 blocks cannot fill 9 stages; use at most 8 stages");
    refuse(&[blocks, "pipeline.boundaries=[8]"], "boundary 8 is above the last of 8 blocks; use one below 8");
    for set in [&[blocks][..], &[blocks, "pipeline.boundaries=[3]"]] {
        load(Some(""), set).expect("a cut of eight blocks");
    }
}

#[test]
fn a_cut_by_hand() {
    let settings = load(Some(""), &["pipeline.layout=E A*3 | (A A)*2 A L"]).expect("a layout of ten layers");
    let found = (settings.pipeline.partition, settings.pipeline.boundaries);
    assert_eq!(found, (PartitionChoice::Explicit, Some(vec![4])));
    let refuse = |layout: &str, column: usize, message: &str| {
        let set = format!("pipeline.layout={layout}");
        let first = format!("--set {set}: column {column}: {message}");
        let caret = format!("  {}^", " ".repeat(column - 1));
        check_set(&[&set], &[&first, &format!("  {layout}"), &caret]);
    };
    refuse("E A*4 | | A*4 L", 9, "this stage has no layer; remove the bar, or write a layer");
    refuse("E A*4 | A*3 L", 14, "the layout has 9 layers and the model 10; write one letter for each");
    refuse(
        "E A*4 | A*5 L",
        9,
        "layer 9 of the model is of the kind `head`, and `A` is of the kind `decoder` before it; write another letter",
    );
    check_set(
        &["pipeline.partition=even", "pipeline.layout=E A*4 | A*4 L"],
        &["--set pipeline.layout=E A*4 | A*4 L: `layout` and `partition` both choose the cut"],
    );
    check_set(
        &["pipeline.partition=explicit", "pipeline.layout=E A*4 | A*4 L"],
        &["--set pipeline.layout=E A*4 | A*4 L: `layout` and `partition` both choose the cut"],
    );
    check_set(
        &["pipeline.schedule=auto", "pipeline.layout=E A*4 | A*4 L"],
        &[
            "--set pipeline.layout=E A*4 | A*4 L: `layout` has no effect without a schedule by name or from a file",
        ],
    );
    check_set(
        &["pipeline.layout=E A*4 | A*3 | A L"],
        &["--set pipeline.layout=E A*4 | A*3 | A L: the layout has 3 stages, and the schedule 2"],
    );
}

#[test]
fn sizes_beside_a_schedule_from_a_file() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let schedule = folder.path().join("s.csv");
    std::fs::write(&schedule, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n").expect("a file");
    let schedule = schedule.display();
    let check_both = |sizes: &str, argument: &str, problems: &[&str]| {
        let file = format!("[pipeline]\nschedule = \"{schedule}\"\n{sizes}");
        let arguments: &[&str] = if argument.is_empty() { &[] } else { &[argument] };
        let found = load(Some(&file), arguments).err().unwrap_or_default();
        assert_eq!(found.lines().collect::<Vec<_>>(), problems);
    };
    check_both("ranks = 2\nstages_per_rank = 1\nmicrobatches = 2", "", &[]);
    check_both("", "", &[]);
    check_both(
        "ranks = 3\nmicrobatches = 8",
        "",
        &[
            &format!("a.toml:3:9: `ranks` is 3, and the schedule in {schedule} has 2"),
            &format!("a.toml:4:16: `microbatches` is 8, and the schedule in {schedule} has 2"),
        ],
    );
    check_both(
        "",
        "pipeline.stages_per_rank=2",
        &[&format!(
            "--set pipeline.stages_per_rank=2: `stages_per_rank` is 2, and the schedule in {schedule} has 1"
        )],
    );
    check_both("microbatches = 4", "mesh.data_parallel=2", &[]);
    let argument = format!("pipeline.schedule={schedule}");
    assert!(
        load(Some("[pipeline]\nranks = 3"), &[&argument]).is_ok(),
        "an argument replaces the file's sizes"
    );
    let notes = |sizes: &str, further: &[&str]| {
        let file = format!("[pipeline]\n{sizes}");
        let notes =
            load_all(Some(&file), &[&[argument.as_str()], further].concat()).expect("no mistake").notes;
        notes
            .iter()
            .map(|note| note.split_once("a.toml ").map_or("", |(_, words)| words).to_owned())
            .collect()
    };
    let found: Vec<String> = notes("ranks = 3\nstages_per_rank = 1\nmicrobatches = 8", &[]);
    let replaced = |size: &str| format!("is replaced by {size} of {schedule}");
    assert_eq!(found, [replaced("2"), replaced("2")]);
    let found: Vec<String> = notes("ranks = 2\nmicrobatches = 2", &["mesh.data_parallel=2"]);
    assert_eq!(found, [format!("{} for 2 replicas", replaced("4"))]);
    let found: Vec<String> = notes("ranks = 2\nmicrobatches = 2", &[]);
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn settings_of_generators_are_for_schedules_that_have_them() {
    check_set(
        &["pipeline.schedule=group-interleaved", "pipeline.memory_limit=[]"],
        &["--set pipeline.memory_limit=[]: `memory_limit` is empty"],
    );
    let refuse = |arguments: &[&str], place: &str, message: &str| {
        let found = load(None, arguments).expect_err("it is refused");
        assert!(found.starts_with(&format!("--set {place}: {message}")), "{found}");
    };
    for (set, setting) in [
        ("pipeline.group_size=2", "group_size"),
        ("pipeline.wide_warmup=true", "wide_warmup"),
        ("pipeline.memory_limit=2", "memory_limit"),
        ("pipeline.costs=F=2", "costs"),
        ("pipeline.slices=2", "slices"),
        ("pipeline.overlap=true", "overlap"),
    ] {
        refuse(&[set], set, &format!("`1f1b` has no setting `{setting}`; leave it out"));
        let key = set.split(['.', '=']).nth(1).expect("a key");
        let without = format!("`{key}` has no effect without a schedule by name");
        refuse(&["pipeline.schedule=auto", set], set, &without);
    }
    let greedy = "pipeline.schedule=zb-greedy";
    refuse(&[greedy, "pipeline.costs=G=1"], "pipeline.costs=G=1", "");
    refuse(&[greedy, "pipeline.memory_limit=[1, 2, 3]"], "pipeline.memory_limit=[1, 2, 3]", "");
    refuse(
        &[greedy, "pipeline.memory_limit=0"],
        "pipeline.memory_limit=0",
        "`memory_limit` is 0, where a whole number from 1 to 2147483647 is expected",
    );
    let grouped = "pipeline.schedule=group-interleaved";
    refuse(&[grouped, "pipeline.ranks=3", "pipeline.group_size=1"], "pipeline.group_size=1", "");
    let generated = |set: &[&str]| {
        let scheduled = load_all(None, set).expect("sound arguments").scheduled().expect("a schedule");
        match scheduled.source.generated().expect("a size that was checked") {
            ProgramSource::Schedule(schedule) => schedule,
            other => panic!("{other:?}"),
        }
    };
    let four = ["pipeline.ranks=4", "pipeline.microbatches=8", "model.num_hidden_layers=8"];
    let small = generated(&[&[grouped, "pipeline.group_size=2"], &four[..]].concat());
    let spec = ScheduleSpec { ranks: 4, microbatches: 8, group_size: Some(2), ..ScheduleSpec::default() };
    assert_eq!(Ok(small), generate("group-interleaved", &spec));
    let costs = "pipeline.costs=F=1,I=1,W=3";
    let limited = generated(&[&[greedy, "pipeline.memory_limit=[4, 3, 2, 2]", costs], &four[..]].concat());
    let memory_limit = Some(PerStage::Each(vec![4, 3, 2, 2]));
    let costs = Some("F=1,I=1,W=3".parse().expect("costs"));
    let spec = ScheduleSpec { group_size: None, memory_limit, costs, ..spec };
    assert_eq!(Ok(limited), generate("zb-greedy", &spec));
    let wide = generated(
        &[&["pipeline.schedule=interleaved-zb-h1", "pipeline.wide_warmup=true"], &four[..]].concat(),
    );
    let spec = ScheduleSpec { ranks: 4, microbatches: 8, wide_warmup: true, ..ScheduleSpec::default() };
    assert_eq!(Ok(wide), generate("interleaved-zb-h1", &spec));
    let overlapped =
        generated(&[&["pipeline.schedule=interleaved1f1b", "pipeline.overlap=true"], &four[..]].concat());
    let spec = ScheduleSpec { ranks: 4, microbatches: 8, overlap: true, ..ScheduleSpec::default() };
    assert_eq!(Ok(overlapped), generate("interleaved1f1b", &spec));
}

#[test]
fn ranks_may_have_threads_of_their_own() {
    let check = |value: &str, expected: [usize; 3], written: &str| {
        let settings =
            load(None, &[&format!("pipeline.threads_per_rank={value}")]).expect("numbers of threads");
        let found = [0, 1, 2].map(|rank| settings.pipeline.threads_per_rank.of(WorldRank::new(rank)));
        assert_eq!((found, &*settings.by_key()["pipeline.threads_per_rank"]), (expected, written));
    };
    check("3", [3, 3, 3], "3");
    check("[4, 1]", [4, 1, 4], "[4, 1]");
    check("[1, 2, 3]", [1, 2, 3], "[1, 2, 3]");
    check("[2, 2]", [2, 2, 2], "2");
    let refuse = |value: &str, expected: &str| {
        let argument = format!("pipeline.threads_per_rank={value}");
        check_set(&[&argument], &[&format!("--set {argument}: `threads_per_rank` {expected}")]);
    };
    refuse("[]", "is empty");
    refuse("[2, 0]", "is [2, 0], where whole numbers from 1 to 1024 is expected");
    refuse("[1025]", "is [1025], where whole numbers from 1 to 1024 is expected");
    refuse("many", "is a text, where a whole number is expected");
}

#[test]
fn the_ranks_of_a_profile_are_as_many_as_the_ranks_of_the_run() {
    let found = |set: &[&str]| load(None, set).map(|settings| settings.pipeline.profile_ranks);
    assert_eq!(found(&["pipeline.profile_ranks=[0, 2]"]), Ok(vec![0, 2]));
    assert_eq!(found(&["pipeline.profile_ranks=[2, 0]"]), Ok(vec![2, 0]));
    assert_eq!(found(&["pipeline.profile_ranks=[]"]), Ok(Vec::new()));
    let refuse = |value: &str, expected: &str| {
        let argument = format!("pipeline.profile_ranks={value}");
        check_set(&[&argument], &[&format!("--set {argument}: `profile_ranks` {expected}")]);
    };
    refuse("[0, 1, 2]", "names 3 ranks, and the run has 2");
    let list = "where a list of different ranks, such as [0, 2] is expected";
    for wrong in ["[0, 0]", "[-1, 0]"] {
        refuse(wrong, &format!("is a list, {list}"));
    }
}
