//! The list of the commands in the help, by subject.

use std::fmt::Write;

use clap::Command;
use clap::builder::Styles;

/// The commands of each subject.
const GROUPS: [(&str, &[&str]); 6] = [
    ("Training", &["train", "resume", "watch", "launch", "check", "init", "devices", "fingerprint", "audit"]),
    ("Models and data", &["generate", "export", "quantize", "add-tokens", "inspect", "data", "tokenize"]),
    ("Schedules", &["schedule", "lower", "validate", "simulate", "compare", "partition", "vpp"]),
    ("Plans", &["profile", "plan", "clusters"]),
    ("Pages", &["view", "report"]),
    ("Shell", &["completions", "man", "help"]),
];

/// Returns a command whose help has a heading above the subcommands of each subject.
pub(super) fn grouped(mut command: Command) -> Command {
    let names = GROUPS.iter().flat_map(|(_, names)| *names).filter(|name| **name != "help");
    for (order, name) in names.enumerate() {
        command = command.mut_subcommand(name, |command| command.display_order(order));
    }
    let list = command.clone().help_template("{subcommands}").render_help().to_string();
    let list = with_headings(&list, command.get_styles());
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}Options:\n{{options}}{{after-help}}"
    ))
}

/// Puts the headings into a list of commands, whose lines are wrapped.
fn with_headings(list: &str, styles: &Styles) -> String {
    let (header, literal) = (styles.get_header(), styles.get_literal());
    let mut text = String::new();
    for line in list.trim_matches('\n').lines() {
        let name = line.strip_prefix("  ").filter(|rest| !rest.starts_with(' '));
        let Some(name) = name.and_then(|rest| rest.split_whitespace().next()) else {
            writeln!(text, "{line}").expect("a string takes all text");
            continue;
        };
        if let Some((heading, _)) = GROUPS.iter().find(|(_, names)| names.first() == Some(&name)) {
            let gap = if text.is_empty() { "" } else { "\n" };
            writeln!(text, "{gap}{header}{heading}:{header:#}").expect("a string takes all text");
        }
        let rest = &line[2 + name.len()..];
        writeln!(text, "  {literal}{name}{literal:#}{rest}").expect("a string takes all text");
    }
    format!("{text}\n")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;
    use crate::arguments::Arguments;

    #[test]
    fn every_command_is_in_one_group() {
        let command = Arguments::command();
        let all: BTreeSet<&str> = command.get_subcommands().map(Command::get_name).chain(["help"]).collect();
        let listed: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), all);
        assert_eq!(listed.len(), all.len());
    }

    #[test]
    fn the_help_lists_the_commands_by_subject() {
        let help = Arguments::whole_command().render_help().to_string();
        let mut expected = String::new();
        for (heading, names) in GROUPS {
            expected.push_str(&format!("{heading}:\n"));
            names.iter().for_each(|name| expected.push_str(&format!("  {name}\n")));
        }
        let is_command = |line: &&str| {
            line.starts_with("  ") && !line.trim_start().starts_with('-') && !line.starts_with("   ")
        };
        let start = help.find("Training:").expect("the first heading");
        let end = help.find("Options:").expect("the options");
        let lines = help[start..end].lines().filter(|line| line.ends_with(':') || is_command(line));
        let found: String = lines
            .map(|line| {
                let word = line.split("  ").nth(1).filter(|_| line.starts_with("  "));
                word.map_or_else(|| format!("{line}\n"), |word| format!("  {word}\n"))
            })
            .collect();
        assert_eq!(found, expected);
    }
}
