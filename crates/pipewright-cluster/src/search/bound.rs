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
//!
//! **Several kinds of machines.** Kind `k` has `g_k` GPUs, and one of them takes `t_kp` for part `p` of the model: a
//! block, the embedding, the head, the optimizer. If it does the share `x_kp` of the part, a step takes at least
//! `T >= sum_p x_kp t_kp / g_k` for each `k`. The sum of these inequalities, each multiplied by `g_k w_k`, gives
//! `T sum_k g_k w_k >= sum_p min_k w_k t_kp` for any speeds `w_k`, because the shares of a part sum to 1. The bound
//! takes the speed of a kind with all parts, relative to the first kind. It is then the sum over kinds of what each can
//! do if all parts are faster by the same factor, and lower if some kinds are better at some parts.

use crate::attention::best_attention_seconds;
use crate::elementwise::{block_traffic, embedding_traffic, loss_traffic};
use crate::layout::{Layout, Precision, ShardedState};
use crate::machine::Machine;
use crate::measured_times::MeasuredProduct;
use crate::memory::Parameters;
use crate::search::request::Request;
use crate::setting::Setting;
use pipewright_shapes::model::{Block, Matrix};
use pipewright_shapes::training::Training;

/// The part of an attention's time that its forward takes at least: its backward takes less than five times
/// as long.
const FORWARD_ATTENTION: f64 = 1.0 / 6.0;

/// The seconds of a step on one GPU.
struct OnOneGpu {
    /// The seconds of each part of the model for one row: the blocks, the embedding, the head and the predictors.
    parts: Vec<f64>,
    optimizer: f64,
    /// The smallest ratio of a measured time to the seconds of a part.
    ratio: f64,
}

impl OnOneGpu {
    /// Returns the seconds of a step of `rows` rows.
    fn step(&self, rows: f64) -> f64 {
        self.parts.iter().sum::<f64>() * self.ratio * rows + self.optimizer
    }
}

/// Returns the seconds of a step that no layout of a request can be faster than.
pub fn lower_bound(request: &Request) -> f64 {
    let kinds = request.kinds();
    let (rows, own) = (f64::from(request.batch), on_one_gpu(request, &request.machine));
    let (mut least, mut gpus) = (own.parts.clone(), f64::from(request.gpus.max(1)));
    let mut optimizer = own.optimizer;
    for (machine, count) in kinds.into_iter().skip(1) {
        let other = on_one_gpu(request, machine);
        let speed = own.step(rows) / other.step(rows);
        for (part, seconds) in least.iter_mut().zip(&other.parts) {
            *part = part.min(speed * seconds * other.ratio / own.ratio);
        }
        optimizer = optimizer.min(speed * other.optimizer);
        gpus += f64::from(count) * (speed - 1.0);
    }
    OnOneGpu { parts: least, optimizer, ratio: own.ratio }.step(rows) / gpus
}

/// Returns the least seconds of the parts of a request on one GPU of a machine.
fn on_one_gpu(request: &Request, machine: &Machine) -> OnOneGpu {
    let model = &request.model;
    // One row on one GPU that divides nothing.
    let (scores, implementation) = (request.scores, request.implementation);
    let layout = Layout { scores, implementation, ..Layout::on_one_gpu(request.sequence, request.precision) };
    let setting = Setting { model, layout: &layout, machine };
    let per_head_parameter = model.head_operations_per_parameter();
    let products = |per_parameter: f64, active: u128, precision: Precision| {
        per_parameter * active as f64 * layout.tokens() / machine.product_rate(precision)
    };
    let moved = |bytes: f64| bytes / machine.kernel_bandwidth();
    let block_seconds = |block: &Block| {
        let active = block.matrices(model.hidden).iter().map(Matrix::active_parameters).sum();
        let traffic = block_traffic(block, &setting);
        let attention = best_attention_seconds(&block.mixer, &setting);
        let products = products(block.training.operations_per_parameter(), active, layout.precision);
        if block.training == Training::ForwardOnly {
            return products + FORWARD_ATTENTION * attention + moved(traffic.forward);
        }
        products + attention + moved(traffic.forward + traffic.backward)
    };
    let head_traffic = loss_traffic(&setting);
    let head =
        products(per_head_parameter, model.head_matrix_parameters(), layout.precision.outside_products())
            + moved(head_traffic.forward + head_traffic.backward);
    let predictor = model.predictor_blocks().iter().map(block_seconds).sum::<f64>()
        + products(per_head_parameter, u128::from(2 * model.hidden * model.hidden), layout.precision)
        + head;
    let embedding = embedding_traffic(&setting);
    let embedding = moved(embedding.forward + if model.is_adapted() { 0.0 } else { embedding.backward });
    let blocks = model.blocks.iter().map(block_seconds);
    let parts = blocks.chain([embedding, head, f64::from(model.predictors) * predictor]).collect();
    let optimizer = [ShardedState::Optimizer, ShardedState::Parameters].map(|sharding| {
        let layout = Layout { sharding, ..layout.clone() };
        Setting { layout: &layout, ..setting }
            .update_seconds(Parameters::of_matrices(model.trained_parameters() as f64))
    });
    let optimizer = optimizer[0].min(optimizer[1]);
    // Measured times may be faster than the rates.
    OnOneGpu { parts, optimizer, ratio: least_measured_ratio(&setting) }
}

/// Returns the smallest ratio of a measured step to what the rates of the machine allow, or 1 if no measured time is
/// faster. The factors of measured blocks multiply times that measured products may have made smaller.
fn least_measured_ratio(setting: &Setting<'_>) -> f64 {
    let measured = &setting.machine.measured;
    let ratio = |product: &MeasuredProduct| {
        product.seconds / (product.operations() / setting.machine.product_rate(product.precision))
    };
    let products = measured.products.iter().map(ratio).fold(1.0, f64::min);
    let factors = measured.blocks.iter().flat_map(|block| setting.measured_factors(block));
    products * factors.fold(1.0, f64::min)
}
