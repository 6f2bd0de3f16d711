//! Measurements that replace parts of a prediction.

use pipewright_cluster::catalogue::from_toml;
use pipewright_cluster::layout::{Layout, Precision, ShardedState};
use pipewright_cluster::machine::Machine;
use pipewright_cluster::measured::{read, unused_products};
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::predict::{Prediction, predict};
use pipewright_cluster::product::Product;
use pipewright_cluster::published::Run;
use pipewright_cluster::search::{Request, lower_bound, search};
use pipewright_cluster::setting::Setting;
use pipewright_schedule::error_text::with_causes;
use pipewright_shapes::model::Model;

use crate::comparison::request_for;
use crate::data::{predicted, run};

/// The prediction of a run with measurements, and what is said about them.
fn with(run: &Run, text: &str) -> (Prediction, Vec<String>) {
    let measured = read(text).expect("measurements");
    let machine = measured.machine(&run.model, &run.machine).expect("a machine");
    let sentences = measured.sentences(&run.model, &run.machine, &machine, run.layout.implementation);
    (predicted(&Run { machine, ..run.clone() }), sentences)
}

/// Checks that measurements change the prediction of Llama 3 70B as `is_right` says, before and after.
fn check(text: &str, sentence: &str, is_right: impl Fn(&Prediction, &Prediction) -> bool) {
    let run = run("llama3-70B", "H100 80");
    let (after, sentences) = with(&run, text);
    let before = predicted(&run);
    assert!(is_right(&before, &after), "{text}: {before:?}\n{after:?}");
    assert_eq!(sentences, [sentence]);
}

fn near(one: f64, other: f64) -> bool {
    (one / other - 1.0).abs() < 1e-9
}

/// The expected text of a rate, without digits that the sentences do not have.
fn plain(rate: f64) -> f64 {
    (rate * 1000.0).round() / 1000.0
}

#[test]
fn rates_replace_the_constants_of_their_part_alone() {
    let machine = run("llama3-70B", "H100 80").machine;
    let constants = machine.constants;
    let memory = plain(machine.kernel_bandwidth() / 1e9);
    let node = plain(machine.node_bandwidth * constants.link / 1e9);
    let products = plain(constants.product_fp8);
    check(
        "[products]\nshare_fp8 = 0.27",
        &format!("0.27 of the FP8 peak in products instead of {products}"),
        |before, after| {
            after.parts.products > 1.5 * before.parts.products
                && near(after.parts.attention, before.parts.attention)
        },
    );
    let attention = constants.attention;
    check(
        &format!("[attention]\nshare = {}", attention / 2.0),
        &format!("{} of the bf16 peak in attention instead of {attention}", plain(attention / 2.0)),
        |before, after| {
            (after.parts.attention / before.parts.attention - 2.0).abs() < 0.01
                && near(after.parts.products, before.parts.products)
        },
    );
    let half = plain(memory / 2.0);
    check(
        &format!("[memory]\ngb_per_s = {half}"),
        &format!("{half} GB/s of memory instead of {memory}"),
        |before, after| after.parts.elementwise > 1.9 * before.parts.elementwise,
    );
    check(
        "[node]\ngb_per_s = \"100 GB/s\"",
        &format!("100 GB/s inside a node instead of {node}"),
        |before, after| {
            after.parts.tensor > 2.0 * before.parts.tensor
                && near(after.parts.elementwise, before.parts.elementwise)
        },
    );
    check(
        "[memory]\ngb_per_s = 3400",
        &format!("3400 GB/s of memory instead of {memory}, which is above the data sheet's 3350"),
        |before, after| after.parts.elementwise < before.parts.elementwise,
    );
    check("[network]\nlatency_us = 500", "500 us of latency between nodes instead of 10", |before, after| {
        after.bubble > before.bubble
    });
}

#[test]
fn what_is_predicted_replaces_itself() {
    let run = run("llama3-70B", "H100 80");
    let constants = run.machine.constants;
    let (share, network) = (constants.product_fp8, run.machine.network_bandwidth * constants.link / 1e9);
    let text = format!("[products]\nshare_fp8 = {share}\n[network]\ngb_per_s = {network}");
    let (after, sentences) = with(&run, &text);
    assert!(near(after.seconds, predicted(&run).seconds));
    assert_eq!(sentences.len(), 2);
}

