//! Places in the text of a chat at which the texts of its messages begin and end.
//!
//! A template may trim a text, leave it out, or write an earlier answer in another way than the last one, and
//! the same text may be in several messages. So texts are not searched for. The chat is rendered again with
//! marks around the texts of its messages, and the marks are where the texts begin and end. They count only
//! if the text without its marks is the text of the chat.

use std::cell::OnceCell;
use std::ops::Range;

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::chat::message::normalized;
use crate::chat::template::{ChatRenderer, nested_marks};
use crate::error::{DataError, DataErrorKind};

/// Noncharacters of Unicode, which begin a mark before a text, begin one behind it, and end a mark.
const MARKS: [char; 3] = ['\u{fdd2}', '\u{fdd3}', '\u{fdd4}'];
/// A text with marks may take this many times the steps of a chat, because the marks take steps too.
const LIMITS: u64 = 2;
/// The keys of the texts of a message.
const TEXTS: [&str; 4] = ["reasoning_content", "reasoning", "thinking", "content"];

/// The texts of a message: the number of the message, and the number of the text in it.
type TextId = (usize, usize);

/// A place in a rendered text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Anchor {
    text: TextId,
    /// Whether the text ends here, and does not begin.
    is_end: bool,
    at: usize,
}

/// How a message is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marking {
    /// It has no marks, because they change what the template writes.
    Nothing,
    /// The marks are inside the white space around a text, which a template may trim.
    InsideSpace,
    /// The marks are around the white space too.
    AroundSpace,
    /// The only mark is behind a text, inside the white space.
    Behind,
}

/// Messages with their text.
pub(crate) struct AnchoredChat<'a> {
    renderer: &'a ChatRenderer,
    /// The messages as templates read them, where tool calls are tables.
    messages: Vec<Value>,
    tools: &'a Value,
    text: &'a str,
    marking: Vec<Marking>,
    anchors: Vec<Anchor>,
    /// The error of a template that exceeds a limit. It is not rendered again then.
    exceeded: OnceCell<DataError>,
}

/// The place behind the text of the first messages.
#[derive(Clone, Copy, Debug)]
struct Boundary {
    at: usize,
    /// Whether the template writes more than white space between the last known place and this one.
    has_ending: bool,
}

impl<'a> AnchoredChat<'a> {
    /// Finds the places in `text`, which is the text of the messages.
    ///
    /// # Errors
    /// When the text has the characters of marks, or a message is malformed.
    pub(crate) fn new(
        renderer: &'a ChatRenderer,
        messages: &[Value],
        tools: &'a Value,
        text: &'a str,
    ) -> Result<Self, DataError> {
        if text.contains(MARKS) {
            return Err(nested_marks());
        }
        let count = messages.len();
        let messages = messages.iter().enumerate().map(|(index, message)| normalized(message, index + 1));
        let mut chat = Self {
            renderer,
            messages: messages.collect::<Result<_, _>>()?,
            tools,
            text,
            marking: vec![Marking::Nothing; count],
            anchors: Vec::new(),
            exceeded: OnceCell::new(),
        };
        let all = vec![Marking::InsideSpace; count];
        if let Some(anchors) = chat.anchors_of(&all) {
            (chat.marking, chat.anchors) = (all, anchors);
            return Ok(chat);
        }
        for index in 0..count {
            for marking in [Marking::InsideSpace, Marking::AroundSpace, Marking::Behind] {
                let mut one = vec![Marking::Nothing; count];
                one[index] = marking;
                if let Some(anchors) = chat.anchors_of(&one) {
                    chat.marking[index] = marking;
                    chat.anchors.extend(anchors);
                    break;
                }
            }
        }
        Ok(chat)
    }

    /// Returns the places of messages that are marked; `None` if the marks change the text.
    fn anchors_of(&self, marking: &[Marking]) -> Option<Vec<Anchor>> {
        let (text, anchors) = self.marked(&self.messages, marking, false)?;
        (text == self.text).then_some(anchors)
    }

    /// Renders messages with marks. Returns the text without the marks and their places; `None` if the
    /// template fails or damages a mark.
    fn marked(&self, messages: &[Value], marking: &[Marking], prompt: bool) -> Option<(String, Vec<Anchor>)> {
        let messages: Vec<Value> = messages
            .iter()
            .zip(marking)
            .enumerate()
            .map(|(index, (message, marking))| with_marks(message, index, *marking))
            .collect();
        without_marks(&self.rendered(&messages, prompt)?)
    }

