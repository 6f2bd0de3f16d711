//! The time of blocks, the embedding and the head for one microbatch on one rank.

use crate::attention::attention_time;
use crate::collective::Group;
use crate::elementwise::{Traffic, block_traffic, embedding_traffic, loss_traffic};
use crate::layout::{Precision, Recompute, Scores};
use crate::model::{Block, Division, FeedForward, Matrix, Mixer};
use crate::parts::Parts;
use crate::product::Product;
use crate::setting::Setting;

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
}

impl std::ops::AddAssign for StageTime {
    fn add_assign(&mut self, other: Self) {
        self.forward = self.forward + other.forward;
        self.backward = self.backward + other.backward;
        self.again = self.again + other.again;
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
    /// Returns the time of a block.
    pub fn block(&self, block: &Block) -> StageTime {
        let matrices = block.matrices(self.model.hidden);
        let products = self.products(&matrices);
        let attention = attention_time(&block.mixer, self);
        let traffic = block_traffic(block, self.model, self.layout);
        let tensor = self.tensor_communication(block);
        let experts = self.expert_communication(block);
        let context = self.context_communication(block);
        let wait = |communication: f64, computation: f64| (communication - computation).max(0.0);
        let forward = Parts {
            products: products.forward,
            attention: attention.forward,
            elementwise: self.moved(traffic.forward),
            tensor: tensor * (1.0 - self.machine.constants.hidden),
            experts,
            context: wait(context, attention.forward),
            data: 0.0,
        };
        let backward = Parts {
            products: products.input + products.weight,
            attention: attention.backward,
            elementwise: self.moved(traffic.backward),
            tensor: self.exposed_backward(tensor, &products),
            experts,
            context: wait(2.0 * context, attention.backward),
            data: 0.0,
        };
        let again = self.again(&forward, &products);
        StageTime { forward, backward, again }
    }

    /// Returns the time of the embedding.
    pub fn embedding(&self) -> StageTime {
        self.only_moved(embedding_traffic(self.model, self.layout))
    }

    /// Returns the time of the last norm, the head and the loss.
    pub fn head(&self) -> StageTime {
        let mut time = self.only_moved(loss_traffic(self.model, self.layout));
        let (hidden, vocabulary) = (self.model.hidden, self.model.vocabulary);
        let head =
            Matrix { input: hidden, output: vocabulary, division: Division::Columns, of_experts: None };
        let [forward, input, weight] = self.product(&head, Precision::Half);
        time.forward.products = forward;
        time.backward.products = input + weight;
        time
    }

    /// Returns the time of one head that predicts a further token, with its block.
    pub fn predictor(&self) -> StageTime {
        let mut time = self.head();
        if let Some(last) = self.model.blocks.last() {
            time += self.block(last);
        }
        let hidden = self.model.hidden;
        let joined =
            Matrix { input: 2 * hidden, output: hidden, division: Division::Columns, of_experts: None };
        let [forward, input, weight] = self.product(&joined, self.layout.precision);
        time.forward.products += forward;
        time.backward.products += input + weight;
        time
    }

    fn only_moved(&self, traffic: Traffic) -> StageTime {
        let parts = |bytes: f64| Parts { elementwise: self.moved(bytes), ..Parts::default() };
        StageTime {
            forward: parts(traffic.forward),
            backward: parts(traffic.backward),
            again: Parts::default(),
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

    /// The seconds of a product in the forward, and of the products for the gradients of inputs and weights.
    fn product(&self, matrix: &Matrix, precision: Precision) -> [f64; 3] {
        let tensor = f64::from(self.layout.tensor);
        let (mut rows, mut inner, mut columns) =
            (self.layout.tokens(), matrix.input as f64, matrix.output as f64);
        match matrix.division {
            Division::Columns => columns /= tensor,
            Division::Rows => inner /= tensor,
            Division::Whole => rows /= self.layout.sequence_division(),
        }
        // The experts of a rank are computed one after another, each with its share of the tokens.
        let mut copies = 1.0;
        if let Some(share) = matrix.of_experts {
            copies = share.of as f64 / f64::from(self.layout.expert);
            rows *= share.used as f64 / copies;
        }
        let seconds = |rows, inner, columns, output_bytes| {
            copies * Product { rows, columns, inner, output_bytes }.seconds(self.machine, precision)
        };
        // Gradients of weights are added to sums of four bytes.
        [
            seconds(rows, inner, columns, 2.0),
            seconds(rows, columns, inner, 2.0),
            seconds(inner, rows, columns, 8.0),
        ]
    }

    /// The seconds of a block's collectives in the tensor group in one forward: a gather before and a
    /// reduction after each part, or a reduction to all, which takes as long.
    fn tensor_communication(&self, block: &Block) -> f64 {
        let group = Group { ranks: self.layout.tensor, stride: 1 };
        let parts = u8::from(block.mixer != Mixer::None) + u8::from(block.feed_forward != FeedForward::None);
        f64::from(parts) * group.all_reduce(self.machine, self.hidden_bytes())
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
        let gathers = half * (1.0 - self.machine.constants.hidden);
        gathers + (half - products.weight).max(0.0) + (half - products.input).max(0.0)
    }

    /// The seconds in which tokens are sent to the ranks of their experts and back.
    fn expert_communication(&self, block: &Block) -> f64 {
        let FeedForward::Experts(experts) = block.feed_forward else { return 0.0 };
        let group = Group { ranks: self.layout.expert, stride: self.layout.tensor * self.layout.context };
        let bytes = self.hidden_bytes() * experts.per_token as f64 / self.layout.sequence_division();
        2.0 * group.all_to_all(self.machine, bytes)
    }

    /// The seconds in which keys and values pass around the ranks of a sequence.
    fn context_communication(&self, block: &Block) -> f64 {
        let width = match block.mixer {
            Mixer::Attention(attention) => 2 * attention.key_width(),
            Mixer::Latent(latent) => {
                latent.heads * (latent.plain_size + latent.rotary_size + latent.value_size)
            }
            Mixer::Mamba2(_) | Mixer::None => 0,
        };
        let group = Group { ranks: self.layout.context, stride: self.layout.tensor };
        let own = 2.0 * width as f64 * self.layout.tokens() / f64::from(self.layout.tensor);
        group.gather(self.machine, own * f64::from(self.layout.context))
    }

    fn again(&self, forward: &Parts, products: &Products) -> Parts {
        let elementwise = forward.elementwise;
        match (self.layout.recompute, self.layout.scores) {
            (Recompute::None, _) => Parts::default(),
            (Recompute::Full, _) => *forward,
            (Recompute::Selective, Scores::Unfused) => {
                Parts { attention: forward.attention, ..Parts::default() }
            }
            (Recompute::Selective, Scores::Fused) => {
                Parts { products: products.second, elementwise, ..Parts::default() }
            }
        }
    }
}
