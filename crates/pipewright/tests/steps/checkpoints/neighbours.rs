//! Copies of the state in the memories of two machines. Each machine also holds the copies of the other
//! machine.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use pipewright::byte_channel::ByteChannel;
use pipewright::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriter, CopyExchange, CopyFolder, CopyTarget, GatheredCopy,
};
use pipewright::ids::WorldRank;
use pipewright::pipeline::Pipeline;
use tempfile::TempDir;

use super::{DEADLINE, adamw, folder, launch, parameters, state, take_steps};

/// Two processes on two machines, with the folders of their copies.
struct Machines {
    _scratch: TempDir,
    folders: [CopyFolder; 2],
    writers: Vec<CheckpointWriter>,
}

/// Starts the processes in `receive`, which also take the copies that are sent to them.
fn machines(receive: &[usize], deadline: Duration) -> Machines {
    let scratch = folder();
    let folders = ["a", "b"].map(|name| CopyFolder::create(&scratch.path().join(name)).expect("a folder"));
    let channels = ByteChannel::group(2);
    let start = |index: usize| {
        let (channel, folder) = (channels[index].clone(), folders[index].clone());
        Arc::new(CopyExchange::start(channel, folder, deadline).expect("a thread"))
    };
    let writers = receive.iter().map(|&index| {
        let neighbour = Some((start(index), WorldRank::new(1 - index as u32)));
        let (folder, series) = (folders[index].clone(), "first".to_owned());
        CheckpointWriter::copy(CopyTarget { folder, files: 2, series, neighbour }, DEADLINE)
    });
    let writers = writers.collect::<Result<_, _>>().expect("a thread");
    Machines { folders, writers, _scratch: scratch }
}

impl Machines {
    /// Makes the copy of a step: each process has one rank.
    fn copy(&mut self, pipeline: &mut Pipeline, step: u64) {
        for (index, writer) in self.writers.iter_mut().enumerate() {
            let mut part = state(pipeline, step);
            part.ranks = vec![part.ranks.remove(index)];
            writer.save(part).expect("nothing is under way");
        }
        for writer in &mut self.writers {
            writer.wait().expect("it is written and sent");
        }
    }

    /// Returns the complete copies on these machines.
    fn complete(&self, machines: &[usize]) -> Vec<GatheredCopy> {
        let parts: Vec<_> =
            machines.iter().map(|&index| self.folders[index].parts().expect("a folder")).collect();
        GatheredCopy::gather(&parts)
    }
}

#[test]
fn each_machine_has_the_whole_state_and_a_run_resumes_from_it() {
    let mut machines = machines(&[0, 1], DEADLINE);
    let mut pipeline = launch("1f1b", 2, adamw());
    for step in 1..=5 {
        take_steps(&mut pipeline, step - 1..step);
        machines.copy(&mut pipeline, step);
    }
    for (index, folder) in machines.folders.iter().enumerate() {
        let copies = machines.complete(&[index]);
        let steps: Vec<u64> = copies.iter().map(GatheredCopy::step).collect();
        assert_eq!(steps, [5, 4, 3], "earlier copies are removed");
        folder.assemble(&copies[0]).expect("all files are here");
        let copy = Arc::new(Checkpoint::open(&folder.committed(5)).expect("a sound checkpoint"));
        assert_eq!(copy.manifest().files.len(), 2);
        let mut whole = launch("gpipe", 1, adamw());
        whole.restore(&copy).expect("it is restored");
        assert_eq!(parameters(&mut whole), parameters(&mut pipeline), "machine {index}");
        assert_eq!(machines.complete(&[index])[0].step(), 5, "a copy from which a run has resumed");
    }
}

#[test]
fn a_file_that_was_damaged_on_its_way_is_found() {
    let mut machines = machines(&[0, 1], DEADLINE);
    let mut pipeline = launch("1f1b", 2, adamw());
    machines.copy(&mut pipeline, 1);
    let copy = machines.complete(&[1]).remove(0);
    let [own, received] = [1, 0].map(|index| &copy.manifest().files[index]);
    let path = machines.folders[1].path().join(".saving-00000001").join(&received.name);
    let mut bytes = fs::read(&path).expect("the file");
    *bytes.last_mut().expect("a tensor") ^= 1;
    fs::write(&path, bytes).expect("the file");
    machines.folders[1].check_file(1, own).expect("the other file is sound");
    let error = machines.folders[1].check_file(1, received).expect_err("another hash");
    assert!(error.to_string().contains("the file is damaged"), "{error}");
    machines.folders[0].check_file(1, received).expect("the machine that wrote it has it");
}

#[test]
fn a_machine_keeps_its_own_copies_if_its_neighbour_is_silent() {
    let mut machines = machines(&[0], Duration::from_millis(200));
    let mut pipeline = launch("1f1b", 2, adamw());
    let writer = &mut machines.writers[0];
    for step in 1..=2 {
        writer.save(state(&mut pipeline, step)).expect("nothing is under way");
        let outcome = writer.wait();
        if step == 1 {
            let error = outcome.expect_err("nobody receives");
            assert!(matches!(&error, CheckpointError::NotSent { .. }), "{error}");
            assert!(
                error.to_string().contains("rank 1 has confirmed nothing of a copy for 0.2 s"),
                "{error}"
            );
        } else {
            outcome.expect("later copies are not sent");
        }
    }
    let steps: Vec<u64> = machines.complete(&[0]).iter().map(GatheredCopy::step).collect();
    assert_eq!(steps, [2, 1]);
}
