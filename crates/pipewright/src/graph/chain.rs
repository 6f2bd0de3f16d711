//! Consecutive layers in one stage: each layer takes the tensors that the layer before it returns.
//!
//! A chain of layers needs no names: a layer is known by its index in the model, so that a parameter has the
//! path `layers.INDEX.PARAMETER` whatever the cut.

use std::any::Any;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::module::{Module, ModuleDisplay};

use super::any_layer::ChainLayer;
use super::layer::{refusal_of, variant_of};
use crate::stage::{ModulePlace, NO_SKIPS, Skips, StageBody, StageContext, StageError, in_layer};
use crate::tensor::Values;

/// Contiguous layers, as a stage. `K` says how the layers are called ([`ChainLayer`]).
#[derive(Module, Debug)]
pub(crate) struct Chain<L: Module, K: Clone + Send + std::fmt::Debug + 'static> {
    layers: Vec<L>,
    #[module(skip)]
    names: Names,
    #[module(skip)]
    kind: PhantomData<K>,
}

/// Where the layers of a stage are in the model.
#[derive(Clone, Debug)]
struct Names {
    /// The index of the first layer in the model.
    first: usize,
    /// The prefix of the paths of each layer.
    prefixes: Vec<Arc<str>>,
    /// The variant of each layer that is an enum: Burn begins the layer's own paths with it.
    variants: Vec<Option<String>>,
}

impl<L: Module, K: Clone + Send + std::fmt::Debug + 'static> Chain<L, K> {
    /// Makes a stage of these layers; the first of them is layer `first` of the model.
    pub(crate) fn new(first: usize, layers: Vec<L>) -> Self {
        let prefixes = (first..first + layers.len()).map(|index| format!("layers.{index}").into());
        let variants = layers.iter().map(variant_of).collect();
        Self { names: Names { first, prefixes: prefixes.collect(), variants }, layers, kind: PhantomData }
    }

    /// Returns the index in the stage of a layer of the model. It may be behind the last one.
    fn index_of(&self, place: &ModulePlace) -> Option<usize> {
        match place {
            ModulePlace::Layer(index) => index.checked_sub(self.names.first),
            _ => None,
        }
    }

    /// Returns the index of a parameter's layer in the stage, and the name that the layer itself gives the
    /// parameter.
    fn split<'a>(&self, local: &'a str) -> Option<(usize, &'a str)> {
        let (index, rest) = local.strip_prefix("layers.")?.split_once('.')?;
        let index: usize = index.parse().ok()?;
        let variant = self.names.variants.get(index)?.as_deref();
        let own = variant.and_then(|variant| rest.strip_prefix(variant)?.strip_prefix('.'));
        Some((index, own.unwrap_or(rest)))
    }
}

impl<L, K> StageBody for Chain<L, K>
where
    L: ChainLayer<K> + Module + ModuleDisplay + 'static,
    K: Clone + Send + std::fmt::Debug + 'static,
{
    type Output = Values;

    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, StageError> {
        (0..self.layers.len()).try_fold(inputs, |values, layer| self.forward_block(layer, values, context))
    }

    fn blocks(&self) -> usize {
        self.layers.len()
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn forward_block(
        &self,
        block: usize,
        inputs: Values,
        context: &StageContext,
    ) -> Result<Values, StageError> {
        let (layer, name) = (&self.layers[block], &self.names.prefixes[block]);
        let outputs = in_layer(name, || context.run_layer(name, || layer.forward(inputs, context)))?;
        outputs.map_err(|source| StageError::Layer { layer: name.clone(), source })
    }

    fn layer_name(&self, layer: usize) -> Option<Arc<str>> {
        self.names.prefixes.get(layer).cloned()
    }

    fn part(&self, place: &ModulePlace) -> Option<(&dyn Any, &'static str)> {
        self.layers.get(self.index_of(place)?).map(L::part)
    }

    fn part_mut(&mut self, place: &ModulePlace) -> Option<(&mut dyn Any, &'static str)> {
        let index = self.index_of(place)?;
        self.layers.get_mut(index).map(L::part_mut)
    }

    fn parts_changed(&mut self) {
        self.names.variants = self.layers.iter().map(variant_of).collect();
    }

    fn exposed(&self) -> &dyn Any {
        &self.layers
    }

    fn parameter_path(&self, local: &str) -> String {
        let Some((index, rest)) = self.split(local) else { return local.to_owned() };
        let layer = &self.layers[index];
        let own = layer.parameter_path(rest);
        // Other holders of a shared parameter are other layers: no layer's index can be part of its path.
        if layer.shared_parameters().contains(&own) {
            own
        } else {
            format!("{}.{own}", self.names.prefixes[index])
        }
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        self.split(local).is_some_and(|(index, rest)| self.layers[index].stays_in_single_precision(rest))
    }

    fn refuses_slices(&self) -> Option<String> {
        let mut layers = self.layers.iter().zip(&self.names.prefixes);
        layers.find_map(|(layer, name)| refusal_of(name, layer.refuses_slices()))
    }

    fn shared_parameters(&self) -> Vec<String> {
        self.layers.iter().flat_map(L::shared_parameters).collect()
    }

    fn skips(&self) -> &Skips {
        &NO_SKIPS
    }
}