#[test]
fn measured_figures_are_not_assumed() {
    let run = run("llama3-70B", "H100 80");
    let text = "[network]\nlatency_us = 20\n[products]\nshare = 0.6\n[memory]\ngb_per_s = 2600";
    let machine = read(text).expect("measurements").machine(&run.model, &run.machine).expect("a machine");
    let keys = machine.keys_by_source();
    let of =
        |source: &str| keys.iter().find(|(own, _)| own.starts_with(source)).map(|(_, keys)| keys.clone());
    assert_eq!(of("measured"), Some(vec!["network_latency_us"]));
    assert_eq!(of("assumed"), Some(vec!["node_latency_us"]));
    let constants = machine.source_of("constants");
    assert!(
        constants.ends_with("NeMo Automodel; `memory` is measured; `product` is measured"),
        "{constants}"
    );
}

/// The times of a block in the layout in which it was measured are the measured ones.
#[test]
fn a_measured_layer_has_its_times() {
    let run = run("llama3-70B", "H100 80");
    let text = "[[layer]]\nsequence = 8192\ntensor_parallel = 4\nprecision = \"fp8\"\nforward_s = 7e-3\nbackward_s = 0.02";
    let measured = read(text).expect("measurements");
    let machine = measured.machine(&run.model, &run.machine).expect("a machine");
    let time = |machine: &Machine| {
        Setting { model: &run.model, layout: &run.layout, machine }.block(&run.model.blocks[0])
    };
    let (before, after) = (time(&run.machine), time(&machine));
    assert!(near(after.forward.total(), 7e-3) && near(after.backward.total(), 0.02), "{after:?}");
    let sentences = measured.sentences(&run.model, &run.machine, &machine, run.layout.implementation);
    let percent = |after: f64, before: f64| format!("{:+.1}%", (after / before - 1.0) * 100.0);
    let forward = percent(7e-3, before.forward.total());
    let backward = percent(0.02, before.backward.total());
    let expected =
        format!("blocks such as number 0: forward {forward}, backward {backward} against the prediction");
    assert_eq!(sentences, [expected]);
}

#[test]
fn a_measured_product_has_its_time() {
    let run = run("llama2-7B", "H100");
    let text = "[[product]]\nrows = 4096\ncolumns = 4096\ninner = 11008\nprecision = \"fp8\"\nseconds = 0.1";
    let (after, sentences) = with(&run, text);
    let microbatches = f64::from(run.layout.microbatches());
    let forwards = 0.1 * run.model.blocks.len() as f64 * microbatches;
    let more = after.parts.products - predicted(&run).parts.products;
    assert!((more / forwards - 1.0).abs() < 0.02, "{more} and {forwards}");
    assert_eq!(sentences, ["the product of 4096 x 11008 and 11008 x 4096"]);
}

/// They are accepted, because a data sheet may be wrong.
#[test]
fn measurements_above_the_peak_are_named() {
    let run = run("llama2-7B", "H100");
    let peak = run.machine.peak(Precision::Fp8);
    let seconds = 2.0 * 4096.0 * 4096.0 * 11008.0 / peak;
    let product = |share: f64| {
        let seconds = seconds / share;
        format!(
            "[[product]]\nrows = 4096\ncolumns = 4096\ninner = 11008\nprecision = \"fp8\"\nseconds = {seconds:e}"
        )
    };
    let shape = "the product of 4096 x 11008 and 11008 x 4096";
    assert_eq!(with(&run, &product(0.99)).1, [shape]);
    assert_eq!(with(&run, &product(3.25)).1, [format!("{shape}, which is 325% of the data sheet's peak")]);
    // 202 million parameters in four matrices of 4096 x 4096 and three of 4096 x 11008.
    let forward = 2.0 * 202_375_168.0 * 4096.0 / peak;
    let layer = |forward: f64, backward: f64| {
        let sizes = "[[layer]]\nsequence = 4096\nprecision = \"fp8\"";
        with(&run, &format!("{sizes}\nforward_s = {forward:e}\nbackward_s = {backward:e}")).1.remove(0)
    };
    assert!(layer(forward * 1.01, forward * 2.02).ends_with("against the prediction"));
    assert!(layer(forward / 2.0, forward * 4.0).ends_with(", which is 200% of the data sheet's peak"));
    assert!(layer(forward * 2.0, forward).ends_with(", which is 200% of the data sheet's peak"));
}

