//! Answers the requests of the page on which schedules are chosen, predicted and compared in a browser.
//!
//! A request and its answer are JSON. The figures are those of `pipewright simulate --format json` and of
//! `pipewright compare --format json`, because the same functions compute them.
//!
//! ```
//! let request = r#"{"do": "simulate", "setup": {"schedule": "gpipe", "ranks": "2", "microbatches": "2"}}"#;
//! let answer: serde_json::Value = serde_json::from_str(&pipewright_page::answer(request))?;
//! assert_eq!(answer["summary"]["makespan"], 8.0);
//! assert_eq!(answer["command"], "pipewright simulate gpipe --ranks 2 --microbatches 2");
//! # Ok::<(), serde_json::Error>(())
//! ```

mod fields;
mod setup;
mod commands;
mod prediction;
mod comparison;
mod request;
#[cfg(target_arch = "wasm32")]
mod module;

pub use request::answer;
