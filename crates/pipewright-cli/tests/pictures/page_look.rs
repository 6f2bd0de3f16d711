//! Tests of the page's contents, at first and after zooming.

use crate::browser::{Browser, CTRL};
use crate::made::Made;

const LARGE: &str = "simulate 1f1b --ranks 64 --microbatches 256";

impl Browser {
    /// Returns the colour of the plot, such as `#7db3e8`, at a time and a fraction of the height of a rank's
    /// lane. Labels are in the middle of the lane.
    fn colour(&mut self, seconds: f64, rank: u32, share: f64) -> String {
        let x = format!("gutter + xOf({seconds} / data.quantum)");
        let y =
            format!("axisHeight + rowOf({rank}).top + (rowOf({rank}).bottom - rowOf({rank}).top) * {share}");
        let channels = format!("[...paint.getImageData({x}, {y}, 1, 1).data].slice(0, 3)");
        let hex =
            format!("'#' + {channels}.map((channel) => channel.toString(16).padStart(2, '0')).join('')");
        self.value(&hex).as_str().expect("a colour").to_owned()
    }

    /// Returns the colour of a sort of action and a chunk in a theme.
    fn fill(&mut self, theme: u32, sort: u32, chunk: u32) -> String {
        let fill = self.value(&format!("data.themes[{theme}].fills[{sort}][{chunk}][0]"));
        fill.as_str().expect("a colour").to_owned()
    }
}

#[test]
fn everything_fits_at_first() {
    let made = Made::page(LARGE);
    for (width, height) in [(800, 600), (1400, 800)] {
        let Some(mut browser) = Browser::open(&made.path(), width, height) else { return };
        assert!(browser.holds("view.zoom === 1 && view.left === 0 && view.top === 0 && span() === whole"));
        assert!(browser.holds("ranks.length * rowHeight() <= plotHeight() + 0.01 && rowHeight() > 3"));
        assert!(browser.holds("document.documentElement.scrollHeight <= innerHeight"));
        assert!(browser.holds("document.documentElement.scrollWidth <= innerWidth"));
        // The first forward and the last backward are visible.
        let (forward, backward) = (browser.fill(0, 0, 0), browser.fill(0, 1, 0));
        assert_eq!(browser.colour(30.0, 0, 0.5), forward);
        let last = browser.colour(893.0, 0, 0.5);
        assert!(last == backward, "{last}, not {backward}");
        // The overview contains the colours of the timeline.
        let overview = "new Set(new Uint32Array(paintOverview.getImageData(0, 0, overview.width, overview.height).data.buffer)).size";
        assert!(browser.number(overview) > 20.0);
    }
}

#[test]
fn axis_legend_and_names_stay_in_sight() {
    let made = Made::page(LARGE);
    let Some(mut browser) = Browser::open(&made.path(), 1000, 700) else { return };
    for _ in 0..6 {
        browser.wheel([600.0, 500.0], [0.0, -300.0], CTRL);
    }
    assert!(browser.holds("view.top > 1 && view.left > 0"));
    let legend = "(() => { const box = document.getElementById('legend').getBoundingClientRect();
        return box.top >= 0 && box.bottom <= innerHeight && box.height > 0; })()";
    assert!(browser.holds(legend));
    let texts = browser.texts();
    let names: Vec<&String> = texts.iter().filter(|text| text.starts_with("rank ")).collect();
    assert!(names.len() > 5 && !names.contains(&&"rank 0".to_owned()), "{names:?}");
    assert!(
        texts.iter().filter(|text| text.parse::<f64>().is_ok()).count() >= 3,
        "marks of the axis: {texts:?}"
    );
}

#[test]
fn large_microbatches_have_labels() {
    let made = Made::page(LARGE);
    let Some(mut browser) = Browser::open(&made.path(), 1400, 800) else { return };
    assert!(!browser.texts().iter().any(|text| text.starts_with("0F")));
    browser.value("zoomBy(60, plotWidth() * 0.6, 0), draw(), 0");
    let texts = browser.texts();
    let has_large = |text: &String| {
        text.split_once(['F', 'B'])
            .is_some_and(|(_, microbatch)| microbatch.parse::<u32>().is_ok_and(|it| it > 99))
    };
    assert!(texts.iter().filter(|text| has_large(text)).count() > 20, "{texts:?}");
}

#[test]
fn chunks_have_shades_and_narrow_cells_tell_the_stage() {
    let made = Made::page("simulate zbvzerobubble --ranks 4 --microbatches 8");
    let Some(mut browser) = Browser::open(&made.path(), 1000, 500) else { return };
    let (first, second) = (browser.fill(0, 0, 0), browser.fill(0, 0, 1));
    assert_ne!(first, second);
    // Rank 0 runs the forwards of stage 0 and, when the first microbatch returns, the forwards of stage 7.
    assert_eq!(browser.colour(0.2, 0, 0.9), first);
    assert_eq!(browser.colour(7.2, 0, 0.9), second);
    // The label has two lines: the stage and the sort, then the microbatch.
    let texts = browser.texts();
    assert!(texts.contains(&"7F".to_owned()) && !texts.contains(&"7F0".to_owned()), "{texts:?}");
    // With less room, the label omits the sort, which the hue shows.
    let label = "labelOf({ stage: 7, letter: 'F', microbatch: 3 }, 11, 36, true, [11, 9].map((size) => widthsOf(paint, size)))";
    assert_eq!(browser.value(label), serde_json::json!([["7", "3"], 9]));
    assert!(browser.holds("document.getElementById('legend').textContent.includes('shades: chunks 0 to 1')"));
}

