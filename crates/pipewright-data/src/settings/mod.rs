//! The parts of the settings: dates, chat templates by name, what counts in the loss, the keys of records,
//! preference training, and mixtures.

pub(crate) mod date;
pub(crate) mod chat_template;
pub(crate) mod train_on;
pub(crate) mod record;
pub(crate) mod preference;
pub(crate) mod mix;
