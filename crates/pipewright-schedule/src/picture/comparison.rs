//! The page that compares schedules: a table of figures, and the pictures of all schedules on one scale.

use crate::picture::html::variables;
use crate::picture::palette::{DARK, LIGHT, OF_PAGE};
use crate::picture::settings::{PictureSettings, TimeUnit, escaped};
use crate::picture::svg::svg_in;
use crate::timeline::Timeline;

/// A schedule whose picture is on the page.
#[derive(Debug, Clone, Copy)]
pub struct ComparedPicture<'a> {
    /// The name, the heading of the picture.
    pub name: &'a str,
    /// The run to draw.
    pub timeline: &'a Timeline,
}

/// The content of the page.
#[derive(Debug, Clone, Copy)]
pub struct Comparison<'a> {
    /// The heading.
    pub title: &'a str,
    /// The first row of the table.
    pub head: &'a [&'a str],
    /// The other rows. The last cell of a row with fewer cells takes the rest of the width.
    pub rows: &'a [Vec<String>],
    /// The sentence below the table.
    pub note: &'a str,
    /// The pictures, from top to bottom.
    pub pictures: &'a [ComparedPicture<'a>],
    /// The unit of their times.
    pub unit: TimeUnit,
}

/// Makes the page. The longest timeline has the whole width, and the others are on its scale.
pub fn comparison(comparison: &Comparison<'_>) -> String {
    let &Comparison { title, head, rows, note, pictures, unit } = comparison;
    let span = pictures.iter().map(|picture| picture.timeline.makespan()).fold(0.0, f64::max);
    let mut drawn = String::new();
    for (index, &ComparedPicture { name, timeline }) in pictures.iter().enumerate() {
        let settings = PictureSettings { title: name, unit, span: Some(span), ..PictureSettings::default() };
        // Every picture has the same identifiers, which must be unique in a page.
        let picture = svg_in(timeline, &settings, &OF_PAGE)
            .replace("id=\"name\"", &format!("id=\"name-{index}\""))
            .replace("aria-labelledby=\"name\"", &format!("aria-labelledby=\"name-{index}\""))
            .replace("id=\"bubble\"", &format!("id=\"bubble-{index}\""))
            .replace("url(#bubble)", &format!("url(#bubble-{index})"));
        drawn.push_str(&format!("<figure>{picture}</figure>\n"));
    }
    include_str!("comparison.html")
        .replace("{{light}}", &variables(&LIGHT, 1))
        .replace("{{dark}}", &variables(&DARK, 1))
        .replace("{{title}}", &braceless(title))
        .replace("{{note}}", &braceless(note))
        .replace("{{table}}", &html_table(head, rows))
        .replace("{{pictures}}", &drawn)
}

/// Returns the table of a comparison in HTML. The last cell of a row with fewer cells takes the rest of the width.
pub fn html_table(head: &[&str], rows: &[Vec<String>]) -> String {
    let titles: String =
        head.iter().map(|cell| format!("<th scope=\"col\">{}</th>", braceless(cell))).collect();
    let mut table = format!("<table><thead><tr>{titles}</tr></thead><tbody>\n");
    for row in rows {
        table.push_str("<tr>");
        for (index, cell) in row.iter().enumerate() {
            let missing = if index + 1 == row.len() { head.len().saturating_sub(row.len()) } else { 0 };
            let span = if missing > 0 {
                format!(" colspan=\"{}\" class=\"reason\"", missing + 1)
            } else {
                String::new()
            };
            let (open, close) = if index == 0 { ("th scope=\"row\"", "th") } else { ("td", "td") };
            table.push_str(&format!("<{open}{span}>{}</{close}>", braceless(cell)));
        }
        table.push_str("</tr>\n");
    }
    table + "</tbody></table>"
}

/// Escapes a text for a page. It cannot contain a place to fill.
fn braceless(text: &str) -> String {
    escaped(text).replace('{', "&#123;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csv::parse_program;
    use crate::simulate::logical;

    #[test]
    fn pictures_have_one_scale_and_identifiers_of_their_own() {
        let timeline = |rows: &str| {
            let program = parse_program(rows).expect("rows");
            logical(&program).expect("no deadlock").timeline(1.0)
        };
        let (short, long) = (timeline("0F0,0B0\n"), timeline("0F0,0F1,0B0,0B1\n"));
        let pictures = [("short", &short), ("<long>", &long)];
        let pictures = pictures.map(|(name, timeline)| ComparedPicture { name, timeline });
        let rows = vec![vec!["short".to_owned(), "2".to_owned()], vec!["none{{rows}}".to_owned()]];
        let page = comparison(&Comparison {
            title: "two",
            head: &["schedule", "time"],
            rows: &rows,
            note: "a note",
            pictures: &pictures,
            unit: TimeUnit::Costs,
        });
        assert_eq!(page.matches("<svg ").count(), 2);
        assert_eq!(page.matches("id=\"bubble-1\"").count(), 1);
        assert!(page.contains("url(#bubble-0)") && !page.contains("url(#bubble)"), "{page}");
        assert!(page.contains("&lt;long&gt;") && page.contains("none&#123;&#123;rows}}"), "{page}");
        // Half the width of the longer one.
        assert!(page.contains("width=\"550\" height=\"32.00\" fill=\"url(#bubble-0)\""), "{page}");
        assert!(page.contains("width=\"1100\" height=\"32.00\" fill=\"url(#bubble-1)\""), "{page}");
        assert!(!page.contains("{{"), "a place in the page is not filled");
        for reference in ["src=", "@import", "<script"] {
            assert!(!page.contains(reference), "{reference}");
        }
    }
}
