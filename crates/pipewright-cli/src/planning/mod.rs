//! Plans for a run: profiles, the search, and the configuration that a plan becomes.

pub(crate) mod auto;
pub(crate) mod replan;
pub(crate) mod decision;
pub(crate) mod measure;
pub(crate) mod profile_cache;
pub(crate) mod profile_text;
pub(crate) mod rates;
pub(crate) mod request;
mod adapters;
pub(crate) mod configurations;
