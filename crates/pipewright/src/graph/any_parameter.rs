//! Visits to the parameters of a layer whose type is unknown. Burn's visitors have a method per number of
//! dimensions, which a trait object cannot have. So a parameter passes through `dyn Any`, with its number of
//! dimensions.

use std::any::Any;

use burn::module::{Flag, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor};

use crate::tensor::ValueKind;

/// A visitor without its type.
pub(super) trait AnyVisitor {
    fn visit(&mut self, kind: ValueKind, dimensions: usize, parameter: &dyn Any);
    fn visit_flag(&mut self, flag: &Param<Flag>);
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
}

/// A mapper without its type.
pub(super) trait AnyMapper {
    /// Returns a parameter of the same type.
    fn map(&mut self, kind: ValueKind, dimensions: usize, parameter: Box<dyn Any>) -> Box<dyn Any>;
    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag>;
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
}

/// Passes Burn's visits to a visitor without its type.
pub(super) struct OfVisitor<'a>(pub(super) &'a mut dyn AnyVisitor);

/// Passes Burn's visits to a mapper without its type.
pub(super) struct OfMapper<'a>(pub(super) &'a mut dyn AnyMapper);

/// Gives the visits to Burn's visitor.
pub(super) struct ToVisitor<'a, V>(pub(super) &'a mut V);

/// Gives the visits to Burn's mapper.
pub(super) struct ToMapper<'a, M>(pub(super) &'a mut M);

/// A parameter passes through `dyn Any` with the number of dimensions and the kind of its type.
const OWN_TYPE: &str = "the parameter has the type that its visitor named";

impl ModuleVisitor for OfVisitor<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.visit(ValueKind::Float, D, param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.0.visit(ValueKind::Int, D, param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.0.visit(ValueKind::Bool, D, param);
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.0.visit_flag(flag);
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit(name, container_type);
    }
}

impl ModuleMapper for OfMapper<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        *self.0.map(ValueKind::Float, D, Box::new(param)).downcast().expect(OWN_TYPE)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        *self.0.map(ValueKind::Int, D, Box::new(param)).downcast().expect(OWN_TYPE)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        *self.0.map(ValueKind::Bool, D, Box::new(param)).downcast().expect(OWN_TYPE)
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.0.map_flag(flag)
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit(name, container_type);
    }
}

/// Calls a method for each number of dimensions that a parameter may have.
macro_rules! by_dimensions {
    ($dimensions:expr, $D:ident => $call:expr, [$($number:literal),*]) => {
        match $dimensions {
            $($number => {
                const $D: usize = $number;
                $call
            })*
            more => unreachable!("a parameter has {more} dimensions, and Burn's modules have at most 12"),
        }
    };
    ($dimensions:expr, $D:ident => $call:expr) => {
        by_dimensions!($dimensions, $D => $call, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    };
}

impl<V: ModuleVisitor> AnyVisitor for ToVisitor<'_, V> {
    fn visit(&mut self, kind: ValueKind, dimensions: usize, parameter: &dyn Any) {
        by_dimensions!(dimensions, D => match kind {
            ValueKind::Float => self.0.visit_float::<D>(parameter.downcast_ref().expect(OWN_TYPE)),
            ValueKind::Int => self.0.visit_int::<D>(parameter.downcast_ref().expect(OWN_TYPE)),
            ValueKind::Bool => self.0.visit_bool::<D>(parameter.downcast_ref().expect(OWN_TYPE)),
        });
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.0.visit_flag(flag);
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.0.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.0.exit_module(name, container);
    }
}

impl<M: ModuleMapper> AnyMapper for ToMapper<'_, M> {
    fn map(&mut self, kind: ValueKind, dimensions: usize, parameter: Box<dyn Any>) -> Box<dyn Any> {
        by_dimensions!(dimensions, D => match kind {
            ValueKind::Float => Box::new(self.0.map_float::<D>(*parameter.downcast().expect(OWN_TYPE))),
            ValueKind::Int => Box::new(self.0.map_int::<D>(*parameter.downcast().expect(OWN_TYPE))),
            ValueKind::Bool => Box::new(self.0.map_bool::<D>(*parameter.downcast().expect(OWN_TYPE))),
        })
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.0.map_flag(flag)
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.0.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.0.exit_module(name, container);
    }
}
