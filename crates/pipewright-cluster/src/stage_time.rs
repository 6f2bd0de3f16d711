//! The time of blocks, the embedding and the head for one microbatch on one rank.

use crate::attention::attention_time;
use crate::collective::Group;
use crate::elementwise::{
    Traffic, activation_traffic, adapter_traffic, block_traffic, embedding_traffic, feed_forward_traffic,
    loss_traffic, norm_traffic,
};
use crate::implementation::NumberFormat;
use crate::layout::{Modules, Precision, Recompute, Scores};
use crate::measured_times::MeasuredBlock;
use crate::parts::Parts;
use crate::product::Product;
use crate::setting::Setting;
use pipewright_shapes::model::{Block, Dense, Division, Experts, FeedForward, Matrix, Mixer};
use pipewright_shapes::training::{AdaptedLayer, AdapterSizes, Adapters, Training};

/// The kernels of a block's elementwise operations in a forward: norms, residual sums, positions, activation.
const KERNELS: f64 = 8.0;

/// The time of a part of a model for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StageTime {
    /// The forward.
    pub forward: Parts,
    /// The backward, without what it computes again.
    pub backward: Parts,
    /// The part of the forward that the backward computes again.
    pub again: Parts,
    /// The seconds of `backward` that compute gradients of weights. A schedule can compute them later.
    pub weights: f64,
    /// The seconds of collectives that are hidden behind gradients of weights. They are exposed if a schedule
    /// computes gradients of weights later.
    pub behind_weights: f64,
}

impl StageTime {
    /// Returns the seconds of the forward and the backward.
    pub fn total(&self) -> f64 {
        (self.forward + self.backward + self.again).total()
    }

    /// Returns the seconds of the forward and of the backward without gradients of weights, which nothing waits for.
    pub(crate) fn way(&self) -> f64 {
        (self.total() - self.weights).max(0.0)
    }
}

impl std::ops::AddAssign for StageTime {
    fn add_assign(&mut self, other: Self) {
        self.forward = self.forward + other.forward;
        self.backward = self.backward + other.backward;
        self.again = self.again + other.again;
        self.weights += other.weights;
        self.behind_weights += other.behind_weights;
    }
}

impl StageTime {
    /// Multiplies the forward and the backward by factors.
    fn scaled(self, forward: f64, backward: f64) -> Self {
        Self {
            forward: self.forward * forward,
            backward: self.backward * backward,
            again: self.again * forward,
            weights: self.weights * backward,
            behind_weights: self.behind_weights * backward,
        }
    }
}

/// The products of a block.
#[derive(Default)]
struct Products {
    forward: f64,
    /// The products of the forward that selective recomputation computes again.
    second: f64,
    input: f64,
    weight: f64,
}

