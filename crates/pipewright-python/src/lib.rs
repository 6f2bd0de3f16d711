//! The Python package `pipewright`: makes, proves, predicts, plans and draws pipelines from Python.
//!
//! The module is `pipewright._native`; `python/pipewright/__init__.py` is the package that users import. Its
//! names and numbers are the command line's, because `pipewright-schedule` and
//! `pipewright-cluster` compute all of them: this crate
//! reads arguments, releases the interpreter's lock, and turns errors into exceptions.

mod errors;
mod interrupt;
mod arguments;
mod rows;
mod costs;
mod profile;
mod lowering;
mod proof;
mod timeline;
mod prediction;
mod measured;
mod program;
mod schedule;
mod plan;
mod cluster;

/// Proves, predicts, plans and draws pipelines.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::cluster::{PyPrediction, predict, shapes};
    #[pymodule_export]
    use crate::costs::PyCosts;
    #[pymodule_export]
    use crate::measured::read_trace;
    #[pymodule_export]
    use crate::plan::{PyPlan, plan};
    #[pymodule_export]
    use crate::profile::PyProfile;
    #[pymodule_export]
    use crate::program::{PyProgram, read_csv};
    #[pymodule_export]
    use crate::schedule::{PySchedule, schedule, schedules};
    #[pymodule_export]
    use crate::timeline::PyTimeline;
}
