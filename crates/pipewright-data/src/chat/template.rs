//! Chat templates: Jinja as transformers renders it (`apply_chat_template`).
//!
//! The variables are `messages`, `tools`, `add_generation_prompt`, the special tokens of the tokenizer, and the
//! variables in `chat_template_kwargs`; `raise_exception`, `strftime_now`, `tojson` and the methods of Python's texts and
//! dictionaries exist. The text of a `{% generation %}` block is what an assistant writes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use pipewright_system::bounded_file::{SMALL_TEXT, read_regular_text};
use serde_json::Value as Json;

use crate::chat::identity::{DATE_FUNCTION, TemplateIdentity};
use crate::chat::message::{normalized, tools_of, with_decoded_arguments};
use crate::chat::source::{self, Malformed, Prepared};
use crate::chat::special_tokens::{SpecialTokens, read_json};
use crate::chat::{filters, json_text, limits, operators, python_text, text_methods, value_tests};
use crate::config::DataConfig;
use crate::error::{DataError, DataErrorKind};
use crate::settings::chat_template::{ChatTemplate, TEMPLATES};
use crate::settings::date::Date;

/// The name of a template in its own file.
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The file of a tokenizer that has its special tokens, and often the template.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The variables that each chat has.
const VARIABLES: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];
/// Noncharacters of Unicode, which mark the text of `generation` blocks.
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];
const NAME: &str = "chat template";
/// The steps that a template may take: as many for each chat, as many more for each byte of it, and as many for each
/// pair of its first messages, because some templates compare each message with all others. A byte of text that the
/// template reads, writes or copies costs a small part of a step.
const STEPS: u64 = 300_000;
const STEPS_PER_BYTE: u64 = 20;
const STEPS_PER_PAIR: u64 = 16;
const PAIRED_MESSAGES: usize = 2000;
/// The deepest nesting of loops, macros and blocks while a template is rendered. A call of a macro counts as 4.
const RECURSION: usize = 200;

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
    /// Further variables that the settings name.
    kwargs: BTreeMap<String, Value>,
    has_generation: bool,
    identity: TemplateIdentity,
}

impl ChatRenderer {
    /// Reads the template that the settings name. By default it is next to the tokenizer.
    ///
    /// # Errors
    /// When there is no template, a file cannot be read, or the template is malformed.
    pub fn of(config: &DataConfig) -> Result<Self, DataError> {
        let FoundTemplate { text, template, tokens } = FoundTemplate::find(config)?;
        let kwargs = &config.chat_template_kwargs;
        if let Some(name) = VARIABLES.iter().find(|name| kwargs.contains_key(**name)) {
            return Err(DataError::new(format!(
                "`chat_template_kwargs` has `{name}`, which the template gets from each chat; remove it"
            )));
        }
        let renderer = Self::new(&text, tokens, config.date).map_err(|Malformed { line, reason }| {
            DataError::new(format!(
                "the chat template {template} is malformed{}: {reason}; correct it, or name another as `chat_template` in \
                 [data], or with `generate --chat-template`",
                in_line(line)
            ))
        })?;
        let identity = renderer.identity.clone().with_kwargs(kwargs);
        // The text of a JSON value is well-formed.
        let value = |json: &Json| json_text::parse(json.to_string().as_bytes()).unwrap_or_default();
        let kwargs = kwargs.iter().map(|(name, json)| (name.clone(), value(json))).collect();
        Ok(Self { kwargs, identity, ..renderer })
    }

