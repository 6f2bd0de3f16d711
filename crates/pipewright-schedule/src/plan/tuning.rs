//! The numbers that the search and the bounds are tuned with, and what each of them trades.
//!
//! None of them changes what is true: a plan has the time of the simulator, and a bound is valid for all
//! plans, whatever the values. They trade work against smaller gaps. The values of limits follow from the
//! work that they allow; the others were chosen by trials on the random models of `examples/plans`, unless a
//! field says otherwise.

/// The share by which sums of times may differ by rounding: much more than `f64` needs, and much less than
/// any gap.
pub(super) const ROUNDING: f64 = 1e-9;

/// The phases of the search.
pub(super) mod search {
    /// The gap below which the search ends. A smaller one takes all work for gains that nobody measures in a
    /// run; it is the accuracy of the bounds.
    pub(crate) const GOOD_ENOUGH: f64 = 5e-4;
    /// The share by which times must differ to count as different. It is above the rounding of sums, so that
    /// an order that is faster only by rounding does not replace one that needs less memory.
    pub(crate) const DIFFERENT: f64 = 1e-12;
    /// The share by which an order by rules may be slower than the limit and is still justified. A larger one
    /// justifies more orders in vain; justifying shortens most orders by 1% to 4%.
    pub(crate) const SLOWER: f64 = 0.02;
    /// The most plans of each number of stages that are kept for later changes: more starts for `polish.rs`,
    /// and more memory.
    pub(crate) const PROMISING: usize = 16;
    /// The most computations of a plan that is kept for later changes. It limits the memory of the kept plans
    /// to about 13 MB for each number of stages.
    pub(crate) const LARGEST: usize = 1 << 16;
    /// The most computations of a step with one stage per rank. Larger divisions take too much memory, and
    /// more time than a search has.
    pub(crate) const MOST_COMPUTATIONS: u128 = 1 << 21;
    /// The share by which the bound of a head in more parts must be lower, so that it is preferred: fewer
    /// parts have fewer messages, which the simple bound hardly counts.
    pub(crate) const SAME_BOUND: f64 = 2e-3;
    /// The plans of a division get at least one part in this many of the work that is left. More for one
    /// division leaves less for the others.
    pub(crate) const SHARE: u64 = 6;
    /// They get at least the work in which rules make this many plans with the most stages, for each
    /// microbatch per rank. Fewer leave models with many stages with too few plans by rules.
    pub(crate) const PLANS: u64 = 125;
    /// The largest number of choices of recomputation that are all tried. Six whole stages have that many.
    pub(crate) const ALL_CHOICES: u64 = 64;
    /// Shares of the microbatches that are in flight in 1F1B, the most promising first. For each share, stages
    /// recompute as few layers as they can to hold so many. More shares leave fewer rules for each.
    pub(crate) const IN_FLIGHT: [f64; 4] = [1.0, 2.0, 1.5, 0.6];
}

/// The work that the search is charged for each operation, in choices of the rules. They are ratios of times
/// that were measured.
pub(super) mod work {
    /// The computations of a given order that are evaluated in the time of one choice.
    pub(crate) const EVALUATED: u64 = 5;
    /// A change of a walk, for each stage of a rank.
    pub(crate) const WALKED: u64 = 4;
    /// The stages whose times a change of a walk over unlike ranks computes in the time of one choice.
    pub(crate) const WALKED_UNLIKE: u64 = 2;
    /// The making of a schedule for its costs, for each of its computations.
    pub(crate) const MADE: u64 = 10;
    /// The justification of an order with the evaluation of the result, for each computation.
    pub(crate) const JUSTIFIED: u64 = 3;
    /// The choice of what an order must recompute, for each computation.
    pub(crate) const REFITTED: u64 = 6;
}

/// The cuts that the search begins with.
pub(super) mod pool {
    /// The largest number of cuts of an arrangement that are all tried. More take more time than walks that
    /// find the best.
    pub(crate) const ALL_CUTS: u64 = 300;
    /// The number of walks and of descents that look for balanced cuts of an arrangement.
    pub(crate) const WALKS: u64 = 2;
    /// The attempts of a descent.
    pub(crate) const DESCENTS: usize = 150;
    /// The halvings that find the bound of a round in a descent: an accuracy of one in 16,000.
    pub(crate) const HALVINGS: u32 = 14;
    /// The steps of a walk with given ranks, for each stage.
    pub(crate) const WALK_STEPS: usize = 750;
    /// The most steps of such a walk, so that models with hundreds of stages leave work for plans.
    pub(crate) const MOST_WALK_STEPS: usize = 20_000;
    /// Such a walk has at most one step for each this many units of the work that is left, so that a small
    /// search leaves most of it to the plans.
    pub(crate) const WALK_SHARE: u64 = 1_000;
    /// The steps of all walks in which rounds may visit the ranks in any order, as a multiple of the steps of
    /// one walk with given ranks.
    pub(crate) const FREE_STEPS: usize = 12;
    /// If there are more than the fewest of them, each has at least so many steps for each ordered pair of
    /// stages. Many short walks find better cuts than a few long ones, but a walk over many stages must not
    /// end too early.
    pub(crate) const FREE_STEPS_OF_PAIR: usize = 10;
    /// The fewest and the most of these walks.
    pub(crate) const FREE_WALKS: [usize; 2] = [2, 32];
}

