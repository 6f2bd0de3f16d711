//! A batch that has failed on another rank is dropped between a computation of the batch before it and the messages behind
//! that computation.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use pipewright::nn::SplitBackward;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::{Action, Microbatch, StageIndex};

use super::kinds::{Kind, sharded};
use super::{collect_log, delayed, hang_until_logged};
use crate::ahead::batches::{RATE, numbered, parameters, result_of};
use crate::support::count::Count;
use crate::support::{Mlp, ending_in_loss};

const RANKS: u32 = 4;
/// With replicas, the row of a rank does not end with a computation.
const REPLICAS: u32 = 2;

/// Rank 0 fails in a forward of the second batch while rank 1 is in a backward of the first one.
#[derive(Debug)]
struct Failure {
    /// The backward of rank 1, which waits until rank 0 has failed.
    held: Action,
    /// The microbatch of the forward of rank 0.
    microbatch: Microbatch,
    text: String,
    /// The batches that the test has begun.
    begun: Count,
    /// How often rank 1 has come to the backward, and rank 0 to the forward.
    held_count: Count,
    failing_count: Count,
}

fn is_rank(rank: u32) -> bool {
    std::thread::current().name() == Some(&format!("rank-{rank}"))
}

impl Failure {
    fn before_forward(&self, context: &StageContext) {
        if context.stage().get() != 0 {
            return;
        }
        // The first batch does not come to the place where the second one begins before the test has begun both.
        self.begun.wait_for(2);
        if context.microbatch() == self.microbatch && is_rank(0) && self.failing_count.add_one() == 2 {
            self.held_count.wait_for(1);
            panic!("{}", self.text);
        }
    }

    fn during(&self, action: Action) {
        if action == self.held && is_rank(1) && self.held_count.add_one() == 1 {
            hang_until_logged(&self.text);
        }
    }
}

/// Holds the backward of a microbatch.
struct Held {
    failure: Arc<Failure>,
    stage: StageIndex,
    microbatch: Microbatch,
}

impl SplitBackward<2, 2> for Held {
    type Weights = Tensor<1>;
    type Saved = ();
    type Waiting = Tensor<1>;

    fn forward(&self, input: Tensor<2>, _weights: Tensor<1>) -> (Tensor<2>, ()) {
        (input, ())
    }

    fn backward_input(
        &self,
        (): &(),
        weights: Tensor<1>,
        gradient: Tensor<2>,
        wanted: bool,
    ) -> (Option<Tensor<2>>, Tensor<1>) {
        let Self { failure, stage, microbatch } = self;
        failure.during(Action::InputBackward { stage: *stage, microbatch: *microbatch });
        (wanted.then_some(gradient), weights.zeros_like())
    }

    fn backward_weights(&self, waiting: Tensor<1>) -> Tensor<1> {
        let Self { failure, stage, microbatch } = self;
        failure.during(Action::WeightBackward { stage: *stage, microbatch: *microbatch });
        waiting
    }
}

#[derive(Module, Debug)]
struct Watched {
    layers: Mlp,
    /// Has no gradient.
    unused: Param<Tensor<1>>,
    #[module(skip)]
    stage: usize,
    #[module(skip)]
    failure: Option<Arc<Failure>>,
}

impl StageModule for Watched {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let failure = self.failure.clone().inspect(|failure| failure.before_forward(context));
        let output = self.layers.forward(input, context);
        match failure {
            Some(failure) => {
                let held = Held { failure, stage: context.stage(), microbatch: context.microbatch() };
                held.apply(output, &self.unused)
            }
            // The gradient of the unused parameter is 0 too.
            None => output + self.unused.val().unsqueeze() * 0.0,
        }
    }

    fn parameter_path(&self, local: &str) -> String {
        let of_layers = local.strip_prefix("layers.").map(|local| self.layers.parameter_path(local));
        of_layers.unwrap_or_else(|| format!("{local}.{}", self.stage))
    }
}

fn launch(config: &PipelineConfig, failure: Option<Arc<Failure>>) -> Pipeline {
    let make = move |index: StageIndex| -> Result<Stage, Infallible> {
        let unused = Param::from_data([0.0], &Device::flex().autodiff());
        let layers = Mlp::of_stage(index, RANKS);
        let watched = Watched { layers, unused, stage: index.index(), failure: failure.clone() };
        ending_in_loss(index.get() + 1 == RANKS, watched)
    };
    let world = World::local(RANKS * config.data_parallel);
    let program = Kind::of(config.clone()).program("1f1b", RANKS);
    Pipeline::launch(program, world, config, make).expect("it starts")
}

/// Checks that the first batch counts, that the failure has its place, and that the pipeline continues as if the second batch
/// had not been.
fn check(held: &str, failing: u32) {
    let whole = PipelineConfig { data_parallel: REPLICAS, ..delayed() };
    for (name, config) in [("whole", whole), ("sharded", sharded())] {
        check_in(&format!("{held}, {name}"), held, failing, &config);
    }
}

fn check_in(what: &str, held: &str, failing: u32, config: &PipelineConfig) {
    collect_log();
    let text = format!("out of cheese during {what}");
    let failure = Arc::new(Failure {
        held: held.parse().expect("an action"),
        microbatch: Microbatch::new(failing),
        text: text.clone(),
        begun: Count::default(),
        held_count: Count::default(),
        failing_count: Count::default(),
    });
    let deadline = Duration::from_secs(120);
    let config = PipelineConfig { deadline, ..config.clone() };
    let [mut pipeline, mut plain] = [Some(failure.clone()), None].map(|failure| launch(&config, failure));
    for number in 0..2 {
        pipeline.begin(numbered(number, &config), RATE).expect("it begins");
        failure.begun.add_one();
    }
    let expected = plain.step_batch(numbered(0, &config), RATE).expect("a step");
    assert_eq!(result_of(&pipeline.finish().expect("the first step")), result_of(&expected), "{what}");
    let error = pipeline.finish().expect_err("its forward fails").to_string();
    let place = format!("rank 0, stage 0, microbatch {failing}, action 0F{failing}: ");
    assert!(error.starts_with(&format!("step 2: {place}")) && error.ends_with(&text), "{error}");
    for number in 5..8 {
        let expected = plain.step_batch(numbered(number, &config), RATE).expect("a step");
        let found = pipeline.step_batch(numbered(number, &config), RATE).expect("a step");
        assert_eq!(result_of(&found).1, result_of(&expected).1, "{what}, batch {number}");
    }
    assert_eq!(parameters(&mut pipeline), parameters(&mut plain), "{what}");
}

/// The gradient of the last microbatch is sent after the drop.
#[test]
fn the_last_gradient_of_the_batch_before_is_sent() {
    check("1I3", 2);
}

#[test]
fn an_earlier_gradient_of_the_batch_before_is_sent() {
    check("1I2", 1);
}

/// The last computation of a batch, behind which replicas add up their gradients.
#[test]
fn the_gradients_of_the_batch_before_are_summed() {
    check("1W3", 2);
}
