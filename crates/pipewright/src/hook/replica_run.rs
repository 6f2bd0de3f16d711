//! The actions between replicas that a hook's functions run: [`UnshardRun`], [`ReshardRun`] and
//! [`ReduceRun`].
//!
//! All replicas run the same program, and an exchange needs all of them: the functions of all replicas must
//! decide alike.

use std::sync::Arc;

use pipewright_schedule::words::counted;
use pipewright_schedule::{Action, StageIndex};

use super::action_run::Place;
use crate::ids::WorldRank;
use crate::stage::{StageError, StageParameters};
use crate::tensor::shard::RowShard;
use crate::tensor::{OptionalTensors, Value, ValueKind};

/// A stage at an action between replicas.
#[derive(Clone, Copy)]
pub(crate) struct ReplicaPlace {
    pub(crate) place: Place,
    /// The number of replicas that take part, and the number of this one among them.
    pub(crate) replicas: u32,
    pub(crate) replica: u32,
}

/// An `UNSHARD`. A function that calls neither [`run`](Self::run) nor
/// [`set_parameters`](Self::set_parameters) leaves the stage without its parameters, unless they are still
/// gathered; the next computation that needs them fails.
pub struct UnshardRun<'a> {
    at: ReplicaPlace,
    parameters: &'a mut dyn StageParameters,
    is_asked: bool,
}

/// A `RESHARD`. A function that does not call [`run`](Self::run) leaves the parameters gathered, until a
/// later `RESHARD` or the end of the program.
pub struct ReshardRun<'a> {
    at: ReplicaPlace,
    is_asked: bool,
    parameters: &'a dyn StageParameters,
}

/// A `REDUCE_GRAD` or a `WAIT_REDUCE_GRAD`.
///
/// A function for `REDUCE_GRAD` that does not call [`run`](Self::run) takes over the sum. When the program
/// ends, the gradients must be the sums over all replicas; if parameters are sharded, this replica's rows of
/// them ([`own_rows`](Self::own_rows)). A function for `WAIT_REDUCE_GRAD` sees the sums, if the runtime has
/// made them: it is called when they have arrived.
pub struct ReduceRun<'a> {
    at: ReplicaPlace,
    parameters: &'a mut dyn StageParameters,
    is_due: bool,
    is_asked: bool,
}

impl<'a> UnshardRun<'a> {
    pub(crate) fn new(at: ReplicaPlace, parameters: &'a mut dyn StageParameters) -> Self {
        Self { at, parameters, is_asked: false }
    }

    /// Sends this replica's rows to the other replicas when the function returns, and gathers theirs until
    /// the stage computes. Has no effect if parameters are not sharded, or are still gathered.
    pub fn run(&mut self) {
        self.is_asked = true;
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked && !self.is_gathered()
    }

    /// Returns whether the stage has its whole parameters; also if they are not sharded.
    pub fn is_gathered(&self) -> bool {
        self.parameters.is_gathered()
    }

    /// Returns this replica's rows of each parameter, in the order of [`paths`](Self::paths). `None` if the
    /// replica has no rows of it, or has it whole. Fails if no parameter is sharded.
    ///
    /// # Errors
    /// When parameters are not sharded.
    pub fn rows(&self) -> Result<OptionalTensors, StageError> {
        if self.at.is_sharded(self.parameters) {
            Ok(self.parameters.rows())
        } else {
            Err(StageError::function("parameters are not sharded, so there are no rows"))
        }
    }

    /// Gives the stage its whole parameters, which the function has gathered in its own way: one tensor for
    /// each path, `None` for parameters that this replica has whole (not trained ones). They must be the rows
    /// of all replicas.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape than its parameter, parameters are not sharded, or
    /// replicas hold experts of the stage together, so that they have different parameters.
    pub fn set_parameters(&mut self, whole: OptionalTensors) -> Result<(), StageError> {
        if !self.at.is_sharded(self.parameters) {
            return Err(StageError::function("parameters are not sharded, so none are gathered"));
        }
        if self.parameters.table().has_own_experts {
            return Err(StageError::function(
                "replicas hold experts of the stage together, so their rows belong to different parameters: call \
                 `UnshardRun::run`, or set `expert_parallel` to 1",
            ));
        }
        check(&whole, self.parameters, |index, shape| {
            let is_cut = self.parameters.row_shard(index) != RowShard::WHOLE;
            if is_cut { vec![Some(shape.to_vec())] } else { vec![None] }
        })?;
        self.parameters.release();
        self.parameters.gather(whole);
        Ok(())
    }
}

impl<'a> ReshardRun<'a> {
    pub(crate) fn new(at: ReplicaPlace, parameters: &'a dyn StageParameters) -> Self {
        Self { at, parameters, is_asked: false }
    }

    /// Drops the rows of the other replicas when the function returns.
    pub fn run(&mut self) {
        self.is_asked = true;
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked
    }
}

impl<'a> ReduceRun<'a> {
    pub(crate) fn new(at: ReplicaPlace, parameters: &'a mut dyn StageParameters, is_due: bool) -> Self {
        Self { at, parameters, is_due, is_asked: false }
    }

    /// Begins the sum over the replicas when the function returns. In a `WAIT_REDUCE_GRAD` it has no effect.
    pub fn run(&mut self) {
        self.is_asked = true;
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked
    }

    /// Returns whether this step sums gradients over replicas: not with one replica, and not in a step
    /// without an update, whose gradients wait for later ones.
    pub fn is_due(&self) -> bool {
        self.is_due
    }

