//! The forward and the backward pass of a mixture of experts on the CPU back end.

use std::borrow::Cow;

use burn::tensor::{Tensor, bf16};
use pipewright_kernel::grouped::{ExpertElement, Groups};

use super::clamped_gate::{self, bounds};
use super::expert::{ExpertActivation, ExpertForm};
use super::expert_exchange::Arrived;
use super::expert_low_rank::{KeptLowRank, LowRankExperts, LowRankPass, singles};
use super::expert_matrices::{KeptMatrices, KeptMatrix, Matrices, MatrixValue, Part, Parts};
use super::operation::{
    CpuTensor, Operation, ReadElement, Tape, are_multiplied_in_bf16, cpu_tensor, tensor_of, with_dtype,
};
use super::relu_squared;
use super::swiglu;

/// The inputs of a mixture, without its matrices.
#[derive(Clone, Debug)]
pub(super) struct Mixture {
    /// Tokens, width, inner width.
    pub(super) sizes: [usize; 3],
    /// The number of choices of a token.
    pub(super) count: usize,
    pub(super) form: ExpertForm,
    pub(super) x: CpuTensor,
    /// The weight of each sorted row.
    pub(super) weights: Vec<f32>,
    pub(super) groups: Groups,
    /// The rows that this rank computes, if several replicas hold the experts together.
    pub(super) arrived: Option<Arrived>,
}

impl Mixture {
    /// Returns the groups of the rows that this rank computes, and the number of groups of an expert.
    fn computed(&self) -> (&Groups, usize) {
        match &self.arrived {
            Some(arrived) => (&arrived.groups, arrived.sources()),
            None => (&self.groups, 1),
        }
    }

