//! Chat templates: Jinja as transformers renders it (`apply_chat_template`).
//!
//! The variables are `messages`, `tools`, `add_generation_prompt` and the special tokens of the tokenizer;
//! `raise_exception`, `strftime_now`, `tojson` and the methods of Python's texts and dictionaries exist. The
//! text of a `{% generation %}` block is what an assistant writes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use pipewright_system::bounded_file::{SMALL_TEXT, read_regular_text};
use serde_json::Value as Json;

use crate::chat::error::{ChatProblem, TemplateError};
use crate::chat::identity::{DATE_FUNCTION, TemplateIdentity};
use crate::chat::python_json::tojson;
use crate::chat::special_tokens::SpecialTokens;
use crate::config::{DataConfig, Tokenizer};
use crate::settings::chat_template_choice::ChatTemplate;
use crate::settings::date::Date;
use crate::settings::named_templates::TEMPLATES;

/// The name of a template in its own file.
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The file of a tokenizer that has its special tokens, and often the template.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Noncharacters of Unicode, which mark the text of `generation` blocks.
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];
const NAME: &str = "chat template";

/// A rendered chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    /// The text.
    pub text: String,
    /// The bytes of the text in `generation` blocks.
    pub generated: Vec<Range<usize>>,
}

/// A template that is ready for use.
#[derive(Debug)]
pub struct ChatRenderer {
    environment: Environment<'static>,
    /// The special tokens by the names that templates have for them, such as `bos_token`.
    tokens: BTreeMap<String, String>,
    has_generation: bool,
    identity: TemplateIdentity,
}

impl ChatRenderer {
    /// Reads the template that the settings name. By default it is next to the tokenizer.
    ///
    /// # Errors
    /// When there is no template, a file cannot be read, or the template is malformed.
    pub fn of(config: &DataConfig) -> Result<Self, TemplateError> {
        let Source { text, template, tokens } = Source::find(config)?;
        Self::new(&text, tokens, config.date).map_err(|error| {
            let (line, reason) = (error.line(), reason_of(&error));
            TemplateError::Malformed { template, line, reason }
        })
    }

    /// Returns the identity of the template that the settings name.
    ///
    /// # Errors
    /// When there is no template or a file cannot be read.
    pub(crate) fn identity_of(config: &DataConfig) -> Result<TemplateIdentity, TemplateError> {
        let Source { text, tokens, .. } = Source::find(config)?;
        Ok(TemplateIdentity::new(&text, &tokens, config.date))
    }

    /// Returns the identity of the template that this renderer has read.
    pub(crate) fn identity(&self) -> &TemplateIdentity {
        &self.identity
    }

    /// Compiles a template. `date` is the date of `strftime_now`.
    pub(crate) fn new(
        source: &str,
        tokens: BTreeMap<String, String>,
        date: Option<Date>,
    ) -> Result<Self, Error> {
        let identity = TemplateIdentity::new(source, &tokens, date);
        let (source, has_generation) = with_marks(source);
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(method_of_python);
        environment.set_formatter(write_as_python);
        environment.add_filter("tojson", |value: &Value, arguments: Kwargs| tojson(value, arguments));
        environment.add_filter(GENERATION, |text: &str| format!("{}{text}{}", MARKS[0], MARKS[1]));
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function(DATE_FUNCTION, move |format: &str| {
            let date = date.ok_or_else(|| {
                "the template asks for the date: write `data.date`, such as 2024-07-26".to_owned()
            });
            date.and_then(|date| date.format(format))
                .map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
        });
        environment.add_template_owned(NAME, source)?;
        Ok(Self { environment, tokens, has_generation, identity })
    }

    /// Returns whether the template marks what an assistant writes.
    pub(crate) fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Renders messages. With `prompt`, the beginning of an assistant's answer follows them.
    ///
    /// # Errors
    /// When the template fails.
    pub fn render(
        &self,
        messages: &[Value],
        tools: &Value,
        prompt: bool,
    ) -> Result<RenderedChat, ChatProblem> {
        let failed = |error: Error| ChatProblem::Template { line: error.line(), reason: reason_of(&error) };
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let tokens = self.tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str())));
        let own = [
            ("messages", Value::from(messages)),
            ("tools", tools.clone()),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(prompt)),
        ];
        let text = template.render(Value::from_pairs(tokens.chain(own))).map_err(failed)?;
        without_marks(&text)
    }
}

/// The text of a template.
struct Source {
    text: String,
    /// The template in messages.
    template: String,
    /// The special tokens of the tokenizer.
    tokens: BTreeMap<String, String>,
}

impl Source {
    /// Reads the template that the settings name.
    fn find(config: &DataConfig) -> Result<Self, TemplateError> {
        let folder = folder_of(config);
        let settings = tokenizer_settings(config)?;
        let in_file = |file: &Path| Ok((text_of(file)?, file.display().to_string()));
        let (source, template) = match &config.chat_template {
            Some(ChatTemplate::Named(name)) => (named(name)?, name.clone()),
            Some(ChatTemplate::File(file)) => in_file(file)?,
            None => match folder.map(|folder| folder.join(TEMPLATE_FILE)).filter(|file| file.exists()) {
                Some(file) => in_file(&file)?,
                None => {
                    let path = folder.unwrap_or(Path::new("")).join(TOKENIZER_CONFIG);
                    let source = template_in(&settings).ok_or(TemplateError::Missing)?;
                    (source, format!("in {}", path.display()))
                }
            },
        };
        Ok(Self { text: source, template, tokens: SpecialTokens::of(config)?.into_texts() })
    }
}

