//! Checks that compare keys of several sections. They run only if no key has a problem by itself, because
//! they would compare defaults that the user did not write.

use pipewright::train::Decay;
use pipewright::verification::Verify;
use pipewright_models::training_memory::ComputeDevices;
use pipewright_schedule::generate::find;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::{Recompute, Slices};

use crate::settings::checkpoints::Copies;
use crate::settings::document::Document;
use crate::settings::mesh::{EXPERTS, LOOKAHEAD};
use crate::settings::offload::OffloadPlace;
use crate::settings::paths::Surroundings;
use crate::settings::pipeline::TransportChoice;
use crate::settings::place::Place;
use crate::settings::problem::ProblemKind;
use crate::settings::section::Section;
use crate::settings::whole::Settings;

/// Refuses settings that contradict each other. `source` is the source of the program, unless a plan chooses
/// it.
pub(super) fn check(
    document: &mut Document,
    surroundings: &Surroundings,
    settings: &Settings,
    source: Option<&ProgramSource>,
) {
    let mut checks = CrossChecks { document, surroundings, settings };
    checks.check_rate();
    checks.check_validation();
    checks.check_rampup();
    checks.check_lookahead();
    checks.check_experts();
    checks.check_copies();
    checks.check_verify();
    checks.check_offload();
    if let Some(slices) = source.map(slices_of).filter(|slices| !slices.is_one()) {
        checks.check_slices(slices);
    }
}

/// Returns the number of slices into which a program cuts each microbatch.
fn slices_of(source: &ProgramSource) -> Slices {
    match source {
        ProgramSource::Named(name, spec) => {
            find(name).map_or(Slices::ONE, |generator| generator.slices_of(spec))
        }
        ProgramSource::Schedule(schedule) => schedule.slices(),
        ProgramSource::Rows(rows) => rows.slices(),
    }
}

struct CrossChecks<'a> {
    document: &'a mut Document,
    surroundings: &'a Surroundings,
    settings: &'a Settings,
}

