//! A time of a step that no layout can be faster than, by the cost model.
//!
//! **Derivation.** Each GPU computes its share of the products, of attention and of the bytes of elementwise
//! operations. No layout makes their sum over all GPUs smaller: tensor, sequence and context parallelism
//! divide them at best, and recomputation adds to them. The bound takes each at the best rate of the machine:
//! products at the sustained rate of large products, without idle parts of waves; attention at the rate of
//! long sequences; bytes at the rate of elementwise kernels, without launches. No GPU waits, and no
//! communication is exposed. The optimizer reads and writes its bytes of each trained parameter once on some
//! GPU. With adapters, the gradients of frozen matrices and the backward of blocks before the adapters do not
//! count, and neither do the products of the adapters.

use crate::attention::best_attention_seconds;
use crate::elementwise::{block_traffic, embedding_traffic, loss_traffic};
use crate::layout::{Layout, Precision};
use crate::predict::OPTIMIZER_TRAFFIC;
use crate::search::request::Request;
use crate::setting::Setting;
use pipewright_shapes::model::{Block, Matrix};
use pipewright_shapes::training::Training;

/// The part of an attention's time that its forward takes at least: its backward takes less than five times
/// as long.
const FORWARD_ATTENTION: f64 = 1.0 / 6.0;

/// Returns the seconds of a step that no layout of a request can be faster than.
pub fn lower_bound(request: &Request) -> f64 {
    let (model, machine) = (&request.model, &request.machine);
    // One row on one GPU that divides nothing.
    let (scores, kernels) = (request.scores, request.kernels);
    let layout = Layout { scores, kernels, ..Layout::on_one_gpu(request.sequence, request.precision) };
    let setting = Setting { model, layout: &layout, machine };
    let per_head_parameter = model.head_operations_per_parameter();
    let products = |per_parameter: f64, active: u128, precision: Precision| {
        per_parameter * active as f64 * layout.tokens() / machine.product_rate(precision)
    };
    let moved = |bytes: f64| bytes / machine.kernel_bandwidth();
    let block_seconds = |block: &Block| {
        let active = block.matrices(model.hidden).iter().map(Matrix::active_parameters).sum();
        let traffic = block_traffic(block, model, &layout);
        let attention = best_attention_seconds(&block.mixer, &setting);
        let products = products(block.training.operations_per_parameter(), active, layout.precision);
        if block.training == Training::ForwardOnly {
            return products + FORWARD_ATTENTION * attention + moved(traffic.forward);
        }
        products + attention + moved(traffic.forward + traffic.backward)
    };
    let head_traffic = loss_traffic(model, &layout);
    let head = products(per_head_parameter, model.table_parameters(), Precision::Half)
        + moved(head_traffic.forward + head_traffic.backward);
    let predictor = model.predictor_blocks().iter().map(block_seconds).sum::<f64>()
        + products(per_head_parameter, u128::from(2 * model.hidden * model.hidden), layout.precision)
        + head;
    let embedding = embedding_traffic(model, &layout);
    let row = model.blocks.iter().map(block_seconds).sum::<f64>()
        + moved(embedding.forward + if model.is_adapted() { 0.0 } else { embedding.backward })
        + head
        + f64::from(model.predictors) * predictor;
    let optimizer = moved(OPTIMIZER_TRAFFIC * model.trained_parameters() as f64);
    // Measured times may be faster than the rates.
    let row = row * machine.least_measured_ratio();
    (row * f64::from(request.batch) + optimizer) / f64::from(request.gpus.max(1))
}
