//! The modules of a running pipeline, between two steps: reading them with their type, changing them, and
//! freezing their parameters.

use std::any::{Any, type_name};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::Device;

use super::error::{Mistake, PipelineError};
use super::ranks::End;
use super::running::Pipeline;
use crate::driver::Command;
use crate::executor::Visited;
use crate::stage::{ChangeModule, ModulePlace, ReadModule, Visit, for_stage};
use crate::verification::Verify;

/// The type of a module that is not the one that was asked for.
type OtherType = Arc<Mutex<Option<&'static str>>>;

impl Pipeline {
    /// Calls `read` with the module at a place, on the thread of its rank, and returns what it returns. The
    /// module is a Burn module: the module of a stage ([`Stage::new`](crate::stage::Stage::new)), a layer of
    /// [`Layers`](super::Layers) by its number, or a node of a graph by its name. If parameters are sharded,
    /// it has the whole of them.
    ///
    /// With several processes, all must call it, and all but the one that has the module get `None`. A
    /// process does not know the modules of the others: a place that does not exist is `None` in all of them.
    /// If there are several replicas, the first one reads. If several ranks compute the stage together,
    /// `read` is called on each of them, so that it can run the module, and the first one returns the result.
    /// It has its shards of the parameters.
    ///
    /// ```
    /// # use burn::module::Module;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::AdamWConfig;
    /// # use burn::tensor::{Device, Tensor};
    /// # use pipewright::pipeline::{Layers, Pipeline};
    /// # use pipewright::stage::{StageContext, StageModule};
    /// # #[derive(Module, Debug)]
    /// # struct Block {
    /// #     linear: Linear,
    /// # }
    /// # impl StageModule for Block {
    /// #     type Input = Tensor<2>;
    /// #     type Output = Tensor<2>;
    /// #     fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
    /// #         self.linear.forward(input)
    /// #     }
    /// # }
    /// # let block = |_layer| Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()) };
    /// # let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
    /// let mut pipeline =
    ///     Pipeline::builder(Layers::new(4, block)).ranks(2).loss(loss).optimizer(AdamWConfig::new().init()).launch()?;
    /// let weight = pipeline.module(3, |block: &Block| block.linear.weight.val().inner())?;
    /// assert_eq!(weight.expect("it is in this process").dims(), [8, 8]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When no module is at this place, it has another type, or a rank fails. If a rank fails, accumulated
    /// gradients are dropped.
    pub fn module<M: Module + 'static, R: Send + 'static>(
        &mut self,
        place: impl Into<ModulePlace>,
        read: impl Fn(&M) -> R + Send + Sync + 'static,
    ) -> Result<Option<R>, PipelineError> {
        self.require_none_begun()?;
        let place = place.into();
        let result = Arc::new(Mutex::new(None));
        let (other, kept) = (OtherType::default(), result.clone());
        let noted = other.clone();
        let read: Arc<ReadModule> =
            Arc::new(move |module: &dyn Any, name, keep| match module.downcast_ref::<M>() {
                Some(module) => {
                    let result = read(module);
                    if keep {
                        *lock(&kept) = Some(result);
                    }
                }
                None => *lock(&noted) = Some(name),
            });
        let visited = self.visit(Visit::Read { place: place.clone(), read, keep: true })?;
        self.check_found::<M>(place, &visited, &other)?;
        let result = lock(&result).take();
        Ok(result)
    }