    /// Returns the identity of the template that the settings name.
    ///
    /// # Errors
    /// When there is no template or a file cannot be read.
    pub(crate) fn identity_of(config: &DataConfig) -> Result<TemplateIdentity, DataError> {
        let FoundTemplate { text, tokens, .. } = FoundTemplate::find(config)?;
        let identity = TemplateIdentity::new(&text, &tokens, config.date);
        Ok(identity.with_kwargs(&config.chat_template_kwargs))
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
    ) -> Result<Self, Malformed> {
        let identity = TemplateIdentity::new(source, &tokens, date);
        let Prepared { source, has_generation } = source::prepare(source)?;
        let malformed = |error: Error| Malformed { line: error.line(), reason: reason_of(&error) };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(malformed)?);
        environment.set_recursion_limit(RECURSION);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(method_of_python);
        environment.set_formatter(write_as_python);
        limits::add_to(&mut environment);
        filters::add_to(&mut environment);
        value_tests::add_to(&mut environment);
        operators::add_to(&mut environment);
        environment.remove_global("debug");
        environment.add_filter(source::GENERATION, |text: &str| format!("{}{text}{}", MARKS[0], MARKS[1]));
        environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
            Err(python_text::error(python_text::text_of(message)?))
        });
        environment.add_function(DATE_FUNCTION, move |format: &str| {
            let date = date.ok_or_else(|| {
                "the template asks for the date: write `data.date`, such as 2024-07-26".to_owned()
            });
            date.and_then(|date| date.format(format))
                .map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
        });
        environment.add_template_owned(NAME, source).map_err(malformed)?;
        Ok(Self { environment, tokens, kwargs: BTreeMap::new(), has_generation, identity })
    }

    /// Returns whether the template marks what an assistant writes.
    pub(crate) fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Renders messages. With `prompt`, the beginning of an assistant's answer follows them.
    ///
    /// # Errors
    /// When a message, a tool call or the tools are malformed, or the template fails or exceeds a limit.
    pub fn render(&self, messages: &[Value], tools: &Value, prompt: bool) -> Result<RenderedChat, DataError> {
        self.render_within(messages, tools, prompt, 1)
    }

    /// Renders messages in `limits` times the steps of a chat.
    pub(crate) fn render_within(
        &self,
        messages: &[Value],
        tools: &Value,
        prompt: bool,
        limits: u64,
    ) -> Result<RenderedChat, DataError> {
        let messages = messages.iter().enumerate().map(|(index, message)| normalized(message, index + 1));
        let messages: Vec<Value> = messages.collect::<Result<_, _>>()?;
        let tools = tools_of(tools)?;
        let Some(decoded) = with_decoded_arguments(&messages)? else {
            return self.render_normalized(&messages, &tools, prompt, limits);
        };
        // A template that joins the arguments with other text, as DeepSeek V3's does, needs them as text.
        match self.render_normalized(&decoded, &tools, prompt, limits) {
            Err(error) if error.kind != DataErrorKind::Exhausted => {
                self.render_normalized(&messages, &tools, prompt, limits).map_err(|_| error)
            }
            rendered => rendered,
        }
    }

    fn render_normalized(
        &self,
        messages: &[Value],
        tools: &Value,
        prompt: bool,
        limits: u64,
    ) -> Result<RenderedChat, DataError> {
        let bytes = size_of(messages.iter().chain([tools]));
        let paired = messages.len().min(PAIRED_MESSAGES) as u64;
        let steps = limits * (STEPS + STEPS_PER_BYTE * bytes + STEPS_PER_PAIR * paired * paired);
        let failed = |error: Error| {
            let line = in_line(error.line());
            if error.kind() != ErrorKind::OutOfFuel {
                return DataError::new(format!("the chat template fails{line}: {}", reason_of(&error)));
            }
            let problem = format!(
                "the chat template takes more than {steps} steps for a chat of {bytes} bytes{line}, or makes values that are too \
                 large: it does not end, or its loops are inside each other; correct it, or name another as `chat_template` \
                 in [data]"
            );
            DataError::new(problem).of_kind(DataErrorKind::Exhausted)
        };
        let tokens = self.tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str())));
        let kwargs = self.kwargs.iter().map(|(name, value)| (name.as_str(), value.clone()));
        let own = VARIABLES.into_iter().zip([
            Value::from(messages),
            tools.clone(),
            Value::from(()),
            Value::from(prompt),
        ]);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(steps));
        let template = environment.get_template(NAME).map_err(failed)?;
        let text = template.render(Value::from_pairs(tokens.chain(kwargs).chain(own))).map_err(failed)?;
        without_marks(&text)
    }
}

/// Returns about how many bytes of text values have.
pub(crate) fn size_of<'v>(values: impl Iterator<Item = &'v Value>) -> u64 {
    let bytes = values.map(|value| match value.kind() {
        ValueKind::Map => {
            let pairs = value.as_object().and_then(minijinja::value::DynObject::try_iter_pairs);
            pairs.into_iter().flatten().map(|(key, value)| size_of([&key, &value].into_iter())).sum()
        }
        ValueKind::Seq => {
            value.try_iter().into_iter().flatten().map(|item| size_of(std::iter::once(&item))).sum()
        }
        _ => value.as_str().map_or(8, |text| 8 + text.len() as u64),
    });
    bytes.sum()
}