#[test]
fn an_overlap_is_one_cell_of_two_halves() {
    let made = Made::page("schedule dualpipev --ranks 4 --microbatches 10");
    let Some(mut browser) = Browser::open(&made.path(), 1400, 500) else { return };
    let at = browser.number("ranks[0].cells.kind.indexOf(overlap)");
    let [start, end] =
        ["start", "end"].map(|side| browser.number(&format!("ranks[0].cells.{side}[{at}] * data.quantum")));
    for share in [0.1, 0.8] {
        let time = start + (end - start) * share;
        let (upper, lower) = (browser.colour(time, 0, 0.1), browser.colour(time, 0, 0.9));
        let forward = [browser.fill(0, 0, 0), browser.fill(0, 0, 1)];
        let backward = [browser.fill(0, 1, 0), browser.fill(0, 1, 1)];
        assert!(forward.contains(&upper) && backward.contains(&lower), "{upper} above {lower}");
    }
}

#[test]
fn the_dark_theme_follows_the_reader() {
    let made = Made::page("simulate 1f1b --ranks 4 --microbatches 8");
    let Some(mut browser) = Browser::open(&made.path(), 1000, 600) else { return };
    for (place, scheme) in [(0, "light"), (1, "dark"), (0, "light")] {
        browser.prefer(scheme);
        assert_eq!(browser.colour(0.2, 0, 0.9), browser.fill(place, 0, 0), "{scheme}");
        let page = browser.value(&format!("data.themes[{place}].page"));
        let body = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g)
            .map((channel) => (+channel).toString(16).padStart(2, '0')).join('')";
        assert_eq!(
            format!("#{}", browser.value(body).as_str().expect("a colour")),
            page.as_str().expect("a colour")
        );
    }
}

#[test]
fn screen_readers_get_a_table() {
    let made = Made::page("simulate zbvzerobubble --ranks 4 --microbatches 8");
    let Some(mut browser) = Browser::open(&made.path(), 1000, 600) else { return };
    let nodes = browser.accessible();
    let count = |role: &str| nodes.iter().filter(|node| node.0 == role).count();
    assert_eq!(
        (count("table"), count("row"), count("rowheader"), count("columnheader")),
        (1, 5, 4, 6),
        "{nodes:?}"
    );
    let says = |role: &str, text: &str| nodes.iter().any(|node| node.0 == role && node.1.contains(text));
    assert!(says("image", "Timeline of each rank"));
    assert!(says("cell", "0, 7") && says("cell", "0F0 0F1") && says("cell", "%"), "{nodes:?}");
    assert!(says("button", "Zoom in") && says("checkbox", "memory"));
}

#[test]
fn the_memory_lane_is_shown_on_request() {
    for (flag, shows) in [("", false), (" --memory-lane", true)] {
        let made = Made::page(&format!("{LARGE}{flag}"));
        let Some(mut browser) = Browser::open(&made.path(), 1000, 800) else { return };
        assert_eq!(browser.holds("view.showsMemory"), shows);
        assert!(browser.holds("ranks.length * rowHeight() <= plotHeight() + 0.01"));
    }
}

/// Compares the columns of some lanes with the shares of their time. Returns the number of columns that
/// differ, and the number of columns with at least two sorts.
const COLUMNS: &str = "(() => {
    const width = Math.round(plotWidth()), pixels = paint.getImageData(gutter, axisHeight, width, Math.round(plotHeight()));
    const words = new Uint32Array(pixels.data.buffer), bubbles = [theme.bubblePixel, theme.hatchPixel];
    const sortOfPixel = (word) => bubbles.includes(word) ? 'bubble'
        : 'FBIW'[theme.lit.slice(0, 4).findIndex((shades) => shades.some(({ pixel }) => pixel === word))] ?? 'blend';
    let [wrong, mixed] = [0, 0];
    const isInSight = (index) => rowOf(index).top >= 0 && rowOf(index).bottom <= plotHeight() - 1;
    for (const index of [3, 20, 40, 61].filter(isInSight)) {
        const row = rowOf(index), [top, bottom] = [Math.round(row.top), Math.round(row.bottom)];
        for (let x = 0; x < width; x++) {
            const counts = new Map(), pixel = span() / width, from = view.left + x * pixel;
            for (let y = top; y < bottom; y++) {
                const sort = sortOfPixel(words[y * width + x]);
                counts.set(sort, (counts.get(sort) ?? 0) + 1);
            }
            const times = timesBetween(ranks[index], from, from + pixel);
            mixed += counts.size > 1;
            const isRight = ['F', 'B', 'I', 'W', 'bubble'].every((sort) =>
                Math.abs((counts.get(sort) ?? 0) - (times.get(sort) ?? 0) / pixel * (bottom - top)) <= 1.01);
            wrong += !isRight || counts.has('blend');
        }
    }
    return [wrong, mixed];
})()";