    /// Renders messages; `None` if the template fails.
    fn rendered(&self, messages: &[Value], prompt: bool) -> Option<String> {
        if self.exceeded.get().is_some() {
            return None;
        }
        match self.renderer.render_within(messages, self.tools, prompt, LIMITS) {
            Ok(chat) => Some(chat.text),
            Err(error) if error.kind == DataErrorKind::Exhausted => {
                self.exceeded.get_or_init(|| error);
                None
            }
            Err(_) => None,
        }
    }

    /// Returns the part of the text that is an answer, without the beginning of an answer. An answer right before it
    /// ends at `end_before`.
    ///
    /// # Errors
    /// When the part is not found or the template exceeds a limit.
    pub(crate) fn answer(&self, index: usize, end_before: Option<usize>) -> Result<Range<usize>, DataError> {
        if self.is_missing(index) {
            return Err(self.unknown(index + 1));
        }
        let start = if index == 0 { Some(self.start_of_first()) } else { self.start(index) };
        let start = start.or_else(|| self.start_behind(index, end_before?));
        let start = start.ok_or_else(|| self.unknown(index))?;
        Ok(start..self.end_or_last(index, start)?)
    }

    /// Returns the part of the text that is a message, with the beginning of an answer.
    ///
    /// # Errors
    /// When the part is not found or the template exceeds a limit.
    pub(crate) fn message(&self, index: usize) -> Result<Range<usize>, DataError> {
        let before = if index == 0 { Some(0) } else { self.end(index - 1, 0) };
        let answer = self.answer(index, before)?;
        Ok(before.map_or(answer.start, |before| before.min(answer.start))..answer.end)
    }

    /// Returns the place behind the first `count` messages, or behind the beginning of an answer after them.
    ///
    /// # Errors
    /// When the place is not found or the template exceeds a limit.
    pub(crate) fn end_of_prompt(&self, count: usize) -> Result<usize, DataError> {
        let end = [false, true].into_iter().find_map(|prompt| self.boundary(count, prompt));
        end.map(|end| end.at).ok_or_else(|| self.unknown(count))
    }

    fn end_or_last(&self, index: usize, start: usize) -> Result<usize, DataError> {
        let is_last = index + 1 == self.messages.len();
        let end = if is_last { Some(self.text.len()) } else { self.end(index, start) };
        end.ok_or_else(|| self.unknown(index + 1))
    }

    /// Returns whether the template leaves out the text of a message: its marks change nothing and are not written.
    fn is_missing(&self, index: usize) -> bool {
        let content = self.messages[index].get_attr("content").unwrap_or_default();
        let is_text = content.as_str().is_some_and(|text| !is_blank(text));
        is_text
            && self.marking[index] != Marking::Nothing
            && self.anchors.iter().all(|anchor| anchor.text.0 != index)
    }

    /// Returns why the place behind the first messages is not known.
    fn unknown(&self, messages: usize) -> DataError {
        if let Some(error) = self.exceeded.get() {
            return DataError::new(error.to_string()).of_kind(error.kind);
        }
        DataError::new(format!(
            "where the text of the first {messages} messages ends cannot be found in the text of the chat, so the assistant's \
             part is not known: write `train_on = \"completion\"` or \"all\" in [data], or name a template with `generation` \
             blocks"
        ))
    }

    /// Returns the place in the whole text behind the first `count` messages, with the beginning of an answer
    /// if `prompt`; `None` if it is not known.
    ///
    /// The text of these messages and the whole text must be the same from the end of a message's text on.
    /// Before it they may differ.
    fn boundary(&self, count: usize, prompt: bool) -> Option<Boundary> {
        let (first, anchors) = self.marked(&self.messages[..count], &self.marking, prompt)?;
        self.common_places(&anchors).find_map(|(here, there)| {
            let tail = &first[there..];
            let has_ending = !tail.trim().is_empty();
            self.text[here..].starts_with(tail).then_some(Boundary { at: here + tail.len(), has_ending })
        })
    }

    /// Returns the ends of texts that are in both texts, the last one first, and the beginnings of both. A template
    /// may write a text several times, for example the name of a function also before its result.
    fn common_places(&self, anchors: &[Anchor]) -> impl Iterator<Item = (usize, usize)> {
        let is_same = |anchor: &Anchor, other: &Anchor| other.is_end && other.text == anchor.text;
        let ends = anchors.iter().enumerate().rev().filter(|(_, anchor)| anchor.is_end);
        let common = ends.filter_map(move |(index, there)| {
            let before = anchors[..index].iter().filter(|other| is_same(there, other)).count();
            let here = self.anchors.iter().filter(|other| is_same(there, other)).nth(before)?;
            Some((here.at, there.at))
        });
        common.chain([(0, 0)])
    }

