//! The regions of a stage in which the ranks of a tensor group compute a layer together.
//!
//! Outside of a region, each rank has all tokens, or with sequence parallelism (Korthikanti et al., 2022,
//! <https://arxiv.org/abs/2205.05198>) its share of the tokens of each row: norms, residual connections and
//! dropout then work on a share. Inside, all ranks have all tokens.
//!
//! | | each rank has all tokens | each rank has a share |
//! |---|---|---|
//! | [`Region::enter`] | nothing; the backward adds | gathers the shares; the backward adds and keeps the share |
//! | [`Region::leave`] | adds; the backward does nothing | adds and keeps the share; the backward gathers |
//!
//! A product does not keep an input that was gathered. Its backward gathers the shares again.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::parallel::{TensorParallel, exchanged, sum_of_sent, tensor_of};
use super::remade::note_gathered;
use super::tensor_link::TensorLink;
use crate::autodiff::{Rule, inner_of, on_tape_of, record};
use crate::tensor::Value;

/// The edge of a region in which the ranks of a tensor group compute a layer together.
///
/// All ranks of the group must call the same operations in the same order.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    tensor: &'a TensorParallel,
    /// The rows whose tokens the ranks share outside of the region; `None` if each rank has all tokens.
    rows: Option<usize>,
}

impl<'a> Region<'a> {
    /// Returns a region. Outside it, each rank has all tokens.
    pub fn of_whole(tensor: &'a TensorParallel) -> Self {
        Self { tensor, rows: None }
    }

    /// Returns a region. Outside it, each rank has its share of the tokens of each of `rows` rows.
    pub fn of_shares(tensor: &'a TensorParallel, rows: usize) -> Self {
        Self { tensor, rows: (tensor.ranks() > 1).then_some(rows) }
    }

    /// Returns the rank's connection to the others of its group.
    pub fn tensor(&self) -> &'a TensorParallel {
        self.tensor
    }

    /// Returns the hidden states of all tokens. The backward adds the gradients of all ranks. Shapes: `x [tokens
    /// outside, width]`, result `[tokens inside, width]`.
    ///
    /// # Panics
    /// When a rank of the group fails.
    pub fn enter(&self, x: Tensor<2>) -> Tensor<2> {
        match self.rows {
            None => self.tensor.enter(x),
            Some(rows) => self.tensor.gathered(x.clone(), RankCut::of_shares(self.tensor, x.dims(), rows)),
        }
    }

    /// Returns the sum of `x` over all ranks: all of it, or this rank's share of the tokens. Shapes: `x [tokens
    /// inside, width]`, result `[tokens outside, width]`.
    ///
    /// # Panics
    /// When the ranks cannot have equal shares of the tokens of a row, or a rank of the group fails.
    pub fn leave(&self, x: Tensor<2>) -> Tensor<2> {
        match self.rows {
            None => self.tensor.sum(x),
            Some(rows) => self.tensor.scattered(x.clone(), RankCut::of_whole(self.tensor, x.dims(), rows)),
        }
    }
}

/// How a tensor is cut into the parts of the ranks: into columns, if it is seen as blocks of rows.
#[derive(Clone, Copy, Debug)]
struct RankCut {
    ranks: usize,
    blocks: usize,
    part: [usize; 2],
    whole: [usize; 2],
}

impl RankCut {
    /// Returns the cut of the tokens of `rows` rows, from the shape of a rank's share.
    fn of_shares(tensor: &TensorParallel, part @ [tokens, width]: [usize; 2], rows: usize) -> Self {
        let ranks = tensor.ranks() as usize;
        Self { ranks, blocks: rows, part, whole: [tokens * ranks, width] }
    }

    /// Returns the cut of the tokens of `rows` rows, from the shape of all tokens.
    fn of_whole(tensor: &TensorParallel, whole @ [tokens, width]: [usize; 2], rows: usize) -> Self {
        let (ranks, length) = (tensor.ranks() as usize, tokens / rows.max(1));
        assert!(
            length.is_multiple_of(ranks),
            "{ranks} tensor ranks cannot have equal shares of rows of {length} tokens: use rows whose length is a multiple of \
             {ranks}, or turn sequence parallelism off"
        );
        Self { ranks, blocks: rows, part: [tokens / ranks, width], whole }
    }

