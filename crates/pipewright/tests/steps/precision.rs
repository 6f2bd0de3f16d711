//! Half precision: the same bits for every cut, half the bytes between stages, parameters in single
//! precision, and losses that are scaled in f16.

mod half;
mod loss_scale;
mod run;
