//! The function `strftime_now` of chat templates, for a date that the configuration names. A run that renders
//! its chats again must get the same text, so the clock is not read.

use std::fmt::Write;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A date of the Gregorian calendar, with the text `2024-07-26`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Date {
    year: u32,
    month: u32,
    day: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl FromStr for Date {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Option<Vec<u32>> = text.split('-').map(|part| part.parse().ok()).collect();
        match numbers.as_deref() {
            Some(&[year @ 1..=9999, month @ 1..=12, day]) if (1..=days_of(year, month)).contains(&day) => {
                Ok(Self { year, month, day })
            }
            _ => Err(format!("{text:?} is not a date such as 2024-07-26")),
        }
    }
}

impl Date {
    /// Returns the date so many days after 1970-01-01; `None` after the year 9999.
    pub fn days_after_1970(days: u64) -> Option<Self> {
        let mut left = u32::try_from(days).ok()?;
        for year in 1970..=9999 {
            for month in 1..=12 {
                match left.checked_sub(days_of(year, month)) {
                    Some(rest) => left = rest,
                    None => return Some(Self { year, month, day: left + 1 }),
                }
            }
        }
        None
    }
}

impl TryFrom<String> for Date {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Date> for String {
    fn from(Date { year, month, day }: Date) -> Self {
        format!("{year:04}-{month:02}-{day:02}")
    }
}

fn days_of(year: u32, month: u32) -> u32 {
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    match month {
        2 => 28 + u32::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

impl Date {
    /// Returns the number of days before the date in its year.
    fn days_before(self) -> u32 {
        (1..self.month).map(|month| days_of(self.year, month)).sum::<u32>() + self.day - 1
    }

    /// Returns the day of the week, counted from Sunday.
    fn weekday(self) -> usize {
        let years = self.year - 1;
        // The first day of the year 1 was a Monday.
        ((1 + years * 365 + years / 4 - years / 100 + years / 400 + self.days_before()) % 7) as usize
    }

    /// Writes the date in a format of Python's `strftime`. The time of the day is midnight.
    pub(crate) fn format(self, format: &str) -> Result<String, String> {
        let mut text = String::new();
        let mut letters = format.chars();
        while let Some(letter) = letters.next() {
            if letter != '%' {
                text.push(letter);
                continue;
            }
            let mut code = letters.next().unwrap_or('%');
            let is_padded = code != '-';
            if !is_padded {
                code = letters.next().unwrap_or('%');
            }
            self.write(code, is_padded, &mut text)?;
        }
        Ok(text)
    }

    fn write(self, code: char, is_padded: bool, text: &mut String) -> Result<(), String> {
        let Self { year, month, day } = self;
        let (month_name, day_name) = (MONTHS[month as usize - 1], WEEKDAYS[self.weekday()]);
        let width = |width: usize| if is_padded { width } else { 1 };
        let written = match code {
            'Y' => write!(text, "{year}"),
            'm' => write!(text, "{month:0width$}", width = width(2)),
            'd' => write!(text, "{day:0width$}", width = width(2)),
            'y' => write!(text, "{:0width$}", year % 100, width = width(2)),
            'j' => write!(text, "{:0width$}", self.days_before() + 1, width = width(3)),
            'B' => write!(text, "{month_name}"),
            'b' | 'h' => write!(text, "{}", &month_name[..3]),
            'A' => write!(text, "{day_name}"),
            'a' => write!(text, "{}", &day_name[..3]),
            'F' => write!(text, "{year}-{month:02}-{day:02}"),
            'H' | 'M' | 'S' => write!(text, "{:0width$}", 0, width = width(2)),
            '%' => write!(text, "%"),
            other => return Err(format!("the date format %{other} is not supported")),
        };
        written.expect("a string takes all text");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(date: &str, format: &str, expected: &str) {
        let found = date.parse::<Date>().and_then(|date| date.format(format));
        assert_eq!(found.unwrap_or_else(|error| error), expected);
    }

    #[test]
    fn dates_have_the_formats_of_python() {
        check("2024-07-06", "%d %b %Y", "06 Jul 2024");
        check("2024-07-06", "%A, %-d %B %y, day %j, %H:%M", "Saturday, 6 July 24, day 188, 00:00");
        check("2000-02-29", "%a %F %%", "Tue 2000-02-29 %");
        check("1999-12-31", "%a", "Fri");
        check("1999-12-31", "%Q", "the date format %Q is not supported");
        for text in ["2023-02-29", "2024-13-01", "2024-1", "today", "0000-01-01"] {
            check(text, "", &format!("{text:?} is not a date such as 2024-07-26"));
        }
    }
}