    /// Returns the cut of a tensor along a dimension. `shape` is the shape of the whole tensor if `is_whole`, and
    /// otherwise the shape of a rank's part.
    fn along(tensor: &TensorParallel, shape: &[usize], dimension: usize, is_whole: bool) -> Self {
        let ranks = tensor.ranks() as usize;
        assert!(dimension < shape.len(), "a tensor of the shape {shape:?} has no dimension {dimension}");
        assert!(
            !is_whole || shape[dimension].is_multiple_of(ranks),
            "{ranks} tensor ranks cannot have equal parts of dimension {dimension} of the shape {shape:?}"
        );
        let blocks = shape[..dimension].iter().product();
        let columns: usize = shape[dimension..].iter().product();
        let [part, whole] = if is_whole { [columns / ranks, columns] } else { [columns, columns * ranks] };
        Self { ranks, blocks, part: [blocks, part], whole: [blocks, whole] }
    }

    /// Joins the parts of all ranks.
    fn join(self, parts: impl Iterator<Item = Tensor<2>>) -> Tensor<2> {
        let columns = self.whole.iter().product::<usize>() / self.blocks.max(1) / self.ranks;
        let parts = parts.map(|part| part.reshape([self.blocks, columns])).collect();
        Tensor::cat(parts, 1).reshape(self.whole)
    }

    /// Cuts a whole tensor into the parts of all ranks.
    fn parts(self, whole: Tensor<2>) -> impl Iterator<Item = Tensor<2>> {
        let columns = self.whole.iter().product::<usize>() / self.blocks.max(1) / self.ranks;
        let blocks = whole.reshape([self.blocks, columns * self.ranks]);
        (0..self.ranks).map(move |rank| blocks.clone().narrow(1, rank * columns, columns).reshape(self.part))
    }
}

impl TensorParallel {
    /// Returns the region of a layer that the ranks compute together, for the tokens of `rows` rows. Outside of it
    /// each rank has a share of them if [`TensorParallel::shares_tokens`].
    pub fn region(&self, rows: usize) -> Region<'_> {
        if self.shares_tokens() { Region::of_shares(self, rows) } else { Region::of_whole(self) }
    }

    /// Returns the whole of a tensor, from the ranks' equal parts along `dimension`, in the order of the
    /// ranks. The gradient of a part is the part of the sum of the ranks' gradients.
    ///
    /// # Panics
    /// When the tensor has no such dimension, or a rank of the group fails.
    pub fn gather<const D: usize>(&self, x: Tensor<D>, dimension: usize) -> Tensor<D> {
        let mut shape = x.dims();
        let cut = RankCut::along(self, &shape, dimension, false);
        shape[dimension] *= cut.ranks;
        self.gathered(x.reshape(cut.part), cut).reshape(shape)
    }

    /// Returns this rank's part, along `dimension`, of the sum of `x` over all ranks. The gradient of each `x` is
    /// the gradients of all parts, joined.
    ///
    /// # Panics
    /// When the tensor has no such dimension or the ranks cannot have equal parts of it, or a rank of the group
    /// fails.
    pub fn reduce_scatter<const D: usize>(&self, x: Tensor<D>, dimension: usize) -> Tensor<D> {
        let mut shape = x.dims();
        let cut = RankCut::along(self, &shape, dimension, true);
        shape[dimension] /= cut.ranks;
        self.scattered(x.reshape(cut.whole), cut).reshape(shape)
    }

    fn gathered(&self, x: Tensor<2>, cut: RankCut) -> Tensor<2> {
        let Some(link) = self.link().cloned() else { return cut.join(vec![x; cut.ranks].into_iter()) };
        let kept = inner_of(x.clone());
        let rule = Arc::new(GatherRule { link: link.clone(), cut });
        let whole = record([x.clone(), x.clone()], gather(&*link, kept.clone(), cut), rule);
        note_gathered(&x, &whole, kept, move |part| gather(&*link, part, cut));
        whole
    }

    /// If any rank's `x` needs a gradient, the result needs one on all ranks, so that all of them run the same
    /// backward.
    fn scattered(&self, x: Tensor<2>, cut: RankCut) -> Tensor<2> {
        let Some(link) = self.link() else {
            let own = cut.parts(x).nth(self.rank().index as usize);
            return own.expect("each rank has a part");
        };
        let (part, is_tracked) = sum_of_sent(&**link, cut.parts(inner_of(x.clone())), x.is_tracked());
        let x = if is_tracked && !x.is_tracked() {
            on_tape_of(inner_of(x.clone()), &x).require_grad()
        } else {
            x
        };
        record([x.clone(), x], part, Arc::new(ScatterRule { link: link.clone(), cut }))
    }
}