    /// Replaces the module at a place, as [`Pipeline::module`] finds it, by what `change` returns for it: a
    /// module with another head, other values, or other layers that take and return the same tensors.
    /// Parameters that keep their id and shape keep the state of the optimizer; others begin without.
    ///
    /// `change` is called in every replica and, with several processes, in each that has the module; all
    /// processes must call this method. It must return the same values everywhere: draw no random numbers in
    /// it, or seed them. If several ranks compute the stage together, it gets the shards of each rank and
    /// returns the new ones.
    ///
    /// # Errors
    /// When no module is at this place, it has another type, two places of the stage would hold one
    /// parameter, the ranks that compute the stage together cannot hold a parameter as it says, a layer does
    /// not compute in the pipeline's precision or cannot run the schedule's slices, or accumulated gradients
    /// wait for an update; nothing is
    /// changed then, and with several processes only the ones that have the module report it. When the
    /// parameters that stages share no longer agree, or `change` panics, the pipeline takes no further step.
    pub fn change_module<M: Module + 'static>(
        &mut self,
        place: impl Into<ModulePlace>,
        change: impl Fn(M) -> M + Send + Sync + 'static,
    ) -> Result<(), PipelineError> {
        self.require_none_begun()?;
        if self.accumulation.is_pending() {
            return Err(PipelineError::ChangeBeforeUpdate);
        }
        let place = place.into();
        let other = OtherType::default();
        let noted = other.clone();
        let change: Arc<ChangeModule> =
            Arc::new(move |module: &mut dyn Any, name, device: &Device| match module.downcast_mut::<M>() {
                Some(module) => {
                    *module = for_stage(change(module.clone()), device);
                    true
                }
                None => {
                    *lock(&noted) = Some(name);
                    false
                }
            });
        let visited = self.visit_to_change(Visit::Change { place: place.clone(), change })?;
        let outcome = self.check_found::<M>(place, &visited, &other);
        // Other processes do not know the outcome, so this one takes part before it reports an error.
        self.ranks.begin_exchange();
        self.find_shared().inspect_err(|_| self.ranks.end(End::HalfChanged))?;
        outcome
    }

    /// Stops training the parameters for whose global path `contains` returns true. They keep their values
    /// and the state of the optimizer until [`Pipeline::unfreeze`], and their gradients are not computed.
    /// Accumulated gradients of these parameters are dropped. Returns the number of parameters of this
    /// process, over all replicas and tensor ranks, that are trained and are now frozen.
    ///
    /// All processes must call it, with functions that return the same. A checkpoint has the values of frozen
    /// parameters, and [`Pipeline::restore`] freezes them again.
    ///
    /// # Errors
    /// When a rank fails. The pipeline then takes no further step. Nothing is changed if steps are verified and
    /// accumulated gradients wait for an update.
    pub fn freeze(
        &mut self,
        contains: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Result<usize, PipelineError> {
        self.require_no_kept_batches()?;
        Ok(self.visit_to_change(Visit::Freeze { contains: Arc::new(contains), freeze: true })?.found)
    }

    /// Trains the parameters again that [`Pipeline::freeze`] has frozen and for whose global path `contains`
    /// returns true. Returns their number, as [`Pipeline::freeze`] does: parameters that the program of the
    /// pipeline does not train, such as the base of adapters, stay frozen and do not count.
    ///
    /// # Errors
    /// As [`Pipeline::freeze`].
    pub fn unfreeze(
        &mut self,
        contains: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Result<usize, PipelineError> {
        self.require_no_kept_batches()?;
        Ok(self.visit_to_change(Visit::Freeze { contains: Arc::new(contains), freeze: false })?.found)
    }

    /// Adds numbers to the parameters at these global paths that are not trained and have as many elements,
    /// such as the corrections of routers. Returns how many it has found in this process, over all replicas
    /// and tensor ranks. The copies on all of them stay equal, because all get the same numbers.
    ///
    /// All processes must call it with the same numbers. Every replica has these parameters whole, also if
    /// the trained ones are sharded, so nothing is gathered.
    ///
    /// # Errors
    /// When a rank fails. The pipeline then takes no further step. Nothing is changed if steps are verified and
    /// accumulated gradients wait for an update.
    pub fn shift(&mut self, by: BTreeMap<Arc<str>, Vec<f32>>) -> Result<usize, PipelineError> {
        self.require_no_kept_batches()?;
        Ok(self.visit_to_change(Visit::Shift { by: Arc::new(by) })?.found)
    }

    /// Refuses a change while a step runs, and while batches wait for an update that a repetition would compute
    /// again with other modules.
    fn require_no_kept_batches(&self) -> Result<(), PipelineError> {
        self.require_none_begun()?;
        let is_kept = self.accumulation.is_pending() && self.setup.config.verify != Verify::Off;
        if is_kept { Err(PipelineError::ChangeBeforeUpdate) } else { Ok(()) }
    }

    /// Lets all ranks change the modules of their stages. If a rank fails, others may have changed theirs,
    /// and the pipeline takes no further step.
    fn visit_to_change(&mut self, visit: Visit) -> Result<Visited, PipelineError> {
        let is_refused = self.setup.abort.diverged().is_some();
        let visited = self.visit(visit);
        let never_began = matches!(visited, Err(PipelineError::InsideLayer));
        if visited.is_err() && !is_refused && !never_began {
            self.ranks.end(End::HalfChanged);
        }
        visited
    }

    /// Lets all ranks visit the modules of their stages.
    fn visit(&mut self, visit: Visit) -> Result<Visited, PipelineError> {
        // Ranks exchange messages for this if parameters are sharded, as in a step.
        let attempt = self.ranks.begin_exchange();
        let replies = self.ranks.command(|reply| Command::Visit { attempt, visit: visit.clone(), reply })?;
        let by_rank = self.ranks.await_ranks(&replies, |visited| visited);
        let by_rank = by_rank.map_err(|error| self.fail(self.ranks.step(), error, false))?;
        let mut all = Visited::default();
        for Visited { found, error } in by_rank {
            all.found += found;
            all.error = all.error.or(error);
        }
        Ok(all)
    }

    /// Returns an error if the module was not found, has another type, or could not be changed.
    fn check_found<M>(
        &self,
        place: ModulePlace,
        visited: &Visited,
        other: &OtherType,
    ) -> Result<(), PipelineError> {
        if let Some(found) = *lock(other) {
            let expected = type_name::<M>();
            return Err(PipelineError::module(format!(
                "the module of {place} is a `{found}`, not a `{expected}`: ask for that type, or for a part of it, such as a \
                 layer by its number"
            )));
        }
        if let Some(reason) = &visited.error {
            let sentence = format!("the module of {place} is not changed: {reason}");
            return Err(PipelineError::Module(Mistake::caused(sentence, reason.clone())));
        }
        let has_all_ranks = self.setup.is_whole_world(self.ranks.ids().count());
        if visited.found == 0 && has_all_ranks {
            return Err(PipelineError::module(format!(
                "the pipeline has no module at {place}: name a stage if you made it with `Stage::new`, a layer of `Layers` \
                 by its number, or a node of a graph by its name"
            )));
        }
        Ok(())
    }
}

fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
