//! Converts the tensors between two stages from the placements of one stage to the placements of the other
//! ([`EdgePlacement`](crate::tensor::EdgePlacement)).
//!
//! The stage that makes tensors says how its ranks hold them. [`Converter::sent`] gives each part its layout, and adds
//! partial sums: each rank adds a part. So a message has at most one part of a tensor, whatever the receiver needs.
//! The stage that takes tensors says how it needs them, and [`Converter::taken`] converts whole tensors and parts to
//! that. Neither stage knows the other's placements.
//!
//! | | needs the whole | needs the same part | needs another part | needs a partial sum |
//! |---|---|---|---|---|
//! | has the whole | nothing | cuts | cuts | the first rank has it, the others zeros |
//! | has a part | gathers | nothing | exchanges parts | its part, and zeros elsewhere |
//!
//! All ranks of the group convert the same tensors at the same place of their programs, with at most one exchange for
//! each list.

use burn::tensor::Tensor;

use super::group_link::GroupLink;
use crate::failure::Cause;
use crate::nn::sum_of_ranks;
use crate::stage::StageError;
use crate::tensor::layout::Layout;
use crate::tensor::{OptionalTensors, Spread, TensorRank, Value, ValueKind};

/// Converts tensors on a rank of a tensor group.
pub(super) struct Converter<'a> {
    pub(super) rank: TensorRank,
    pub(super) group: &'a GroupLink,
    /// Describes the tensors for errors, such as "an output of stage 2".
    pub(super) what: &'a dyn Fn(usize) -> String,
}

