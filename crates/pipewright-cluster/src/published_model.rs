//! The models of files of published runs: their sizes as TOML, and the checks of them.

use std::ops::RangeInclusive;

use pipewright_document::Reader;

use pipewright_shapes::model::{
    Attention, Block, Dense, Experts, FeedForward, Latent, MAX_GROUPS, Mamba2, Mixer, Model,
};
use pipewright_shapes::vectors::Vectors;

/// The widths and numbers of the parts of a model.
const SIZES: RangeInclusive<u64> = 1..=1 << 24;
/// The sizes that may be 0: a model with 0 experts is dense.
const SIZES_FROM_0: RangeInclusive<u64> = 0..=1 << 24;
const HEADS: RangeInclusive<u64> = 1..=1 << 16;

/// The name of a model, which runs refer to, and the model unless it has a mistake.
pub(crate) type PublishedModel = (String, Option<Model>);

/// Reads a table `[[model]]`.
pub(crate) fn read(row: &mut Reader<'_>) -> Option<PublishedModel> {
    row.require(&["name", "layers", "hidden", "inner", "heads", "vocabulary", "activation", "gated", "tied"]);
    let name = row.text("name");
    let model = model(row, name.as_deref().unwrap_or_default());
    Some((name?, model))
}

/// The parts of a block by the letters of a pattern, as Megatron writes them: each block has one part only.
const LETTERS: [char; 4] = ['M', '*', 'E', '-'];

fn model(row: &mut Reader<'_>, name: &str) -> Option<Model> {
    let layers = row.count("layers", 1..=10_000);
    let [hidden, inner, positions] = ["hidden", "inner", "positions"].map(|key| row.whole(key, SIZES));
    let vocabulary = row.whole("vocabulary", 1..=1 << 28);
    let is_gpt = row.word("activation", &[("gelu", true), ("silu", false), ("relu2", false)]);
    let (gated, tied) = (row.flag("gated"), row.flag("tied"));
    // Blocks at the start that are dense although the others have experts.
    let dense_layers = row.count("dense_layers", 0..=u32::MAX).unwrap_or(0);
    let predictors = row.count("predictors", 0..=64).unwrap_or(0);
    let shares_predictors = row.flag("predictors_shared").unwrap_or(false);
    let every = row.count("full_attention_every", 1..=10_000);

    // All keys are read, also if others are missing or wrong. The values in their place fit all others.
    let known = (layers, hidden, inner, gated);
    let (hidden, inner) = (hidden.unwrap_or(*SIZES.end()), inner.unwrap_or(1));
    let gated = gated.unwrap_or(false);
    if let Some(layers) = layers.filter(|&layers| dense_layers > layers) {
        let range = format!("at most the {layers} `layers`");
        row.out_of_range::<()>("dense_layers", &dense_layers.to_string(), &range);
    }
    let mixer = mixer(row, hidden);
    let dense = FeedForward::Dense(Dense { inner, gated });
    let routed = experts(row, Dense { inner, gated }).unwrap_or(dense);
    let mamba = mamba(row);
    let pattern = pattern(row, layers, mamba.is_some());
    for key in ["dense_layers", "full_attention_every"] {
        if pattern.is_some() && row.is_written(key) {
            row.report(
                key,
                format!("the model has a `pattern`, which says what `{key}` says"),
                "leave it out",
            );
        }
    }
    let of_predictor = letters(row, "predictor_pattern", mamba.is_some());
    let ((layers, ..), mixer) = ((known.0?, known.1?, known.2?, known.3?), mixer?);
    let whole = match mixer {
        Mixer::Attention(attention) => Mixer::Attention(Attention { window: None, ..attention }),
        other => other,
    };
    let part = |letter: char| match letter {
        'M' => Block::new(mamba.map_or(Mixer::None, Mixer::Mamba2), FeedForward::None),
        'E' => Block::new(Mixer::None, routed),
        '-' => Block::new(Mixer::None, dense),
        _ => Block::new(whole, FeedForward::None),
    };
    let block = |layer: u32| {
        let sees_all = every.is_some_and(|every| (layer + 1).is_multiple_of(every));
        let feed_forward = if layer < dense_layers { dense } else { routed };
        Block::new(if sees_all { whole } else { mixer }, feed_forward)
    };
    let gpt = is_gpt?;
    Some(Model {
        name: name.to_owned(),
        hidden,
        vocabulary: vocabulary?,
        labels: None,
        tied: tied?,
        blocks: pattern
            .map_or_else(|| (0..layers).map(block).collect(), |letters| letters.chars().map(part).collect()),
        predictors,
        predictor: of_predictor.map_or_else(Vec::new, |letters| letters.chars().map(part).collect()),
        counts_predictors: false,
        shares_predictors,
        further_embedding: positions.map_or(0, |positions| positions * hidden),
        vectors: if gpt { Vectors::GPT } else { Vectors::LLAMA },
        gpt,
        caps_logits: false,
    })
}

