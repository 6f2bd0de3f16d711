//! Plans for the commands: profiles, the search, and the configuration that a plan becomes.

pub(crate) mod auto;
pub(crate) mod replan;
pub(crate) mod config;
pub(crate) mod decision;
pub(crate) mod measure;
pub(crate) mod prediction;
pub(crate) mod print;
pub(crate) mod profile_cache;
pub(crate) mod profile_text;
pub(crate) mod rates;
pub(crate) mod request;
pub(crate) mod emitted;
pub(crate) mod plan_json;
pub(crate) mod given_file;
pub(crate) mod checked;