    /// Returns the inputs of the rows that this rank computes.
    fn rows<T: ReadElement>(&self) -> Cow<'_, [T]> {
        match &self.arrived {
            Some(arrived) => T::read(&arrived.rows),
            None => self.groups.gather(&T::read(&self.x), self.sizes[1]).into(),
        }
    }

    /// Computes the mixture, with products of operands of the type `T`.
    pub(super) fn forward<T: ReadElement + ExpertElement>(
        self,
        matrices: Matrices,
        adapters: Option<LowRankExperts<'_>>,
        tape: Tape<3>,
    ) -> Tensor<2> {
        let Self { sizes: [tokens, width, inner], weights, form, .. } = &self;
        let (groups, sources) = self.computed();
        let held = matrices.held.iter().map(|held| &held.value);
        let parts = Parts::<T>::new(held, matrices.parts, sources);
        let rows = self.rows::<T>();
        let pass = adapters.as_ref().map(|adapters| adapters.pass(groups, sources));
        let indices = |pass: &LowRankPass<'_>| [pass.enter(), pass.enter_up(), pass.leave()];
        let [enters, enters_up, leaves] = pass.as_ref().map_or([None; 3], indices);
        let low_of = |index: Option<usize>, rows: &dyn Fn() -> Vec<f32>, inputs| {
            pass.as_ref().zip(index).map(|(pass, index)| pass.low(&rows(), index, inputs))
        };
        // Returns what the adapter adds to the outputs of the matrix at an index.
        let added = |low: &Option<Vec<f32>>, index, outputs| {
            let (pass, low) = (pass.as_ref()?, low.as_ref()?);
            let mut out = vec![0.0; groups.rows() * outputs];
            pass.add(&mut out, low, index, outputs);
            Some(out)
        };
        let [low_enter, low_up] =
            [enters, enters_up].map(|index| low_of(index, &|| self.rows::<f32>().into_owned(), *width));
        // The tensors that the backward keeps are rounded first, so that it sees the numbers with which the
        // forward continues.
        let shape = [groups.rows(), *inner];
        let begin = |part, index| {
            let biases = matrices.biases.rows(groups, part, *inner, 1.0);
            let low = if index == 2 && low_up.is_some() { &low_up } else { &low_enter };
            biases.or_else(|| added(low, index, *inner))
        };
        let enter = |part, index| match begin(part, index) {
            Some(mut out) => {
                parts.add_product(&mut out, groups, &rows, (part, false), [*width, *inner]);
                tape.rounded(cpu_tensor(out, shape))
            }
            None => {
                let rows = parts.rounded_product(groups, &rows, (part, false), [*width, *inner]);
                tape.rounded(tensor_of(rows, shape))
            }
        };
        let gate = parts.has_gates().then(|| enter(Part::Gate, 1));
        let up = enter(Part::Up, 2);
        let activated = tape.rounded(match (&gate, form.activation) {
            (Some(gate), ExpertActivation::Usual) => swiglu::activated(gate, &up),
            (Some(gate), ExpertActivation::Clamped { alpha, limit }) => {
                clamped_gate::activated(gate, &up, bounds([alpha, limit]))
            }
            (None, _) => relu_squared::activated(&up),
        });
        let activated_rows = T::read(&activated);
        let low_leave = low_of(leaves, &|| singles(&activated), *inner);
        let last = leaves.map_or(0, |first| first + 1);
        let biases = matrices.biases.rows(groups, Part::Down, *width, form.bias_share as f32);
        let out = match biases.or_else(|| added(&low_leave, last, *width)) {
            Some(mut out) => {
                parts.add_product(&mut out, groups, &activated_rows, (Part::Down, false), [*inner, *width]);
                out
            }
            None => parts.product(groups, &activated_rows, (Part::Down, false), [*inner, *width]),
        };
        let out = match &self.arrived {
            Some(arrived) => {
                let [out] = arrived.to_tokens([(out, *width)]);
                out
            }
            None => out,
        };
        let out = self.groups.scatter(&out, Some(weights), *width);
        let shape = [*tokens, *width];
        // Matrices in single precision may be copies.
        drop((parts, rows, activated_rows, pass));
        tape.record(out, shape, |_| {
            let matrices = matrices.kept();
            let adapters = adapters.map(|adapters| KeptLowRank {
                form: adapters.form,
                matrices: adapters.matrices.kept(),
                low: [low_enter, low_up, low_leave],
            });
            ExpertsBackward { mixture: self, gate, up, activated, matrices, adapters }
        })
    }

    /// Defers or computes the gradients of the matrices and biases. `activated` is the input of the last part.
    fn differentiate<T: ReadElement + ExpertElement>(
        &self,
        matrices: &KeptMatrices,
        activated: CpuTensor,
        PartGradients { gate, up, down }: PartGradients<T>,
    ) {
        let [_, width, inner] = self.sizes;
        let (groups, sources) = self.computed();
        let dtype = self.x.dtype();
        let tensor = |rows, width: usize| tensor_of::<T>(rows, [groups.rows(), width]);
        let of_part = |part, rows, (width, share)| {
            let gradient = tensor(rows, width);
            matrices.differentiate_biases::<T>(groups, part, &gradient, (width, share));
            with_dtype(gradient, dtype)
        };
        let gate = gate.map(|gate| of_part(Part::Gate, gate, (inner, 1.0)));
        let up = of_part(Part::Up, up, (inner, 1.0));
        let down = of_part(Part::Down, down, (width, self.form.bias_share as f32));
        let inputs = match &self.arrived {
            Some(arrived) => arrived.rows.clone(),
            None => with_dtype(tensor(self.rows::<T>().into_owned(), width), dtype),
        };
        let before = gate.into_iter().chain([up]).map(|gradient| (inputs.clone(), gradient));
        let last = (activated, down);
        matrices.differentiate(groups, sources, &before.chain([last]).collect::<Vec<_>>());
    }
}

#[derive(Clone, Debug)]
struct ExpertsBackward {
    mixture: Mixture,
    /// Shape `[rows, inner width]`, as are the next two.
    gate: Option<CpuTensor>,
    up: CpuTensor,
    activated: CpuTensor,
    matrices: KeptMatrices,
    adapters: Option<KeptLowRank>,
}

