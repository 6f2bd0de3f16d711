//! Tokenizers in GGUF give texts the ids of the tokenizers from which they were made.

use std::path::Path;

use serde_json::Value;

use crate::chat::special_tokens::SpecialTokens;
use crate::config::Tokenizer;
use crate::encoding::tokenizer::Encoder;

#[test]
fn texts_have_the_ids_of_the_tokenizers_library() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pipewright-gguf/tests/data");
    let expected: Value =
        serde_json::from_slice(&std::fs::read(folder.join("texts.json")).expect("a file")).expect("JSON");
    for (name, ids) in expected["ids"].as_object().expect("a table") {
        let path = folder.join(format!("{name}.gguf")).join("tokenizer.json");
        let encoder = Encoder::of(&Tokenizer::File(path.clone())).expect("a tokenizer").expect("a file");
        for (text, ids) in
            expected["texts"].as_array().expect("texts").iter().zip(ids.as_array().expect("ids"))
        {
            let text = text.as_str().expect("a text");
            let found = encoder.encode(text, true).expect("it has ids");
            assert_eq!(serde_json::json!(found), *ids, "{name}: {text:?}");
            let decoded = encoder.decode(&found, false).expect("it has a text");
            assert!(
                !text.is_ascii() || text.contains("<|") || decoded == text,
                "{name}: {decoded:?} {text:?}"
            );
        }
        let tokens = SpecialTokens::beside(&path).expect("its settings");
        assert!(tokens.text("eos_token").is_some() && tokens.id("eos_token").is_ok_and(|id| id.is_some()));
    }
}
