//! [`AnyLayer`]: a layer without its type, so that layers of different types are in one list or graph.

use std::any::Any;

use burn::module::{Content, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor};
use burn::tensor::Device;

use super::any_parameter::{AnyMapper, AnyVisitor, OfMapper, OfVisitor, ToMapper, ToVisitor};
use super::layer::GraphLayer;
use crate::stage::{StageContext, StageModule, any, any_mut};
use crate::tensor::{BoundaryError, Values, pack, unpack};

/// A layer whose type is known at run time: any [`StageModule`].
///
/// [`LayerList`](crate::pipeline::LayerList) makes them from ordinary layers. In a graph, `AnyLayer` can be the type of the
/// nodes. Its parameters have the paths that the layer gives them.
#[derive(Debug)]
pub struct AnyLayer(Box<dyn Erased>);

impl AnyLayer {
    /// Makes a layer without its type.
    pub fn new<L: StageModule + ModuleDisplay>(layer: L) -> Self {
        Self(Box::new(layer))
    }

    /// Returns the layer if it has this type.
    pub fn downcast_ref<L: StageModule>(&self) -> Option<&L> {
        self.0.part().0.downcast_ref()
    }

    /// Like [`AnyLayer::downcast_ref`], but to change it.
    pub fn downcast_mut<L: StageModule>(&mut self) -> Option<&mut L> {
        self.0.part_mut().0.downcast_mut()
    }

    /// Returns the layer's outputs for one microbatch. `inputs` are the tensors that it takes.
    ///
    /// # Errors
    /// When the layer takes other tensors.
    pub fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError> {
        self.0.forward(inputs, context)
    }
}

impl Clone for AnyLayer {
    fn clone(&self) -> Self {
        self.0.boxed()
    }
}

impl GraphLayer for AnyLayer {
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError> {
        self.0.forward(inputs, context)
    }

    fn refuses_slices(&self) -> Option<String> {
        self.0.refuses_slices()
    }
}

/// A layer of a chain, without the types of its tensors. `K` is the trait through which it is called:
/// [`Typed`] or
/// [`Untyped`].
pub(crate) trait ChainLayer<K> {
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError>;
    fn refuses_slices(&self) -> Option<String>;

    fn parameter_path(&self, local: &str) -> String {
        local.to_owned()
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        let _ = local;
        false
    }