#[test]
fn a_column_of_pixels_shows_shares_instead_of_a_blend() {
    for (arguments, zoom) in [
        (LARGE, 1.0),
        ("simulate zbvzerobubble --ranks 64 --microbatches 256", 1.0),
        ("simulate interleaved1f1b --ranks 64 --microbatches 256", 1.2),
    ] {
        let made = Made::page(arguments);
        let Some(mut browser) = Browser::open(&made.path(), 1400, 800) else { return };
        browser.value(&format!("view.zoom = {zoom}, draw(), 0"));
        let counts = browser.value(COLUMNS);
        let [wrong, mixed] = [0, 1].map(|at| counts[at].as_f64().expect("a number"));
        assert!(wrong == 0.0 && mixed > 500.0, "{arguments}: {wrong} columns are wrong, {mixed} have shares");
        // The tip has the shares as numbers.
        let tip = browser.value("describe({ rank: ranks[20], time: whole / 2 }).join('\\n')");
        let tip = tip.as_str().expect("a text");
        assert!(tip.contains("this column of pixels: ") && tip.ends_with('%'), "{tip}");
    }
}

#[test]
fn few_ranks_use_the_height_of_the_window() {
    for ranks in [2, 8] {
        let made = Made::page(&format!("simulate 1f1b --ranks {ranks} --microbatches 8"));
        let Some(mut browser) = Browser::open(&made.path(), 1000, 500) else { return };
        for (height, zoom) in [(500, 1), (900, 1), (1400, 3)] {
            browser.resize(1000, height);
            browser.value(&format!("view.zoom = {zoom}, draw(), 0"));
            let unused = browser.number("plotHeight() - ranks.length * rowHeight()");
            assert!(unused.abs() < 1.0, "{ranks} ranks at {height}, zoom {zoom}: {unused} pixels are empty");
        }
        assert!(browser.holds("document.documentElement.scrollHeight <= innerHeight"));
    }
}

#[test]
fn printing_is_light_and_keeps_colours() {
    for made in [
        Made::page("simulate 1f1b --ranks 4 --microbatches 8"),
        Made::view("1f1b --ranks 4 --microbatches 8 --cost hop=0.1"),
    ] {
        let Some(mut browser) = Browser::open(&made.path(), 1000, 600) else { return };
        browser.prefer("dark");
        browser.value(
            "addEventListener('beforeprint', () => { window.printed = [theme.colours.page, paint.canvas.width]; }), 0",
        );
        let [light, dark] = [0, 1].map(|theme| browser.value(&format!("data.themes[{theme}].page")));
        let width = browser.number("plot.width");
        assert_eq!(browser.value("theme.colours.page"), dark);
        browser.print();
        assert_eq!(browser.value("printed[0]"), light);
        assert_eq!(browser.number("printed[1]"), 2.0 * width, "the picture is sharp on paper");
        assert_eq!(browser.value("theme.colours.page"), dark, "the screen is dark again");
        // The style of the paper.
        browser.emulate_paper();
        assert_eq!(browser.value("getComputedStyle(document.body).backgroundColor"), "rgb(255, 255, 255)");
        assert_eq!(browser.value("getComputedStyle(plot).printColorAdjust"), "exact");
    }
}

#[test]
fn a_receive_waits_until_its_message_is_sent() {
    // Sends take no time here, so the end of the action that makes the tensor counts.
    let made = Made::page("simulate 1f1b --ranks 3 --microbatches 4 --level comms --cost hop=0.5");
    let Some(mut browser) = Browser::open(&made.path(), 1000, 600) else { return };
    assert!(browser.holds("document.getElementById('waiting').hidden"), "no receive of a prediction waits");
    // The receives begin when the step does, as in a run whose ranks have nothing else to do.
    let early = "(() => {
        for (const { bars } of ranks) bars.kind.forEach((kind, at) => { if (data.kinds[kind][0].startsWith('RECV_')) bars.start[at] = 0; });
        findSends(ranks);
        const times = (name) => ranks.flatMap((lane) => lane.bars.kind.map((_, at) => [nameOf(partsOf(lane, lane.bars, at)), lane.bars.sent[at], lane.bars.end[at]]))
            .find(([own]) => own === name).slice(1).map((time) => Math.round(time * data.quantum * 100) / 100);
        showWaitingInLegend();
        return JSON.stringify(['1RECV_F0', '2RECV_F0', '1RECV_B0'].map(times));
    })()";
    assert_eq!(browser.value(early), "[[1,1.5],[2.5,3],[6,6.5]]");
    assert!(browser.holds("!document.getElementById('waiting').hidden"));
}