/// Reads the attention of blocks: latent if a width of compressed keys and values is given.
fn mixer(row: &mut Reader<'_>, hidden: u64) -> Option<Mixer> {
    let [heads, key_value_heads] = ["heads", "key_value_heads"].map(|key| row.whole(key, HEADS));
    let [head_size, window] = ["head_size", "window"].map(|key| row.whole(key, SIZES));
    let [query_rank, key_value_rank, plain_size, rotary_size, value_size] =
        ["query_rank", "key_value_rank", "plain_size", "rotary_size", "value_size"]
            .map(|key| row.whole(key, SIZES));
    let heads = heads?;
    if let Some(key_value_rank) = key_value_rank {
        let needed = [("plain_size", plain_size), ("rotary_size", rotary_size), ("value_size", value_size)];
        for (key, _) in needed.iter().filter(|(_, size)| size.is_none()) {
            let sentence = format!("the model has a `key_value_rank` and no `{key}`");
            row.report("key_value_rank", sentence, format!("add `{key}`, the width in a head"));
        }
        let (plain_size, rotary_size, value_size) = (plain_size?, rotary_size?, value_size?);
        return Some(Mixer::Latent(Latent {
            heads,
            query_rank,
            key_value_rank,
            plain_size,
            rotary_size,
            value_size,
            gate: 0,
            indexer: None,
        }));
    }
    if head_size.is_none() && heads > hidden {
        let sentence = format!("the model's {heads} `heads` are more than its `hidden` of {hidden}");
        row.report("heads", sentence, "use fewer heads, or give `head_size`");
    }
    if let Some(shared) = key_value_heads.filter(|&shared| !heads.is_multiple_of(shared)) {
        let range = format!("a number that divides the {heads} heads of queries");
        row.out_of_range::<()>("key_value_heads", &shared.to_string(), &range);
    }
    let key_value_heads = key_value_heads.unwrap_or(heads);
    let head_size = head_size.unwrap_or(hidden / heads);
    let rotary_size = head_size;
    Some(Mixer::Attention(Attention { heads, key_value_heads, head_size, window, rotary_size, gate: 0 }))
}

/// Reads the experts; `None` for a model without experts. `dense` is the part of blocks without experts.
fn experts(row: &mut Reader<'_>, dense: Dense) -> Option<FeedForward> {
    let [per_token, expert_inner, groups, groups_per_token, width] =
        ["experts_per_token", "expert_inner", "expert_groups", "groups_per_token", "expert_latent"]
            .map(|key| row.whole(key, SIZES));
    let [count, shared_inner] = ["experts", "shared_inner"].map(|key| row.whole(key, SIZES_FROM_0));
    let count = count.filter(|&count| count > 0)?;
    match per_token {
        None => {
            let sentence = format!("the model has {count} `experts` and no `experts_per_token`");
            row.report("experts", sentence, "add the number that a token uses");
        }
        Some(used) if used > count => {
            let range = format!("at most the {count} `experts`");
            row.out_of_range::<()>("experts_per_token", &used.to_string(), &range);
        }
        Some(_) => {}
    }
    let groups = groups.unwrap_or(1);
    if !count.is_multiple_of(groups) || groups > MAX_GROUPS {
        let range = format!("a number up to {MAX_GROUPS} that divides the {count} experts");
        row.out_of_range::<()>("expert_groups", &groups.to_string(), &range);
    }
    if let Some(used) = groups_per_token.filter(|&used| used > groups) {
        let range = format!("at most the {groups} `expert_groups`");
        row.out_of_range::<()>("groups_per_token", &used.to_string(), &range);
    }
    let experts = Experts {
        count,
        per_token: per_token.unwrap_or(1),
        expert: Dense { inner: expert_inner.unwrap_or(dense.inner), ..dense },
        shared_inner: shared_inner.unwrap_or(0),
        groups,
        groups_per_token: groups_per_token.unwrap_or(groups),
    };
    Some(match width {
        Some(width) => FeedForward::LatentExperts { experts, width },
        None => FeedForward::Experts(experts),
    })
}

/// Reads the sizes of Mamba-2; `None` for a model without them.
fn mamba(row: &mut Reader<'_>) -> Option<Mamba2> {
    const KEYS: [&str; 6] =
        ["mamba_heads", "mamba_head_size", "mamba_state", "mamba_groups", "mamba_convolution", "mamba_chunk"];
    let sizes = KEYS.map(|key| row.whole(key, SIZES));
    let written = KEYS.into_iter().find(|key| row.is_written(key))?;
    for key in KEYS {
        if !row.is_written(key) {
            row.report(written, format!("the model has `{written}` and no `{key}`"), format!("add `{key}`"));
        }
    }
    let [heads, head_size, state, groups, convolution, chunk] = sizes;
    Some(Mamba2 {
        heads: heads?,
        head_size: head_size?,
        state: state?,
        groups: groups?,
        convolution: convolution?,
        chunk: chunk?,
    })
}

/// Reads the letters of a pattern, one for each of `layers` blocks.
fn pattern(row: &mut Reader<'_>, layers: Option<u32>, has_mamba: bool) -> Option<String> {
    let letters = letters(row, "pattern", has_mamba)?;
    if let Some(layers) = layers.filter(|&layers| letters.len() != layers as usize) {
        let sentence = format!("`pattern` has {} letters for {layers} `layers`", letters.len());
        row.report("pattern", sentence, "write a letter for each block");
        return None;
    }
    Some(letters)
}

/// Reads a key with letters of blocks.
fn letters(row: &mut Reader<'_>, key: &'static str, has_mamba: bool) -> Option<String> {
    let letters = row.text(key)?;
    let unknown = letters.chars().find(|letter| !LETTERS.contains(letter));
    if let Some(letter) = unknown {
        let sentence = format!("`{key}` has the letter `{letter}`");
        row.report(key, sentence, "use M (Mamba-2), * (attention), E (experts) and - (dense)");
        return None;
    }
    if letters.contains('M') && !has_mamba {
        row.report(
            key,
            format!("`{key}` has blocks of Mamba-2, and the model has no sizes of them"),
            "add `mamba_heads` and the other sizes",
        );
        return None;
    }
    Some(letters)
}