impl Setting<'_> {
    /// Returns the time of a block. If its kind was measured, the prediction is scaled by what was measured.
    pub fn block(&self, block: &Block) -> StageTime {
        let predicted = self.predicted_block(block);
        match self.machine.measured.block(block, self.layout) {
            Some(measured) => {
                let [forward, backward] = self.measured_factors(measured);
                predicted.scaled(forward, backward)
            }
            None => predicted,
        }
    }

    /// Returns the measured times of the forward and the backward of a block, divided by the predicted ones of the
    /// layout's stack.
    pub(crate) fn measured_factors(&self, measured: &MeasuredBlock) -> [f64; 2] {
        let layout = measured.sizes.layout(self.layout.implementation);
        let predicted = Setting { layout: &layout, ..*self }.predicted_block(&measured.block);
        [measured.forward / predicted.forward.total(), measured.backward / predicted.backward.total()]
    }

    fn predicted_block(&self, block: &Block) -> StageTime {
        let block = &block.with_copies(self.layout.tensor);
        let matrices = block.matrices(self.model.hidden);
        let mut products = self.products(&matrices);
        let mut adapters = Traffic::default();
        if let Training::Adapters(own) = &block.training {
            let [forward, input, weight] = self.adapter_products(own);
            products.forward += forward;
            products.input += input;
            // The block's own matrices are frozen.
            products.weight = weight;
            adapters = adapter_traffic(own, self.layout);
        }
        let attention = attention_time(&block.mixer, self);
        let traffic = block_traffic(block, self);
        let tensor = self.tensor_communication(block);
        let context = self.context_communication(block);
        let wait = |communication: f64, computation: f64| (communication - computation).max(0.0);
        let mut forward = Parts {
            products: products.forward,
            attention: attention.forward,
            elementwise: self.moved(traffic.forward + adapters.forward),
            tensor: tensor * (1.0 - self.hidden_tensor()),
            context: wait(context, attention.forward),
            ..Parts::default()
        };
        let mut backward = Parts {
            products: products.input + products.weight,
            attention: attention.backward,
            elementwise: self.moved(traffic.backward + adapters.backward),
            tensor: self.exposed_backward(tensor, &products),
            context: wait(2.0 * context, attention.backward),
            ..Parts::default()
        };
        let computed = [forward.computation(), backward.computation()];
        [forward.launches, backward.launches] = self.launches(block, computed);
        [forward.experts, backward.experts] = self.exposed_dispatch(block, computed);
        if block.training == Training::ForwardOnly {
            return StageTime { forward, ..StageTime::default() };
        }
        let again = self.again(block, &forward, &products);
        let weights = products.weight;
        StageTime { forward, backward, again, weights, behind_weights: self.behind_weights(tensor, weights) }
    }

    /// Returns the time of the embedding.
    pub fn embedding(&self) -> StageTime {
        let time = self.only_moved(embedding_traffic(self));
        if self.model.is_adapted() { StageTime { backward: Parts::default(), ..time } } else { time }
    }

    /// Returns the time of the last norm, the head and the loss.
    pub fn head(&self) -> StageTime {
        let mut time = self.only_moved(loss_traffic(self));
        let [forward, input, weight] =
            self.product(&self.head_matrix(), self.layout.precision.outside_products());
        let weight = if self.model.is_adapted() { 0.0 } else { weight };
        time.forward.products = forward;
        time.backward.products = input + weight;
        time.weights = weight;
        time
    }

    /// Returns the time of the blocks that predict one further token, without their pass through the head.
    pub fn predictor(&self) -> StageTime {
        let mut time = StageTime::default();
        self.model.predictor_blocks().iter().for_each(|block| time += self.block(block));
        let [forward, input, weight] = self.product(&self.joining_matrix(), self.layout.precision);
        time.forward.products += forward;
        time.backward.products += input + weight;
        time.weights += weight;
        time
    }

    fn only_moved(&self, traffic: Traffic) -> StageTime {
        let parts = |bytes: f64| Parts { elementwise: self.moved(bytes), ..Parts::default() };
        StageTime {
            forward: parts(traffic.forward),
            backward: parts(traffic.backward),
            ..StageTime::default()
        }
    }

    /// The seconds of elementwise kernels that read and write `bytes`.
    fn moved(&self, bytes: f64) -> f64 {
        bytes / self.machine.kernel_bandwidth() + KERNELS * self.machine.constants.launch
    }

    fn products(&self, matrices: &[Matrix]) -> Products {
        let mut sum = Products::default();
        for (index, matrix) in matrices.iter().enumerate() {
            let [forward, input, weight] = self.product(matrix, self.layout.precision);
            sum.forward += forward;
            sum.input += input;
            sum.weight += weight;
            sum.second += if index % 2 == 1 { forward } else { 0.0 };
        }
        sum
    }

    /// The seconds of the products of a block's adapters: in the forward, and for the gradients of inputs and
    /// weights. For magnitudes, each forward multiplies both matrices of an adapter.
    fn adapter_products(&self, adapters: &Adapters) -> [f64; 3] {
        let products =
            adapters.matrices().map(|matrix| self.product(&matrix, self.layout.precision.outside_products()));
        let [forward, input, weight] =
            products.fold([0.0; 3], |sum, product| [0, 1, 2].map(|part| sum[part] + product[part]));
        let AdapterSizes { rank, has_magnitudes, .. } = adapters.sizes();
        let seconds = |layer: AdaptedLayer| self.adapter_matrix(&layer, rank);
        let matrices: f64 = if has_magnitudes { adapters.layers().map(seconds).sum() } else { 0.0 };
        [forward + matrices, input, weight]
    }

    /// The seconds of the product of both matrices of a layer's adapter.
    fn adapter_matrix(&self, layer: &AdaptedLayer, rank: u64) -> f64 {
        let [rows, columns] = self.layout.matrix_of([layer.input, layer.output], layer.division);
        let product = Product { rows, columns, inner: rank as f64, output_bytes: 4.0 };
        product.seconds(self, self.layout.precision.outside_products())
    }

    /// The matrix of the head.
    fn head_matrix(&self) -> Matrix {
        let (input, output) = (self.model.hidden, self.model.outputs());
        Matrix { input, output, division: Division::Columns, of_experts: None }
    }

    /// The matrix that joins the hidden states of two tokens to predict a further one.
    fn joining_matrix(&self) -> Matrix {
        let hidden = self.model.hidden;
        Matrix { input: 2 * hidden, output: hidden, division: Division::Columns, of_experts: None }
    }

    /// Returns the shapes of all products with parameters on one rank, with their precision.
    pub fn product_shapes(&self) -> Vec<(Product, Precision)> {
        let precision = self.layout.precision;
        let mut kinds: Vec<Block> = Vec::new();
        let predictor = if self.model.predictors > 0 { self.model.predictor_blocks() } else { &[] };
        for block in self.model.blocks.iter().chain(predictor) {
            let block = block.with_copies(self.layout.tensor);
            if !kinds.contains(&block) {
                kinds.push(block);
            }
        }
        let mut matrices: Vec<(Matrix, Precision)> = Vec::new();
        for block in kinds {
            matrices.extend(block.matrices(self.model.hidden).into_iter().map(|matrix| (matrix, precision)));
        }
        matrices.push((self.head_matrix(), precision.outside_products()));
        if self.model.predictors > 0 {
            matrices.push((self.joining_matrix(), precision));
        }
        let shapes = |(matrix, precision): &(Matrix, Precision)| {
            self.shapes(matrix).1.map(|product| (product, *precision))
        };
        matrices.iter().flat_map(shapes).collect()
    }

    /// The seconds of a product in the forward, and of the products for the gradients of inputs and weights.
    fn product(&self, matrix: &Matrix, precision: Precision) -> [f64; 3] {
        let (groups, products) = self.shapes(matrix);
        products.map(|product| product.grouped_seconds(groups, self, precision))
    }

    /// The product of a matrix in the forward, and the products for the gradients of inputs and weights, with
    /// the number of such products that run at the same time.
    fn shapes(&self, matrix: &Matrix) -> (f64, [Product; 3]) {
        let tensor = f64::from(self.layout.tensor);
        let expert_tensor = f64::from(self.layout.expert_tensor);
        let mut rows = self.layout.tokens();
        let (mut groups, mut division) = (1.0, tensor);
        if let Some(share) = matrix.of_experts {
            // The tokens of a tensor group are divided among its experts' groups.
            groups = (share.of as f64 / f64::from(self.layout.expert)).max(1.0);
            rows *= self.layout.rows_per_token(matrix) * expert_tensor / (groups * tensor);
            division = expert_tensor;
        }
        let (mut inner, mut columns) = (matrix.input as f64, matrix.output as f64);
        match matrix.division {
            Division::Columns => columns /= division,
            Division::Rows => inner /= division,
            Division::Whole => rows /= self.layout.sequence_division(),
        }
        let product = |rows, inner, columns, output_bytes| Product { rows, columns, inner, output_bytes };
        let element = self.layout.precision.element_bytes();
        // Gradients of weights are added to sums of four bytes.
        let products = [
            product(rows, inner, columns, element),
            product(rows, columns, inner, element),
            product(inner, rows, columns, 8.0),
        ];
        (groups, products)
    }

    /// The seconds of a block's collectives in the tensor group in one forward: a gather before and a
    /// reduction after each part, or a reduction to all. If a tensor group divides each expert, its ranks
    /// gather all tokens that were sent to their experts.
    fn tensor_communication(&self, block: &Block) -> f64 {
        let group = Group { ranks: self.layout.tensor, stride: 1 };
        let hidden = self.hidden_bytes();
        let exchange = |bytes: f64| {
            if self.layout.sequence_parallel {
                2.0 * group.gather(self.machine, bytes)
            } else {
                group.all_reduce(self.machine, bytes)
            }
        };
        let mixer = if block.mixer == Mixer::None { 0.0 } else { exchange(hidden) };
        let feed_forward = match block.feed_forward {
            FeedForward::Dense(_) => exchange(hidden),
            FeedForward::Experts(experts) | FeedForward::LatentExperts { experts, .. } => {
                let share = self.expert_share(block);
                let shared = if experts.shared_inner > 0 { exchange(hidden) } else { 0.0 };
                let rows = experts.per_token as f64 * self.layout.expert_load();
                let is_divided = self.layout.expert_tensor > 1;
                shared + if is_divided { exchange(hidden * share * rows) } else { 0.0 }
            }
            FeedForward::None => 0.0,
        };
        mixer + feed_forward
    }

    /// The exposed collectives of the tensor group in a backward. Without sequence parallelism, the sums over
    /// the group run while gradients of weights are computed. With it, only half of the collectives do: the
    /// reductions of gradients of inputs. The gathers of gradients come before all products. A second gather
    /// of each input runs at the same time as the product for the gradient of the input.
    fn exposed_backward(&self, communication: f64, products: &Products) -> f64 {
        if !self.layout.sequence_parallel {
            return (communication - products.weight).max(0.0);
        }
        let half = communication / 2.0;
        let gathers = half * (1.0 - self.hidden_tensor());
        gathers + (half - products.weight).max(0.0) + (half - products.input).max(0.0)
    }

    /// The seconds of the tensor group's collectives in a backward that gradients of weights hide.
    fn behind_weights(&self, communication: f64, weights: f64) -> f64 {
        let overlapping = if self.layout.sequence_parallel { communication / 2.0 } else { communication };
        overlapping.min(weights)
    }

    /// The width of the routed experts' inputs, divided by the width of the hidden states.
    fn expert_share(&self, block: &Block) -> f64 {
        block.feed_forward.expert_width(self.model.hidden) as f64 / self.model.hidden as f64
    }

    /// The seconds in which a rank waits for tokens that are sent to the ranks of their experts and back, in a
    /// forward and in a backward that compute for so long. If the stack overlaps the exchange, a forward exchanges
    /// while the backward of another microbatch computes, and the other way round.
    fn exposed_dispatch(&self, block: &Block, [forward, backward]: [f64; 2]) -> [f64; 2] {
        let Some(experts) = block.feed_forward.experts() else { return [0.0; 2] };
        let implementation = &self.layout.implementation;
        let group = Group { ranks: self.layout.expert, stride: self.layout.expert_tensor };
        let width = block.feed_forward.expert_width(self.model.hidden) as f64;
        let numbers =
            width * self.layout.tokens() / self.layout.sequence_division() * self.layout.expert_load();
        let send = |format: NumberFormat| {
            group.dispatch(self.machine, numbers * format.bytes(), experts, implementation.dispatcher)
        };
        // Results and their gradients come back in the format of other tensors.
        let element = self.layout.precision.element_format();
        let dispatched = implementation.dispatched.unwrap_or(element);
        let (there, back) = (send(dispatched), send(element));
        let exchanges = [there + back, 2.0 * back];
        if !implementation.overlaps_experts {
            return exchanges;
        }
        let hidden = self.stack().hidden_experts;
        let exposed = |exchange: f64, beside: f64| exchange - (hidden * exchange).min(beside);
        [exposed(exchanges[0], backward), exposed(exchanges[1], forward)]
    }

    /// The share of a tensor group's exchanges that products hide.
    fn hidden_tensor(&self) -> f64 {
        match self.layout.implementation.overlaps_tensor {
            Some(true) => self.stack().hidden_tensor,
            Some(false) => 0.0,
            None => self.machine.constants.hidden,
        }
    }

    /// The seconds in which the ranks of a sequence exchange what a mixer needs of other tokens. Keys and
    /// values pass around a ring, as far as a window reaches. The ranks of a state space exchange its inputs
    /// and its outputs, so that each rank scans some of the heads for the whole sequence.
    fn context_communication(&self, block: &Block) -> f64 {
        let layout = self.layout;
        let group = Group { ranks: layout.context, stride: layout.tensor };
        let element = layout.precision.element_bytes();
        let bytes = |width: u64| element * width as f64 * layout.tokens() / f64::from(layout.tensor);
        let (width, window) = match block.mixer {
            Mixer::Attention(attention) => (2 * attention.key_width(), attention.window),
            Mixer::Latent(latent) => {
                (latent.heads * (latent.plain_size + latent.rotary_size + latent.value_size), None)
            }
            Mixer::Mamba2(mamba) => {
                return group.all_to_all(self.machine, bytes(mamba.projected()))
                    + group.all_to_all(self.machine, bytes(mamba.inner()));
            }
            Mixer::Delta(delta) => {
                return group.all_to_all(self.machine, bytes(delta.scanned()))
                    + group.all_to_all(self.machine, bytes(delta.value_width()));
            }
            Mixer::None => return 0.0,
        };
        let own = f64::from(layout.sequence) / f64::from(layout.context);
        let reached = window.map_or(f64::INFINITY, |window| (window as f64 / own).ceil());
        let steps = reached.min(f64::from(layout.context) - 1.0);
        group.ring_exchange(self.machine, bytes(width), steps)
    }

    /// The part of a forward that a backward computes again.
    fn again(&self, block: &Block, forward: &Parts, products: &Products) -> Parts {
        let elementwise = forward.elementwise;
        match (self.layout.recompute, self.layout.scores) {
            (Recompute::None, _) => Parts::default(),
            (Recompute::Modules(modules), _) => self.modules_again(block, modules, forward),
            (Recompute::Full, _) => *forward,
            (Recompute::Selective, Scores::Unfused) => {
                Parts { attention: forward.attention, ..Parts::default() }
            }
            (Recompute::Selective, Scores::Fused) => {
                Parts { products: products.second, elementwise, ..Parts::default() }
            }
        }
    }

    /// The seconds in which a backward computes parts of a block again.
    fn modules_again(&self, block: &Block, modules: Modules, forward: &Parts) -> Parts {
        let hidden = self.model.hidden;
        let mut matrices = Vec::new();
        if let (true, Mixer::Latent(latent)) = (modules.has(Modules::LATENT), &block.mixer) {
            matrices.extend(latent.up_matrices());
        }
        let (mut exchanged, mut moved) = (0.0, 0.0);
        match &block.feed_forward {
            FeedForward::Dense(_) if modules.has(Modules::DENSE) => {
                matrices.extend(block.feed_forward.matrices(hidden));
                moved += feed_forward_traffic(block, self).forward;
            }
            FeedForward::Experts(_) | FeedForward::LatentExperts { .. } if modules.has(Modules::EXPERTS) => {
                matrices.extend(block.feed_forward.matrices(hidden));
                exchanged = forward.experts;
                moved += feed_forward_traffic(block, self).forward;
            }
            FeedForward::Experts(experts) | FeedForward::LatentExperts { experts, .. } => {
                let shared = FeedForward::Dense(Dense { inner: experts.shared_inner, ..experts.expert });
                let shared = Block { feed_forward: shared, ..*block };
                if modules.has(Modules::SHARED_EXPERT) && experts.shared_inner > 0 {
                    matrices.extend(shared.feed_forward.matrices(hidden));
                    moved += activation_traffic(&shared, self).forward;
                }
                if modules.has(Modules::EXPERT_ACTIVATIONS) {
                    let routed = FeedForward::Experts(Experts { shared_inner: 0, ..*experts });
                    moved += activation_traffic(&Block { feed_forward: routed, ..*block }, self).forward;
                }
            }
            FeedForward::Dense(_) | FeedForward::None => {}
        }
        if modules.has(Modules::NORMS) {
            moved += norm_traffic(block, self).forward;
        }
        let attention = if modules.has(Modules::SCORES) { forward.attention } else { 0.0 };
        let products = self.products(&matrices).forward;
        let elementwise = if moved > 0.0 { self.moved(moved) } else { 0.0 };
        Parts { products, attention, elementwise, experts: exchanged, ..Parts::default() }
    }
}