    /// Returns the gradient of each parameter, in the order of [`paths`](Self::paths): this replica's sum
    /// over its microbatches, not divided, or after the reduction the sum over all replicas, of this
    /// replica's rows if parameters are sharded. `None` if a parameter has no gradient; between a
    /// `REDUCE_GRAD` and its wait, all are `None`.
    pub fn gradients(&self) -> OptionalTensors {
        (0..self.parameters.table().paths.len()).map(|index| self.parameters.sums().get(index)).collect()
    }

    /// Replaces the gradients.
    ///
    /// # Errors
    /// When there are more or fewer gradients than parameters, or one is not a float tensor of its
    /// parameter's shape or of this replica's rows of it.
    pub fn set_gradients(&mut self, gradients: OptionalTensors) -> Result<(), StageError> {
        check(&gradients, self.parameters, |index, shape| {
            vec![None, Some(shape.to_vec()), Some(rows_of(self.parameters.row_shard(index), shape))]
        })?;
        gradients.into_iter().enumerate().for_each(|(index, gradient)| {
            self.parameters.sums_mut().set(index, gradient);
        });
        Ok(())
    }

    /// Returns this replica's rows of tensors that have the shapes of the parameters; the tensors themselves
    /// if parameters are not sharded.
    pub fn own_rows(&self, whole: OptionalTensors) -> OptionalTensors {
        let cut = |(index, tensor): (usize, Option<Value>)| match self.parameters.row_shard(index) {
            RowShard::WHOLE => tensor,
            part => tensor.and_then(|tensor| part.cut(&tensor)),
        };
        whole.into_iter().enumerate().map(cut).collect()
    }
}

/// Methods that all of them have.
macro_rules! at_a_stage {
    ($run:ident) => {
        impl $run<'_> {
            /// Returns the rank that runs the action.
            pub fn rank(&self) -> WorldRank {
                self.at.place.rank
            }

            /// Returns the action.
            pub fn action(&self) -> Action {
                self.at.place.action
            }

            /// Returns the stage.
            pub fn stage(&self) -> StageIndex {
                self.at.place.action.stage()
            }

            /// Returns the number of replicas that take part: the replicas that hold the parameters together
            /// for `UNSHARD` and `RESHARD`, all replicas for the others.
            pub fn replicas(&self) -> u32 {
                self.at.replicas
            }

            /// Returns the number of this replica among them, from 0.
            pub fn replica(&self) -> u32 {
                self.at.replica
            }

            /// Returns whether each replica holds only its rows of the parameters.
            pub fn is_sharded(&self) -> bool {
                self.at.is_sharded(&*self.parameters)
            }

            /// Returns the global path of each parameter of the stage.
            pub fn paths(&self) -> &[Arc<str>] {
                &self.parameters.table().paths
            }
        }
    };
}

at_a_stage!(UnshardRun);
at_a_stage!(ReshardRun);
at_a_stage!(ReduceRun);

impl ReplicaPlace {
    fn is_sharded(&self, parameters: &dyn StageParameters) -> bool {
        (0..parameters.table().paths.len()).any(|index| parameters.row_shard(index) != RowShard::WHOLE)
    }
}

/// Checks that the gradients of a stage are what the update takes: this replica's rows if parameters are
/// sharded.
pub(crate) fn check_sums(parameters: &dyn StageParameters) -> Result<(), StageError> {
    let sums: OptionalTensors =
        (0..parameters.table().paths.len()).map(|index| parameters.sums().get(index)).collect();
    check(&sums, parameters, |index, shape| vec![None, Some(rows_of(parameters.row_shard(index), shape))])
}

/// Returns the shape of a shard of a parameter of this shape.
fn rows_of(part: RowShard, shape: &[usize]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let Some(rows) = shape.first_mut().filter(|_| part != RowShard::WHOLE) {
        *rows = part.rows(*rows).len();
    }
    shape
}

/// Checks that each tensor is absent or has a shape as `expected` says for its index and its parameter's
/// shape.
fn check(
    tensors: &OptionalTensors,
    parameters: &dyn StageParameters,
    expected: impl Fn(usize, &[usize]) -> Vec<Option<Vec<usize>>>,
) -> Result<(), StageError> {
    let (found, paths) = (tensors.len(), &parameters.table().paths);
    if found != paths.len() {
        let (found, expected) = (counted(found, "tensor"), counted(paths.len(), "parameter"));
        return Err(StageError::Mistake(format!(
            "the function gave {found}, and the stage has {expected}: give one for each path"
        )));
    }
    for (index, (tensor, path)) in tensors.iter().zip(paths).enumerate() {
        let expected = expected(index, &parameters.table().shapes[index]);
        let is_float = tensor.as_ref().is_none_or(|tensor| tensor.kind() == ValueKind::Float);
        let shape = tensor.as_ref().map(|tensor| tensor.shape().to_vec());
        if !is_float || !expected.contains(&shape) {
            let found = tensor.as_ref().map_or("no tensor".to_owned(), |tensor| {
                format!("{:?} {:?}", tensor.dtype(), tensor.shape().to_vec())
            });
            let taken = expected.into_iter().flatten().next_back();
            let taken = taken.map_or("none".to_owned(), |shape| format!("a float tensor of shape {shape:?}"));
            return Err(StageError::Mistake(format!(
                "the function left {found} for the parameter `{path}`, which takes {taken}"
            )));
        }
    }
    Ok(())
}