    fn shared_parameters(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the layer as the user made it, and the name of its type.
    fn part(&self) -> (&dyn Any, &'static str);
    fn part_mut(&mut self) -> (&mut dyn Any, &'static str);
}

/// A layer is called as a [`StageModule`].
#[derive(Clone, Debug)]
pub(crate) enum Typed {}

/// A layer is called as a [`GraphLayer`].
#[derive(Clone, Debug)]
pub(crate) enum Untyped {}

impl<L: StageModule + ModuleDisplay> ChainLayer<Typed> for L {
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError> {
        Ok(pack(StageModule::forward(self, unpack(inputs)?, context)))
    }

    fn parameter_path(&self, local: &str) -> String {
        StageModule::parameter_path(self, local)
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        StageModule::stays_in_single_precision(self, local)
    }

    fn shared_parameters(&self) -> Vec<String> {
        StageModule::shared_parameters(self)
    }

    fn refuses_slices(&self) -> Option<String> {
        StageModule::refuses_slices(self)
    }

    fn part(&self) -> (&dyn Any, &'static str) {
        any(self)
    }

    fn part_mut(&mut self) -> (&mut dyn Any, &'static str) {
        any_mut(self)
    }
}

impl<L: GraphLayer> ChainLayer<Untyped> for L {
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError> {
        GraphLayer::forward(self, inputs, context)
    }

    fn refuses_slices(&self) -> Option<String> {
        GraphLayer::refuses_slices(self)
    }

    fn part(&self) -> (&dyn Any, &'static str) {
        any(self)
    }

    fn part_mut(&mut self) -> (&mut dyn Any, &'static str) {
        any_mut(self)
    }
}

impl ChainLayer<Typed> for AnyLayer {
    fn forward(&self, inputs: Values, context: &StageContext) -> Result<Values, BoundaryError> {
        self.0.forward(inputs, context)
    }

    fn parameter_path(&self, local: &str) -> String {
        self.0.parameter_path(local)
    }

    fn stays_in_single_precision(&self, local: &str) -> bool {
        self.0.stays_in_single_precision(local)
    }

    fn shared_parameters(&self) -> Vec<String> {
        self.0.shared_parameters()
    }

    fn refuses_slices(&self) -> Option<String> {
        self.0.refuses_slices()
    }

    fn part(&self) -> (&dyn Any, &'static str) {
        self.0.part()
    }

    fn part_mut(&mut self) -> (&mut dyn Any, &'static str) {
        self.0.part_mut()
    }
}

/// The methods of a module that can be called without its type.
trait Erased: ChainLayer<Typed> + Send + std::fmt::Debug {
    fn boxed(&self) -> AnyLayer;
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device>;
    fn fork(self: Box<Self>, device: &Device) -> AnyLayer;
    fn to_device(self: Box<Self>, device: &Device) -> AnyLayer;
    fn train(self: Box<Self>) -> AnyLayer;
    fn valid(&self) -> AnyLayer;
    fn materialize(self: Box<Self>) -> AnyLayer;
    fn num_params(&self) -> usize;
    fn visit(&self, visitor: &mut dyn AnyVisitor);
    fn map(self: Box<Self>, mapper: &mut dyn AnyMapper) -> AnyLayer;
    fn content(&self, content: Content) -> Option<Content>;
}

impl<L: StageModule + ModuleDisplay> Erased for L {
    fn boxed(&self) -> AnyLayer {
        AnyLayer::new(self.clone())
    }

    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        Module::collect_devices(self, devices)
    }

    fn fork(self: Box<Self>, device: &Device) -> AnyLayer {
        AnyLayer::new(Module::fork(*self, device))
    }

    fn to_device(self: Box<Self>, device: &Device) -> AnyLayer {
        AnyLayer::new(Module::to_device(*self, device))
    }

    fn train(self: Box<Self>) -> AnyLayer {
        AnyLayer::new(Module::train(*self))
    }

    fn valid(&self) -> AnyLayer {
        AnyLayer::new(Module::valid(self))
    }

    fn materialize(self: Box<Self>) -> AnyLayer {
        AnyLayer::new(Module::materialize(*self))
    }

    fn num_params(&self) -> usize {
        Module::num_params(self)
    }

    fn visit(&self, visitor: &mut dyn AnyVisitor) {
        Module::visit(self, &mut OfVisitor(visitor));
    }

    fn map(self: Box<Self>, mapper: &mut dyn AnyMapper) -> AnyLayer {
        AnyLayer::new(Module::map(*self, &mut OfMapper(mapper)))
    }

    fn content(&self, content: Content) -> Option<Content> {
        ModuleDisplayDefault::content(self, content)
    }
}

impl Module for AnyLayer {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.0.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.0.fork(device)
    }

    fn to_device(self, device: &Device) -> Self {
        self.0.to_device(device)
    }

    fn train(self) -> Self {
        self.0.train()
    }

    fn valid(&self) -> Self {
        self.0.valid()
    }

    fn materialize(self) -> Self {
        self.0.materialize()
    }

    fn num_params(&self) -> usize {
        self.0.num_params()
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.0.visit(&mut ToVisitor(visitor));
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.0.map(&mut ToMapper(mapper))
    }
}

impl ModuleDisplayDefault for AnyLayer {
    fn content(&self, content: Content) -> Option<Content> {
        self.0.content(content)
    }

    fn num_params(&self) -> usize {
        self.0.num_params()
    }
}

impl ModuleDisplay for AnyLayer {}
