//! The hint for a file whose actions may number slices: a table does not say into how many slices microbatches are cut.

use pipewright_schedule::{ActionKind, Program};

/// Returns a line that names `--slices`, if the program counts whole microbatches but each stage runs its backwards as those
/// of slices: in groups of one size, each in descending order.
pub(super) fn slice_hint(program: &Program) -> Option<String> {
    let stages = program.placement().stages() as usize;
    let mut backwards: Vec<Vec<u32>> = vec![Vec::new(); stages];
    for action in program.rows().iter().flatten() {
        if let (ActionKind::Backward | ActionKind::InputBackward, Some(number)) =
            (action.kind(), action.microbatch())
        {
            backwards[action.stage().index()].push(number.get());
        }
    }
    let slices = backwards.first()?.first()? + 1;
    let are_slices = program.slices().is_one()
        && slices > 1
        && slices < program.microbatches()
        && backwards.iter().all(|of_stage| is_descending_in_groups(of_stage, slices));
    are_slices.then(|| {
        format!(
            "each stage runs its backwards in groups of {slices}, in descending order, as those of slices; if the actions \
             number slices, add --slices {slices}"
        )
    })
}

/// Returns whether `numbers` are 0, 1, 2 and so on, in groups of `size` that are each reversed.
fn is_descending_in_groups(numbers: &[u32], size: u32) -> bool {
    let expected = (0..).map(|place| place / size * size + (size - 1 - place % size));
    numbers.iter().zip(expected).all(|(&number, expected)| number == expected)
}
