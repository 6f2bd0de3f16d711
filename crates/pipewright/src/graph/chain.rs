//! Consecutive layers in one stage: each layer takes the tensors that the layer before it returns.
//!
//! A chain of layers needs no names: a layer is known by its place in the model, so that a parameter has the path
//! `layers.PLACE.PARAMETER` whatever the cut.

use std::any::Any;
use std::sync::Arc;

use burn::module::{Module, ModuleDisplay};

use super::any_layer::ChainLayer;
use super::layer::{GraphLayer, refusal_of, variant_of};
use crate::stage::{
    ModulePlace, NO_SKIPS, Skips, StageBody, StageContext, StageError, any, any_mut, in_layer,
};
use crate::tensor::Values;

/// Contiguous layers with a typed forward, as a stage.
#[derive(Module, Debug)]
pub(crate) struct TypedChain<L: Module> {
    layers: Vec<L>,
    #[module(skip)]
    places: Places,
}

/// Contiguous layers that check their tensors themselves, as a stage.
#[derive(Module, Debug)]
pub(crate) struct MixedChain<L: Module> {
    layers: Vec<L>,
    #[module(skip)]
    places: Places,
}

/// Where the layers of a stage are in the model.
#[derive(Clone, Debug)]
struct Places {
    /// The first layer.
    first: usize,
    /// The prefix of the paths of each layer.
    names: Vec<Arc<str>>,
    /// The variant of each layer that is an enum: Burn begins the layer's own paths with it.
    variants: Vec<Option<String>>,
}

impl<L: Module> TypedChain<L> {
    /// Makes a stage of these layers; the first of them is layer `first` of the model.
    pub(crate) fn new(first: usize, layers: Vec<L>) -> Self {
        let places = Places::of(first, &layers);
        Self { layers, places }
    }
}

impl<L: Module> MixedChain<L> {
    /// As [`TypedChain::new`].
    pub(crate) fn new(first: usize, layers: Vec<L>) -> Self {
        let places = Places::of(first, &layers);
        Self { layers, places }
    }
}

impl<L: ChainLayer + Module + ModuleDisplay + 'static> StageBody for TypedChain<L> {
    type Output = Values;

    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, StageError> {
        (0..self.layers.len()).try_fold(inputs, |values, layer| self.forward_block(layer, values, context))
    }

    fn blocks(&self) -> usize {
        self.layers.len()
    }

    fn forward_block(
        &self,
        block: usize,
        inputs: Values,
        context: &StageContext,
    ) -> Result<Values, StageError> {
        let (layer, name) = (&self.layers[block], &self.places.names[block]);
        let outputs = in_layer(name, || context.run_layer(name, || layer.forward(inputs, context)))?;
        outputs.map_err(|source| StageError::Layer { layer: name.clone(), source })
    }

    fn part(&self, place: &ModulePlace) -> Option<(&dyn Any, &'static str)> {
        self.layers.get(self.places.layer(place)?).map(L::part)
    }

    fn part_mut(&mut self, place: &ModulePlace) -> Option<(&mut dyn Any, &'static str)> {
        self.layers.get_mut(self.places.layer(place)?).map(L::part_mut)
    }

    fn parts_changed(&mut self) {
        self.places.variants = variants_of(&self.layers);
    }

    fn exposed(&self) -> &dyn Any {
        &self.layers
    }

    fn parameter_path(&self, local: &str) -> String {
        let Some((place, rest)) = self.places.split(local) else { return local.to_owned() };
        let layer = &self.layers[place];
        let own = layer.parameter_path(rest);
        // Other holders of a shared parameter are other layers: no layer's place can be part of its path.
        match layer.shared_parameters().contains(&own) {
            true => own,
            false => format!("{}.{own}", self.places.names[place]),
        }
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        let Some((place, rest)) = self.places.split(local) else { return false };
        self.layers[place].stays_in_single_precision(rest)
    }

    fn refuses_slices(&self) -> Option<String> {
        let mut layers = self.layers.iter().zip(&self.places.names);
        layers.find_map(|(layer, name)| refusal_of(name, layer.refuses_slices()))
    }

    fn shared_parameters(&self) -> Vec<String> {
        self.layers.iter().flat_map(L::shared_parameters).collect()
    }

    fn skips(&self) -> &Skips {
        &NO_SKIPS
    }
}