impl Converter<'_> {
    /// Returns tensors as they are sent, from tensors of these spreads: whole, or a part with its layout.
    pub(super) fn sent(
        &self,
        tensors: OptionalTensors,
        spread: impl Fn(usize) -> Spread,
    ) -> Result<OptionalTensors, Cause> {
        if self.rank.of == 1 {
            return Ok(tensors);
        }
        let mut to_ranks = vec![OptionalTensors::new(); self.rank.of as usize];
        let (mut placed, mut sums) = (OptionalTensors::with_capacity(tensors.len()), Vec::new());
        for (index, tensor) in tensors.into_iter().enumerate() {
            let tensor = tensor.map(Value::without_layout);
            placed.push(match (tensor, spread(index)) {
                // A rank without a tensor exchanges too, so that the ranks agree whether there is a sum.
                (tensor, Spread::Partial) => {
                    tensor.iter().try_for_each(|tensor| self.require_floats(index, tensor))?;
                    for (rank, pieces) in (0..).zip(&mut to_ranks) {
                        let rank = TensorRank { index: rank, ..self.rank };
                        pieces.push(tensor.clone().map(|tensor| tensor.part_for(rank)));
                    }
                    sums.push((index, tensor.map(|tensor| tensor.layout_for(self.rank))));
                    None
                }
                (Some(tensor), Spread::Split { dimension }) => Some(self.as_part(index, tensor, dimension)?),
                (tensor, _) => tensor,
            });
        }
        if sums.is_empty() {
            return Ok(placed);
        }
        let of_ranks = self.group.exchange(to_ranks)?;
        let mut of_ranks: Vec<_> = of_ranks.into_iter().map(Vec::into_iter).collect();
        for (index, layout) in sums {
            let pieces = of_ranks.iter_mut().filter_map(|pieces| pieces.next().flatten());
            let pieces: Vec<Value> = pieces.collect();
            let Some(layout) = layout else {
                if pieces.is_empty() {
                    continue;
                }
                let problem = "is a partial sum, and has no value on this tensor rank: every rank adds a value, which may be zero";
                return Err(self.mistake(index, problem));
            };
            let requires_grad = pieces.iter().any(Value::requires_grad);
            let sum = sum(pieces);
            let sum = if requires_grad { sum.requiring_grad() } else { sum.constant() };
            placed[index] = Some(if layout.dimension.is_some() { sum.with_layout(layout) } else { sum });
        }
        Ok(placed)
    }

    /// Returns tensors of these spreads, from tensors as they were sent. A part keeps its layout.
    pub(super) fn taken(
        &self,
        tensors: OptionalTensors,
        spread: impl Fn(usize) -> Spread,
    ) -> Result<OptionalTensors, Cause> {
        if self.rank.of == 1 {
            return Ok(tensors);
        }
        let mut to_ranks = vec![OptionalTensors::new(); self.rank.of as usize];
        let (mut placed, mut moved) = (OptionalTensors::with_capacity(tensors.len()), Vec::new());
        for (index, tensor) in tensors.into_iter().enumerate() {
            let Some(tensor) = tensor else {
                placed.push(None);
                continue;
            };
            let needed = spread(index);
            match (part_of(&tensor), needed) {
                (Some(along), Spread::Whole) => {
                    to_ranks.iter_mut().for_each(|pieces| pieces.push(Some(tensor.clone())));
                    moved.push((index, along, None));
                }
                (Some(along), Spread::Split { dimension }) if along != dimension => {
                    let layout = self.layout(index, tensor.whole_shape(), dimension)?;
                    for (rank, pieces) in (0..).zip(&mut to_ranks) {
                        pieces.push(Some(
                            own_storage(tensor.part(&layout.for_rank(rank))).with_settings_of(&tensor),
                        ));
                    }
                    moved.push((index, along, Some(layout)));
                }
                _ => {}
            }
            placed.push(Some(tensor));
        }
        let of_ranks = if moved.is_empty() { Vec::new() } else { self.group.exchange(to_ranks)? };
        let mut of_ranks: Vec<_> = of_ranks.into_iter().map(Vec::into_iter).collect();
        for (index, along, layout) in moved {
            let Some(own) = placed[index].take() else { continue };
            let pieces: OptionalTensors = of_ranks.iter_mut().map(|pieces| pieces.next().flatten()).collect();
            let joined = self.joined(index, &own, pieces, along, layout.as_ref())?;
            placed[index] = Some(match layout {
                Some(layout) => joined.with_layout(layout),
                None => joined,
            });
        }
        let finished = placed.into_iter().enumerate().map(|(index, tensor)| {
            tensor.map(|tensor| self.without_exchange(index, tensor, spread(index))).transpose()
        });
        finished.collect()
    }

    /// Converts a tensor that needs nothing of the other ranks.
    fn without_exchange(&self, index: usize, tensor: Value, needed: Spread) -> Result<Value, Cause> {
        let whole = tensor.whole_shape();
        if needed == Spread::Partial {
            self.require_floats(index, &tensor)?;
        }
        Ok(match (part_of(&tensor), needed) {
            (None, Spread::Whole) => tensor.without_layout(),
            (None, Spread::Split { dimension }) => {
                let layout = self.layout(index, whole, dimension)?;
                own_storage(tensor.part(&layout)).with_settings_of(&tensor).with_layout(layout)
            }
            (None, Spread::Partial) => {
                let own =
                    if self.rank.index > 0 { tensor.zeros(&whole).with_settings_of(&tensor) } else { tensor };
                own.without_layout()
            }
            (Some(along), Spread::Split { .. }) => {
                self.layout(index, whole, along)?;
                tensor
            }
            (Some(along), Spread::Partial) => {
                let layout = tensor.layout().cloned().unwrap_or_else(|| tensor.layout_for(self.rank));
                let pieces = (0..self.rank.of).map(|rank| {
                    let is_own = rank == self.rank.index;
                    if is_own { tensor.clone() } else { tensor.zeros(&layout.for_rank(rank).part()) }
                });
                Value::joined(pieces.collect(), along).with_settings_of(&tensor)
            }
            (Some(_), Spread::Whole) => tensor,
        })
    }

    /// Joins the pieces of all ranks along a dimension. With a layout, they are the parts of this rank's new part.
    fn joined(
        &self,
        index: usize,
        own: &Value,
        pieces: OptionalTensors,
        along: usize,
        layout: Option<&Layout>,
    ) -> Result<Value, Cause> {
        let of_message = own.layout().cloned().unwrap_or_else(|| own.layout_for(self.rank));
        for (rank, piece) in (0..).zip(&pieces) {
            let mut expected = of_message.for_rank(rank).part();
            if let Some(Layout { dimension: Some(dimension), .. }) = layout {
                expected[*dimension] /= self.rank.of as usize;
            }
            let fits = |piece: &Value| piece.shape().to_vec() == expected && piece.dtype() == own.dtype();
            if !piece.as_ref().is_some_and(fits) {
                let found =
                    piece.as_ref().map(|piece| format!("{:?} {:?}", piece.dtype(), piece.shape().to_vec()));
                let (found, dtype) = (found.unwrap_or_else(|| "nothing".to_owned()), own.dtype());
                return Err(self.mistake(
                    index,
                    &format!(
                        "is {found} on tensor rank {rank}, and {dtype:?} {expected:?} is expected there: the parts of all ranks \
                         are equally long and have one type"
                    ),
                ));
            }
        }
        Ok(Value::joined(pieces.into_iter().flatten().collect(), along).with_settings_of(own))
    }

    /// Returns a part along a dimension with its layout.
    fn as_part(&self, index: usize, part: Value, dimension: usize) -> Result<Value, Cause> {
        let mut shape = part.shape().to_vec();
        match shape.get_mut(dimension) {
            Some(size) => *size *= self.rank.of as usize,
            None => return Err(self.lacks(index, &shape, dimension)),
        }
        Ok(part.with_layout(Layout { rank: self.rank, dimension: Some(dimension), shape }))
    }

    /// Returns the layout of this rank's part of a tensor of `shape`.
    fn layout(&self, index: usize, shape: Vec<usize>, dimension: usize) -> Result<Layout, Cause> {
        match shape.get(dimension) {
            Some(size) if size.is_multiple_of(self.rank.of as usize) => {
                Ok(Layout { rank: self.rank, dimension: Some(dimension), shape })
            }
            Some(size) => Err(self.mistake(
                index,
                &format!(
                    "has the shape {shape:?}, and {} tensor ranks cannot have equal parts of {size} along dimension {dimension}",
                    self.rank.of
                ),
            )),
            None => Err(self.lacks(index, &shape, dimension)),
        }
    }

    fn require_floats(&self, index: usize, tensor: &Value) -> Result<(), Cause> {
        if tensor.kind() == ValueKind::Float {
            return Ok(());
        }
        Err(self.mistake(
            index,
            &format!("has the type {:?}, and only floats can be partial sums", tensor.dtype()),
        ))
    }

    fn lacks(&self, index: usize, shape: &[usize], dimension: usize) -> Cause {
        self.mistake(
            index,
            &format!(
                "has the shape {shape:?}, and its module says that tensor ranks split it along dimension {dimension}"
            ),
        )
    }

    fn mistake(&self, index: usize, problem: &str) -> Cause {
        StageError::Mistake(format!(
            "{} {problem} (`StageModule::input_placement`, `StageModule::output_placement`)",
            (self.what)(index)
        ))
        .into()
    }
}

/// Returns a part in its own storage. Other kinds than floats are copied when they are sent.
fn own_storage(part: Value) -> Value {
    if part.kind() == ValueKind::Float { part.copied() } else { part }
}

/// Returns the sum of tensors of one shape, added in their order in single precision.
pub(super) fn sum(tensors: Vec<Value>) -> Value {
    let shape = tensors.first().map(|first| first.shape().to_vec()).unwrap_or_default();
    let rows = [1, shape.iter().product()];
    let as_row = |tensor: Value| Tensor::from_dispatch(tensor.reshaped(&rows).into_dispatch());
    Value::of(sum_of_ranks(tensors.into_iter().map(as_row).collect())).reshaped(&shape)
}

/// Returns the dimension along which a tensor is a part; `None` if it is whole.
fn part_of(tensor: &Value) -> Option<usize> {
    tensor.layout()?.dimension
}
