//! The documents of a microbatch's tokens, which side inputs name.

use burn::tensor::{Int, Tensor};
use pipewright::batch::SideInputError;
use pipewright::nn::TokenScope;
use pipewright::stage::StageContext;
use pipewright::tensor::Boundary;
use pipewright::train::data::{DOCUMENTS, POSITIONS};

/// Returns a side input, or `None` if the step has no side input of that name.
///
/// # Panics
/// When it has other tensors than `T`.
pub(crate) fn side<T: Boundary>(context: &StageContext, name: &str) -> Option<T> {
    match context.side(name) {
        Ok(tensors) => Some(tensors),
        Err(SideInputError::Missing { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Returns the documents of the tokens of `rows` rows, if the step says which they are, with their positions.
///
/// # Panics
/// When a side input has another shape.
pub(crate) fn given_scope(context: &StageContext, [rows, sequence]: [usize; 2]) -> Option<TokenScope> {
    let documents = numbers(context, DOCUMENTS, [rows, sequence])?.into();
    let whole = TokenScope::whole(rows, sequence);
    let positions = numbers(context, POSITIONS, [rows, sequence]).map_or(whole.positions, Into::into);
    Some(TokenScope { sequence, documents, positions })
}

fn numbers(context: &StageContext, name: &str, shape: [usize; 2]) -> Option<Vec<u32>> {
    let given = side::<Tensor<2, Int>>(context, name)?;
    assert_eq!(given.dims(), shape, "`{name}` has a number for each token");
    Some(given.into_data().iter::<i64>().map(|number| number as u32).collect())
}
