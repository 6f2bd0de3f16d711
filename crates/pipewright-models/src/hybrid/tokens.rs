//! The documents, positions, validity and relations of a microbatch's tokens. Every stage makes them from the
//! token ids and from the side inputs of the microbatch, which it looks up by the microbatch's index.

use std::sync::Arc;

use burn::tensor::{Bool, Int, Tensor};
use pipewright::batch::SideInputError;
use pipewright::nn::{Relations, TokenScope};
use pipewright::stage::StageContext;
use pipewright_shapes::hybrid::HybridConfig;

use super::side_inputs::RELATIONS;
use crate::documents::{documents_of, given_scope, host, side};
use crate::valid_tokens::given_counts;

/// The tokens of a microbatch, or the tokens that a block sees.
#[derive(Clone, Debug)]
pub(crate) struct Tokens {
    pub(crate) scope: TokenScope,
    /// Whether each token is valid; the tokens after a row's valid ones are padding.
    pub(crate) valid: Arc<[bool]>,
    pub(crate) relations: Option<Relations>,
}

impl Tokens {
    /// Returns the tokens of a microbatch with `ids`.
    ///
    /// # Panics
    /// When a side input does not have the shape of its kind.
    pub(crate) fn new(config: &HybridConfig, ids: &Tensor<2, Int>, context: &StageContext) -> Self {
        let [rows, sequence] = ids.dims();
        let scope = given_scope(context, [rows, sequence]).unwrap_or_else(|| TokenScope {
            documents: documents_of(&host(ids), sequence, config.bos_token_id).into(),
            ..TokenScope::whole(rows, sequence)
        });
        let counts = counts(context, rows, sequence);
        let valid = (0..rows * sequence).map(|token| token % sequence < counts[token / sequence]).collect();
        let relations =
            (config.num_relations > 0).then(|| relations(config, context, [rows, sequence])).flatten();
        Self { scope, valid, relations }
    }

    pub(crate) fn len(&self) -> usize {
        self.valid.len()
    }

    /// Returns the tokens with these indices, `length` of each row.
    pub(crate) fn choose(&self, indices: &[usize], length: usize) -> Self {
        let sequence = self.scope.sequence;
        let chosen = |all: &[u32]| indices.iter().map(|&index| all[index]).collect();
        let relations = self.relations.as_ref().map(|relations| {
            let mut mask = Vec::with_capacity(indices.len() * relations.count * length);
            for (row, indices) in indices.chunks(length).enumerate() {
                for relation in 0..relations.count {
                    for query in indices {
                        let start =
                            ((row * relations.count + relation) * sequence + query % sequence) * sequence;
                        mask.extend(indices.iter().map(|key| relations.mask[start + key % sequence]));
                    }
                }
            }
            Relations { count: relations.count, mask: mask.into() }
        });
        Self {
            scope: TokenScope {
                sequence: length,
                documents: chosen(&self.scope.documents),
                positions: chosen(&self.scope.positions),
            },
            valid: indices.iter().map(|&index| self.valid[index]).collect(),
            relations,
        }
    }
}

/// Returns the number of valid tokens of each row: all, unless a side input says otherwise.
///
/// # Panics
/// When a number is 0, or larger than the number of a row's tokens.
pub(crate) fn counts(context: &StageContext, rows: usize, sequence: usize) -> Vec<usize> {
    given_counts(context, rows, sequence).unwrap_or_else(|| vec![sequence; rows])
}

fn relations(
    config: &HybridConfig,
    context: &StageContext,
    [rows, sequence]: [usize; 2],
) -> Option<Relations> {
    let count = config.num_relations;
    let (shape, flags) = match context.side::<Tensor<4, Int>>(RELATIONS) {
        Ok(mask) => (mask.dims(), mask.into_data().iter::<i64>().map(|flag| u8::from(flag != 0)).collect()),
        Err(SideInputError::Missing { .. }) => return None,
        Err(_) => {
            let mask = side::<Tensor<4, Bool>>(context, RELATIONS)?;
            (mask.dims(), mask.into_data().iter::<bool>().map(u8::from).collect::<Vec<u8>>())
        }
    };
    let expected = [rows, count, sequence, sequence];
    assert_eq!(shape, expected, "`{RELATIONS}` has a flag for each relation and pair of tokens");
    Some(Relations { count, mask: flags.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_tokens_keep_what_they_carry() {
        let tokens = Tokens {
            scope: TokenScope { documents: vec![0, 1, 1, 3, 3, 3].into(), ..TokenScope::whole(2, 3) },
            valid: vec![true, true, false, true, true, true].into(),
            relations: Some(Relations { count: 1, mask: (0..18).collect() }),
        };
        let chosen = tokens.choose(&[0, 2, 4, 5], 2);
        assert_eq!(*chosen.scope.positions, [0, 2, 1, 2]);
        assert_eq!(*chosen.scope.documents, [0, 1, 3, 3]);
        assert_eq!(*chosen.valid, [true, false, true, true]);
        assert_eq!(*chosen.relations.expect("it has some").mask, [0, 2, 6, 8, 13, 14, 16, 17]);
    }
}