/// The walk that balances cuts.
pub(super) mod walk {
    /// The share by which a step may be worse, at first. A larger share lets the walk cross more bad cuts to
    /// reach a better one; a smaller share balances sooner.
    pub(crate) const TOLERANCE: f64 = 2.0;
    /// The part of a delay by which a rank counts as slower: the time by which its longest stage (`F + I`)
    /// exceeds the mean of all stages, for as many microbatches as there are ranks. That many wait for the
    /// stage while the pipeline fills.
    pub(crate) const LONG_STAGE: f64 = 0.3;
    /// The power of each rank's bound in the sum. A higher one is nearer to the maximum, but rewards lighter
    /// ranks less. It is a constant, because products replace a power that the compiler knows.
    pub(crate) const POWER: i32 = 24;
}

/// The annealing of plans by rules.
pub(super) mod annealing {
    /// The most episodes. The work usually ends first.
    pub(crate) const EPISODES: usize = 100;
    /// The attempts of an episode for each stage. Fewer begin more often from another cut.
    pub(crate) const TRIES: usize = 20;
    /// The most random changes of a layout that is then balanced again.
    pub(crate) const CHANGES: usize = 8;
    /// The steps of the walk that balances it.
    pub(crate) const BALANCING: usize = 120;
    /// In one of so many of these walks, stages may change their ranks.
    pub(crate) const FREE: usize = 5;
    /// The share by which a plan may become slower at the beginning of an episode.
    pub(crate) const WORSE: f64 = 0.01;
}

/// The changes of the best plans.
pub(super) mod polish {
    /// The share by which a change may make the plan slower at first, times a random number.
    pub(crate) const WORSE: f64 = 0.002;
    /// One of so many changes moves boundaries. They change all times, so they help less often than moves.
    pub(crate) const BOUNDARIES: usize = 10;
    /// The most boundaries that one change moves.
    pub(crate) const MOST_BOUNDARIES: usize = 8;
    /// The farthest that a computation moves within its row.
    pub(crate) const REACH: usize = 12;
    /// The most changes that are tried in a round, for each computation of the order. The work of large
    /// models ends first.
    pub(crate) const TRIES: usize = 1200;
    /// The most plans that are changed. More begin with more variety, and each gets less work.
    pub(crate) const STARTS: usize = 8;
    /// Only plans that take less than this many times the time of the best plan are changed.
    pub(crate) const NEAR: f64 = 1.1;
}

/// The search of the best cut for a given schedule.
pub(super) mod best_cut {
    /// The largest number of cuts that are all tried.
    pub(crate) const ALL_CUTS: u64 = 3_000;
    /// The steps of the walk to a first cut, for each stage. There is one walk only, so it is longer than the
    /// walks of a plan.
    pub(crate) const WALK_STEPS: usize = 1_500;
}

