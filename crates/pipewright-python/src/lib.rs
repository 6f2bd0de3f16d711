//! The Python package `pipewright_pp` (`pip install pipewright-pp`): makes, proves, predicts, plans and draws pipelines from Python.
//!
//! The module is `pipewright_pp._native`; `python/pipewright_pp/__init__.py` is the package that users import. Its
//! names and numbers are the command line's, because `pipewright-schedule` and
//! `pipewright-cluster` compute all of them: this crate
//! reads arguments, releases the interpreter's lock, and turns errors into exceptions.

mod errors;
mod interrupt;
mod arguments;
mod rows;
mod frame;
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
mod comparison;
mod cluster_input;
mod cluster;
mod html;
mod cluster_plan;
mod cluster_check;
mod command_line;

/// Proves, predicts, plans and draws pipelines.
#[pyo3::pymodule]
mod _native {
    /// The version of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python expects")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    use crate::cluster::{PyPrediction, predict, shapes};
    #[pymodule_export]
    use crate::cluster_check::{PyJudgement, check_cluster};
    #[pymodule_export]
    use crate::cluster_plan::{PyClusterPlan, clusters, plan_cluster};
    #[pymodule_export]
    use crate::command_line::run_command;
    #[pymodule_export]
    use crate::comparison::{PyComparison, compare};
    #[pymodule_export]
    use crate::costs::PyCosts;
    #[pymodule_export]
    use crate::frame::PyFrame;
    #[pymodule_export]
    use crate::measured::read_trace;
    #[pymodule_export]
    use crate::plan::{PyPlan, plan};
    #[pymodule_export]
    use crate::profile::PyProfile;
    #[pymodule_export]
    use crate::program::{_restore_program, PyProgram, read_csv};
    #[pymodule_export]
    use crate::schedule::{_restore_schedule, PySchedule, schedule, schedules};
    #[pymodule_export]
    use crate::timeline::PyTimeline;
}
