//! Tests that equal runs write equal checkpoints: each file, the manifest included, depends on nothing but the state.

use super::adapters;
use crate::run::Run;

#[test]
fn equal_runs_write_equal_checkpoints() {
    for set in [
        &[][..],
        &["pipeline.ranks=2", "pipeline.stages_per_rank=2", "pipeline.schedule=interleaved1f1b"],
        &["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded", "model.tie_word_embeddings=true"],
        &["mesh.tensor_parallel=2", "run.precision=f16"],
        &["data.validation_share=0.25", "run.eval_every=1", "run.checkpoint_every=1"],
    ] {
        let hashes = [(); 2].map(|()| {
            let run = Run::new();
            run.train(&[set, &["run.steps=2"]].concat());
            run.hashes()
        });
        assert_eq!(hashes[0], hashes[1], "{set:?}");
        assert!(hashes[0].iter().any(|(name, _)| name == "manifest.json"), "{hashes:?}");
    }
}

#[test]
fn equal_runs_write_equal_checkpoints_of_adapters() {
    let hashes = [(); 2].map(|()| {
        let folder = adapters::folder();
        folder.train(&["pipeline.ranks=2"]);
        folder.hashes()
    });
    assert_eq!(hashes[0], hashes[1]);
}