/// The search over unlike ranks.
pub(super) mod unlike {
    /// The share by which a step of a walk may be worse, at first. It is smaller than for equal ranks: stages are also
    /// divided and joined, which leads out of bad cuts.
    pub(crate) const TOLERANCE: f64 = 0.2;
    /// In one of so many changes of a walk, the slowest rank gives layers to another one. Other changes often concern
    /// ranks that have time left.
    pub(crate) const GUIDED: usize = 3;
    /// The share of the work of a search. Memory limits and walks make its units longer than for equal ranks.
    pub(crate) const EFFORT: f64 = 1.0;
    /// The same for more than [`ALL_SUBSETS`] ranks. Their gaps are larger, and a unit of their work takes less time,
    /// because they have fewer divisions to compare.
    pub(crate) const EFFORT_OF_MANY: f64 = 1.25;
    /// The steps of a walk from one of many layouts, for each stage.
    pub(crate) const FIRST_STEPS: usize = 60;
    /// The walks that continue from the best of the layouts.
    pub(crate) const LONG_WALKS: usize = 3;
    /// The steps of such a walk, for each stage.
    pub(crate) const WALK_STEPS: usize = 3_000;
    /// The walks of a division have at most one part in this many of the work that is left.
    pub(crate) const WALK_SHARE: u64 = 8;
    /// The part of a delay by which a rank counts as slower in a walk, as for equal ranks. It is smaller, because slow
    /// ranks have few and long stages in any case.
    pub(crate) const LONG_STAGE: f64 = 0.1;
    /// How many times as long as the shortest way microbatches stay in flight, as walks count memory. Microbatches wait for
    /// each other, and `W` frees memory after `I`. A layout that counts on less needs second forwards; one that counts
    /// on more loses speed. Where memory decides, 3 finds the fastest plans most often.
    pub(crate) const STAYS: [f64; 2] = [3.0, 1.0];
    /// The layouts with about as many stages on which a few rules are tried first.
    pub(crate) const LOOKS: usize = 4;
    /// The steps of the walk that compares divisions, for each stage.
    pub(crate) const QUICK_STEPS: usize = 150;
    /// The steps of the walk that balances a changed plan for an estimate, for each stage.
    pub(crate) const ESTIMATE_STEPS: usize = 30;
    /// The most orders of the ranks, times cuts, that are all tried with one stage on each rank.
    pub(crate) const ALL_LAYOUTS: u64 = 3_000;
    /// All subsets of so many ranks are compared.
    pub(crate) const ALL_SUBSETS: u32 = 5;
    /// The most ranks whose places in the order the bound counts. More take too long.
    pub(crate) const MOST_ORDERED: usize = 64;
    /// The accuracy of the bisections for unlike ranks, as a share. Their tests take little time.
    pub(crate) const ACCURACY: f64 = 1e-4;
    /// The most sizes of layers by which the bound measures times.
    pub(crate) const SIZES: usize = 24;
    /// The largest number of parts of a size that are measured too.
    pub(crate) const PARTS: u32 = 4;
    /// The shares of a unit that do not count in a measure. The last one is so near to 1 that only whole units count.
    pub(crate) const SHARES: [f64; 4] = [0.3, 0.6, 0.8, 1.0 - 1e-9];
    /// The most visits of the search for layers that fit into the times of the ranks, for each time.
    pub(crate) const VISITS: usize = 40_000;
    /// The most orders by links.
    pub(crate) const CHAINS: usize = 4;
    /// The most subsets of the ranks by one rule.
    pub(crate) const SUBSETS: usize = 24;
    /// The most divisions that are searched after the first comparison.
    pub(crate) const DIVISIONS: usize = 2;
    /// The plans of a division get at least one part in this many of the work that is left. More changes of layouts help
    /// more than more changes of orders.
    pub(crate) const SHARE: u64 = 3;
    /// The divisions into replicas that are planned.
    pub(crate) const DIVISIONS_OF_REPLICAS: usize = 3;
    /// The divisions of the rows from which rows move.
    pub(crate) const FIRST_ROWS: usize = 4;
    /// The most runs of rows of one length that move from one replica to another one after the first guess.
    pub(crate) const MOVED_RUNS: usize = 8;
    /// Divisions that were this many times slower in the comparison are not searched.
    pub(crate) const NEAR: f64 = 1.15;
}

/// The bounds.
pub(super) mod bound {
    /// The accuracy of the bisections, as a share. The bound is lower than what can be proved by at most
    /// that.
    pub(crate) const ACCURACY: f64 = 5e-4;
    /// The largest number of cuts with one stage per rank that are all tried. More take longer than the
    /// bisection.
    pub(crate) const MOST_CUTS: u64 = 6_000;
    /// The largest number of parts of an item that a unit is. Each part takes another pass over the layers.
    pub(crate) const PARTS: u32 = 3;
}

/// The bound from idle time (`bound/idle.rs`).
pub(super) mod idle {
    /// The most pieces of cuts for which the bound is computed: about a second on one core.
    pub(crate) const MOST_PIECES: usize = 100_000;
    /// The share by which the bound is raised in a step. Larger steps keep more pieces, smaller ones are more
    /// steps.
    pub(crate) const RAISE: f64 = 0.02;
    /// A part contains the cuts whose longest forward is at most this many times its smallest one. Smaller
    /// parts prove more, and there are more of them.
    pub(crate) const PART: f64 = 1.12;
    /// The first part reaches at least to this share of `F` of all layers, so that there are few parts of
    /// cuts with short forwards.
    pub(crate) const SHORTEST: f64 = 1e-3;
    /// The most changes of the weights of a part. The search usually ends for lack of progress before.
    pub(crate) const CHANGES: usize = 60;
    /// The rate at which weights follow the sums, at first.
    pub(crate) const RATE: f64 = 40.0;
    /// The rate is half as large after this many changes.
    pub(crate) const HALF_RATE: f64 = 10.0;
    /// The smallest weight, so that a weight can grow again.
    pub(crate) const SMALLEST_WEIGHT: f64 = 1e-9;
    /// The search for weights ends if the bound does not grow by this share within `patience` changes. It is
    /// a fifth of the accuracy of the bisections.
    pub(crate) const PROGRESS: f64 = 1e-4;
    /// The number of these changes.
    pub(crate) const PATIENCE: usize = 10;
    /// The most levels of the longest forward so far. Each level is another copy of the table.
    pub(crate) const LEVELS: usize = 6;
    /// The most rows of the table, if there is more than one level.
    pub(crate) const ROWS: usize = 15_000;
    /// The last shared time is this share of `I` of all layers after the earliest first backward.
    pub(crate) const LAST: f64 = 0.65;
}

/// The bound for two stages per rank (`bound/pairs.rs`).
pub(super) mod pairs {
    /// The most beginnings of cuts that are visited for a time.
    pub(crate) const VISITS: usize = 300_000;
    /// The most of them that are visited for all times together. With 16 ranks, that takes a tenth of a
    /// second.
    pub(crate) const ALL_VISITS: usize = 1_000_000;
}