impl CrossChecks<'_> {
    fn section(&mut self, name: &'static str) -> Section<'_> {
        Section::new(self.document, self.surroundings, name)
    }

    fn is_sound(&self) -> bool {
        self.document.problems.is_empty()
    }

    /// Refuses phases of the learning rate that are longer than the run.
    fn check_rate(&mut self) {
        if !self.is_sound() {
            return;
        }
        let (optimizer, steps) = (&self.settings.optimizer, self.settings.run.steps);
        let (warmup_steps, restart_at) = (optimizer.warmup_steps, optimizer.restart_at);
        let decay_steps = optimizer.decay_steps.filter(|_| optimizer.schedule == Decay::Wsd).unwrap_or(0);
        let since_restart = steps.saturating_sub(restart_at);
        let after_warmup = since_restart.saturating_sub(warmup_steps);
        if restart_at > 0 && restart_at >= steps {
            self.report_too_long("restart_at", ProblemKind::LateRestart { restart_at, steps });
        } else if warmup_steps > steps {
            self.report_too_long("warmup_steps", ProblemKind::LongWarmup { warmup_steps, steps });
        } else if warmup_steps > since_restart {
            let kind = ProblemKind::LongSecondWarmup { warmup_steps, restart_at, steps };
            self.report_too_long("warmup_steps", kind);
        } else if decay_steps > after_warmup {
            self.report_too_long(
                "decay_steps",
                ProblemKind::LongDecay { decay_steps, restart_at, steps: after_warmup },
            );
        }
    }

    /// Reports a phase that does not fit into the run, at the key that was written last.
    fn report_too_long(&mut self, key: &'static str, kind: ProblemKind) {
        let is_argument = |section: &Section<'_>, key| matches!(section.place(key), Place::Set { .. });
        let is_phase_argument = is_argument(&self.section("optimizer"), key);
        if is_argument(&self.section("run"), "steps") && !is_phase_argument {
            return self.section("run").report("steps", kind);
        }
        self.section("optimizer").report(key, kind);
    }

    /// Refuses steps in which the number of batches cannot rise.
    fn check_rampup(&mut self) {
        let run = &self.settings.run;
        if run.rampup_steps > 0 && run.accumulate.get() == 1 {
            let (key, other) = ("rampup_steps", "accumulated batches (`accumulate` is 1)");
            let advice = "write `accumulate` in [run], or remove the key";
            self.section("run").report(key, ProblemKind::Without { key, other, advice });
        }
    }

    /// Refuses copies on a neighbour in a run that makes no copies, or that has one process.
    fn check_copies(&mut self) {
        let (run, transport) = (&self.settings.run, self.settings.pipeline.transport);
        let (other, advice) = match (run.copies, run.copy_every, transport) {
            (Copies::Machine, ..) | (Copies::Neighbour, 1.., TransportChoice::Mpi) => return,
            (Copies::Neighbour, 0, _) => (
                "copies of the state (`copy_every` is 0)",
                "write `copy_every = 1` in [run], or remove the key",
            ),
            (Copies::Neighbour, _, TransportChoice::Local) => (
                "processes (`pipeline.transport` is \"local\")",
                "start the run with `pipewright launch`, which makes each rank a process, or write `copies = \"machine\"`",
            ),
        };
        self.section("run").report("copies", ProblemKind::Without { key: "copies", other, advice });
    }

    /// Refuses to verify steps on devices that may compute other bits each time, and to replace hosts of wrong
    /// ranks without verification.
    fn check_verify(&mut self) {
        let run = &self.settings.run;
        if run.verify != Verify::Off && !run.devices.are_processor() {
            let (key, other) =
                ("verify", "the processor (`device` is another one, whose bits may differ each time)");
            let advice = "write `device = \"flex\"` in [run], or remove the key";
            self.section("run").report(key, ProblemKind::Without { key, other, advice });
        }
        if run.verify == Verify::Off && run.replace_wrong {
            let (key, other) = ("replace_wrong", "verified steps (`verify` is \"off\")");
            let advice = "write `verify = \"on-suspicion\"` in [run], or remove the key";
            self.section("run").report(key, ProblemKind::Without { key, other, advice });
        }
    }

    /// Refuses to move tensors of the processor to the host's memory, where they are.
    fn check_offload(&mut self) {
        let Settings { run, mesh, pipeline, .. } = self.settings;
        let to_host = pipeline.offload.place() == Some(OffloadPlace::Host);
        let devices = run.devices.compute_devices(mesh.ranks(pipeline.ranks));
        if to_host && devices != ComputeDevices::Others {
            let key = "offload";
            let other = "a device other than the processor (`run.device`), whose tensors are in the host's memory already";
            let advice = "write `offload = \"file\"`, or remove it";
            self.section("pipeline").report(key, ProblemKind::Without { key, other, advice });
        }
    }

    /// Refuses keys of evaluations that have no effect, or that would evaluate a model on inputs that it does
    /// not have in training.
    fn check_validation(&mut self) {
        if !self.is_sound() {
            return;
        }
        let Settings { data, run, .. } = self.settings;
        let mut refuse = |section, key, other, advice| {
            self.section(section).report(key, ProblemKind::Without { key, other, advice });
        };
        if run.eval_every > 0 && !data.has_validation() {
            let advice = "write `validation` or `validation_share` in [data], or `eval_every = 0`";
            refuse("run", "eval_every", "validation data", advice);
        }
        if run.eval_every == 0 {
            let advice = "write `eval_every` in [run], or remove the key";
            for (key, is_written) in [
                ("patience", run.patience > 0),
                ("eval_batches", run.eval_batches > 0),
                ("sample_prompts", !run.sample_prompts.is_empty()),
            ] {
                if is_written {
                    refuse("run", key, "evaluations (`eval_every` is 0)", advice);
                }
            }
        }
        let has_files = !data.validation.is_empty();
        if data.validation_side.is_some() && !has_files {
            let advice =
                "the rows that `validation_share` holds out have the side inputs of `side`: remove the key";
            refuse("data", "validation_side", "`validation`", advice);
        }
        if data.side.is_some() && has_files && data.validation_side.is_none() {
            let advice = "write `validation_side`, a file with side inputs for the rows of `validation`";
            refuse("data", "validation", "side inputs, which the training data has", advice);
        }
    }

    /// Refuses a lookahead that does not fit the window or the ranks of the pipeline.
    fn check_lookahead(&mut self) {
        let Settings { mesh, pipeline, .. } = self.settings;
        let unfit = mesh.unshard().and_then(|config| config.check(pipeline.ranks).err());
        if let Some(error) = unfit.filter(|_| self.is_sound()) {
            self.section("mesh").report(LOOKAHEAD, error.into());
        }
    }

    /// Refuses replicas that hold the experts together and do not form groups, or have another setting that
    /// does not work with them.
    fn check_experts(&mut self) {
        let Settings { mesh, run, .. } = self.settings;
        let (experts, replicas) = (mesh.expert_parallel, mesh.data_parallel);
        if experts == 1 || !self.is_sound() {
            return;
        }
        if mesh.mesh(1).expert_groups().is_none() {
            let range = format!(
                "{replicas}, the number of replicas (`data_parallel`), or a divisor of it that is a power of two,"
            );
            let kind = ProblemKind::OutOfRange { key: EXPERTS, value: experts.to_string(), range };
            return self.section("mesh").report(EXPERTS, kind);
        }
        if !mesh.mesh(1).groups_fit() {
            let sizes: Vec<String> = mesh.mesh(1).expert_sizes().iter().map(u32::to_string).collect();
            let range = format!(
                "{}, for groups of {} replicas that hold the other parameters together (`data_parallel`),",
                sizes.join(" or "),
                mesh.shards()
            );
            let kind = ProblemKind::OutOfRange { key: EXPERTS, value: experts.to_string(), range };
            return self.section("mesh").report(EXPERTS, kind);
        }
        let others = [
            ("mesh", "whole_experts", mesh.whole_experts && mesh.tensor_parallel > 1),
            ("run", "device", !run.devices.are_processor()),
        ];
        for (section, key, _) in others.into_iter().filter(|(_, _, is_set)| *is_set) {
            self.section(section).report(key, ProblemKind::BesideExperts { key, experts });
        }
    }

    /// Refuses rows that do not divide into slices, and settings that need whole microbatches.
    fn check_slices(&mut self, slices: Slices) {
        if !self.is_sound() {
            return;
        }
        let Settings { data, pipeline, mesh, .. } = self.settings;
        if !data.seq_len.is_multiple_of(slices.get()) {
            let range = format!("a multiple of {slices}, the number of slices,");
            let kind = ProblemKind::OutOfRange { key: "seq_len", value: data.seq_len.to_string(), range };
            if self.section("data").is_written("seq_len") {
                self.section("data").report("seq_len", kind);
            } else {
                self.section("pipeline").report_at_first_of(&["slices", "schedule"], kind);
            }
        }
        let needs_whole = [
            ("data", "packed", data.packed),
            ("data", "side", data.side.is_some()),
            ("pipeline", "recompute", pipeline.recompute != Recompute::None),
            ("mesh", "tensor_parallel", mesh.tensor_parallel > 1),
        ];
        for (section, key, _) in needs_whole.into_iter().filter(|(_, _, is_set)| *is_set) {
            self.section(section).report(key, ProblemKind::BesideSlices { key });
        }
    }
}
