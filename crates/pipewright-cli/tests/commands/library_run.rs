//! The pages of a run that a program wrote with the library.

use std::fs;
use std::process::Command;

use burn::module::Param;
use pipewright::prelude::*;

/// A layer with one parameter.
#[derive(Module, Debug)]
struct Scale {
    factor: Param<Tensor<1>>,
}

impl StageModule for Scale {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, x: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        x * self.factor.val().unsqueeze()
    }
}

#[test]
fn report_and_view_read_the_folder_of_a_program() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("mine");
    let scale = |_| Scale { factor: Param::from_tensor(Tensor::ones([1], &Device::flex().autodiff())) };
    let mut pipeline = Pipeline::builder(Layers::new(4, scale))
        .ranks(2)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(AdamWConfig::new().init())
        .launch()
        .expect("it starts");
    let mut log = RunLog::open(&run, 0).expect("a new folder");
    log.write_config("layers = 4 # my own settings\n").expect("it is written");
    let x = Tensor::<2>::ones([4, 2], &Device::flex());
    for _ in 0..3 {
        let summary = pipeline.step(x.clone(), x.clone() * 2.0, 1e-2).expect("a step");
        let metrics = log.metrics(&summary, 1e-2, 4);
        log.step(&metrics, &summary).expect("it is written");
        log.keep_timeline(&summary).expect("it is written");
    }
    log.finish().expect("it is written");
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    assert!(metrics.lines().all(|line| line.contains(r#""unit":"samples""#)), "{metrics}");
    for command in ["report", "view"] {
        let page = folder.path().join(format!("{command}.html"));
        let mut program = Command::new(assert_cmd::cargo::cargo_bin!("pipewright"));
        let output = program.arg(command).arg(&run).arg("-o").arg(&page).output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = fs::read_to_string(&page).expect("a page");
        assert!(command == "view" || text.contains("my own settings"), "{command}");
        assert!(command == "view" || text.contains(r#""unit":"samples""#), "the run has no tokens");
    }
}
