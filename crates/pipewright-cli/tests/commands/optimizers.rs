//! Tests of the optimizers of a configuration, and of groups of parameters with settings of their own.

use std::collections::BTreeMap;

use crate::run::{Run, in_one_line, tensors};

const NAMES: [&str; 8] = [
    "optimizer.name=adamw",
    "optimizer.name=adamw_8bit",
    "optimizer.name=lion",
    "optimizer.name=adam",
    "optimizer.name=sgd",
    "optimizer.name=sgd,optimizer.momentum=0.9,optimizer.nesterov=true",
    "optimizer.name=muon",
    "optimizer.name=adafactor",
];

/// Values by parameter.
type Values = BTreeMap<String, Vec<f32>>;

/// Takes one step in a folder of its own, and returns the parameters after it.
fn after_a_step(set: &[&str]) -> Values {
    let run = Run::new();
    run.train(&[&["run.steps=1", "optimizer.warmup_steps=0", "optimizer.schedule=constant"], set].concat());
    let all = tensors(&run.path("out/checkpoints/step-00000001")).into_iter();
    let floats = |bytes: Vec<u8>| {
        bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().expect("four bytes"))).collect()
    };
    all.filter(|(name, _)| !name.contains('@')).map(|(name, bytes)| (name, floats(bytes))).collect()
}

/// Returns the parameters before the first step.
fn initial() -> Values {
    after_a_step(&["optimizer.name=sgd", "optimizer.learning_rate=1e-30", "optimizer.weight_decay=0"])
}

#[test]
fn every_optimizer_trains_the_same_under_every_cut_and_resumes() {
    for name in NAMES {
        let set: Vec<&str> = name.split(',').collect();
        let whole = Run::new();
        whole.train(&[&set[..], &["run.steps=6", "pipeline.ranks=1"]].concat());
        let losses = whole.losses();
        assert!(losses[5][0] < losses[0][0], "{name}: {losses:?}");
        let parts = Run::new();
        parts.train(&[&set[..], &["run.steps=6", "run.checkpoint_every=3", "pipeline.ranks=2"]].concat());
        assert_eq!(parts.figures(), whole.figures(), "{name}");
        parts.print(&["resume", "out/checkpoints/step-00000003", "--set", "pipeline.ranks=4"]);
        assert_eq!(parts.figures(), whole.figures(), "{name}");
        let last = |run: &Run| tensors(&run.path("out/checkpoints/step-00000006"));
        assert_eq!(last(&parts), last(&whole), "{name}");
    }
}

#[test]
fn optimizers_that_use_whole_matrices_refuse_parts_of_parameters() {
    let run = Run::new();
    for (mesh, part) in [
        (
            ["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"],
            "updates whole matrices, and with `mesh.data_parallel_mode",
        ),
        (["mesh.tensor_parallel=2", "pipeline.ranks=1"], "depends on other elements"),
    ] {
        for name in NAMES {
            let set: Vec<&str> = name.split(',').chain(mesh).chain(["run.steps=1"]).collect();
            // The rows of a replica are whole.
            let mixes_row = name.ends_with("8bit") && mesh[0].starts_with("mesh.tensor");
            if !mixes_row && !name.ends_with("muon") && !name.ends_with("adafactor") {
                run.succeed(&["check", "small.toml"], &set);
                run.train(&set);
                continue;
            }
            let said = ["check", "train"].map(|command| {
                run.refuse(&[command, "small.toml"], &set, part);
                in_one_line(&run.call(&[command, "small.toml"], &set).2)
            });
            assert_eq!(said[0], said[1], "{name}");
        }
    }
}

#[test]
fn muon_updates_the_matrices_of_blocks_and_adamw_the_rest() {
    let (muon, adamw) = (after_a_step(&["optimizer.name=muon"]), after_a_step(&[]));
    let before = initial();
    let is_hidden = |name: &str| name.contains("_proj.");
    for (name, values) in &muon {
        assert_eq!(*values != adamw[name], is_hidden(name), "{name}");
    }
    // The update of a matrix has singular values near 1 times the rate and the scale: 0.2 times the root of
    // the longer side. The coefficients of the iteration leave them between 0.7 and 1.2.
    let name = "model.layers.0.self_attn.q_proj.weight";
    let update: Vec<f64> = muon[name]
        .iter()
        .zip(&before[name])
        .map(|(after, before)| f64::from(after - before * (1.0 - 0.01 * 0.1)))
        .collect();
    let width = update.len().isqrt();
    let frobenius = update.iter().map(|x| x * x).sum::<f64>().sqrt();
    let unit = 0.01 * 0.2 * (width as f64).sqrt() * (width as f64).sqrt();
    assert!((0.6 * unit..1.25 * unit).contains(&frobenius), "{frobenius} {unit}");
}

