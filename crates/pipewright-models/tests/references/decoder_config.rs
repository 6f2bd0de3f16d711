//! The configuration of a decoder, whatever its family is.

/// Evaluates an expression with the configuration of a decoder, of whatever family it is.
macro_rules! with_decoder {
    ($model:expr, $config:ident => $value:expr) => {
        match $model {
            pipewright_models::ModelConfig::Llama($config) => $value,
            pipewright_models::ModelConfig::Qwen2($config) => $value,
            pipewright_models::ModelConfig::Qwen3($config) => $value,
            pipewright_models::ModelConfig::Qwen3Moe($config) => $value,
            pipewright_models::ModelConfig::Qwen2Moe($config) => $value,
            pipewright_models::ModelConfig::Mistral($config) => $value,
            pipewright_models::ModelConfig::Mixtral($config) => $value,
            pipewright_models::ModelConfig::SmolLm3($config) => $value,
            pipewright_models::ModelConfig::Granite($config) => $value,
            pipewright_models::ModelConfig::Phi3($config) => $value,
            pipewright_models::ModelConfig::Olmo2($config) => $value,
            pipewright_models::ModelConfig::Gemma2($config) => $value,
            pipewright_models::ModelConfig::Gemma3($config) => $value,
            pipewright_models::ModelConfig::Starcoder2($config) => $value,
            pipewright_models::ModelConfig::Gpt2($config) => $value,
            pipewright_models::ModelConfig::GptOss($config) => $value,
            pipewright_models::ModelConfig::DeepseekV2($config) => $value,
            pipewright_models::ModelConfig::DeepseekV3($config) => $value,
            other => panic!("{other:?} is not a decoder"),
        }
    };
}
pub(crate) use with_decoder;
