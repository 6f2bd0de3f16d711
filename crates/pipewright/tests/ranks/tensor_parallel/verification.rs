//! Verified steps of ranks that compute stages together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::Tensor;
use pipewright::hook::{ActionHook, BackwardRun};
use pipewright::ids::WorldRank;
use pipewright::pipeline::PipelineConfig;
use pipewright::stage::StageError;
use pipewright::tensor::{pack, unpack};
use pipewright::verification::Verify;

use super::model::{config_of, launch, sizes, take_step, take_steps, try_launch};

/// The second rank of the group of stage 1, whose gradients of one backward are infinite once.
const WRONG: u32 = 3;

struct Infinite(AtomicBool);

impl ActionHook for Infinite {
    fn backward(&self, run: &mut BackwardRun<'_>) -> Result<(), StageError> {
        run.run_all()?;
        if run.rank().get() == WRONG && run.microbatch().get() == 1 && self.0.swap(false, Ordering::SeqCst) {
            let gradients = run.gradients().iter().flatten().cloned().collect();
            let gradient = unpack::<Tensor<2>>(gradients).expect("one input");
            run.set_gradients(pack(gradient.mul_scalar(f32::INFINITY)).into_iter().map(Some).collect());
        }
        Ok(())
    }
}

#[test]
fn a_rank_of_a_tensor_group_is_named_and_the_step_has_the_right_bits() {
    let sizes = sizes(2, 1, 2);
    let hook: Arc<dyn ActionHook> = Arc::new(Infinite(AtomicBool::new(true)));
    let config = PipelineConfig { verify: Verify::OnSuspicion, hook: Some(hook), ..config_of(sizes) };
    let mut pipeline = try_launch("1f1b", sizes, &config, None).expect("it starts");
    let summary = take_step(&mut pipeline, 0).expect("a step");
    let difference = summary.verification.expect("a suspicion").difference.expect("a difference");
    assert_eq!(difference.action().as_deref(), Some("1B1"), "{difference}");
    assert_eq!(difference.wrong, [WorldRank::new(WRONG)], "{difference}");
    let steps = take_steps(&mut pipeline, 1..2);
    let expected = take_steps(&mut launch("1f1b", sizes), 0..2);
    assert_eq!((summary.losses, summary.gradient_norm), expected[0]);
    assert_eq!(steps, expected[1..]);
}
