//! The command `pipewright`: schedules, partitions and training runs from the command line.
//!
//! This crate reads arguments and configurations, calls the libraries, and shows their results. Code that
//! users of the libraries need too belongs in the libraries.

mod exhaustion;
mod signal;
mod keys;
mod display;
mod schedules;
mod planning;
mod terminal;
mod commands;
mod arguments;

use std::process::ExitCode;

use pipewright::memory::TrackingAllocator;
use pipewright_planning::failure::{self, Failure};
use pipewright_planning::{panic, screen};

use crate::arguments::{Arguments, Command};
use crate::planning::configurations::TrainingConfigurations;

/// Counts the memory of each rank, for the display and `metrics.jsonl`. Mimalloc keeps large blocks for
/// reuse; the system's allocator returns them at each free and has to clear fresh pages at the next
/// allocation.
#[global_allocator]
static ALLOCATOR: TrackingAllocator<mimalloc::MiMalloc> = TrackingAllocator(mimalloc::MiMalloc);

/// Keeps freed memory in the process. Each step allocates the same gigabytes that the previous step freed.
/// Returning them to the system between steps costs up to a sixth of the step's time, because the system
/// clears the pages.
fn keep_freed_memory() {
    /// The option `mi_option_purge_delay` of mimalloc's C interface. The value -1 means never.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    // SAFETY: the process has no other threads yet.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
}

fn main() -> ExitCode {
    keep_freed_memory();
    exhaustion::watch();
    signal::outlive_limits();
    let arguments = Arguments::parse_shortened();
    screen::set_quiet(arguments.quiet);
    display::log::start();
    match panic::guard(|| run(&arguments.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure::report(&failure);
            failure.kind.exit_code().into()
        }
    }
}

fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Train(arguments) => commands::train::run(arguments),
        Command::Launch(arguments) => commands::launch::run(arguments),
        Command::Watch(arguments) => commands::watch::run(arguments),
        Command::Resume(arguments) => commands::resume::run(arguments),
        Command::Fingerprint(arguments) => commands::fingerprint::run(arguments),
        Command::Audit(arguments) => commands::audit::run(arguments),
        Command::Inspect(arguments) => commands::inspect::run(arguments),
        Command::Export(arguments) => commands::export::run(arguments),
        Command::AddTokens(arguments) => commands::add_tokens::run(arguments),
        Command::Quantize(arguments) => commands::quantize::run(arguments),
        Command::Generate(arguments) => commands::generate::run(arguments),
        Command::Check(arguments) => commands::check::run(arguments),
        Command::Data(arguments) => commands::data::run(arguments),
        Command::Tokenize(arguments) => commands::tokenize::run(arguments),
        Command::Devices(arguments) => commands::devices::run(arguments),
        Command::Init(arguments) => commands::init::run(arguments),
        Command::Planning(command) => command.run(&TrainingConfigurations),
        Command::View(arguments) => commands::view::run(arguments),
        Command::Report(arguments) => commands::report::run(arguments),
        Command::Profile(arguments) => commands::profile::run(arguments),
        Command::Partition(arguments) => commands::partition::run(arguments),
        Command::Completions(arguments) => commands::completions::run(arguments, Arguments::whole_command()),
        Command::Man(arguments) => commands::man::run(arguments, Arguments::whole_command()),
    }
}
