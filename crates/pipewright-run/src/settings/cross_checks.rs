//! Checks that compare keys of several sections. They run only if no key has a problem by itself, because
//! they would compare defaults that the user did not write.

use pipewright::train::Decay;
use pipewright::verification::Verify;
use pipewright_document::Problem;
use pipewright_models::PreferenceKind;
use pipewright_models::training_memory::ComputeDevices;
use pipewright_schedule::generate::find;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::words::counted;
use pipewright_schedule::{Recompute, Slices};

use crate::settings::checkpoints::Copies;
use crate::settings::data::BYTES;
use crate::settings::document::Document;
use crate::settings::keys::LARGEST_COUNT;
use crate::settings::mesh::{BATCH_SHARES, EXPERTS, LOOKAHEAD};
use crate::settings::offload::OffloadPlace;
use crate::settings::paths::Surroundings;
use crate::settings::pipeline::{AUTO, ScheduleChoice, TransportChoice};
use crate::settings::replan::Replan;
use crate::settings::run::Exact;
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
    checks.check_tokens();
    checks.check_validation();
    checks.check_preference();
    checks.check_lookahead();
    checks.check_profile_ranks();
    checks.check_experts();
    checks.check_shares();
    checks.check_batch_shares();
    checks.check_run();
    if let Some(slices) = source.map(slices_of).filter(|slices| !slices.is_one()) {
        checks.check_slices(slices);
        checks.check_moves_of_slices();
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

/// Returns a setting with which layers cannot move, and a key and a value with which they can.
fn unmovable(settings: &Settings) -> Option<(&'static str, &'static str)> {
    let Settings { mesh, pipeline, run, .. } = settings;
    let refused: [(bool, &str, &str); 4] = [
        (
            mesh.tensor_parallel > 1,
            "ranks that compute each stage together (`mesh.tensor_parallel`)",
            "tensor_parallel = 1` in [mesh]",
        ),
        (
            mesh.expert_parallel > 1,
            "replicas that hold experts together (`mesh.expert_parallel`)",
            "expert_parallel = 1` in [mesh]",
        ),
        (
            pipeline.offload.place().is_some(),
            "tensors that leave memory (`pipeline.offload`)",
            "offload = \"none\"` in [pipeline]",
        ),
        (run.verify != Verify::Off, "steps that are verified (`run.verify`)", "verify = \"off\"` in [run]"),
    ];
    refused.into_iter().find(|(is_set, ..)| *is_set).map(|(_, what, instead)| (what, instead))
}

/// Returns the key of a phase of the learning rate that is longer than the run, with a sentence about it.
pub(crate) fn long_phase(settings: &Settings) -> Option<(&'static str, String)> {
    let (optimizer, steps) = (&settings.optimizer, settings.run.steps);
    let (warmup_steps, restart_at) = (optimizer.warmup_steps, optimizer.restart_at);
    let decay_steps = optimizer.decay_steps.filter(|_| optimizer.schedule == Decay::Wsd).unwrap_or(0);
    let since_restart = steps.saturating_sub(restart_at);
    let after_warmup = since_restart.saturating_sub(warmup_steps);
    let run = counted(steps, "step");
    if restart_at > 0 && restart_at >= steps {
        Some(("restart_at", format!("`restart_at` is {restart_at}, and the run has {run}")))
    } else if warmup_steps > steps {
        let sentence = format!(
            "`warmup_steps` is {warmup_steps}, and the run has {run}: the learning rate never reaches its highest"
        );
        Some(("warmup_steps", sentence))
    } else if warmup_steps > since_restart {
        let sentence = format!(
            "`warmup_steps` is {warmup_steps}, and `restart_at` is {restart_at} of {run}: the learning rate never reaches \
             its highest again"
        );
        Some(("warmup_steps", sentence))
    } else if decay_steps > after_warmup {
        let restart =
            if restart_at > 0 { format!("`restart_at` = {restart_at} and ") } else { String::new() };
        let rest = counted(after_warmup, "step");
        let sentence =
            format!("`decay_steps` is {decay_steps}, and after {restart}the warm-up, the run has {rest}");
        Some(("decay_steps", sentence))
    } else {
        None
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
        if !self.is_sound() || self.settings.run.epochs.is_some() {
            return;
        }
        if let Some((key, sentence)) = long_phase(self.settings) {
            self.report_too_long(key, sentence);
        }
    }

    /// Refuses tokens that no tokenizer gets.
    fn check_tokens(&mut self) {
        if !self.settings.model.added_tokens().is_empty() && self.settings.data.tokenizer == BYTES {
            let advice = "name the `tokenizer.json` of the model";
            self.section("model").report_without("add_tokens", "a tokenizer (`data.tokenizer`)", advice);
        }
    }

    /// Refuses layers that would move under a schedule of slices.
    fn check_moves_of_slices(&mut self) {
        if self.settings.run.replan == Replan::WhenSlow {
            let sentence = "layers cannot move to other ranks (`replan`) with a schedule that cuts microbatches into slices";
            let help =
                "write for example `schedule = \"1f1b\"` in [pipeline], or `replan = \"never\"` in [run]";
            self.section("run").report("replan", sentence, help);
        }
    }

    /// Reports a phase that does not fit into the run, at the key that was written last.
    fn report_too_long(&mut self, key: &str, sentence: String) {
        let help = format!("lower `{key}` in [optimizer], or raise `steps` in [run]");
        let is_phase_argument = self.section("optimizer").is_argument(key);
        if self.section("run").is_argument("steps") && !is_phase_argument {
            return self.section("run").report("steps", sentence, help);
        }
        self.section("optimizer").report(key, sentence, help);
    }

    /// Refuses a key if it has no effect without something else.
    fn refuse_if(&mut self, has_none: bool, section: &'static str, key: &str, other: &str, advice: &str) {
        if has_none {
            self.section(section).report_without(key, other, advice);
        }
    }

    /// Refuses keys of a run that have no effect without others.
    fn check_run(&mut self) {
        let Settings { run, mesh, pipeline, .. } = self.settings;
        let is_ramped = run.rampup_steps > 0 && run.accumulate.get() == 1;
        let other = "accumulated batches (`accumulate` is 1)";
        let advice = "write `accumulate` in [run], or remove the key";
        self.refuse_if(is_ramped, "run", "rampup_steps", other, advice);

        let is_idle = mesh.keep_gathered && run.accumulate.get() == 1;
        self.refuse_if(is_idle, "mesh", "keep_gathered", other, advice);

        let is_copied = run.copies == Copies::Neighbour;
        let (other, advice) = if run.copy_every == 0 {
            ("copies of the state (`copy_every` is 0)", "write `copy_every = 1` in [run], or remove the key")
        } else {
            (
                "processes (`pipeline.transport` is \"local\")",
                "start the run with `pipewright launch`, which makes each rank a process, or write `copies = \"machine\"`",
            )
        };
        let is_local = pipeline.transport == TransportChoice::Local;
        self.refuse_if(is_copied && (run.copy_every == 0 || is_local), "run", "copies", other, advice);

        if let Some((what, instead)) = unmovable(self.settings).filter(|_| run.replan == Replan::WhenSlow) {
            let sentence = format!("layers cannot move to other ranks (`replan`) with {what}");
            let help = format!("write `{instead}, or `replan = \"never\"` in [run]");
            self.section("run").report("replan", sentence, help);
        }

        let is_everywhere = run.exact == Exact::Everywhere;
        let other = "the processor (`device` is another one, which adds in an order of its own)";
        let advice = "write `device = \"flex\"` in [run], or `exact = \"processor\"`";
        self.refuse_if(is_everywhere && !run.devices.are_processor(), "run", "exact", other, advice);

        let is_verified = run.verify != Verify::Off;
        let other = "the processor (`device` is another one, whose bits may differ each time)";
        let advice = "write `device = \"flex\"` in [run], or remove the key";
        self.refuse_if(is_verified && !run.devices.are_processor(), "run", "verify", other, advice);
        let other = "verified steps (`verify` is \"off\")";
        let advice = "write `verify = \"on-suspicion\"` in [run], or remove the key";
        self.refuse_if(!is_verified && run.replace_wrong, "run", "replace_wrong", other, advice);

        let to_host = pipeline.offload.place() == Some(OffloadPlace::Host);
        let devices = run.devices.compute_devices(mesh.ranks(pipeline.ranks));
        let other = "a device other than the processor (`run.device`), whose tensors are in the host's memory already";
        let is_there = to_host && devices != ComputeDevices::Others;
        self.refuse_if(is_there, "pipeline", "offload", other, "write `offload = \"file\"`, or remove it");
    }

    /// Refuses keys of evaluations that have no effect, or that would evaluate a model on inputs that it does
    /// not have in training.
    fn check_validation(&mut self) {
        if !self.is_sound() {
            return;
        }
        let Settings { data, run, .. } = self.settings;
        let advice = "write `validation` or `validation_share` in [data], or `eval_every = 0`";
        let is_blind = run.eval_every > 0 && !data.has_validation();
        self.refuse_if(is_blind, "run", "eval_every", "validation data", advice);
        let of_evaluations = [
            ("patience", run.patience > 0),
            ("eval_batches", run.eval_batches > 0),
            ("sample_prompts", !run.sample_prompts.is_empty()),
        ];
        for (key, is_written) in of_evaluations {
            let advice = "write `eval_every` in [run], or remove the key";
            let is_idle = is_written && run.eval_every == 0;
            self.refuse_if(is_idle, "run", key, "evaluations (`eval_every` is 0)", advice);
        }
        let (has_files, has_side) = (!data.validation.is_empty(), data.validation_side.is_some());
        let advice =
            "the rows that `validation_share` holds out have the side inputs of `side`: remove the key";
        self.refuse_if(has_side && !has_files, "data", "validation_side", "`validation`", advice);
        let is_lacking = data.side.is_some() && has_files && !has_side;
        let other = "side inputs, which the training data has";
        let advice = "write `validation_side`, a file with side inputs for the rows of `validation`";
        self.refuse_if(is_lacking, "data", "validation", other, advice);
    }

    /// Refuses training on preferences or labels without what its loss needs.
    fn check_preference(&mut self) {
        let Settings { preference, adapter, data, pipeline, run, .. } = self.settings;
        if !self.is_sound() {
            return;
        }
        let has_labels = !data.labels.is_empty();
        let advice = "name .jsonl, .json or .parquet files with such records as `path` in [data]";
        self.refuse_if(has_labels && data.is_built_in(), "data", "labels", "records with labels", advice);
        for key in data.unfit_for_labels().into_iter().filter(|_| has_labels) {
            let sentence = format!("`{key}` does not work with training on labels (`labels`)");
            self.section("data").report(key, sentence, format!("remove `{key}`"));
        }
        let Some(preference) = preference.as_ref() else { return };
        if has_labels {
            let sentence = "`labels` does not work with preference training (`preference.loss`)".to_owned();
            self.section("data").report("labels", sentence, "remove `labels`");
        }
        let needs = preference.loss.needs_reference() && adapter.is_none();
        let advice = "add a section [adapter] with `kind = \"lora\"`, or write `loss = \"orpo\"` or `\"simpo\"`, which need no reference";
        self.refuse_if(
            needs,
            "preference",
            "loss",
            "adapters: its reference is the model without them",
            advice,
        );
        let is_single = preference.loss == PreferenceKind::Kto && pipeline.microbatch_size == 1;
        let other =
            "several rows in a microbatch (`pipeline.microbatch_size` is 1), whose completions it exchanges";
        self.refuse_if(
            is_single,
            "preference",
            "loss",
            other,
            "write `microbatch_size = 2` or more in [pipeline]",
        );
        let advice = "name .jsonl, .json or .parquet files with such records as `path` in [data]";
        let other = "records with completions";
        self.refuse_if(data.is_built_in(), "preference", "loss", other, advice);
        for key in data.unfit_for_labels() {
            let sentence = format!("`{key}` does not work with preference training (`preference.loss`)");
            self.section("data").report(key, sentence, format!("remove `{key}`"));
        }
        if run.label_smoothing > 0.0 {
            let sentence =
                "`label_smoothing` smooths the targets of tokens, and preference training has none"
                    .to_owned();
            let help = "remove it; `label_smoothing` in [preference] is the share of wrong labels";
            self.section("run").report("label_smoothing", sentence, help);
        }
    }

    /// Refuses a lookahead that does not fit the window or the ranks of the pipeline.
    fn check_lookahead(&mut self) {
        let Settings { mesh, pipeline, .. } = self.settings;
        let unfit = mesh.unshard().and_then(|config| config.check(pipeline.ranks).err());
        if let Some(error) = unfit.filter(|_| self.is_sound()) {
            let mut section = self.section("mesh");
            let place = section.place(LOOKAHEAD);
            section.problems.push(Problem::new(place, format!("`{LOOKAHEAD}`: {error}")));
        }
    }

    /// Refuses another number of ranks of a profile than the run has.
    fn check_profile_ranks(&mut self) {
        let Settings { mesh, pipeline, .. } = self.settings;
        let (named, ranks) = (pipeline.profile_ranks.len() as u64, mesh.ranks(pipeline.ranks));
        if named > 0 && named != u64::from(ranks) && self.is_sound() {
            let sentence =
                format!("`profile_ranks` names {}, and the run has {ranks}", counted(named, "rank"));
            let help = "name one rank of the profile for each rank of the run, or remove the key";
            self.section("pipeline").report("profile_ranks", sentence, help);
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
            self.section("mesh").out_of_range::<()>(EXPERTS, &experts.to_string(), &range);
            return;
        }
        if !mesh.mesh(1).groups_fit() {
            let sizes: Vec<String> = mesh.mesh(1).expert_sizes().iter().map(u32::to_string).collect();
            let range = format!(
                "{}, for groups of {} replicas that hold the other parameters together (`data_parallel`),",
                sizes.join(" or "),
                mesh.shards()
            );
            self.section("mesh").out_of_range::<()>(EXPERTS, &experts.to_string(), &range);
            return;
        }
        let others = [
            ("mesh", "whole_experts", mesh.whole_experts && mesh.tensor_parallel > 1),
            ("run", "device", !run.devices.are_processor()),
        ];
        for (section, key, _) in others.into_iter().filter(|(_, _, is_set)| *is_set) {
            let sentence = format!(
                "`{key}` does not work with {experts} replicas that hold the experts together (`mesh.expert_parallel`)"
            );
            let help = format!("leave `{key}` out, or write `expert_parallel = 1` in [mesh]");
            self.section(section).report(key, sentence, help);
        }
    }

    /// Refuses rows whose tokens the tensor ranks cannot share equally.
    fn check_shares(&mut self) {
        let Settings { data, mesh, .. } = self.settings;
        let ranks = mesh.tensor_parallel;
        if !self.is_sound() || !mesh.sequence_parallel || data.seq_len.is_multiple_of(ranks) {
            return;
        }
        let sentence = format!(
            "`seq_len` is {}, and {ranks} tensor ranks that share the tokens of a row (`mesh.sequence_parallel`) need a multiple \
             of {ranks}",
            data.seq_len
        );
        let help = format!("write a multiple of {ranks}, or leave `sequence_parallel` out");
        self.section("data").report("seq_len", sentence, help);
    }

    /// Refuses shares of the batch that are not one for each replica, or with which a microbatch has no whole number of
    /// rows.
    fn check_batch_shares(&mut self) {
        let Settings { mesh, pipeline, .. } = self.settings;
        let (shares, replicas, size) = (&mesh.batch_shares, mesh.data_parallel, pipeline.microbatch_size);
        if !self.is_sound() || shares.is_empty() {
            return;
        }
        let found = if shares.len() != replicas as usize {
            let sentence = format!(
                "`{BATCH_SHARES}` has {}, and the mesh has {}",
                counted(shares.len(), "share"),
                counted(replicas, "replica")
            );
            Some((sentence, "write one share for each replica (`data_parallel`)".to_owned()))
        } else if mesh.microbatch_rows(size).is_none() {
            let sentence = format!(
                "with `{BATCH_SHARES} = {shares:?}`, microbatches of {} (`pipeline.microbatch_size`) on average do not have whole \
                 numbers of rows in each replica",
                counted(size, "row")
            );
            let step = mesh.microbatch_step();
            let next = u64::from(size).div_ceil(step).saturating_mul(step);
            let possible = u32::try_from(next).ok().filter(|next| *next <= LARGEST_COUNT);
            let help = match possible.and_then(|next| mesh.microbatch_rows(next)) {
                Some(_) => format!(
                    "write a `microbatch_size` that is a multiple of {step}, such as {next}, or other shares"
                ),
                None => "write smaller shares, or shares with a common divisor".to_owned(),
            };
            Some((sentence, help))
        } else if pipeline.schedule == ScheduleChoice::Named(AUTO.to_owned()) {
            let sentence = format!(
                "`{BATCH_SHARES}` does not work with the schedule `{AUTO}`, which plans for replicas of equal speed"
            );
            Some((sentence, format!("remove `{BATCH_SHARES}`, or name a schedule")))
        } else {
            None
        };
        if let Some((sentence, help)) = found {
            self.section("mesh").report(BATCH_SHARES, sentence, help);
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
            let sentence = format!("`seq_len` is {}, where {range} is expected", data.seq_len);
            let help = format!("write {range}");
            if self.section("data").is_written("seq_len") {
                self.section("data").report("seq_len", sentence, help);
            } else {
                let mut section = self.section("pipeline");
                let key = section.first_of(&["slices", "schedule"]);
                section.report(key, sentence, help);
            }
        }
        let needs_whole = [
            ("preference", "loss", self.settings.preference.is_some()),
            ("data", "packed", data.packed),
            ("data", "side", data.side.is_some()),
            ("pipeline", "recompute", pipeline.recompute != Recompute::None),
            ("mesh", "tensor_parallel", mesh.tensor_parallel > 1),
        ];
        for (section, key, _) in needs_whole.into_iter().filter(|(_, _, is_set)| *is_set) {
            let sentence =
                format!("`{key}` does not work with a schedule that cuts microbatches into slices");
            let help = format!("leave `{key}` out, or write for example `schedule = \"1f1b\"` in [pipeline]");
            self.section(section).report(key, sentence, help);
        }
    }
}