/// The filter that stands for the tag `generation`.
const GENERATION: &str = "mark_generation";

/// Returns the folder of the tokenizer, if it is a file.
fn folder_of(config: &DataConfig) -> Option<&Path> {
    match &config.tokenizer {
        Tokenizer::File(tokenizer) => tokenizer.parent(),
        Tokenizer::Bytes => None,
    }
}

/// Returns the settings next to the tokenizer; null if there are none.
fn tokenizer_settings(config: &DataConfig) -> Result<Json, TemplateError> {
    let path = folder_of(config).map(|folder| folder.join(TOKENIZER_CONFIG)).filter(|path| path.exists());
    path.map_or(Ok(Json::Null), |path| json_of(&path))
}

/// Returns the template named `name`.
fn named(name: &str) -> Result<String, TemplateError> {
    let template = TEMPLATES.iter().find(|(known, _)| *known == name);
    template
        .map(|(_, source)| (*source).to_owned())
        .ok_or_else(|| TemplateError::Unknown { name: name.to_owned() })
}

fn text_of(path: &Path) -> Result<String, TemplateError> {
    read_regular_text(path, SMALL_TEXT)
        .map_err(|source| TemplateError::Read { path: path.to_owned(), source })
}

fn json_of(path: &Path) -> Result<Json, TemplateError> {
    let text = text_of(path)?;
    serde_json::from_str(&text).map_err(|source| TemplateError::Json { path: path.to_owned(), source })
}

/// Returns the template in a `tokenizer_config.json`: a text, or a list with a template named `default`.
fn template_in(settings: &Json) -> Option<String> {
    match &settings["chat_template"] {
        Json::String(text) => Some(text.clone()),
        Json::Array(templates) => {
            let default = templates.iter().find(|template| template["name"] == "default")?;
            Some(default["template"].as_str()?.to_owned())
        }
        _ => None,
    }
}

/// Replaces the tags of `generation` blocks, which Jinja does not know, by tags of a filter. Returns whether
/// there are any.
fn with_marks(source: &str) -> (String, bool) {
    let (mut marked, mut rest, mut is_marked) = (String::with_capacity(source.len()), source, false);
    while let Some((before, tag)) = rest.split_once("{%") {
        marked.push_str(before);
        marked.push_str("{%");
        let Some((tag, after)) = tag.split_once("%}") else {
            rest = tag;
            continue;
        };
        let name = tag.trim_matches(|letter: char| letter.is_whitespace() || matches!(letter, '-' | '+'));
        match name {
            "generation" => marked.push_str(&tag.replace(name, &format!("filter {GENERATION}"))),
            "endgeneration" => marked.push_str(&tag.replace(name, "endfilter")),
            _ => marked.push_str(tag),
        }
        is_marked |= name == "generation";
        marked.push_str("%}");
        rest = after;
    }
    marked.push_str(rest);
    (marked, is_marked)
}

/// Takes the marks out of a rendered text.
fn without_marks(marked: &str) -> Result<RenderedChat, ChatProblem> {
    let (mut text, mut generated, mut start) = (String::with_capacity(marked.len()), Vec::new(), None);
    for letter in marked.chars() {
        if letter == MARKS[0] {
            if start.replace(text.len()).is_some() {
                return Err(ChatProblem::Marks);
            }
        } else if letter == MARKS[1] {
            generated.push(start.take().ok_or(ChatProblem::Marks)?..text.len());
        } else {
            text.push(letter);
        }
    }
    match start {
        None => Ok(RenderedChat { text, generated }),
        Some(_) => Err(ChatProblem::Marks),
    }
}

/// Calls a method of Python's texts, dictionaries and lists.
fn method_of_python(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), method, arguments) {
        // The library begins a word only after white space and some signs.
        (Some(text), "title", []) => Ok(Value::from(titled(text))),
        _ => unknown_method_callback(state, value, method, arguments),
    }
}

/// Returns a text whose words begin with capitals; a word is a sequence of letters.
fn titled(text: &str) -> String {
    let mut is_inside = false;
    let letters = text.chars().flat_map(|letter| {
        let was_inside = std::mem::replace(&mut is_inside, letter.is_alphabetic());
        let cased: Vec<char> =
            if was_inside { letter.to_lowercase().collect() } else { letter.to_uppercase().collect() };
        cased
    });
    letters.collect()
}

/// Writes a value as Python's `str` does, where that differs from Jinja.
fn write_as_python(output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    use minijinja::value::ValueKind;

    let text = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(output, state, value),
    };
    output.write_str(text).map_err(Error::from)
}

/// Returns the message of an error of the template.
fn reason_of(error: &Error) -> String {
    error.detail().map_or_else(
        || error.kind().to_string(),
        |detail| match error.kind() {
            ErrorKind::InvalidOperation => detail.to_owned(),
            kind => format!("{kind}: {detail}"),
        },
    )
}