/// The gradients of the results of each part.
struct PartGradients<T> {
    gate: Option<Vec<T>>,
    up: Vec<T>,
    down: Vec<T>,
}

impl Operation<3> for ExpertsBackward {
    fn backward(self, gradient: CpuTensor, wanted: [bool; 3]) -> [Option<CpuTensor>; 3] {
        let held: Vec<_> = self.matrices.kept.iter().map(KeptMatrix::value).collect();
        let tensors = held.iter().filter_map(MatrixValue::tensor);
        if are_multiplied_in_bf16(tensors.chain([&self.mixture.x])) {
            self.backward_in::<bf16>(&held, &gradient, wanted)
        } else {
            self.backward_in::<f32>(&held, &gradient, wanted)
        }
    }
}

impl ExpertsBackward {
    /// Returns the gradients, from products of operands of the type `T`.
    fn backward_in<T: ReadElement + ExpertElement>(
        self,
        held: &[MatrixValue],
        gradient: &CpuTensor,
        [for_x, for_weights, for_matrices]: [bool; 3],
    ) -> [Option<CpuTensor>; 3] {
        let Self { mixture, gate, up, activated, matrices, adapters } = self;
        let [tokens, width, inner] = mixture.sizes;
        let (groups, sources) = mixture.computed();
        let values = adapters.as_ref().map(KeptLowRank::values);
        let pass =
            adapters.as_ref().zip(values.as_deref()).map(|(kept, held)| kept.pass(held, groups, sources));
        let single = |rows: &[T], width: usize| singles(&tensor_of(rows.to_vec(), [groups.rows(), width]));
        let parts = Parts::<T>::new(held, matrices.parts, sources);
        let d_out = mixture.groups.gather(&T::read(gradient), width);
        let (mut d_out, weights) = match &mixture.arrived {
            Some(arrived) => (arrived.to_experts(d_out, width), &arrived.weights),
            None => (d_out, &mixture.weights),
        };
        // The replicas whose tokens the rows are need the gradients.
        let are_sent = mixture.arrived.is_some();
        // The gradient of the activated rows, before the weight of the row.
        let mut d_activated = parts.product(groups, &d_out, (Part::Down, true), [width, inner]);
        let leave = pass.as_ref().and_then(|pass| Some((pass, pass.leave()?)));
        let back_leave = leave.map(|(pass, first)| {
            let back = pass.back(&single(&d_out, width), first + 1, width);
            pass.add_back(&mut d_activated, &back, first, inner);
            back
        });
        let share = mixture.form.bias_share as f32;
        let d_weights = (for_weights || are_sent).then(|| {
            // The weight of a row multiplies its product and its bias.
            let mut products = T::row_products(&T::read(&activated), &d_activated, inner);
            if let Some(biases) = matrices.biases.rows(groups, Part::Down, width, share) {
                let of_biases = T::row_products(&d_out, &biases, width);
                products.iter_mut().zip(of_biases).for_each(|(product, of_bias)| *product += of_bias);
            }
            products
        });
        f32::scale_rows(&mut d_activated, weights, inner);
        let (d_gate, d_up) = activation_gradients::<T>(gate, up, d_activated, mixture.form.activation);
        let enter = pass.as_ref().and_then(|pass| Some((pass, pass.enter()?)));
        let enter = enter.zip(d_gate.as_ref()).map(|((pass, first), d_gate)| {
            let gradients = [d_gate, &d_up].map(|rows| single(rows, inner));
            let [mut back, of_up] =
                [0, 1].map(|index| pass.back(&gradients[index], first + 1 + index, inner));
            let backs = if let Some(own) = pass.enter_up() {
                vec![(first, back), (own, of_up)]
            } else {
                back.iter_mut().zip(of_up).for_each(|(sum, of_up)| *sum += of_up);
                vec![(first, back)]
            };
            (pass, backs, gradients)
        });
        let d_rows = (for_x || are_sent).then(|| {
            let mut d_rows = parts.product(groups, &d_up, (Part::Up, true), [inner, width]);
            if let Some(d_gate) = &d_gate {
                parts.add_product(&mut d_rows, groups, d_gate, (Part::Gate, true), [inner, width]);
            }
            if let Some((pass, backs, _)) = &enter {
                backs.iter().for_each(|(first, back)| pass.add_back(&mut d_rows, back, *first, width));
            }
            d_rows
        });
        if let (true, Some(adapters)) = (for_matrices, &adapters) {
            let tensor = |rows: Vec<f32>, width: usize| cpu_tensor(rows, [groups.rows(), width]);
            let rank = adapters.form.rank();
            let enter = enter.map(|(_, backs, gradients)| {
                let x = mixture.rows::<f32>().into_owned();
                let backs = backs.into_iter().map(|(_, back)| tensor(back, rank)).collect();
                (tensor(x, width), backs, gradients.map(|rows| tensor(rows, inner)))
            });
            let leave = back_leave.map(|mut back| {
                let mut d_out = single(&d_out, width);
                f32::scale_rows(&mut back, weights, rank);
                f32::scale_rows(&mut d_out, weights, width);
                [tensor(singles(&activated), inner), tensor(back, rank), tensor(d_out, width)]
            });
            adapters.differentiate((groups, sources), enter, leave);
        } else if for_matrices {
            T::scale_rows(&mut d_out, weights, width);
            let gradients = PartGradients { gate: d_gate, up: d_up, down: d_out };
            mixture.differentiate(&matrices, activated, gradients);
        }
        let (d_rows, d_weights) = match (&mixture.arrived, d_rows, d_weights) {
            (Some(arrived), Some(d_rows), Some(d_weights)) => {
                let [d_rows, d_weights] = arrived.to_tokens([(d_rows, width), (d_weights, 1)]);
                (for_x.then_some(d_rows), for_weights.then_some(d_weights))
            }
            (_, d_rows, d_weights) => (d_rows, d_weights),
        };
        let d_x =
            d_rows.map(|d_rows| cpu_tensor(mixture.groups.scatter(&d_rows, None, width), [tokens, width]));
        let d_weights = d_weights.map(|products| {
            let mut d_weights = vec![0.0; tokens * mixture.count];
            let assignments = mixture.groups.assignments().iter();
            assignments.zip(products).for_each(|(&index, d)| d_weights[index] = d);
            cpu_tensor(d_weights, [tokens, mixture.count])
        });
        // The token has a gradient, so that the tape continues to the bundle, which takes the gradients out
        // of the slots.
        let slots = adapters.map_or(matrices.slots, |adapters| adapters.matrices.slots);
        let d_token = slots.filter(|_| for_matrices).map(|_| cpu_tensor(vec![0.0], [1]));
        [d_x, d_weights, d_token]
    }
}

/// Returns the gradients of the results of the gates, if there are gates, and of `up`.
fn activation_gradients<T: ReadElement + ExpertElement>(
    gate: Option<CpuTensor>,
    up: CpuTensor,
    gradient: Vec<f32>,
    activation: ExpertActivation,
) -> (Option<Vec<T>>, Vec<T>) {
    let up = T::read(&up);
    let Some(gate) = gate else { return (None, T::relu_squared_backward(&up, &gradient)) };
    let gate = T::read(&gate);
    let (d_gate, d_up) = match activation {
        ExpertActivation::Usual => T::swiglu_backward(&gate, &up, &gradient),
        ExpertActivation::Clamped { alpha, limit } => {
            T::clamped_gate_backward(&gate, &up, &gradient, bounds([alpha, limit]))
        }
    };
    (Some(d_gate), d_up)
}