fn gather(link: &dyn TensorLink, part: Tensor<2>, cut: RankCut) -> Tensor<2> {
    let parts = exchanged(link, vec![Value::of(part); cut.ranks]);
    cut.join(parts.into_iter().map(tensor_of))
}

#[derive(Debug)]
struct GatherRule {
    link: Arc<dyn TensorLink>,
    cut: RankCut,
}

impl Rule for GatherRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        [Some(sum_of_sent(&*self.link, self.cut.parts(gradient), true).0), None]
    }
}

#[derive(Debug)]
struct ScatterRule {
    link: Arc<dyn TensorLink>,
    cut: RankCut,
}

impl Rule for ScatterRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        [Some(gather(&*self.link, gradient, self.cut)), None]
    }
}

#[cfg(test)]
mod tests {
    use burn::module::ParamId;
    use burn::tensor::{DType, TensorData, Tolerance};
    use pipewright_schedule::recompute::{LayerPart, LayerParts};

    use super::super::check::{counted, numbers, on_ranks};
    use super::super::layout::Layout;
    use super::super::product::multiply;
    use super::super::remade::with_parts;
    use super::super::rms_norm;
    use super::*;

    /// Checks that the parts of `gather` and `reduce_scatter` along a dimension equal the results of the whole, and that
    /// each of the two is the backward of the other.
    fn check(ranks: u32, shape: [usize; 3], dimension: usize, dtype: DType) {
        let part = |x: Tensor<3>, rank: u32| {
            let size = shape[dimension] / ranks as usize;
            x.narrow(dimension, rank as usize * size, size)
        };
        let whole = || numbers(shape, 1.0).cast(dtype);
        let of_rank = |rank: u32| (numbers(shape, 2.0) * (1.3 + f64::from(rank)).powi(3)).cast(dtype);
        let sum = (0..ranks).map(|rank| of_rank(rank).cast(DType::F32)).reduce(|sum, x| sum + x);
        let sum = sum.expect("a rank").cast(dtype);
        let found = on_ranks(ranks, |tensor| {
            let rank = tensor.rank().index;
            let own = part(whole(), rank).autodiff().require_grad();
            let gathered = tensor.gather(own.clone(), dimension);
            let gradients = (gathered.clone() * of_rank(rank).autodiff()).sum().backward();
            let of_part = own.grad(&gradients).expect("a leaf").into_data();
            let own = of_rank(rank).autodiff().require_grad();
            let scattered = tensor.reduce_scatter(own.clone(), dimension);
            let gradients = (scattered.clone() * part(whole(), rank).autodiff()).sum().backward();
            let of_whole = own.grad(&gradients).expect("a leaf").into_data();
            (gathered.inner().into_data(), of_part, scattered.inner().into_data(), of_whole)
        });
        for (rank, (gathered, of_part, scattered, of_whole)) in (0..).zip(found) {
            let case = format!("rank {rank} of {ranks}, {shape:?} along {dimension}, {dtype:?}");
            assert_eq!(gathered, whole().into_data(), "{case}");
            assert_eq!(of_part, part(sum.clone(), rank).into_data(), "{case}");
            assert_eq!(scattered, part(sum.clone(), rank).into_data(), "{case}");
            assert_eq!(of_whole, whole().into_data(), "{case}");
        }
    }

    #[test]
    fn gather_and_reduce_scatter_are_each_others_backward() {
        for dtype in [DType::F32, DType::BF16] {
            check(2, [3, 4, 5], 1, dtype);
            check(4, [3, 4, 5], 1, dtype);
            check(3, [3, 4, 5], 0, dtype);
            check(5, [1, 1, 5], 2, dtype);
            check(1, [3, 4, 5], 1, dtype);
        }
    }

    #[test]
    fn each_rank_sends_its_part_or_the_parts_of_the_others() {
        let sent = |run: &(dyn Fn(TensorParallel) + Sync)| counted(4, run).1;
        let part = 2 * 3 * 5 * 4;
        assert_eq!(sent(&|tensor| drop(tensor.gather(numbers::<3>([2, 3, 5], 1.0), 1))), 4 * 3 * part);
        let whole = [2, 12, 5];
        assert_eq!(sent(&|tensor| drop(tensor.reduce_scatter(numbers::<3>(whole, 1.0), 1))), 4 * 3 * part);
    }

