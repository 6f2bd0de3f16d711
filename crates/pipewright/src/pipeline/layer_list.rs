//! [`LayerList`]: layers of different types, one after another.

use std::any::{TypeId, type_name};
use std::convert::Infallible;
use std::fmt::Display;
use std::sync::Arc;

use burn::module::ModuleDisplay;

use super::build_error::BuildError;
use crate::graph::AnyLayer;
use crate::stage::StageModule;
use crate::tensor::Values;

/// A model as a list of layers of different types, in the order of the data flow.
///
/// Each layer takes what the layer before it returns; a pipeline does not launch if the types differ. Layers
/// are numbered and their parameters are named as in [`Layers`](super::Layers). A layer is made on the thread
/// of the rank that has it.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{EmbeddingConfig, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Int, Tensor};
/// use pipewright::nn::{Embedding, Linear, cross_entropy};
/// use pipewright::pipeline::{LayerList, Pipeline};
/// use pipewright::stage::{StageContext, StageModule};
///
/// #[derive(Module, Debug)]
/// struct Tokens {
///     embedding: Embedding,
/// }
///
/// impl StageModule for Tokens {
///     type Input = Tensor<2, Int>;
///     type Output = Tensor<3>;
///
///     fn forward(&self, ids: Tensor<2, Int>, _context: &StageContext) -> Tensor<3> {
///         self.embedding.forward(ids)
///     }
/// }
///
/// #[derive(Module, Debug)]
/// struct Head {
///     linear: Linear,
/// }
///
/// impl StageModule for Head {
///     type Input = Tensor<3>;
///     type Output = Tensor<3>;
///
///     fn forward(&self, hidden: Tensor<3>, _context: &StageContext) -> Tensor<3> {
///         self.linear.forward(hidden)
///     }
/// }
///
/// let device = || Device::flex().autodiff();
/// let layers = LayerList::new()
///     .layer(move || Tokens { embedding: EmbeddingConfig::new(16, 8).init(&device()).into() })
///     .layer(move || Head { linear: LinearConfig::new(8, 16).init(&device()).into() });
/// let mut pipeline = Pipeline::builder(layers)
///     .ranks(2)
///     .loss(|logits: Tensor<3>, targets: Tensor<2, Int>| cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1)))
///     .optimizer(AdamWConfig::new().init())
///     .launch()?;
/// let ids = Tensor::<2, Int>::ones([4, 5], &Device::flex());
/// pipeline.step(ids.clone(), ids, 1e-3)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct LayerList {
    layers: Vec<Listed>,
}

/// A layer of a list, which is made later.
struct Listed {
    make: Arc<dyn Fn() -> Result<AnyLayer, String> + Send + Sync>,
    types: LayerTypes,
}

/// The types of the tensors at the edges of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerTypes {
    pub(super) takes: EdgeType,
    pub(super) returns: EdgeType,
}

/// A type of tensors between layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct EdgeType {
    id: TypeId,
    name: &'static str,
}

impl LayerList {
    /// Makes a list without layers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a layer. `make` is called once in each replica.
    pub fn layer<L, F>(self, make: F) -> Self
    where
        L: StageModule + ModuleDisplay,
        F: Fn() -> L + Send + Sync + 'static,
    {
        self.layers(1, move |_| make())
    }

    /// Adds `count` layers of one type; `make` gets their numbers, counted from 0 among these layers.
    pub fn layers<L, F>(self, count: usize, make: F) -> Self
    where
        L: StageModule + ModuleDisplay,
        F: Fn(usize) -> L + Send + Sync + 'static,
    {
        self.try_layers(count, move |index| Ok::<_, Infallible>(make(index)))
    }

    /// Like [`LayerList::layers`], for layers whose construction may fail, for example because their
    /// parameters are read from a file.
    pub fn try_layers<L, E, F>(mut self, count: usize, make: F) -> Self
    where
        L: StageModule + ModuleDisplay,
        E: Display,
        F: Fn(usize) -> Result<L, E> + Send + Sync + 'static,
    {
        let make = Arc::new(make);
        let types = LayerTypes { takes: EdgeType::of::<L::Input>(), returns: EdgeType::of::<L::Output>() };
        self.layers.extend((0..count).map(|index| {
            let make = make.clone();
            let make = move || make(index).map(AnyLayer::new).map_err(|error| error.to_string());
            Listed { make: Arc::new(make), types }
        }));
        self
    }

    pub(super) fn types(&self) -> Vec<LayerTypes> {
        self.layers.iter().map(|layer| layer.types).collect()
    }

    /// Returns the function that makes the layer at a place.
    pub(super) fn into_make(self) -> impl Fn(usize) -> Result<AnyLayer, String> + Send + Sync + 'static {
        move |index| (self.layers[index].make)()
    }
}

impl std::fmt::Debug for LayerList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerList").field("layers", &self.types()).finish()
    }
}

impl EdgeType {
    pub(super) fn of<T: 'static>() -> Self {
        Self { id: TypeId::of::<T>(), name: type_name::<T>() }
    }

    /// Returns whether tensors of this type can be taken as the other one. [`Values`] can be any tensors.
    fn fits(self, other: Self) -> bool {
        let is_any = |edge: Self| edge.id == TypeId::of::<Values>();
        self.id == other.id || is_any(self) || is_any(other)
    }

    /// Returns the name without the paths of modules, such as `Tensor<2, Int>`.
    fn short(self) -> String {
        let mut short = String::new();
        let mut word = String::new();
        for letter in self.name.chars() {
            match letter {
                ':' => word.clear(),
                letter if letter.is_alphanumeric() || letter == '_' => word.push(letter),
                letter => {
                    short.push_str(&std::mem::take(&mut word));
                    short.push(letter);
                }
            }
        }
        short.push_str(&word);
        short.replace(", Float", "")
    }
}

/// Checks that each layer takes what the layer before it returns, and the loss what the last one returns.
pub(super) fn check_types(layers: &[LayerTypes], loss: Option<EdgeType>) -> Result<(), BuildError> {
    let pairs = layers.windows(2).enumerate();
    let mut differing = pairs.filter(|(_, pair)| !pair[0].returns.fits(pair[1].takes));
    if let Some((layer, pair)) = differing.next() {
        let (returns, takes) = (pair[0].returns.short(), pair[1].takes.short());
        return Err(BuildError::Settings(format!(
            "layer {layer} returns {returns}, and the next layer takes {takes}: layers that follow each other have one type \
             between them (`StageModule::Output`, `StageModule::Input`)"
        )));
    }
    match (layers.last(), loss) {
        (Some(last), Some(loss)) if !last.returns.fits(loss) => {
            let layer = layers.len() - 1;
            let (returns, takes) = (last.returns.short(), loss.short());
            Err(BuildError::Settings(format!(
                "layer {layer}, the last one, returns {returns}, and the loss takes {takes}"
            )))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Int, Tensor};

    use super::*;

    #[test]
    fn names_are_those_that_a_user_writes() {
        assert_eq!(EdgeType::of::<Tensor<2>>().short(), "Tensor<2>");
        assert_eq!(EdgeType::of::<(Tensor<3>, Tensor<2, Int>)>().short(), "(Tensor<3>, Tensor<2, Int>)");
    }
}