#[test]
fn a_group_has_its_own_rate_and_decay() {
    let is_first = |name: &str| name.starts_with("model.layers.0.");
    let check = |own: &str, elsewhere: &str, base: &[&str], has_own: &dyn Fn(&str) -> bool| {
        let groups = format!("optimizer.groups=[{{ parameters = {own} }}]");
        let found = after_a_step(&[base, &[&groups]].concat());
        // The gradients of the first step are the same.
        let (as_base, as_own) = (after_a_step(base), after_a_step(&[base, &[elsewhere]].concat()));
        let mut counts = [0, 0];
        for (name, values) in &found {
            let (expected, other) =
                if has_own(name) { (&as_own[name], &as_base[name]) } else { (&as_base[name], &as_own[name]) };
            let close = values.iter().zip(expected).all(|(found, expected)| (found - expected).abs() <= 1e-7);
            assert!(close, "{own}: {name}");
            counts[usize::from(has_own(name))] += usize::from(values != other);
        }
        assert!(counts.iter().all(|count| *count > 0), "{own}: {counts:?}");
    };
    for name in NAMES {
        let base: Vec<&str> = name.split(',').collect();
        check(
            "[\"model.layers.0.*\"], learning_rate = 0.002",
            "optimizer.learning_rate=0.002",
            &base,
            &is_first,
        );
    }
    check("[\"norm\"], weight_decay = 50", "optimizer.weight_decay=50", &[], &|name| name.contains("norm"));
    // A parameter without decay may get its own.
    let no_decay = ["optimizer.no_decay=[\"norm\", \"embedding\"]", "optimizer.weight_decay=50"];
    let set =
        [&no_decay[..], &["optimizer.groups=[{ parameters = [\"embedding\"], weight_decay = 50 }]"]].concat();
    let (found, with, without) =
        (after_a_step(&set), after_a_step(&["optimizer.weight_decay=50"]), after_a_step(&no_decay));
    assert_eq!(found["model.embed_tokens.weight"], with["model.embed_tokens.weight"]);
    assert_eq!(found["model.norm.weight"], without["model.norm.weight"]);
    assert_ne!(found["model.norm.weight"], with["model.norm.weight"]);
}

fn norm_of_change<'a>(after: &'a Values, before: &'a Values, part: impl Fn(&str) -> bool + 'a) -> f64 {
    let names = after.keys().filter(|name| part(name));
    let changes = names.flat_map(|name| after[name].iter().zip(&before[name]));
    changes.map(|(after, before)| f64::from(after - before).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn a_group_is_clipped_by_its_own_norm_and_elements_by_their_size() {
    // With a rate of 1 the change of a parameter is its clipped gradient.
    const SGD: [&str; 3] = ["optimizer.name=sgd", "optimizer.learning_rate=1", "optimizer.weight_decay=0"];
    let before = initial();
    let is_head = |name: &str| name.starts_with("lm_head");
    for ranks in ["pipeline.ranks=1", "pipeline.ranks=2"] {
        let group = "optimizer.groups=[{ parameters = [\"lm_head.*\"], clip_norm = 0.001 }]";
        let after = after_a_step(&[&SGD[..], &[ranks, group, "optimizer.clip_norm=0.01"]].concat());
        let head = norm_of_change(&after, &before, is_head);
        assert!((head - 0.001).abs() < 1e-6, "{head}");
        let rest = norm_of_change(&after, &before, |name| !is_head(name));
        assert!((rest - 0.01).abs() < 1e-5, "{rest}");

        let after = after_a_step(
            &[&SGD[..], &[ranks, "optimizer.clip_norm=0", "optimizer.clip_value=1e-4"]].concat(),
        );
        let changes = after.iter().flat_map(|(name, values)| values.iter().zip(&before[name]));
        let changes: Vec<f32> = changes.map(|(after, before)| (after - before).abs()).collect();
        let largest = changes.iter().copied().fold(0.0, f32::max);
        assert!((largest - 1e-4).abs() < 1e-6, "{largest}");
        let at_limit = changes.iter().filter(|change| (**change - 1e-4).abs() < 1e-6).count();
        assert!(at_limit > 10, "{at_limit}");
    }
}

#[test]
fn a_group_that_has_no_parameter_is_refused() {
    let set = "optimizer.groups=[{ parameters = [\"model.layer.0.*\"], learning_rate = 1 }]";
    let no_parameter = "optimizer.groups: `model.layer.0.*` matches no parameter of the model";
    let run = Run::new();
    for command in ["check", "train"] {
        run.fail(2, &[command, "small.toml"], &[set], &[no_parameter, "model.embed_tokens.weight"]);
    }
}
