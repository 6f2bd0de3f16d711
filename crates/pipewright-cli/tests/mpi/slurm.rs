//! Tests of `launch` inside an allocation of Slurm, with scripts in place of Slurm's programs. The scripts
//! start the processes of all nodes on this machine. `slurm_cluster.rs` has a trial with Slurm itself.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Folder, figures, folder, pipewright, restarts, signal, train_on_threads, with_overrides, words};

/// Starts a process for each entry of the list of nodes, after `before`, or fails if a node is down. Only
/// processes on the node `WRONG` get the fault `FAULT`.
const SRUN: &str = r#"#!/bin/sh
[ "$1" != --version ] || { echo 'slurm 22.05.8'; exit; }
options=$*
while :; do
    case $1 in
    --nodelist=*) nodes=$(echo "${1#*=}" | tr , ' ') ;;
    -n) shift ;;
    -*) ;;
    *) break ;;
    esac
    shift
done
for node in $nodes; do [ ! -e "down-$node" ] || exit 1; done
[ "$2" != launch ] || exec "$@"
echo "$options" >> starts
[ ! -e before ] || . ./before
[ ! -e down-next ] || mv down-next "$(cat down-next)"
processes=
for node in $nodes; do
    fault=
    [ "$node" != "$WRONG" ] || fault="-x PIPEWRIGHT_FAULT=$FAULT"
    processes="$processes ${processes:+:} -n 1 -x SLURMD_NODENAME=$node $fault $*"
done
# Without quotes, the command becomes words.
exec mpirun --quiet --oversubscribe $processes
"#;

/// Hands the nodes of the job 8 over to the allocation, which is the job 7.
const SCONTROL: &str = r#"#!/bin/sh
case "$*" in
'show hostnames '*) echo "$3" | tr , '\n' ;;
'update JobId=8 NumNodes=0') rm "$RUN/down-b" ;;
*) exit 1 ;;
esac
"#;

