//! Slurm: the hosts of an allocation, the command that starts processes there, and the return of lost nodes.
//!
//! With `--no-kill`, Slurm takes a lost node from the allocation, and does not give it back when the node
//! registers again. But another job can get the node and hand it over (`--dependency=expand`), if the cluster
//! has `SchedulerParameters=permit_job_expansion`.

use std::env;
use std::process::Command;
use std::time::Duration;

use pipewright_system::private_folder::TemporaryFolder;

use crate::error::RunError;
use crate::launch::hosts::Host;
use crate::launch::short_command::{Printed, run};

/// The longest time in which Slurm names the hosts of an allocation.
const LONGEST_ANSWER: Duration = Duration::from_secs(60);

/// The time within which Slurm must give a free node to the other job.
const SECONDS_FOR_NODE: u32 = 10;

/// The longest time of a command of Slurm.
const LIMIT: Duration = Duration::from_secs(30);

/// The options of the allocation, which the other job must have too, with the variables that have their
/// values.
const OPTIONS: [(&str, &str); 7] = [
    ("partition", "SLURM_JOB_PARTITION"),
    ("account", "SLURM_JOB_ACCOUNT"),
    ("qos", "SLURM_JOB_QOS"),
    ("cpus-per-task", "SLURM_CPUS_PER_TASK"),
    ("mem", "SLURM_MEM_PER_NODE"),
    ("mem-per-cpu", "SLURM_MEM_PER_CPU"),
    ("gpus-per-node", "SLURM_GPUS_PER_NODE"),
];

/// Returns the hosts of an allocation, in Slurm's order.
///
/// # Errors
/// Fails if Slurm does not name them.
pub(super) fn hosts_of(nodes: &str) -> Result<Vec<Host>, RunError> {
    let failed = |reason: String| {
        RunError::input(format!(
            "the hosts of the allocation are not known: `scontrol show hostnames` {reason}"
        ))
    };
    if nodes.starts_with('-') {
        return Err(RunError::input(format!(
            "SLURM_JOB_NODELIST={nodes}: this is not a list of nodes; name the hosts in a file (--hosts)"
        )));
    }
    let printed = run(Command::new("scontrol").args(["show", "hostnames", nodes]), LONGEST_ANSWER, || false);
    let printed = printed.map_err(|error| failed(format!("cannot be run: {error}")))?;
    let names = printed.stdout;
    if !printed.is_success {
        return Err(failed(printed.stderr.trim().to_owned()));
    }
    let tasks = env::var("SLURM_TASKS_PER_NODE").unwrap_or_default();
    let slots = slots_of_slurm(&tasks).ok_or_else(|| {
        RunError::input(format!(
            "SLURM_TASKS_PER_NODE={tasks}: not understood; name the hosts in a file (--hosts)"
        ))
    })?;
    let slots = slots.into_iter().chain(std::iter::repeat(1));
    let hosts = names.lines().zip(slots).map(|(name, slots)| Host::read(name, slots));
    let hosts = hosts
        .collect::<Result<Vec<Host>, String>>()
        .map_err(|mistake| failed(format!("says that {mistake}")))?;
    if hosts.is_empty() { Err(failed(format!("names none of `{nodes}`"))) } else { Ok(hosts) }
}

/// Reads the numbers of tasks of all nodes, such as `4(x2),3`.
fn slots_of_slurm(text: &str) -> Option<Vec<u32>> {
    let mut slots = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        slots.extend(std::iter::repeat_n(count.parse::<u32>().ok()?, times));
    }
    Some(slots)
}

/// Returns `srun` of Slurm, which starts the processes in the order of the hosts, as `mpirun` does. By
/// itself, it would order the nodes, and spread the tasks over all of them. The user's own settings have
/// precedence.
pub(super) fn srun(count: u32, hosts: &[Host]) -> Command {
    let mut command = Command::new("srun");
    if env::var_os("SLURM_MPI_TYPE").is_none() {
        command.arg("--mpi=pmix");
    }
    // A question to a host runs next to other steps of the allocation.
    command.args(["--kill-on-bad-exit=1", "--overlap"]);
    // A step has the processors per task of its allocation only if it asks for them.
    if let Ok(processors) = env::var("SLURM_CPUS_PER_TASK") {
        command.arg(format!("--cpus-per-task={processors}"));
    }
    let tasks = hosts.iter().flat_map(|host| std::iter::repeat_n(host.name.as_str(), host.slots as usize));
    let tasks: Vec<&str> = tasks.take(count as usize).collect();
    command.args(["--distribution=arbitrary".to_owned(), format!("--nodelist={}", tasks.join(","))]);
    // It is about the whole allocation.
    command.env_remove("SLURM_NTASKS_PER_NODE");
    command
}

/// Lets the free hosts of `hosts` that are not in the allocation any more join it again. The others stay
/// as they are, also when `is_stopped`.
///
/// # Errors
/// Returns Slurm's words about nodes that are free and cannot join.
pub(super) fn rejoin(hosts: &[Host], is_stopped: impl Fn() -> bool) -> Result<(), String> {
    let Ok(job) = env::var("SLURM_JOB_ID") else { return Ok(()) };
    let refusals = hosts.iter().filter(|host| is_free_outside(&job, &host.name, &is_stopped));
    let refusals = refusals.filter_map(|host| add(&job, host, &is_stopped).err());
    let refusals: Vec<String> = refusals.collect();
    if refusals.is_empty() || is_stopped() { Ok(()) } else { Err(refusals.join("\n")) }
}

