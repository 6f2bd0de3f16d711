//! Tests of the path without the instruction on a processor that has it: a program of tests runs some of its
//! tests again in a process that does not use the instruction. Narrow products then do not use AVX-512 either.

use std::env;
use std::process::Command;
use std::sync::LazyLock;

/// A process in which this variable is set does not use the instruction.
const HIDDEN: &str = "PIPEWRIGHT_HIDE_BF16_PRODUCTS";

/// Tests with this part in their names are not run again, so that a test that runs others does not run itself.
const CALLER: &str = "without_the_instruction";

/// Returns whether this process does not use the instruction even if the processor has it.
pub fn is_hidden() -> bool {
    static IS_HIDDEN: LazyLock<bool> = LazyLock::new(|| env::var_os(HIDDEN).is_some());
    *IS_HIDDEN
}

/// Runs the tests of this program whose names contain `filter` in a process that does not use the instruction.
/// The calling test has `without_the_instruction` in its name.
///
/// # Panics
/// When a test fails, or no test has such a name.
pub fn run_without_instruction(filter: &str) {
    let program = env::current_exe().expect("a program of tests has a path");
    let output = Command::new(program)
        .args([filter, "--skip", CALLER])
        .env(HIDDEN, "1")
        .output()
        .expect("a program of tests can run again");
    let [printed, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{filter} without the instruction:\n{printed}\n{errors}");
    assert!(printed.contains("test result: ok.") && !printed.contains("ok. 0 passed"), "no test is {filter}");
}