/// Two measurements of the same kind of block. Each layout has the times of the nearest one.
#[test]
fn the_nearest_measured_layer_counts() {
    let run = run("llama3-70B", "H100 80");
    let layer = |tensor: u32, rows: u32, precision: &str, seconds: f64| {
        format!(
            "[[layer]]\nrows = {rows}\nsequence = 8192\ntensor_parallel = {tensor}\n\
             precision = \"{precision}\"\nforward_s = {seconds}\nbackward_s = {seconds}\n"
        )
    };
    let text =
        [layer(8, 1, "fp8", 1.0), layer(4, 1, "fp8", 2.0), layer(4, 4, "fp8", 3.0), layer(4, 1, "bf16", 4.0)];
    let machine =
        read(&text.concat()).expect("measurements").machine(&run.model, &run.machine).expect("a machine");
    let check = |tensor: u32, rows: u32, precision: Precision, expected: f64| {
        let layout =
            Layout { tensor, expert_tensor: tensor, microbatch: rows, precision, ..run.layout.clone() };
        let time =
            Setting { model: &run.model, layout: &layout, machine: &machine }.block(&run.model.blocks[0]);
        assert!(near(time.forward.total(), expected), "{tensor}, {rows}: {}", time.forward.total());
    };
    check(8, 1, Precision::Fp8, 1.0);
    check(4, 1, Precision::Fp8, 2.0);
    check(4, 4, Precision::Fp8, 3.0);
    check(4, 1, Precision::Half, 4.0);
}

#[test]
fn products_that_a_layout_does_not_have_are_named() {
    let run = run("llama2-7B", "H100");
    let product = |rows: u32, columns: u32, inner: u32| {
        format!(
            "[[product]]\nrows = {rows}\ncolumns = {columns}\ninner = {inner}\nprecision = \"fp8\"\nseconds = 0.1\n"
        )
    };
    // The gate and up projections are one product of 22,016 columns.
    let text = [product(4096, 4096, 11008), product(4096, 22016, 4096), product(4096, 11008, 11008)].concat();
    let machine = read(&text).expect("measurements").machine(&run.model, &run.machine).expect("a machine");
    let unused = unused_products(&Setting { model: &run.model, layout: &run.layout, machine: &machine });
    assert_eq!(unused, ["the product of 4096 x 11008 and 11008 x 11008"]);
}

/// A measured block scales measured products, too. All take a third of their predictions.
#[test]
fn no_measured_run_is_faster_than_the_bound() {
    let run = run("llama2-7B", "H100");
    let layout = Layout { tensor: 8, expert_tensor: 8, sequence_parallel: true, ..run.layout.clone() };
    let setting = |layout| Setting { model: &run.model, layout, machine: &run.machine };
    let mut text = String::new();
    for (product, precision) in setting(&run.layout).product_shapes() {
        let Product { rows, columns, inner, .. } = product;
        let (seconds, precision) =
            (product.seconds(&setting(&run.layout), precision) / 3.0, precision.name());
        let table = format!(
            "[[product]]\nrows = {rows}\ncolumns = {columns}\ninner = {inner}\nprecision = \"{precision}\"\n"
        );
        if !text.contains(&table) {
            text.push_str(&format!("{table}seconds = {seconds:e}\n"));
        }
    }
    let block = setting(&layout).block(&run.model.blocks[0]);
    let (forward, backward) = (block.forward.total() / 3.0, block.backward.total() / 3.0);
    text.push_str(&format!(
        "[[layer]]\nsequence = 4096\ntensor_parallel = 8\nprecision = \"fp8\"\nforward_s = {forward:e}\nbackward_s = {backward:e}\n"
    ));
    let machine = read(&text).expect("measurements").machine(&run.model, &run.machine).expect("a machine");
    let run = Run { machine, ..run };
    let (bound, own) = (lower_bound(&request_for(&run)), predicted(&run).seconds);
    assert!(bound <= own, "{bound} and {own}");
}

fn refuse(text: &str, message: &str) {
    let run = run("llama3-70B", "H100 80");
    let error = match read(text) {
        Ok(measured) => with_causes(&measured.machine(&run.model, &run.machine).expect_err("an error")),
        Err(error) => with_causes(&error),
    };
    assert!(error.contains(message), "{error}");
}

#[test]
fn mistakes_have_a_place() {
    refuse("[products]\nshare = 1.2", "line 2, column 9: `share` is 1.2, where a number from 0.01 to 1");
    refuse(
        "[products]\nshar = 1",
        "line 2, column 1: unknown key `shar` in [products]; did you mean `share`?",
    );
    refuse("[product]\nrows = 1", "line 1, column 1: `columns` is missing in [[product]]");
    refuse(
        "[prodcts]\nshare = 1",
        "line 1, column 2: unknown key `prodcts` in the measurements; did you mean `products`?",
    );
    refuse("network = 3", "line 1, column 11: `network` is a whole number, where a table is expected");
    refuse(
        "[network]\ngb_per_s = \"50 GB\"",
        "which measures bytes, such as `80 GB`; write bytes per second",
    );
    let layer = "[[layer]]\nsequence = 8192\nforward_s = 1\nbackward_s = 1\n";
    refuse(
        &layer.repeat(2),
        "line 5, column 1: this [[layer]] has the sizes of one before it; keep one of them",
    );
    let product = "[[product]]\nrows = 8\ncolumns = 8\ninner = 8\nseconds = 1\n";
    refuse(&product.repeat(2), "line 6, column 1: this [[product]] has the sizes of one before it");
    refuse(
        &format!("{layer}{layer}block = 1"),
        "[[layer]] of block 1 measures the same kind of block in the same sizes as block 0; keep one of them",
    );
    refuse(
        &format!("{layer}block = 80"),
        "[[layer]] is of block 80, and the model has 80; use a number from 0 to 79",
    );
    refuse(&format!("{layer}tensor_parallel = 7"), "64 heads cannot be divided among the ranks of tp = 7");
    refuse(
        &format!("{layer}precision = \"f8\""),
        "where bf16, f16, fp16, fp8, mxfp8, nvfp4, f32 is expected",
    );
}

