//! The examples run to their end.

#[path = "../examples/own_module.rs"]
mod own_module;

#[test]
fn own_module() {
    own_module::main().expect("it trains");
}
