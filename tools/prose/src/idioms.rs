//! The constructions that are counted, each with what to write instead.

use std::sync::LazyLock;

use regex::Regex;

use crate::passages::Passage;

/// A construction that is not idiomatic English, or not plain.
pub struct Idiom {
    pattern: Regex,
    /// Matches the words from the construction on where it is idiomatic.
    unless: Option<Regex>,
    instead: &'static str,
}

/// One use of an idiom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// The line of the passage's start, counted from 1.
    pub line: usize,
    /// The words with some of their context.
    pub excerpt: String,
    /// What to write instead.
    pub instead: &'static str,
}

impl Idiom {
    fn new(pattern: &str, unless: &str, instead: &'static str) -> Self {
        let compile = |pattern: &str| Regex::new(&format!("(?i){pattern}")).expect("a pattern of the list");
        Self {
            pattern: compile(pattern),
            unless: (!unless.is_empty()).then(|| compile(&format!("^(?:{unless})"))),
            instead,
        }
    }

    /// Returns the uses in a passage.
    pub(crate) fn uses(&self, passage: &Passage) -> Vec<Use> {
        let text = passage.text.as_str();
        let counts =
            |start: usize| self.unless.as_ref().is_none_or(|unless| !unless.is_match(&text[start..]));
        let found = self.pattern.find_iter(text).filter(|found| counts(found.start()));
        found
            .map(|found| Use {
                line: passage.line,
                excerpt: excerpt(text, found.start(), found.end()),
                instead: self.instead,
            })
            .collect()
    }
}

/// Returns the text from `start` to `end` with some of the words around it.
fn excerpt(text: &str, start: usize, end: usize) -> String {
    const CONTEXT: usize = 40;
    let start = text.floor_char_boundary(start.saturating_sub(CONTEXT));
    let end = text.ceil_char_boundary((end + CONTEXT).min(text.len()));
    text[start..end].to_owned()
}

/// All constructions that are counted.
pub static IDIOMS: LazyLock<Vec<Idiom>> = LazyLock::new(|| {
    let things = "ranks?|stages?|steps?|microbatch(es)?|process(es)?|devices?|seconds?|layers?|tokens?|messages?|rows?|\
                  replicas?|links?|threads?|actions?|bytes|elements|times|blocks?|machines?|nodes?";
    let list = [
        (
            r"\bthose (of|that|who|which|in|on|at|with|for|from|whose)\b",
            "",
            "repeat the noun: \"the other ranks' gradients\"",
        ),
        (r"\bthat of\b", "", "repeat the noun: \"the head's cost\""),
        (r"(^|[.;:] )As \[?`", "", "\"Like [`X`], but ...\""),
        (
            r"\b(is|are|was|were) (not )?there\b",
            r"\w+ (not )?there,? (a|an|any|no|some|more|\w+ing)\b",
            "exists, is missing, is available",
        ),
        (r"\b(is|are) here\b", "", "exists, is available"),
        (r"\bbeside\b", "", "next to, in the same folder as, in addition to"),
        (
            r"\b(each|both|all|one|some|most|none|two|many|few|first|last|and|, )? ?of which\b",
            "",
            "\"and two of them\", or a sentence of its own",
        ),
        (r"\b(has|have|had) none\b", "", "\"has no X\""),
        (r"\bnor (do|does|is|are|has|have|can|did)\b", "", "\"neither do\", or \"and no ... either\""),
        (r"\bin all\b", r"in all (of|the|other|cases|\w+s)\b", "\"a total of\""),
        (r"\bcomes? on top\b", "", "\"is not included\", \"is added\""),
        (
            &format!(r"\b({things}|\d+|two|three|four|five|six|eight|ten|many|few) a ({things})\b"),
            "",
            "\"per rank\"",
        ),
        (r"(^|[.] )(Who|Whoever)\b", r"[^?]*\?", "name the subject"),
        (r"(^|[.] )What \w", r"[^.]*\?", "a noun as the subject: \"The results of ...\""),
        (
            r"(^|[.] )Of (the|these|those|two|several|equal|all)\b",
            "",
            "\"If several ..., the first one ...\"",
        ),
        (
            r"\b(there )?(is|are|was) no \w+",
            r"there|\w+ no (longer|more|less|need|way|other|reason|guarantee|point|such|one|better|worse|\w+er)\b",
            "\"is not a ...\"",
        ),
        (
            r"\bstands? (in|at|on|beside|there|above|below|between|under|before|behind|first|last)\b",
            "",
            "\"is in\"",
        ),
        (r"\b(lies?|lay) (in|at|on|there|between|behind|beside|near)\b", "", "\"is in\""),
        (r"\b(goes|go|went) on\b", "", "continues"),
        (r"\b(holds? (for|of)|anew|henceforth|hence)\b", "", "\"is true of\", \"again\", \"so\""),
        (r"\b(is|are|was) told\b", "", "\"X notifies Y\""),
        (r"\bplays? (no|a) (part|role)\b", "", "\"does not matter\""),
        (r"\bat the latest\b", "", "\"no later than\""),
    ];
    list.iter().map(|(pattern, unless, instead)| Idiom::new(pattern, unless, instead)).collect()
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passages::Kind;

    /// For each idiom in its order, words that are a use and words that are none.
    const EXAMPLES: &[(&str, &str)] = &[
        ("the gradients and those of other ranks", "pass those gradients"),
        ("the cost and that of the head", "the text that offers it"),
        ("As [`split`], with weights.", "It splits, as [`split`] does."),
        ("the file is not there", "is there a file"),
        ("the rank is here", "here is the rank"),
        ("the file beside it", "besides the file"),
        ("stages, two of which wait", "a stage, which waits"),
        ("the stage has none", "none of the stages"),
        ("nor does the rank", "neither the rank nor the stage"),
        ("three stages in all", "in all cases"),
        ("its messages come on top", "the messages come first"),
        ("two stages a rank", "a stage, a rank"),
        ("Whoever waits is not polled.", "Who waits?"),
        ("What is left is dropped.", "What is left?"),
        ("Of equal candidates the first.", "Some of the candidates"),
        ("this is no file", "there is no file"),
        ("the reason stands below", "the rank stands still"),
        ("the reason lies in the order", "the reason lies elsewhere"),
        ("the step goes on", "the step goes well"),
        ("the same holds for ranks", "the rank holds parameters"),
        ("the rank is told", "the rank is old"),
        ("the order plays no role", "the order plays"),
        ("at the latest in step 2", "the latest step"),
    ];

    #[test]
    fn every_idiom_finds_its_words_and_no_others() {
        assert_eq!(EXAMPLES.len(), IDIOMS.len(), "each idiom has examples");
        for (idiom, (used, plain)) in IDIOMS.iter().zip(EXAMPLES) {
            let count = |text: &str| {
                let text = text.to_owned();
                idiom.uses(&Passage { kind: Kind::Document, line: 1, text }).len()
            };
            assert_eq!([count(used), count(plain)], [1, 0], "{used} / {plain}");
        }
    }
}