    /// Returns the place of an answer that is the first message: behind the beginning of an answer, which is the same
    /// as behind a question.
    fn start_of_first(&self) -> usize {
        let question = [Value::from_pairs([("role", "user"), ("content", "a")])];
        let beginning = self.beginning_behind(&question).filter(|beginning| !beginning.is_empty());
        let own = self.anchors.iter().filter(|anchor| anchor.text.0 == 0).map(|anchor| anchor.at).min();
        let header = &self.text[..own.unwrap_or(self.text.len())];
        beginning.and_then(|beginning| Some(header.find(&*beginning)? + beginning.len())).unwrap_or(0)
    }

    /// Returns the place of an answer: behind the messages before it, and behind the beginning of an answer,
    /// which the prompt has already.
    fn start(&self, index: usize) -> Option<usize> {
        if let Some(start) = self.boundary(index, true) {
            return Some(start.at);
        }
        // The beginning of an answer may continue, for example with the beginning of a thought, although this
        // answer has no thought.
        let before = self.boundary(index, false)?.at;
        let end_of_shared = || {
            let (first, anchors) = self.marked(&self.messages[..index], &self.marking, true)?;
            let (here, there) = self.common_places(&anchors).next()?;
            let end = here + before_open_tag(shared(&self.text[here..], &first[there..])).len();
            let texts = self.anchors.iter().filter(|anchor| anchor.text.0 == index);
            Some(texts.map(|anchor| anchor.at).fold(end, usize::min))
        };
        Some(end_of_shared().map_or(before, |end| end.max(before)))
    }

    /// Returns the place of an answer that follows another one, which ends at `end`.
    fn start_behind(&self, index: usize, end: usize) -> Option<usize> {
        let beginning = self.beginning_behind(&self.messages[..index])?;
        self.text[end..].starts_with(&*beginning).then_some(end + beginning.len())
    }

    /// Returns the place behind an answer that begins at `start` and is not the last message.
    fn end(&self, index: usize, start: usize) -> Option<usize> {
        let end = self.boundary(index + 1, false).filter(|end| end.at >= start);
        if let Some(Boundary { at, has_ending: true }) = end {
            return Some(at);
        }
        // The template may write the end of an answer only if something follows it.
        let followed = self.end_before_answer(index).filter(|at| *at >= start);
        let known = end.map(|end| end.at).max(followed);
        let known = known.or_else(|| self.end_of_empty(index, start));
        known.or_else(|| self.end_before_all(index).filter(|at| *at >= start))
    }

    /// Returns the place behind an answer, which is the same where the beginning of an answer follows it.
    fn end_before_answer(&self, index: usize) -> Option<usize> {
        let (first, anchors) = self.marked(&self.messages[..=index], &self.marking, true)?;
        // A question may also end in another way where an answer follows it, so the beginning of an answer is better
        // known from a chat without messages, if the template allows that.
        let ends = [0, index].map(|count| {
            let beginning = self.beginning_behind(&self.messages[..count])?;
            let first = first.strip_suffix(&*beginning)?;
            self.common_places(&anchors).find_map(|(here, there)| {
                let tail = first.get(there..)?;
                self.text[here..].starts_with(tail).then_some(here + tail.len())
            })
        });
        ends.into_iter().max().flatten()
    }

    /// Returns the place behind an answer that the template ends in the same way whether the chat ends, the beginning
    /// of an answer follows, or another message. The template may end a chat with a token of its own.
    fn end_before_all(&self, index: usize) -> Option<usize> {
        let first_of_own = self.anchors.iter().find(|anchor| anchor.text.0 == index)?.at;
        let render = |prompt| self.marked(&self.messages[..=index], &self.marking, prompt);
        let (closed, open) = (render(false)?, render(true)?);
        // If the beginning of an answer ends every chat, it may begin as the next message does.
        if closed == open {
            return None;
        }
        let tail = |(first, anchors): (String, Vec<Anchor>)| {
            let (here, there) =
                self.common_places(&anchors).next().filter(|(here, _)| *here >= first_of_own)?;
            Some((here, shared(&self.text[here..], &first[there..]).len()))
        };
        let ((here, closed), (other, open)) = (tail(closed)?, tail(open)?);
        let ending = before_open_tag(&self.text[here..here + closed.min(open)]);
        (here == other && !is_blank(ending)).then_some(here + ending.len())
    }

    /// Returns the beginning of an answer behind messages, as far as it differs from the text without it.
    fn beginning_behind(&self, messages: &[Value]) -> Option<String> {
        self.rendered(messages, true)?.strip_prefix(&*self.rendered(messages, false)?).map(str::to_owned)
    }

