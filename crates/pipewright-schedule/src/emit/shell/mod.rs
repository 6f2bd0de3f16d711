//! Reads the commands of a launch script as Bash reads them, without running anything.
//!
//! ```text
//! script --letters--> letters with lines --expansion--> words --script--> commands, with conditions in branches
//! ```
//!
//! Variables, arrays, defaults (`${A:-8}`), sums (`$((2 * A))`), quotes, comments, continued lines, functions and
//! here-documents are read as in Bash. Conditions that compare texts and numbers are decided. A value that needs a
//! command, an argument of the script or a loop is not known, and its word says why: only a reader that needs the value
//! refuses it. A command whose condition cannot be decided counts, and says so. A function that is not called, and the
//! text that a command prints, do not count.

mod word;
mod letters;
mod arithmetic;
mod condition;
mod variables;
mod branches;
mod changes;
mod script;
mod scopes;
mod redirection;
mod loops;
mod compound;
mod expansion;
mod builtins;
#[cfg(test)]
mod tests;

pub(super) use script::{Command, commands};
pub(super) use word::Doubt;
