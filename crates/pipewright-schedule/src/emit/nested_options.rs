//! The values of a document as options: a key is the path to a value, such as `zero_optimization.stage`.

use crate::emit::options::{GivenOption, Options};
use crate::emit::read_error::ReadError;

/// The longest path to a value, in bytes. Without a limit, all options together might not fit into memory.
const LONGEST: usize = 1000;
/// The most objects and lists inside each other.
const MOST_DEPTH: usize = 64;

/// A reader that gets the parts of a document in their order. Values of lists in lists are joined by commas.
///
/// ```
/// use pipewright_schedule::emit::NestedOptions;
/// let mut nested = NestedOptions::default();
/// nested.open(false, 1)?;
/// nested.scalar("pipeline", false, 1)?;
/// nested.open(false, 1)?;
/// nested.scalar("stages", false, 2)?;
/// nested.scalar("4", false, 2)?;
/// nested.close();
/// nested.close();
/// let options = nested.finish();
/// assert_eq!((options.list[0].name.as_str(), options.list[0].line), ("pipeline.stages", 2));
/// # Ok::<(), pipewright_schedule::emit::ReadError>(())
/// ```
#[derive(Debug, Default)]
pub struct NestedOptions {
    open: Vec<Open>,
    list: Vec<GivenOption>,
}

/// An object or a list that is open.
#[derive(Debug)]
struct Open {
    is_list: bool,
    /// The key whose value is next, with its line.
    key: Option<(String, usize)>,
    /// The values of a list.
    values: Vec<String>,
}

impl NestedOptions {
    /// Begins an object or a list.
    ///
    /// # Errors
    /// When too many are inside each other.
    pub fn open(&mut self, is_list: bool, line: usize) -> Result<(), ReadError> {
        if self.open.len() >= MOST_DEPTH {
            return Err(ReadError::new("too many values are inside each other").at(line));
        }
        self.open.push(Open { is_list, key: None, values: Vec::new() });
        Ok(())
    }

    /// Ends an object or a list.
    pub fn close(&mut self) {
        let Some(closed) = self.open.pop() else { return };
        match self.open.last_mut() {
            Some(parent) if parent.is_list => parent.values.push(closed.values.join(",")),
            Some(_) if closed.is_list => self.add(closed.values),
            _ => {}
        }
        self.end_value();
    }

    /// Adds a text: a key, or a value. A value of an object that is `null` is left out.
    ///
    /// # Errors
    /// When no object is open, or the path to a value is too long.
    pub fn scalar(&mut self, text: &str, is_null: bool, line: usize) -> Result<(), ReadError> {
        let Some(last) = self.open.last_mut() else {
            return Err(ReadError::new("expected `key: value`").at(line));
        };
        if last.is_list {
            last.values.push(text.to_owned());
        } else if last.key.is_none() {
            last.key = Some((text.to_owned(), line));
            let names = self.open.iter().filter_map(|open| open.key.as_ref());
            if names.map(|(name, _)| 1 + name.len()).sum::<usize>() > LONGEST {
                let what = format!("the path to a value has more than {LONGEST} bytes; use shorter keys");
                return Err(ReadError::new(what).at(line));
            }
        } else {
            if !is_null {
                self.add(vec![text.to_owned()]);
            }
            self.end_value();
        }
        Ok(())
    }

    /// Returns the options, with the lines of their keys.
    pub fn finish(self) -> Options {
        Options { list: self.list, ..Options::default() }
    }

    /// Adds an option whose path is the keys of the open objects.
    fn add(&mut self, values: Vec<String>) {
        let keys: Option<Vec<&(String, usize)>> = self.open.iter().map(|open| open.key.as_ref()).collect();
        if let Some(keys) = keys
            && let Some(&&(_, line)) = keys.last()
        {
            let names: Vec<&str> = keys.iter().map(|(name, _)| name.as_str()).collect();
            self.list.push(GivenOption::new(&names.join("."), values, line));
        }
    }

    fn end_value(&mut self) {
        if let Some(last) = self.open.last_mut() {
            last.key = None;
        }
    }
}