impl<L: GraphLayer> StageBody for MixedChain<L> {
    type Output = Values;

    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, StageError> {
        (0..self.layers.len()).try_fold(inputs, |values, layer| self.forward_block(layer, values, context))
    }

    fn blocks(&self) -> usize {
        self.layers.len()
    }

    fn forward_block(
        &self,
        block: usize,
        inputs: Values,
        context: &StageContext,
    ) -> Result<Values, StageError> {
        let (layer, name) = (&self.layers[block], &self.places.names[block]);
        let outputs = in_layer(name, || context.run_layer(name, || layer.forward(inputs, context)))?;
        outputs.map_err(|source| StageError::Layer { layer: name.clone(), source })
    }

    fn part(&self, place: &ModulePlace) -> Option<(&dyn Any, &'static str)> {
        self.places.part(&self.layers, place)
    }

    fn part_mut(&mut self, place: &ModulePlace) -> Option<(&mut dyn Any, &'static str)> {
        self.places.part_mut(&mut self.layers, place)
    }

    fn parts_changed(&mut self) {
        self.places.variants = variants_of(&self.layers);
    }

    fn exposed(&self) -> &dyn Any {
        &self.layers
    }

    fn parameter_path(&self, local: &str) -> String {
        match self.places.split(local) {
            Some((place, rest)) => format!("{}.{rest}", self.places.names[place]),
            None => local.to_owned(),
        }
    }

    fn stays_in_single_precision(&self, _local: &str) -> bool {
        false
    }

    fn refuses_slices(&self) -> Option<String> {
        let mut layers = self.layers.iter().zip(&self.places.names);
        layers.find_map(|(layer, name)| refusal_of(name, layer.refuses_slices()))
    }

    fn shared_parameters(&self) -> Vec<String> {
        Vec::new()
    }

    fn skips(&self) -> &Skips {
        &NO_SKIPS
    }
}

impl Places {
    fn of<L: Module>(first: usize, layers: &[L]) -> Self {
        let names = (first..first + layers.len()).map(|place| format!("layers.{place}").into());
        Self { first, names: names.collect(), variants: variants_of(layers) }
    }

    /// Returns the layer of the stage at a place in the model, and the name of its type.
    fn part<'a, L: Any>(&self, layers: &'a [L], place: &ModulePlace) -> Option<(&'a dyn Any, &'static str)> {
        layers.get(self.layer(place)?).map(any)
    }

    /// As [`Places::part`], for a layer that is changed.
    fn part_mut<'a, L: Any>(
        &self,
        layers: &'a mut [L],
        place: &ModulePlace,
    ) -> Option<(&'a mut dyn Any, &'static str)> {
        layers.get_mut(self.layer(place)?).map(any_mut)
    }

    /// Returns the place in the stage of a layer of the model. It may be behind the last one.
    fn layer(&self, place: &ModulePlace) -> Option<usize> {
        match place {
            ModulePlace::Layer(place) => place.checked_sub(self.first),
            _ => None,
        }
    }

    /// Returns the place of a parameter's layer in the stage, and the name that the layer itself gives the parameter.
    fn split<'a>(&self, local: &'a str) -> Option<(usize, &'a str)> {
        let (place, rest) = local.strip_prefix("layers.")?.split_once('.')?;
        let place: usize = place.parse().ok()?;
        let variant = self.variants.get(place)?.as_deref();
        let own = variant.and_then(|variant| rest.strip_prefix(variant)?.strip_prefix('.'));
        Some((place, own.unwrap_or(rest)))
    }
}

fn variants_of<L: Module>(layers: &[L]) -> Vec<Option<String>> {
    layers.iter().map(variant_of).collect()
}
