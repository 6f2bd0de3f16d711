//! The families compared with reference runs, most of them in PyTorch: in one piece, and trained in the
//! pipeline.

mod cases;
mod golden;
mod pipelined;
mod tied;
mod delayed;
mod slices;
mod families;
mod decoders;
mod head_parts;
mod embedding_parts;
mod nemotron_h;
mod hybrid;
mod tensor_parallel;
mod sequence_parallel;
mod expert_parallel;
mod lora;
mod training_form;
mod quantised;
mod streamed;
mod gguf;
mod reference;
mod pipelined_run;