/// A machine with one rank of each kind of measurement.
pub(crate) const MEASURED: &str = r#"
name = "a processor"
f32_tflops = 0.1
memory_gb = 8
memory_gb_per_s = 10
node_gb_per_s = 2
network_gb_per_s = 2
gpus_per_node = 2
multiprocessors = 1
[measured]
overlap = 0.25
[[measured.product]]
rows = 64
columns = 32
inner = 32
precision = "f32"
seconds = 1.5
[[measured.scores]]
sequence = 64
heads = 4
key_value_heads = 2
head_size = 8
precision = "f32"
forward_s = 0.25
backward_s = 0.5
[[measured.kernel]]
kind = "optimizer"
forward_gb_per_s = 4
[[measured.link]]
use = "all_reduce"
between = "node"
gb_per_s = 1
latency_us = 1e6
[[measured.link]]
use = "message"
between = "node"
gb_per_s = 0.5
latency_us = 5e5
"#;

fn small_model() -> Model {
    let config = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
    pipewright_shapes::reader::read(config).expect("a model").model
}

/// The prediction of a small model in f32 on two ranks of a machine.
fn small(machine: &str, change: impl FnOnce(&mut Layout)) -> Prediction {
    let (model, machine) = (small_model(), from_toml(machine).expect("a machine"));
    let mut layout = Layout::on_one_gpu(64, Precision::Single);
    (layout.gpus, layout.batch, layout.sharding) = (2, 2, ShardedState::Nothing);
    change(&mut layout);
    let setting = Setting { model: &model, layout: &layout, machine: &machine };
    predict(&setting, &mut Programs::default()).expect("a prediction")
}

#[test]
fn a_measured_cluster_file_is_planned() {
    let machine =
        from_toml(&MEASURED.replace("forward_gb_per_s = 4", "forward_gb_per_s = 4000")).expect("a machine");
    let request = Request::new(small_model(), machine, 2, 2, 64, Precision::Single);
    let found = search(&request).expect("plans");
    let fastest = found.plans[0].prediction.seconds;
    assert!(lower_bound(&request) <= fastest && fastest < 20.0, "{found:?}");
}

#[test]
fn attention_and_products_in_f32_have_their_measured_times() {
    let parts = small(MEASURED, |_| {}).parts;
    assert!(near(parts.attention, 2.0 * 0.75), "{parts:?}");
    // The output of attention, and the gradient of its input: 64 x 32 times 32 x 32, in two blocks.
    assert!(parts.products > 4.0 * 1.5 && parts.products < 4.01 * 1.5, "{parts:?}");
}

#[test]
fn sums_of_gradients_have_their_measured_rate_and_overlap() {
    let (sharded, data) =
        (small(MEASURED, |layout| layout.sharding = ShardedState::Optimizer), small(MEASURED, |_| {}));
    // Two rounds of a second; a quarter of the time is hidden; the bytes take microseconds.
    assert!((data.parts.data - 1.5).abs() < 1e-3, "{:?}", data.parts);
    // A gather and a reduction, each of one round.
    assert!((sharded.parts.data - 1.5).abs() < 1e-3, "{:?}", sharded.parts);
}

#[test]
fn messages_and_updates_have_their_measured_rates() {
    let pipeline = |machine: &str| small(machine, |layout| (layout.pipeline, layout.batch) = (2, 1)).seconds;
    let assumed =
        pipeline(&MEASURED.replace("\"message\"\nbetween = \"node\"", "\"message\"\nbetween = \"network\""));
    // A message there and one back.
    assert!((pipeline(MEASURED) - assumed - 1.0).abs() < 1e-3);
    let one = small(MEASURED, |layout| (layout.gpus, layout.batch) = (1, 1));
    let parameters = one.memory[0].parameters / 4.0;
    // The gradient, the parameter and two moments of four bytes, each read and written.
    assert!(near(one.optimizer, 32.0 * parameters / 4e9), "{one:?}");
    assert!(near(one.memory[0].optimizer, 8.0 * parameters), "{one:?}");
}