/// A node that was down is not in the allocation.
const SQUEUE: &str = r#"#!/bin/sh
node=${4#--nodelist=}
[ "$3" != --jobs=7 ] || [ -e "down-$node" ] || echo 7
"#;

const SINFO: &str = "#!/bin/sh\necho idle\n";

/// Gets a job with the number 8, or refuses it if there is the file `refuse`.
const SALLOC: &str = r#"#!/bin/sh
echo "salloc $*" >> jobs
[ ! -e refuse ] || { echo 'salloc: error: Requested operation not supported' >&2; exit 1; }
echo 'salloc: Granted job allocation 8' >&2
"#;

const SCANCEL: &str = "#!/bin/sh\necho \"scancel $*\" >> jobs\n";

/// The settings of runs whose rank has computed wrong bits: a copy of the state after each step.
const WRONG: [&str; 6] = [
    "run.steps=14",
    "pipeline.microbatches=2",
    "run.verify=on-suspicion",
    "run.replace_wrong=true",
    "run.copy_every=1",
    "run.copy_folder=copies",
];

/// Returns a folder with the scripts.
fn allocation() -> Folder {
    let folder = folder();
    fs::create_dir(folder.path().join("bin")).expect("a new folder");
    fs::create_dir(folder.path().join("copies")).expect("a new folder");
    let scripts = [("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE), ("sinfo", SINFO)];
    for (name, script) in scripts.into_iter().chain([("salloc", SALLOC), ("scancel", SCANCEL)]) {
        let path = folder.path().join("bin").join(name);
        fs::write(&path, script).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the file is ours");
    }
    folder
}

/// Returns `launch` in an allocation of these nodes, with so many tasks on each, as Slurm writes them. The
/// processes on the node `wrong` have the fault.
fn launch(folder: &Path, nodes: &str, tasks: &str, (wrong, fault): (&str, &str), set: &[&str]) -> Command {
    let mut command = Command::new(pipewright());
    let path = format!("{}:{}", folder.join("bin").display(), env::var("PATH").expect("text"));
    command.current_dir(folder).env("PATH", path).env("OMPI_MCA_orte_tmpdir_base", folder);
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.env("MPIEXEC_TIMEOUT", "150").env("WRONG", wrong).env("FAULT", fault);
    command.env("SLURM_JOB_NODELIST", nodes).env("SLURM_TASKS_PER_NODE", tasks).env("SLURM_JOB_ID", "7");
    command.env("SLURM_JOB_PARTITION", "main").env("RUN", folder);
    command.args(["launch", "--"]).stdin(Stdio::null());
    with_overrides(&mut command, set);
    command
}

/// Returns the figures of a run on threads, which nothing disturbs.
pub(super) fn undisturbed(set: &[&str]) -> Vec<[String; 5]> {
    let folder = folder();
    train_on_threads(folder.path(), set)
}

/// Returns the lists of nodes of all starts.
fn node_lists(folder: &Path) -> Vec<String> {
    let starts = fs::read_to_string(folder.join("starts")).unwrap_or_default();
    let list = |line: &str| {
        line.split_whitespace().find_map(|word| word.strip_prefix("--nodelist=")).unwrap_or("").to_owned()
    };
    starts.lines().map(list).collect()
}

fn succeed(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", words(output));
    words(output)
}

#[test]
fn processes_fill_the_nodes_of_an_allocation_in_their_order() {
    let folder = allocation();
    let set = ["pipeline.ranks=4"];
    let output = launch(folder.path(), "c,a,b", "1,2(x2)", ("", ""), &set).output().expect("it starts");
    succeed(&output);
    assert_eq!(figures(folder.path()), undisturbed(&set));
    assert_eq!(node_lists(folder.path()), ["c,a,a,b"]);
    let start = fs::read_to_string(folder.path().join("starts")).expect("a start");
    assert!(start.contains("--overlap --distribution=arbitrary --nodelist=c,a,a,b -n 4 "), "{start}");
}

#[test]
fn a_node_that_is_down_is_replaced_by_a_spare_one() {
    let folder = allocation();
    // The node fails after the processes have started, and its process ends.
    fs::write(folder.path().join("down-next"), "down-b").expect("a file");
    let set = ["pipeline.ranks=2", "run.steps=8", "run.checkpoint_every=2"];
    let output =
        launch(folder.path(), "a,b,c", "1(x3)", ("b", "panic:1:6"), &set).output().expect("it starts");
    let said = succeed(&output);
    assert_eq!(figures(folder.path()), undisturbed(&set), "{said}");
    assert_eq!(node_lists(folder.path()), ["a,b", "a,c"], "{said}");
}

#[test]
fn a_node_that_does_not_answer_is_an_error_before_the_first_start() {
    let folder = allocation();
    fs::write(folder.path().join("down-b"), "").expect("a file");
    let output = launch(folder.path(), "a,b", "1(x2)", ("", ""), &["pipeline.ranks=1"]).output();
    let output = output.expect("it starts");
    let said = words(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("the node b does not answer: `srun --overlap --nodelist=b -n 1 hostname`"),
        "{said}"
    );
    assert!(node_lists(folder.path()).is_empty(), "{said}");
}

/// A run on two nodes whose second one is lost in step 6, and no longer belongs to the allocation.
struct SmallerRun {
    folder: Folder,
    launch: Child,
}

impl SmallerRun {
    const SET: [&str; 3] = ["pipeline.ranks=2", "run.checkpoint_every=20", "run.timelines=0"];

    fn start(folder: Folder) -> Self {
        fs::write(folder.path().join("down-next"), "down-b").expect("a file");
        let said = fs::File::create(folder.path().join("said")).expect("a file");
        let set = [&Self::SET[..], &["run.steps=200000", "run.deadline_seconds=5"]].concat();
        let mut command = launch(folder.path(), "a,b", "1(x2)", ("b", "panic:1:6"), &set);
        let launch = command.stdout(Stdio::null()).stderr(said).spawn().expect("it starts");
        Self { folder, launch }
    }

    fn text(&self, file: &str) -> String {
        fs::read_to_string(self.folder.path().join(file)).unwrap_or_default()
    }

    fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let since = Instant::now();
        while !is_so(self) {
            assert!(since.elapsed() < Duration::from_secs(120), "no {what}: {}", self.text("said"));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends the run, checks that it has the figures of an undisturbed one, and returns what it has said.
    fn end(mut self) -> String {
        signal(self.launch.id(), "TERM");
        let status = self.launch.wait().expect("it ends");
        let (said, found) = (self.text("said"), figures(self.folder.path()));
        assert_eq!(status.code(), Some(5), "{said}");
        let steps = format!("run.steps={}", found.len());
        assert_eq!(found, undisturbed(&[&Self::SET[..], &[&*steps]].concat()), "{said}");
        said
    }
}

#[test]
fn a_run_grows_again_onto_a_node_that_joins_its_allocation_again() {
    let run = SmallerRun::start(allocation());
    run.wait_until("growth", |run| run.text("out/metrics.jsonl").contains(r#"{"event":"growth""#));
    run.wait_until("start", |run| node_lists(run.folder.path()).len() == 3);
    assert_eq!(node_lists(run.folder.path()), ["a,b", "a", "a,b"]);
    let options = "--no-shell --nodes=1 --job-name=pipewright-7-b --nodelist=b --immediate=10 --dependency=expand:7 \
                   --ntasks-per-node=1 --partition=main";
    assert_eq!(run.text("jobs"), format!("salloc {options}\nscancel --quiet --name=pipewright-7-b\n"));
    let said = run.end();
    assert_eq!(said.matches("the host b answers; the run continues from step ").count(), 1, "{said}");
}

#[test]
fn a_node_that_slurm_does_not_give_back_is_named_once() {
    let folder = allocation();
    fs::write(folder.path().join("refuse"), "").expect("a file");
    let run = SmallerRun::start(folder);
    run.wait_until("second request", |run| run.text("jobs").matches("salloc ").count() > 1);
    assert_eq!(node_lists(run.folder.path()), ["a,b", "a"]);
    let said = run.end();
    let sentence = "the node b is free, and cannot join the allocation again: `salloc: error: Requested operation not \
                    supported` (it needs `SchedulerParameters=permit_job_expansion` in slurm.conf)";
    assert_eq!(said.matches(sentence).count(), 1, "{said}");
}

/// A run in an allocation with a rank that computes wrong bits in step 10.
struct WrongRun {
    folder: Folder,
    said: String,
    code: Option<i32>,
}

impl WrongRun {
    /// Trains on `nodes`, each with so many `tasks`, with the fault in the processes on one node.
    fn new(nodes: (&str, u32), fault: (&str, &str), set: &[&str]) -> Self {
        Self::in_folder(allocation(), nodes, fault, set)
    }

    fn in_folder(folder: Folder, (nodes, tasks): (&str, u32), fault: (&str, &str), set: &[&str]) -> Self {
        let all: Vec<&str> = WRONG.iter().chain(set).copied().collect();
        let tasks = format!("{tasks}(x{})", nodes.split(',').count());
        let output = launch(folder.path(), nodes, &tasks, fault, &all).output().expect("it starts");
        Self { folder, said: words(&output), code: output.status.code() }
    }

    /// Returns the names of the events in the metrics.
    fn events(&self) -> Vec<Value> {
        let metrics = fs::read_to_string(self.folder.path().join("out/metrics.jsonl")).expect("metrics");
        let lines = metrics.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        // A busy machine may slow a rank.
        let counts = |name: &Value| !name.is_null() && name != "slow_rank" && name != "rank_no_longer_slow";
        lines.map(|line| line["event"].clone()).filter(counts).collect()
    }

    /// Checks that the run has the figures of an undisturbed one, was started on these nodes, and says the
    /// `change` in one line, in the metrics and in the report.
    fn check_left_out(&self, set: &[&str], starts: [&str; 2], change: &str) {
        let Self { folder, said, code } = self;
        assert_eq!(*code, Some(0), "{said}");
        let set: Vec<&str> = WRONG[..2].iter().chain(set).copied().collect();
        assert_eq!(figures(folder.path()), undisturbed(&set), "{said}");
        assert_eq!(node_lists(folder.path()), starts, "{said}");
        let lines: Vec<&str> = said.lines().filter(|line| line.contains("left out")).collect();
        let [line] = &lines[..] else { panic!("one line: {said}") };
        assert!(line.contains(change), "{line}");
        let [restart] = &restarts(folder.path())[..] else { panic!("one restart: {said}") };
        let step = |key: &str| restart[key].as_u64().expect("a step");
        // A copy may take longer than a step.
        assert!(step("failed_step") == 10 && (7..=9).contains(&step("step")), "{restart}");
        let cause = restart["cause"].as_str().expect("text");
        assert!(line.contains(cause), "{restart}");
        let mut report = Command::new(pipewright());
        report.current_dir(folder.path()).args(["report", "out", "-o", "page.html"]);
        succeed(&report.output().expect("it starts"));
        let page = fs::read_to_string(folder.path().join("page.html")).expect("a page");
        assert!(page.contains("left out"), "the data of the page");
    }
}

#[test]
fn the_host_of_a_rank_with_wrong_bits_is_replaced_by_a_spare_one() {
    let set = ["pipeline.ranks=2"];
    let run = WrongRun::new(("a,b,c", 1), ("b", "flip:1:10"), &set);
    let change = "; its host b is left out; the run continues from step ";
    run.check_left_out(&set, ["a,b", "a,c"], change);
    let start = "step 10: rank 1 has computed wrong bits in action 1I0 (on ";
    assert!(run.said.contains(start), "{}", run.said);
}

#[test]
fn a_run_without_a_spare_host_continues_with_fewer_ranks() {
    let set = ["pipeline.ranks=2"];
    let run = WrongRun::new(("a,b", 1), ("b", "flip:1:10"), &set);
    run.check_left_out(&set, ["a,b", "a"], ", with 1 rank instead of 2 ");
}

#[test]
fn all_hosts_are_left_out_that_may_have_computed_wrong_bits() {
    // Each replica computes its own bits in every computation.
    let set = ["pipeline.ranks=2", "mesh.data_parallel=2"];
    let run = WrongRun::new(("a,b,c,d,e,f", 1), ("b", "flip:1:10:100"), &set);
    run.check_left_out(&set, ["a,b,c,d", "a,c,e,f"], "; the hosts b and d are left out; ");
}

/// The launcher may end the leader before it has left a record.
#[test]
fn hosts_are_left_out_although_the_leader_leaves_no_record() {
    // The leader takes the link for a record that exists.
    let before = "rm before\nmkdir -p out\nln -s nowhere out/failure.json\n";
    let check = |nodes: &str, fault: &str, set: &[&str], starts, change: &str| {
        let folder = allocation();
        fs::write(folder.path().join("before"), before).expect("a file");
        let run = WrongRun::in_folder(folder, (nodes, 1), ("b", fault), set);
        run.check_left_out(set, starts, change);
    };
    let set = ["pipeline.ranks=2"];
    check("a,b,c", "flip:1:10", &set, ["a,b", "a,c"], "; its host b is left out; ");
    // Without the ranks, this failure is final.
    let set = ["pipeline.ranks=2", "mesh.data_parallel=2"];
    check("a,b,c,d,e,f", "flip:1:10:100", &set, ["a,b,c,d", "a,c,e,f"], "; the hosts b and d are left out; ");
}

#[test]
fn a_wrong_rank_is_named_only_if_no_host_may_be_left_out() {
    let check = |run: &WrongRun, code, sentence: &str| {
        assert_eq!(run.code, Some(code), "{}", run.said);
        assert!(run.said.contains(sentence), "{}", run.said);
        assert_eq!(node_lists(run.folder.path()).len(), 1, "{}", run.said);
        assert_eq!(run.events(), ["wrong_bits"], "{}", run.said);
    };
    let right = "rank 1 has computed wrong bits in action 1I0; the right bits count (on ";
    let set = ["pipeline.ranks=2", "run.replace_wrong=false"];
    check(&WrongRun::new(("a,b,c", 1), ("b", "flip:1:10"), &set), 0, right);
    // The run has one host.
    let set = ["pipeline.ranks=2"];
    check(&WrongRun::new(("a", 2), ("a", "flip:1:10"), &set), 0, right);
    // Both hosts may have computed wrong bits.
    let set = ["pipeline.ranks=2", "mesh.data_parallel=2"];
    let none = "the run does not continue, because no host is left without a and b";
    check(&WrongRun::new(("a,b", 2), ("a", "flip:1:10:100"), &set), 4, none);
}