/// Returns whether a node is not in the allocation of a job and takes further jobs.
fn is_free_outside(job: &str, node: &str, is_stopped: impl Fn() -> bool) -> bool {
    let mut jobs = Command::new("squeue");
    jobs.args(["--noheader", "--format=%A", &format!("--jobs={job}"), &format!("--nodelist={node}")]);
    let jobs = run(&mut jobs, LIMIT, &is_stopped).ok();
    let is_outside = jobs.is_some_and(|jobs| jobs.is_success && jobs.stdout.trim().is_empty());
    let mut states = Command::new("sinfo");
    states.args(["--noheader", "--format=%T", &format!("--nodes={node}")]);
    let is_free = |state: &str| matches!(state.trim(), "idle" | "mixed");
    is_outside && run(&mut states, LIMIT, is_stopped).is_ok_and(|states| states.stdout.lines().any(is_free))
}

/// Adds a free node to the allocation of a job.
///
/// # Errors
/// Returns Slurm's words if it refuses.
fn add(job: &str, Host { name: node, slots }: &Host, is_stopped: impl Fn() -> bool) -> Result<(), String> {
    let name = format!("pipewright-{job}-{node}");
    let mut get = Command::new("salloc");
    get.args(["--no-shell", "--nodes=1", &format!("--job-name={name}"), &format!("--nodelist={node}")]);
    get.args([format!("--immediate={SECONDS_FOR_NODE}"), format!("--dependency=expand:{job}")]);
    get.arg(format!("--ntasks-per-node={slots}"));
    let options = OPTIONS.iter().filter_map(|(option, variable)| Some((option, env::var(variable).ok()?)));
    get.args(options.map(|(option, value)| format!("--{option}={value}")));
    let granted = run(&mut get, LIMIT, is_stopped).ok();
    let added = granted_job(granted.as_ref()).and_then(|other| {
        // The nodes of the other job go to the job that it expands.
        let mut hand_over = Command::new("scontrol");
        hand_over.args(["update", &format!("JobId={other}"), "NumNodes=0"]);
        // It leaves scripts for shells inside the other job. Their names are known, so no other user may put links
        // under these names where it writes them.
        let folder = TemporaryFolder::create().map_err(|error| error.to_string())?;
        let handed_over = run(hand_over.current_dir(folder.path()), LIMIT, || false).ok();
        if handed_over.as_ref().is_some_and(|printed| printed.is_success) {
            return Ok(());
        }
        Err(words_of("scontrol", handed_over.as_ref()))
    });
    // The other job has no node any more, or would keep the node from the run. Best effort: it may not exist.
    let mut end = Command::new("scancel");
    let _ = run(end.args(["--quiet", &format!("--name={name}")]), LIMIT, || false);
    added.map_err(|words| {
        format!(
            "the node {node} is free, and cannot join the allocation again: {words} (it needs \
             `SchedulerParameters=permit_job_expansion` in slurm.conf)"
        )
    })
}

/// Returns the number of the job that `salloc` has got.
///
/// # Errors
/// Returns its words if it has got none.
fn granted_job(granted: Option<&Printed>) -> Result<u32, String> {
    let number = granted.filter(|printed| printed.is_success).and_then(|printed| {
        let (_, number) = printed.stderr.split_once("Granted job allocation ")?;
        number.split_whitespace().next()?.parse().ok()
    });
    number.ok_or_else(|| words_of("salloc", granted))
}

/// Returns the last words of a command of Slurm that has failed.
fn words_of(program: &str, printed: Option<&Printed>) -> String {
    let words = printed.and_then(|printed| printed.stderr.lines().rfind(|line| !line.trim().is_empty()));
    words.map_or_else(|| format!("`{program}` has not answered"), |line| format!("`{}`", line.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_job_is_in_the_words_of_salloc() {
        let check = |is_success, stderr: &str, expected: Result<u32, &str>| {
            let printed = Printed { is_success, stdout: String::new(), stderr: stderr.to_owned() };
            assert_eq!(granted_job(Some(&printed)), expected.map_err(str::to_owned), "{stderr}");
        };
        let pending = "salloc: Pending job allocation 7\n";
        check(true, &format!("{pending}salloc: Granted job allocation 7\nsalloc: Nodes b\n"), Ok(7));
        check(true, "salloc: Granted job allocation 81", Ok(81));
        check(false, &format!("{pending}salloc: error: busy\n\n"), Err("`salloc: error: busy`"));
        check(true, "", Err("`salloc` has not answered"));
        assert_eq!(granted_job(None), Err("`salloc` has not answered".to_owned()));
    }

    #[test]
    fn slurm_states_tasks_by_node() {
        assert_eq!(slots_of_slurm("4(x2),3"), Some(vec![4, 4, 3]));
        assert_eq!(slots_of_slurm("2"), Some(vec![2]));
        assert_eq!(slots_of_slurm("four"), None);
    }
}
