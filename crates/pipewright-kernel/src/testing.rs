//! Tests of the paths without some instructions on a processor that has them: a program of tests runs some of its
//! tests again in a process that does not use the instructions. Such a process can do without AMX, without AMX and
//! AVX-512, or without the vector instructions of products. Only products, conversions to bfloat16 and quantised lookups do
//! without them; other loops (`#[multiversion]`) use the vectors that the processor has.

use std::env;
use std::ffi::OsString;
use std::process::Command;
use std::sync::LazyLock;

/// A process in which this variable is [`TILES`] does not use AMX. If it is [`VECTORS`], the process uses no vector
/// instructions in products. With another value, it uses neither AMX nor AVX-512.
const HIDDEN: &str = "PIPEWRIGHT_HIDE_INSTRUCTIONS";
const TILES: &str = "AMX";
const VECTORS: &str = "vectors";

/// Tests with this part in their names are not run again, so that a test that runs others does not run itself.
const CALLER: &str = "without_the_instruction";

fn hidden() -> Option<&'static OsString> {
    static VALUE: LazyLock<Option<OsString>> = LazyLock::new(|| env::var_os(HIDDEN));
    VALUE.as_ref()
}

/// Returns whether this process does not use AVX-512 even if the processor has it.
pub fn is_hidden() -> bool {
    hidden().is_some_and(|value| value != TILES)
}

/// Returns whether this process does not use AMX even if the processor has it.
pub fn are_tiles_hidden() -> bool {
    hidden().is_some()
}

/// Returns whether this process uses no vector instructions in products even if the processor has them.
pub fn are_vectors_hidden() -> bool {
    hidden().is_some_and(|value| value == VECTORS)
}

/// Runs the tests of this program whose names contain `filter` in a process that does not use AVX-512.
/// The calling test has `without_the_instruction` in its name.
///
/// # Panics
/// When a test fails, or no test has such a name.
pub fn run_without_instruction(filter: &str) {
    run_again(filter, "1");
}

/// Like [`run_without_instruction`], but the process uses AVX512-BF16 if the processor has it.
///
/// # Panics
/// When a test fails, or no test has such a name.
pub fn run_without_tiles(filter: &str) {
    run_again(filter, TILES);
}

fn run_again(filter: &str, hidden: &str) {
    if !cfg!(target_arch = "x86_64") {
        // No other processor has AMX or AVX-512, so this process does not use them either.
        return;
    }
    let program = env::current_exe().expect("a program of tests has a path");
    let output = Command::new(program)
        .args([filter, "--skip", CALLER])
        .env(HIDDEN, hidden)
        .output()
        .expect("a program of tests can run again");
    let [printed, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{filter} with {HIDDEN}={hidden}:\n{printed}\n{errors}");
    assert!(printed.contains("test result: ok.") && !printed.contains("ok. 0 passed"), "no test is {filter}");
}
