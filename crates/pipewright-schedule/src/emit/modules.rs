//! torchtitan's names of modules and schedules, and the cut that it makes by itself.

use crate::emit::model_parts::StageParts;
use crate::emit::read_error::ReadError;

/// The schedules of PyTorch 2.15: the name of a schedule here, and PyTorch's.
pub(super) const PYTORCH: [(&str, &str); 7] = [
    ("1f1b", "1F1B"),
    ("gpipe", "GPipe"),
    ("loopedbfs", "LoopedBFS"),
    ("interleaved1f1b", "Interleaved1F1B"),
    ("interleavedzerobubble", "InterleavedZeroBubble"),
    ("zbvzerobubble", "ZBVZeroBubble"),
    ("dualpipev", "DualPipeV"),
];

/// Returns the parts of stages from the names of their modules. `output` is the head's name in older
/// releases.
pub(super) fn stages_of(modules: &[Vec<String>]) -> Result<Vec<StageParts>, ReadError> {
    let mut blocks = 0;
    let mut stages = Vec::new();
    for (stage, names) in modules.iter().enumerate() {
        let mut parts = StageParts { embedding: false, blocks: blocks..blocks, head: false };
        let wrong = |what: String| Err(ReadError::in_stage(stage, &what));
        for name in names {
            match name.as_str() {
                "tok_embeddings" if stage == 0 => parts.embedding = true,
                "lm_head" | "output" if stage + 1 == modules.len() => parts.head = true,
                // The norm before the head is a part of it.
                "norm" => {}
                name @ ("tok_embeddings" | "lm_head" | "output") => {
                    let place = if name == "tok_embeddings" { "first" } else { "last" };
                    return wrong(format!("`{name}` is not in the {place} stage; move it there"));
                }
                name => match name.strip_prefix("layers.").and_then(|index| index.parse::<usize>().ok()) {
                    Some(index) if index == blocks => {
                        blocks += 1;
                        parts.blocks.end = blocks;
                    }
                    Some(_) => {
                        return wrong(format!(
                            "read `{name}`, and expected `layers.{blocks}`; name each block once, in order"
                        ));
                    }
                    None => {
                        return wrong(format!(
                            "the module `{name}` is not known; a stage has `tok_embeddings`, `layers.0` and so on, `norm` and \
                             `lm_head`"
                        ));
                    }
                },
            }
        }
        stages.push(parts);
    }
    let last = stages.len().saturating_sub(1);
    let ends = [(0, "tok_embeddings"), (last, "lm_head")];
    for (stage, name) in ends {
        let has = stages
            .get(stage)
            .is_some_and(|parts| if stage == 0 && name != "lm_head" { parts.embedding } else { parts.head });
        if !has {
            return Err(ReadError::in_stage(stage, &format!("`{name}` is missing; add it")));
        }
    }
    Ok(stages)
}

/// Returns the stages that torchtitan makes of `blocks` blocks, if the embedding counts as `first` blocks and
/// the head as `last` ones (`_generate_llm_fqn_per_model_part`).
pub(super) fn default_stages(
    stages: usize,
    blocks: usize,
    first: usize,
    last: usize,
) -> Result<Vec<StageParts>, ReadError> {
    let all = blocks + first + last;
    let (each, more) = (all / stages, all % stages);
    if stages > 1 && (each == 0 || first > each || last > each) {
        let what = format!(
            "torchtitan cannot divide {blocks} blocks among {stages} stages, with the embedding as {first} and the head as {last}; \
             give `--parallelism.module_fqns_per_model_part`"
        );
        return Err(ReadError::new(what));
    }
    let mut next = 0;
    let stage = |stage: usize| {
        let size = each + usize::from(stage < more);
        let taken = match stage {
            _ if stages == 1 => blocks,
            0 => size - first,
            _ if stage + 1 == stages => size - last,
            _ => size,
        };
        let start = next;
        next = (next + taken).min(blocks);
        StageParts { embedding: stage == 0, blocks: start..next, head: stage + 1 == stages }
    };
    Ok((0..stages).map(stage).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emit::mapping::torchtitan_names;

    fn read(modules: &[&str]) -> Result<Vec<StageParts>, ReadError> {
        let names = |stage: &&str| stage.split(',').map(str::to_owned).collect();
        stages_of(&modules.iter().map(names).collect::<Vec<_>>())
    }

    #[test]
    fn names_are_read_and_written() {
        let modules = ["tok_embeddings,layers.0", "layers.1,layers.2", "norm,lm_head"];
        let stages = read(&modules).expect("stages");
        let written: Vec<String> = stages.iter().map(|stage| torchtitan_names(stage).join(",")).collect();
        assert_eq!(written, modules);
        assert!(read(&["tok_embeddings,layers.0,norm,output"]).is_ok());
    }

    #[test]
    fn wrong_names_are_refused() {
        let refuse = |modules: &[&str], words: &str| {
            let error = read(modules).expect_err("a mistake").to_string();
            assert!(error.contains(words), "{error}");
        };
        refuse(
            &["tok_embeddings", "layers.1,norm,lm_head"],
            "stage 1: read `layers.1`, and expected `layers.0`",
        );
        refuse(
            &["tok_embeddings,layers.0,lm_head", "layers.1"],
            "stage 0: `lm_head` is not in the last stage",
        );
        refuse(
            &["layers.0", "tok_embeddings,lm_head"],
            "stage 1: `tok_embeddings` is not in the first stage",
        );
        refuse(&["layers.0,lm_head"], "stage 0: `tok_embeddings` is missing");
        refuse(&["tok_embeddings", "layers.0"], "stage 1: `lm_head` is missing");
        refuse(&["tok_embeddings,layer.0,lm_head"], "the module `layer.0` is not known");
    }

    #[test]
    fn blocks_are_divided_as_torchtitan_does() {
        let blocks = |stages, blocks, first, last| -> Vec<usize> {
            let stages = default_stages(stages, blocks, first, last).expect("stages");
            stages.iter().map(|stage| stage.blocks.len()).collect()
        };
        assert_eq!(blocks(4, 8, 1, 1), [2, 3, 2, 1]);
        assert_eq!(blocks(2, 3, 2, 2), [2, 1]);
        assert_eq!(blocks(1, 3, 1, 1), [3]);
        assert!(default_stages(4, 2, 1, 2).is_err());
    }
}
