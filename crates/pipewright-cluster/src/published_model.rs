//! The models of files of published runs: their sizes as TOML, and the checks of them.

use std::ops::RangeInclusive;

use pipewright_document::Reader;

use pipewright_shapes::model::{Attention, Block, Dense, Experts, FeedForward, Mixer, Model};
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

fn model(row: &mut Reader<'_>, name: &str) -> Option<Model> {
    let layers = row.count("layers", 1..=10_000);
    let [hidden, inner, head_size, window, per_token, expert_inner] =
        ["hidden", "inner", "head_size", "window", "experts_per_token", "expert_inner"]
            .map(|key| row.whole(key, SIZES));
    let [heads, key_value_heads] = ["heads", "key_value_heads"].map(|key| row.whole(key, HEADS));
    let [experts, shared_inner] = ["experts", "shared_inner"].map(|key| row.whole(key, SIZES_FROM_0));
    let vocabulary = row.whole("vocabulary", 1..=1 << 28);
    let is_gpt = row.word("activation", &[("gelu", true), ("silu", false), ("relu2", false)]);
    let (gated, tied) = (row.flag("gated"), row.flag("tied"));
    // Blocks at the start that are dense although the others have experts.
    let dense_layers = row.count("dense_layers", 0..=u32::MAX).unwrap_or(0);
    let experts = experts.filter(|&count| count > 0);

    let (layers, hidden, inner, heads, gated) = (layers?, hidden?, inner?, heads?, gated?);
    if head_size.is_none() && heads > hidden {
        let sentence = format!("the model's {heads} `heads` are more than its `hidden` of {hidden}");
        row.report("heads", sentence, "use fewer heads, or give `head_size`");
    }
    let divides = |shared: &u64| heads.is_multiple_of(*shared);
    let uneven = key_value_heads.filter(|shared| !divides(shared)).map(|shared| {
        ("key_value_heads", shared, format!("a number that divides the {heads} heads of queries"))
    });
    let too_many = (dense_layers > layers)
        .then(|| ("dense_layers", u64::from(dense_layers), format!("at most the {layers} `layers`")));
    let unused = per_token.zip(experts).filter(|(used, experts)| used > experts);
    let unused =
        unused.map(|(used, experts)| ("experts_per_token", used, format!("at most the {experts} `experts`")));
    for (key, value, range) in [uneven, too_many, unused].into_iter().flatten() {
        row.out_of_range::<()>(key, &value.to_string(), &range);
    }
    if let (Some(experts), None) = (experts, per_token) {
        let sentence = format!("the model has {experts} `experts` and no `experts_per_token`");
        row.report("experts", sentence, "add the number that a token uses");
    }

    let dense = FeedForward::Dense(Dense { inner, gated });
    let routed = experts.map(|count| {
        FeedForward::Experts(Experts {
            count,
            per_token: per_token.unwrap_or(1),
            expert: Dense { inner: expert_inner.unwrap_or(inner), gated },
            shared_inner: shared_inner.unwrap_or(0),
        })
    });
    let mixer = Mixer::Attention(Attention {
        heads,
        key_value_heads: key_value_heads.unwrap_or(heads),
        head_size: head_size.unwrap_or(hidden / heads),
        window,
    });
    let feed_forward = |layer: u32| if layer < dense_layers { dense } else { routed.unwrap_or(dense) };
    let block = |layer| Block::new(mixer, feed_forward(layer));
    let gpt = is_gpt?;
    Some(Model {
        name: name.to_owned(),
        hidden,
        vocabulary: vocabulary?,
        tied: tied?,
        blocks: (0..layers).map(block).collect(),
        predictors: 0,
        predictor: Vec::new(),
        counts_predictors: false,
        further_embedding: 0,
        vectors: if gpt { Vectors::GPT } else { Vectors::LLAMA },
        gpt,
    })
}