/// The text of a template.
struct FoundTemplate {
    text: String,
    /// The template in messages.
    template: String,
    /// The special tokens of the tokenizer.
    tokens: BTreeMap<String, String>,
}

impl FoundTemplate {
    /// Reads the template that the settings name.
    fn find(config: &DataConfig) -> Result<Self, DataError> {
        let folder = config.tokenizer.file().and_then(Path::parent);
        let settings_file = folder.unwrap_or(Path::new("")).join(TOKENIZER_CONFIG);
        let settings = if folder.is_some() { read_json(&settings_file, SMALL_TEXT)? } else { None };
        let in_file = |file: &Path| {
            let text = read_regular_text(file, SMALL_TEXT);
            let text = text.map_err(|source| DataError::unreadable(file, source))?;
            Ok::<_, DataError>((text, file.display().to_string()))
        };
        let (source, template) = match &config.chat_template {
            Some(ChatTemplate::Named(name)) => (named(name)?, name.clone()),
            Some(ChatTemplate::File(file)) => in_file(file)?,
            None => match folder.map(|folder| folder.join(TEMPLATE_FILE)).filter(|file| file.exists()) {
                Some(file) => in_file(&file)?,
                None => {
                    let source = settings.as_ref().and_then(template_in).ok_or_else(no_template)?;
                    (source, format!("in {}", settings_file.display()))
                }
            },
        };
        Ok(Self { text: source, template, tokens: SpecialTokens::of(config)?.into_texts() })
    }
}

/// Returns the template named `name`.
fn named(name: &str) -> Result<String, DataError> {
    let template = TEMPLATES.iter().find(|(known, _)| *known == name);
    template.map(|(_, source)| (*source).to_owned()).ok_or_else(|| {
        DataError::new(format!(
            "there is no chat template named {name:?}; name one of {}, or a file",
            ChatTemplate::NAMES.join(", ")
        ))
    })
}

fn no_template() -> DataError {
    let problem = format!(
        "there is no chat template next to the tokenizer: name a file or one of {}, as `chat_template` in [data], or with \
         `generate --chat-template`",
        ChatTemplate::NAMES.join(", ")
    );
    DataError::new(problem).of_kind(DataErrorKind::NoTemplate)
}

/// Returns the error of a chat with the characters that mark parts of its text.
pub(crate) fn nested_marks() -> DataError {
    DataError::new(
        "the chat contains a noncharacter from U+FDD0 to U+FDD4, or `generation` blocks of the template are nested; remove them",
    )
}

fn in_line(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(" in line {line}"))
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

/// Takes the marks out of a rendered text.
fn without_marks(marked: &str) -> Result<RenderedChat, DataError> {
    let (mut text, mut generated, mut start) = (String::with_capacity(marked.len()), Vec::new(), None);
    for letter in marked.chars() {
        if letter == MARKS[0] {
            if start.replace(text.len()).is_some() {
                return Err(nested_marks());
            }
        } else if letter == MARKS[1] {
            generated.push(start.take().ok_or_else(nested_marks)?..text.len());
        } else {
            text.push(letter);
        }
    }
    match start {
        None => Ok(RenderedChat { text, generated }),
        Some(_) => Err(nested_marks()),
    }
}

/// Calls a method of Python's texts, dictionaries and lists.
fn method_of_python(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    limits::charge_reading(state, arguments)?;
    let own = match value.as_str() {
        Some(text) => {
            limits::charge_reading(state, std::slice::from_ref(value))?;
            text_methods::call(state, text, method, arguments)?
        }
        None => text_methods::call_of_list(state, value, method, arguments)?,
    };
    own.map_or_else(|| unknown_method_callback(state, value, method, arguments), Ok)
}

/// Writes a value as Python's `str` does.
fn write_as_python(output: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => output.write_str(text),
        None => output.write_str(&python_text::text_of(value)?),
    }
    .map_err(Error::from)
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