    /// Returns the place behind an answer that has no text, also not in the text of the chat. The end that the template
    /// writes behind another answer must follow its beginning.
    fn end_of_empty(&self, index: usize, start: usize) -> Option<usize> {
        let message = &self.messages[index];
        let content = message.get_attr("content").unwrap_or_default();
        let is_empty = content.is_none() || content.is_undefined() || content.as_str().is_some_and(is_blank);
        if !is_empty || self.anchors.iter().any(|anchor| anchor.text.0 == index) {
            return None;
        }
        let mut messages = self.messages[..index].to_vec();
        messages.push(Value::from_pairs([("role", Value::from("assistant")), ("content", Value::from("a"))]));
        let mut marking = self.marking.clone();
        marking[index] = Marking::InsideSpace;
        let (other, anchors) = self.marked(&messages, &marking, false)?;
        let ending = &other[anchors.iter().rfind(|anchor| anchor.text.0 == index)?.at..];
        let is_there = !is_blank(ending) && self.text[start..].starts_with(ending);
        is_there.then_some(start + ending.len())
    }
}

/// Returns the longest common beginning of two texts.
fn shared<'t>(text: &'t str, other: &str) -> &'t str {
    let same = text.char_indices().zip(other.chars()).take_while(|((_, one), two)| one == two).last();
    &text[..same.map_or(0, |((at, letter), _)| at + letter.len_utf8())]
}

/// Returns a text without an incomplete tag at its end, such as `<t`: other tags begin with the same letters.
fn before_open_tag(text: &str) -> &str {
    let open = text.rfind(['<', '[']).filter(|&open| !text[open..].contains(['>', ']']));
    &text[..open.unwrap_or(text.len())]
}

fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

/// Puts marks around the texts of a message, and around the names of the functions that it calls.
fn with_marks(message: &Value, index: usize, marking: Marking) -> Value {
    if marking == Marking::Nothing {
        return message.clone();
    }
    let mut count = 0;
    let mut mark = |value: &Value| match value.as_str().filter(|text| !is_blank(text)) {
        None => value.clone(),
        Some(text) => {
            let core = if marking == Marking::AroundSpace { text } else { text.trim() };
            let mark = |first: char| format!("{first}{index}/{count}{}", MARKS[2]);
            let front = if marking == Marking::Behind { String::new() } else { mark(MARKS[0]) };
            let marked = format!("{front}{core}{}", mark(MARKS[1]));
            count += 1;
            Value::from(text.replacen(core, &marked, 1))
        }
    };
    map_entries(message, &mut |key, value| match value.kind() {
        _ if TEXTS.contains(&key) && value.as_str().is_some() => mark(value),
        ValueKind::Seq if key == "content" => map_items(value, &mut |part| {
            map_entries(part, &mut |key, value| if key == "text" { mark(value) } else { value.clone() })
        }),
        ValueKind::Seq if key == "tool_calls" => map_items(value, &mut |call| {
            map_entries(call, &mut |key, value| match key {
                "name" => mark(value),
                "function" => map_entries(value, &mut |key, value| {
                    if key == "name" { mark(value) } else { value.clone() }
                }),
                _ => value.clone(),
            })
        }),
        _ => value.clone(),
    })
}

/// Returns a table with other values; a value that is not a table remains.
fn map_entries(table: &Value, map: &mut dyn FnMut(&str, &Value) -> Value) -> Value {
    if table.kind() != ValueKind::Map {
        return table.clone();
    }
    let entries = table.try_iter().into_iter().flatten().map(|key| {
        let value = table.get_item(&key).unwrap_or_default();
        let value = key.as_str().map_or_else(|| value.clone(), |key| map(key, &value));
        (key, value)
    });
    Value::from_pairs(entries)
}

/// Returns a list with other items.
fn map_items(list: &Value, map: &mut dyn FnMut(&Value) -> Value) -> Value {
    Value::from(list.try_iter().into_iter().flatten().map(|item| map(&item)).collect::<Vec<_>>())
}

/// Takes the marks out of a text; `None` if one is damaged.
fn without_marks(marked: &str) -> Option<(String, Vec<Anchor>)> {
    let (mut text, mut anchors, mut rest) = (String::with_capacity(marked.len()), Vec::new(), marked);
    while let Some((before, mark)) = rest.split_once(&MARKS[..2]) {
        text.push_str(before);
        let is_end = rest[before.len()..].starts_with(MARKS[1]);
        let (name, after) = mark.split_once(MARKS[2])?;
        let (message, number) = name.split_once('/')?;
        let id = (message.parse().ok()?, number.parse().ok()?);
        anchors.push(Anchor { text: id, is_end, at: text.len() });
        rest = after;
    }
    text.push_str(rest);
    (!text.contains(MARKS[2])).then_some((text, anchors))
}
