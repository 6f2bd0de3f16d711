//! Tests of `profile.rs`.

use super::*;

const GOOD: &str = "[link]\nlatency_s = 5e-6\nbytes_per_s = 1e10\n[[layers]]\nkind = \"attention\"\ncount = 12\n\
                    forward_s = 1e-3\ninput_backward_s = 1e-3\nweight_backward_s = 1e-3\noutput_bytes = 524288\n\
                    parameter_bytes = 4194304\nactivation_bytes = 6291456\n";

/// Checks a profile for a model of 12 layers on the processor.
fn check_for(from: &str, to: &str, expected: &[&str], assumed: &[&str]) {
    check_on("flex", from, to, expected, assumed);
}

/// Checks a profile for a model of 12 layers on devices with these names.
fn check_on(device: &str, from: &str, to: &str, expected: &[&str], assumed: &[&str]) {
    check_ranks_on(device, (&[1], &[]), from, to, expected, assumed);
}

/// Checks a profile for ranks with these numbers of threads, which are these ranks of the profile.
fn check_ranks_on(
    device: &str,
    (threads, profile_ranks): (&[usize], &[u32]),
    from: &str,
    to: &str,
    expected: &[&str],
    assumed: &[&str],
) {
    use pipewright_schedule::{LayerDesc, ModelDesc};
    let layer = LayerDesc {
        path: String::new(),
        kind: "attention".into(),
        parameters: 1 << 20,
        weight: 6 << 20,
        activation_bytes: 6_291_456,
        output_bytes: 524_288,
        keys_values_bytes: 0,
        norms_bytes: 1_048_576,
        feed_forward_bytes: 0,
        products: 0,
        mixing: 0,
        copied: 0,
        device_activation_bytes: None,
        trained: None,
    };
    let model = ModelDesc { layers: vec![layer; 12] };
    let run = ProfiledRun {
        workload: Workload { model: &model, tokens: 256, rows: 1 },
        rates: PeakRates { flops_per_s: 1e12, bytes_per_s: 1e12 },
        devices: DeviceSettings {
            device: None,
            devices: device.split(", ").map(|name| name.parse().expect("a device")).collect(),
            exclusive: false,
        },
        precision: Precision::F32,
        threads: threads.to_vec().into(),
        ranks: 2,
        profile_ranks,
    };
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), GOOD.replacen(from, to, 1)).expect("a file");
    match read_for(file.path(), &run) {
        Ok(profile) => assert_eq!(
            (profile.assumed, expected),
            (assumed.iter().map(|&name| name.to_owned()).collect(), &[""; 0][..])
        ),
        Err(ConfigError::Problems(problems)) => {
            let name = file.path().display().to_string();
            let found: Vec<String> =
                problems.0.iter().map(|problem| problem.to_string().replace(&name, "p.toml")).collect();
            assert_eq!(found, expected);
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_profile_of_another_run_is_refused_where_it_differs() {
    check_for("count", "count", &[], &[]);
    check_for("4194304", "4200000", &[], &[]);
    check_for(
        "count = 12",
        "count = 11",
        &["p.toml:5:8: the profile has 11 layers, and the model of the configuration has 12"],
        &[],
    );
    check_for(
        "4194304",
        "8388608",
        &["p.toml:11:19: `parameter_bytes` is 8388608, and layer 0 of the model (attention) has 4194304"],
        &[],
    );
    check_for(
        "524288",
        "262144",
        &["p.toml:10:16: `output_bytes` is 262144, and layer 0 of the model (attention) has 524288"],
        &[],
    );
    check_for(
        "[link]",
        "[device]\ndevice = \"cuda\"\n[link]",
        &["p.toml:2:10: the profile is of the device cuda, and the configuration computes on flex"],
        &[],
    );
    check_for("[link]", "[device]\nprecision = \"f32\"\n[link]", &[], &[]);
    // The name is for people, and a profile may be of a machine that is not at hand.
    check_for("[link]", "[device]\nname = \"another\"\nthreads_per_rank = 1\n[link]", &[], &[]);
    check_for(
        "[link]",
        "[device]\nthreads_per_rank = 4\n[link]",
        &[
            "p.toml:2:20: `threads_per_rank` of the profile is 4, and `pipeline.threads_per_rank` of the configuration is 1",
        ],
        &[],
    );
    check_for(
        "[link]",
        "tokens = 128\n[link]",
        &["p.toml:1:10: `tokens` of the profile is 128, and `data.seq_len` of the configuration is 256"],
        &[],
    );
    check_for(
        "[link]",
        "[device]\nprecision = \"bf16\"\n[link]",
        &["p.toml:2:13: the profile is of the precision bf16, and the configuration computes in f32"],
        &[],
    );
}

#[test]
fn a_profile_is_for_all_devices_of_its_kind() {
    let check = |profile: &str, run: &str, is_refused: bool| {
        let expected = format!(
            "p.toml:2:10: the profile is of the device {profile}, and the configuration computes on {run}"
        );
        let to = format!("[device]\ndevice = \"{profile}\"\n[link]");
        check_on(run, "[link]", &to, &[expected.as_str()][usize::from(!is_refused)..], &[]);
    };
    check("cuda", "cuda:0", false);
    check("cuda:1", "cuda:0, cuda:1, cuda:2", false);
    check("wgpu:integrated", "wgpu:integrated:1", false);
    check("cuda", "rocm", true);
    check("wgpu:cpu", "wgpu:0", true);
    check("flex", "flex, cuda", true);
    check("a device of its own", "cuda", true);
}

#[test]
fn each_rank_of_a_profile_has_the_threads_and_the_device_of_the_configuration() {
    let check = |device: &str, threads: &[usize], ranks: &[u32], sections: &str, expected: &[&str]| {
        let to = format!("{sections}[link]");
        check_ranks_on(device, (threads, ranks), "[link]", &to, expected, &[]);
    };
    let two = "[[rank]]\nthreads = 4\n[[rank]]\nthreads = 1\n";
    check("flex", &[4, 1], &[], two, &[]);
    let of_rank = |line: u32, threads: u32, own: u32, rank: u32| {
        format!(
            "p.toml:{line}:11: `threads` of the profile is {threads}, and `pipeline.threads_per_rank` of the configuration is \
             {own} for rank {rank}"
        )
    };
    check("flex", &[1, 4], &[], two, &[&*of_rank(2, 4, 1, 0), &*of_rank(4, 1, 4, 1)]);
    check("flex", &[4], &[], two, &[&*of_rank(4, 1, 4, 1)]);
    // A plan uses ranks 0 and 2.
    let three = "[[rank]]\nthreads = 4\n[[rank]]\nthreads = 9\n[[rank]]\nthreads = 1\n";
    check("flex", &[4, 1], &[0, 2], three, &[]);
    check("flex", &[4, 1], &[1, 2], three, &[&*of_rank(4, 9, 4, 0)]);
    let beyond = "p.toml:5:1: `pipeline.profile_ranks` of the configuration names rank 3, and the profile has 3 [[rank]] sections";
    check("flex", &[4, 1], &[0, 3], three, &[beyond]);
    // Ranks without a number of their own have the number of the device.
    let usual = "p.toml:2:20: `threads_per_rank` of the profile is 1, and `pipeline.threads_per_rank` of the configuration is";
    let device = "[device]\nthreads_per_rank = 1\n";
    check("flex", &[1, 2], &[], device, &[&*format!("{usual} 2 for rank 1")]);
    check("flex", &[2, 2], &[], device, &[&*format!("{usual} 2")]);
    check("flex", &[1, 2], &[], &format!("{device}[[rank]]\n[[rank]]\nthreads = 2\n"), &[]);
    let devices = "[[rank]]\n[[rank]]\ndevice = \"cuda\"\n";
    check("flex, cuda:1", &[1], &[], devices, &[]);
    let other = |place: &str, device: &str, rank: u32, own: &str| {
        format!(
            "p.toml:{place}: the profile is of the device {device} for rank {rank}, and the configuration computes on {own} there"
        )
    };
    let swapped = [other("1:1", "flex", 0, "cuda"), other("3:10", "cuda", 1, "flex")];
    check("cuda, flex", &[1], &[], devices, &[&*swapped[0], &*swapped[1]]);
}

#[test]
fn what_a_profile_lacks_is_estimated_if_the_model_is_known() {
    check_for("forward_s = 1e-3\n", "", &[], &["attention.forward_s"]);
    // The parts of activations are estimated with them.
    let assumed = ["attention.activation_bytes", "attention.norms_s"];
    check_for("activation_bytes = 6291456\n", "", &[], &assumed);
    check_for("activation_bytes = 6291456\n", "norms_bytes = 2000\nnorms_s = 1e-5\n", &[], &assumed);
    let kind = "kind = \"attention\"\n";
    let missing = "p.toml:4:1: `norms_bytes` is missing in [[layers]]";
    check_for(kind, &format!("{kind}norms_s = 1e-5\n"), &[missing], &[]);
    check_for("kind = \"attention\"\n", "", &["p.toml:4:1: `kind` is missing in [[layers]]"], &[]);
}
