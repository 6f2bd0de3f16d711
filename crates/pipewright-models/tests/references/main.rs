//! The families compared with reference runs, most of them in PyTorch: in one piece, and trained in the pipeline.

mod golden;
mod pipelined;
mod tied;
mod families;
mod head_parts;
mod nemotron_h;
mod hybrid;
mod tensor_parallel;
mod reference;
mod pipelined_run;
