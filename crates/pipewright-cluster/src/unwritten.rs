//! The settings of a layout that the files for other systems do not say, although the prediction has them.

use pipewright_schedule::plan::{Refusal, System};

use crate::implementation::{Implementation, KernelFusion, NumberFormat, StateFormats, name_of};
use crate::layout::{Layout, Recompute};
use crate::published_layout::{FORMATS, GRAPHS, LOSSES, OPTIMIZERS};

/// A key of files of published runs with its value.
type Given = Option<(&'static str, String)>;

/// Returns the refusal of the first setting that the files for a system do not say; `None` if they say all.
pub(crate) fn unwritten(system: System, layout: &Layout) -> Option<Refusal> {
    let own = match system {
        System::Megatron => megatron(layout),
        System::Torchtitan | System::Deepspeed => others(layout),
    };
    let (key, value) = own.into_iter().chain(of_all(layout)).flatten().next()?;
    Some(Refusal::new(format!(
        "the files for {system} have no option for `{key} = {value}`, which this plan has"
    )))
}

/// Megatron has an option for the format of gradients, and offloads without a pipeline and recomputation.
fn megatron(layout: &Layout) -> Vec<Given> {
    let offloads = layout.pipeline == 1 && layout.recompute == Recompute::None;
    let offloaded = (!offloads && layout.offload_layers > 0).then(|| {
        let next_to = if layout.pipeline > 1 {
            format!("pp = {}", layout.pipeline)
        } else {
            format!("recompute = {}", layout.recompute.name())
        };
        ("offload_layers", format!("{}` next to `{next_to}", layout.offload_layers))
    });
    let [weights, main_weights, moments, _] = state(layout);
    vec![offloaded, weights, main_weights, moments]
}

fn others(layout: &Layout) -> Vec<Given> {
    let offloaded =
        (layout.offload_layers > 0).then(|| ("offload_layers", layout.offload_layers.to_string()));
    [offloaded].into_iter().chain(state(layout)).collect()
}

/// Returns the formats of the training state that are not the usual ones.
fn state(layout: &Layout) -> [Given; 4] {
    let usual = StateFormats::usual(layout.sharding, layout.precision);
    let own = layout.state_formats();
    let format =
        |key, own: NumberFormat, usual| (own != usual).then(|| (key, name_of(&FORMATS, own).to_owned()));
    let main_name = |format| name_of(&FORMATS, format).to_owned();
    let main = own.main_weights.map_or_else(|| "none".to_owned(), main_name);
    [
        format("weights", own.weights, usual.weights),
        (own.main_weights != usual.main_weights).then_some(("main_weights", main)),
        format("moments", own.moments, usual.moments),
        format("gradients", own.gradients, usual.gradients),
    ]
}

/// Returns the settings that the files for no system say.
fn of_all(layout: &Layout) -> Vec<Given> {
    let own = &layout.implementation;
    let usual = Implementation::usual(own.stack);
    let text = |text: &str| text.to_owned();
    vec![
        layout.pass_microbatches.map(|count| ("pass_rows", (count * layout.microbatch).to_string())),
        layout.document_tokens.map(|tokens| ("document_tokens", tokens.to_string())),
        (own.optimizer != usual.optimizer).then(|| ("optimizer", text(name_of(&OPTIMIZERS, own.optimizer)))),
        (own.loss != usual.loss).then(|| ("loss", text(name_of(&LOSSES, own.loss)))),
        (own.kernels != usual.kernels)
            .then(|| ("compiled", (own.kernels == KernelFusion::Fused).to_string())),
        (own.graphs != usual.graphs).then(|| ("cuda_graphs", text(name_of(&GRAPHS, own.graphs)))),
        own.overlaps_tensor.map(|overlaps| ("tensor_overlap", overlaps.to_string())),
        (own.dispatched != usual.dispatched).then(|| {
            (
                "dispatch_precision",
                own.dispatched.map_or("none", |format| name_of(&FORMATS, format)).to_owned(),
            )
        }),
        (!own.reshards).then(|| ("reshard_after_forward", text("false"))),
    ]
}
