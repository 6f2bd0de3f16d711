//! The commands of `pipewright` in the documents have arguments that exist.

use clap::Parser;
use clap::error::ErrorKind;
use pipewright_book::markdown::{Span, files_below, inline_code, shell_lines};
use pipewright_book::root;

use crate::arguments::Arguments;

/// Returns the words of a line of a shell, up to a comment, a pipe or a redirection.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for letter in line.chars() {
        match quote {
            Some(open) if letter == open => quote = None,
            None if letter == '\'' || letter == '"' => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            None if letter.is_whitespace() => words.extend(word.take()),
            None if "|>;&".contains(letter) || letter == '#' && word.is_none() => break,
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

/// Returns the arguments of `pipewright` in a line, if it calls the command.
fn arguments(line: &str) -> Option<Vec<String>> {
    let words = words(line);
    // The value of an option, such as `-p pipewright`, is not the command.
    let is_value = |at: usize| at > 0 && words[at - 1].starts_with('-') && !words[at - 1].contains('=');
    let is_name = |word: &str| word == "pipewright" || word.ends_with("/pipewright");
    let own = (0..words.len()).find(|&at| is_name(&words[at]) && !is_value(at));
    let by_cargo = words.iter().position(|word| word == "--").filter(|_| {
        let starts = |word: &str| words.iter().any(|it| it == word);
        starts("cargo") && starts("run") && !starts("-p")
    });
    let first = own.or(by_cargo)? + 1;
    Some(words[first..].to_vec())
}

/// Returns what is wrong with a command. In a sentence, arguments and values may be left out.
fn fault(line: &str, is_sentence: bool) -> Option<String> {
    let arguments = arguments(line).filter(|arguments| !arguments.is_empty())?;
    let error = Arguments::try_parse_from(std::iter::once("pipewright".to_owned()).chain(arguments)).err()?;
    let is_fine = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
        ErrorKind::MissingRequiredArgument | ErrorKind::InvalidValue => is_sentence,
        _ => false,
    };
    (!is_fine).then(|| error.to_string())
}

#[test]
fn the_commands_in_documents_parse() {
    let (mut faults, mut count) = (Vec::new(), 0);
    for path in files_below(&root(), "md").expect("the repository") {
        let text = std::fs::read_to_string(&path).expect("a document");
        let lines = shell_lines(&text).into_iter().map(|line| (line, false));
        let sentences = inline_code(&text).into_iter().map(|code| (code, true));
        for (Span { line, text: command }, is_sentence) in lines.chain(sentences) {
            count += usize::from(arguments(&command).is_some());
            let fault = fault(&command, is_sentence);
            faults.extend(fault.map(|fault| format!("{}:{line}: {command}\n{fault}", path.display())));
        }
    }
    assert!(count > 100, "{count} commands");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_wrong_flag_is_found() {
    assert!(
        fault("mpirun -n 2 target/release/pipewright train my.toml --set run.steps=2 > log", false).is_none()
    );
    assert!(fault("cargo run --release -- schedule --list   # names", false).is_none());
    assert!(fault("cargo run -p pipewright --example own_module", false).is_none());
    assert!(fault("pipewright schedule 1f1b --rank 2", true).is_some());
    assert!(fault("pipewright resume", true).is_none());
    assert!(fault("pipewright resume", false).is_some());
}