    #[test]
    fn a_part_needs_a_gradient_on_all_ranks_if_one_rank_needs_it() {
        let found = on_ranks(3, |tensor| {
            let x = numbers::<2>([3, 2], 1.0).autodiff();
            let x = if tensor.rank().index == 1 { x.require_grad() } else { x };
            let part = tensor.reduce_scatter(x.clone(), 0);
            let gradient = x.grad(&(part * 2.0).sum().backward());
            gradient.map(Tensor::into_data)
        });
        let expected = Some(TensorData::from([[2.0f32; 2]; 3]));
        assert_eq!(found, [None, expected, None]);
    }

    /// Returns the results and all gradients of two products with a normalisation of shares of 2 rows of 4
    /// tokens, joined over the ranks.
    fn of_region(ranks: u32, parts: LayerParts) -> Vec<TensorData> {
        let share = |x: Tensor<2>, rank: u32| {
            let length = 4 / ranks as usize;
            x.reshape([2, 4 * 6]).narrow(1, rank as usize * length * 6, length * 6).reshape([2 * length, 6])
        };
        let found = on_ranks(ranks, |tensor| {
            let (rank, region) = (tensor.rank().index, Region::of_shares(&tensor, 2));
            let x = share(numbers([8, 6], 1.0), rank).autodiff().require_grad();
            let width = 12 / ranks as usize;
            let columns = numbers::<2>([6, 12], 1.0).narrow(1, rank as usize * width, width);
            let rows = numbers::<2>([12, 6], 1.5).narrow(0, rank as usize * width, width);
            let [columns, rows] = [columns, rows].map(|weight| weight.autodiff().require_grad());
            let factors = numbers::<1>([6], 1.0).autodiff().require_grad();
            let product = |x, weight: &Tensor<2>| multiply(x, weight.clone(), Layout::Plain, ParamId::new());
            let y = with_parts(parts, || {
                let inside = region.enter(rms_norm(x.clone(), factors.clone(), 1e-5));
                region.leave(product(product(inside, &columns).tanh(), &rows))
            });
            let gradients = (y.clone().square()).sum().backward();
            let of = |tensor: &Tensor<2>| tensor.grad(&gradients).expect("a leaf");
            let of_factors = factors.grad(&gradients).expect("a leaf").unsqueeze::<2>();
            [y.inner(), of(&x), of(&columns), of(&rows), of_factors]
        });
        let joined = |index: usize| {
            let of_ranks: Vec<Tensor<2>> = found.iter().map(|found| found[index].clone()).collect();
            match index {
                0 | 1 => {
                    let rows = of_ranks.into_iter().map(|share| {
                        let columns = share.dims().iter().product::<usize>() / 2;
                        share.reshape([2, columns])
                    });
                    Tensor::cat(rows.collect(), 1).reshape([8, 6])
                }
                2 => Tensor::cat(of_ranks, 1),
                3 => Tensor::cat(of_ranks, 0),
                // Each rank has the part of its tokens.
                _ => of_ranks.into_iter().reduce(|sum, part| sum + part).expect("a rank"),
            }
        };
        (0..5).map(|index| joined(index).into_data()).collect()
    }

    #[test]
    fn a_region_of_shares_computes_what_one_rank_does() {
        let expected = of_region(1, LayerParts::NONE);
        for ranks in [2, 4] {
            for parts in [LayerParts::NONE, LayerPart::Norms.into()] {
                for (found, expected) in of_region(ranks, parts).iter().zip(&expected) {
                    found.assert_approx_eq::<f32>(expected, Tolerance::rel_abs(2e-5, 1e-5));
                }
            }
        }
    }

    #[test]
    fn a_product_gathers_its_input_again_instead_of_keeping_it() {
        let sent = |weight_needs: bool| {
            counted(2, |tensor| {
                let x = numbers([8, 6], 1.0).autodiff().require_grad();
                let weight = numbers([6, 6], 1.0).autodiff();
                let weight = if weight_needs { weight.require_grad() } else { weight };
                let y = with_parts(LayerParts::NONE, || {
                    let inside = Region::of_shares(&tensor, 2).enter(x.clone());
                    multiply(inside, weight, Layout::Plain, ParamId::new())
                });
                drop(y.sum().backward());
            })
            .1
        };
        let part = 2 * 8 * 6 * 4;
        // The forward gathers parts, and the backward scatters parts.
        assert_eq!(sent(false), 2 * part);
        assert_eq!(sent(true), 3 * part);
    }

    #[test]
    #[should_panic(expected = "2 tensor ranks cannot have equal shares of rows of 5 tokens")]
    fn unequal_shares_are_refused() {
        let tensor = TensorParallel::unconnected(crate::tensor::TensorRank { index: 0, of: 2 });
        Region::of_shares(&tensor, 2).leave(numbers([10, 6], 1.0));
    }
}
