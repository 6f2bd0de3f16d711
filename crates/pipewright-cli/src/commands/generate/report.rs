//! The output of `pipewright generate`: texts, or an object with everything about them.

use pipewright_models::generation::Generated;
use pipewright_planning::failure::Failure;
use pipewright_planning::output;
use pipewright_planning::screen::say;
use pipewright_run::training::trained_model::TrainedModel;
use pipewright_schedule::words::counted;
use serde_json::{Value, json};

use crate::commands::generate::ranks::Ranks;

/// A text that was generated.
pub(super) struct Outcome {
    pub(super) prompt: String,
    pub(super) prompt_tokens: Vec<u32>,
    pub(super) generated: Generated,
    pub(super) text: String,
}

/// The times of a generation in seconds.
pub(super) struct Times {
    /// Until the first token was made.
    pub(super) first: f64,
    pub(super) whole: f64,
}

/// All texts, in the order of their prompts, and how they were made.
pub(super) struct Report<'a> {
    pub(super) found: &'a TrainedModel,
    pub(super) ranks: &'a Ranks,
    pub(super) outcomes: Vec<Outcome>,
    pub(super) times: Times,
    /// Whether the command has one prompt, which is not in a list.
    pub(super) is_single: bool,
    /// Whether the texts answer messages.
    pub(super) is_chat: bool,
}

impl Report<'_> {
    /// Prints the texts and how fast they were generated. The text of an answer stands alone, others follow
    /// their prompt. Several texts have their number in a line above each.
    pub(super) fn print(&self) -> Result<(), Failure> {
        self.warn_of_length();
        for (number, outcome) in (1..).zip(&self.outcomes) {
            let header = if self.is_single { String::new() } else { format!("==> {number} <==\n") };
            let before = if self.is_chat { "" } else { &outcome.prompt };
            output::write(None, &format!("{header}{before}{}\n", outcome.text))?;
        }
        say(&self.summary());
        Ok(())
    }

    /// Prints an object with a list of all texts.
    pub(super) fn print_json(&self) -> Result<(), Failure> {
        self.warn_of_length();
        let json = json!({
            "model": family(self.found),
            "cache": self.is_cached(),
            "ranks": self.ranks.to_json(),
            "first_token_s": self.times.first,
            "seconds": self.times.whole,
            "tokens_per_second": self.tokens_per_second(),
            "texts": self.outcomes.iter().map(Outcome::to_json).collect::<Vec<Value>>(),
        });
        output::write(None, &format!("{json:#}\n"))
    }

    fn warn_of_length(&self) {
        let lengths = self.outcomes.iter().map(|text| text.prompt_tokens.len() + text.generated.tokens.len());
        let longest = lengths.max().unwrap_or_default();
        if let Some(trained) = self.found.trained_length.filter(|trained| longest > *trained) {
            say(&format!("the text has {longest} tokens, and the model was trained on rows of {trained}"));
        }
    }

    fn is_cached(&self) -> bool {
        self.outcomes.iter().any(|text| text.generated.is_cached)
    }

    fn tokens(&self) -> usize {
        self.outcomes.iter().map(|text| text.generated.tokens.len()).sum()
    }

    fn tokens_per_second(&self) -> f64 {
        self.tokens() as f64 / self.times.whole.max(f64::MIN_POSITIVE)
    }

    /// Returns a sentence with the speed, the ranks, and whether a cache was used.
    fn summary(&self) -> String {
        let cache = if self.is_cached() {
            "with a key-value cache"
        } else {
            "without a key-value cache: each token computes all earlier ones again"
        };
        let end = match self.outcomes.as_slice() {
            [text] if text.generated.is_ended => ", ended by the model",
            _ => "",
        };
        let texts = if self.is_single {
            String::new()
        } else {
            format!(" of {}", counted(self.outcomes.len(), "text"))
        };
        let ranks = match self.ranks.count() {
            1 => String::new(),
            ranks => format!(", on {}", counted(ranks, "rank")),
        };
        let prompts: Vec<usize> = self.outcomes.iter().map(|text| text.prompt_tokens.len()).collect();
        let prompt = match prompts.as_slice() {
            [tokens] => format!("a prompt of {tokens} tokens"),
            _ => format!("prompts of {} tokens", prompts.iter().sum::<usize>()),
        };
        format!(
            "{}: {} tokens{texts}{end} in {:.2} s ({:.1} tokens/s), the first after {:.2} s for {prompt}{ranks}, {cache}",
            family(self.found),
            self.tokens(),
            self.times.whole,
            self.tokens_per_second(),
            self.times.first,
        )
    }
}

impl Outcome {
    fn to_json(&self) -> Value {
        json!({
            "prompt": self.prompt,
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.generated.tokens,
            "stop": if self.generated.is_ended { "eos" } else { "length" },
        })
    }
}

fn family(found: &TrainedModel) -> String {
    found.model.to_json()["model_type"].as_str().unwrap_or("the model").to_owned()
}
