//! The documents of a microbatch's tokens, which side inputs or the tokens themselves name.

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

/// Returns ids as numbers on the host.
pub(crate) fn host(ids: &Tensor<2, Int>) -> Vec<i64> {
    ids.clone().into_data().iter::<i64>().collect()
}

/// Returns how many of the row's ids up to each token are `bos`, the id with which documents begin.
pub(crate) fn documents_of(ids: &[i64], sequence: usize, bos: Option<usize>) -> Vec<u32> {
    let mut documents = Vec::with_capacity(ids.len());
    for row in ids.chunks(sequence) {
        let mut document = 0;
        for &id in row {
            document += u32::from(bos.is_some_and(|bos| id == bos as i64));
            documents.push(document);
        }
    }
    documents
}

/// Returns the last token of each token's document, as an index in the row. Rows have `sequence` tokens.
pub(crate) fn last_of_documents(documents: &[u32], sequence: usize) -> Vec<usize> {
    let mut last = vec![sequence - 1; documents.len()];
    for token in (0..documents.len()).rev().filter(|token| (token + 1) % sequence != 0) {
        let ends = documents[token] != documents[token + 1];
        last[token] = if ends { token % sequence } else { last[token + 1] };
    }
    last
}

fn numbers(context: &StageContext, name: &str, shape: [usize; 2]) -> Option<Vec<u32>> {
    let given = side::<Tensor<2, Int>>(context, name)?;
    assert_eq!(given.dims(), shape, "`{name}` has a number for each token");
    Some(given.into_data().iter::<i64>().map(|number| number as u32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bos_belongs_to_the_document_that_it_opens() {
        assert_eq!(documents_of(&[5, 0, 7, 0, 0, 1, 0, 3], 4, Some(0)), [0, 1, 1, 2, 1, 1, 2, 2]);
        assert_eq!(documents_of(&[5, 0, 7, 0], 4, None), [0; 4]);
    }

    #[test]
    fn documents_end_with_their_row() {
        assert_eq!(last_of_documents(&[0, 0, 1, 1, 1, 2, 0, 0], 4), [1, 1, 3, 3, 0, 1, 3, 3]);
        assert_eq!(last_of_documents(&[0, 0, 1], 1), [0; 3]);
    }
}
