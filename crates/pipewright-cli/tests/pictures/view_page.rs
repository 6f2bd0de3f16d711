//! Tests of the page of `view` for a schedule: causes, critical path, search, keys, and the what-if panel.

use crate::browser::{Browser, CTRL, SHIFT};
use crate::made::{Made, pipewright};

const SMALL: &str = "1f1b --ranks 4 --microbatches 8 --cost F=1,I=1,W=1,hop=0.25";

fn open(arguments: &str, width: u32) -> Option<(Made, Browser)> {
    let made = Made::view(arguments);
    let browser = Browser::open(&made.path(), width, 800)?;
    Some((made, browser))
}

impl Browser {
    /// Clicks on the lane of a rank at a time.
    fn click_at(&mut self, rank: u32, seconds: f64) {
        let lane = format!("rowOf({rank})");
        let y = self.number(&format!(
            "plot.getBoundingClientRect().y + axisHeight + ({lane}.top + {lane}.bottom) / 2"
        ));
        let x =
            self.number(&format!("plot.getBoundingClientRect().x + gutter + xOf({seconds} / data.quantum)"));
        self.click([x, y], 1);
    }
}

/// Returns the makespan that `simulate` prints.
fn makespan(arguments: &str) -> f64 {
    let text = pipewright(format!("simulate {arguments} --format json").split(' ').map(std::ffi::OsStr::new));
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    value["makespan"].as_f64().expect("a number")
}

#[test]
fn the_page_loads_nothing_and_fits() {
    let Some((_made, mut browser)) = open(SMALL, 1400) else { return };
    assert!(browser.requests().is_empty());
    for width in [800, 1400] {
        browser.resize(width, 900);
        browser.frame();
        assert!(browser.holds("document.documentElement.scrollWidth <= innerWidth"), "at {width}");
        assert!(browser.holds("plot.clientHeight >= 250 && span() === whole"), "at {width}");
    }
    assert!(browser.holds("document.documentElement.scrollHeight <= innerHeight"));
    let texts = browser.texts();
    for text in ["rank 0", "rank 3", "predicted"] {
        assert!(texts.iter().any(|drawn| drawn == text), "{texts:?}");
    }
}

#[test]
fn every_bubble_names_its_cause_and_the_chain_ends_at_the_start() {
    for name in ["1f1b", "zbvzerobubble", "interleaved1f1b", "dualpipev"] {
        let Some((_made, mut browser)) =
            open(&format!("{name} --ranks 4 --microbatches 8 --cost hop=0.25"), 1000)
        else {
            return;
        };
        // Every bubble that is not at the end of a rank waits for a message, and each chain leads back to
        // time 0.
        let wrong = "bubblesOf(predictedSource).filter(({ lane, next }) => next >= 0 && causeOf(lane, next).via !== 'message').length";
        assert_eq!(browser.number(wrong), 0.0, "{name}");
        let ends = "bubblesOf(predictedSource).filter(({ next }) => next >= 0).map(({ lane, next }) => chainTo(lane, next).at(-1))
            .every(({ lane, at, cause }) => cause.via === 'start' && lane.cells.start[at] === 0)";
        assert!(browser.holds(ends), "{name}");
        assert!(browser.number("bubblesOf(predictedSource).length") > 4.0, "{name}");
        // The parts of the critical path add up to the whole step.
        let sum = "[...timesOf(criticalPath(predictedSource)).values()].reduce((sum, time) => sum + time, 0) / predictedSource.end";
        assert!((browser.number(sum) - 1.0).abs() < 1e-6, "{name}");
    }
}

#[test]
fn clicking_a_bubble_explains_it_and_escape_returns() {
    let Some((_made, mut browser)) = open(SMALL, 1400) else { return };
    assert!(browser.text("#why").contains("Why it takes 31.5"), "{}", browser.text("#why"));
    // Rank 2 waits for the first microbatch, which passes ranks 0 and 1.
    browser.click_at(2, 1.0);
    let text = browser.text("#why");
    assert!(text.contains("Bubble of 2.5 on rank 2"), "{text}");
    assert!(text.contains("It needs its input: the message of 1F0 from rank 1."), "{text}");
    assert!(text.contains("That action ends at 2.25; the message takes 0.25."), "{text}");
    assert!(text.contains("rank 0 0F0: 0 to 1, at the start of the step"), "{text}");
    // A link in the chain leads to the action.
    browser.click_on("#why .chain .go");
    assert!(browser.text("#why h2").contains("2F0 on rank 2"));
    browser.key("Escape", "");
    assert!(browser.text("#why").contains("Why it takes"));
    // The end of a rank's work has its own words.
    browser.click_at(3, 28.5);
    assert!(
        browser.text("#why").contains("The rank has no work left. The step ends when 0B7 on rank 0 ends.")
    );
}

#[test]
fn hovering_a_bubble_says_what_it_waits_for() {
    let Some((_made, mut browser)) = open(SMALL, 1400) else { return };
    let y = browser.number("plot.getBoundingClientRect().y + axisHeight + rowOf(1).top + 8");
    let x = browser.number("plot.getBoundingClientRect().x + gutter + xOf(0.5 / data.quantum)");
    browser.mouse("mouseMoved", [x, y], false, 0);
    browser.frame();
    let tip = browser.text("#tip");
    assert!(tip.contains("bubble of 1.25: 1F0 waits for the message of 0F0 from rank 0"), "{tip}");
}

#[test]
fn search_and_keys_find_actions_and_bubbles() {
    let Some((_made, mut browser)) = open(SMALL, 1400) else { return };
    browser.key("/", "/");
    assert!(browser.holds("document.activeElement.id === 'search' && document.activeElement.value === ''"));
    for letter in ["2", "f", "3"] {
        browser.key(letter, letter);
    }
    assert_eq!(browser.text("#found"), "1 of 1");
    assert!(browser.text("#why h2").contains("2F3 on rank 2"));
    browser.enter("#search", "microbatch 5");
    assert_eq!(browser.text("#found"), "1 of 11");
    browser.key("Enter", "\r");
    assert_eq!(browser.text("#found"), "2 of 11");
    browser.enter("#search", "9F9");
    assert_eq!(browser.text("#found"), "nothing found");
    browser.key("Escape", "");
    browser.key("b", "b");
    let longest = browser.text("#why h2");
    assert!(longest.starts_with("Bubble of "), "{longest}");
    browser.key("b", "b");
    assert_ne!(
        browser.number("selected.from * 100 + selected.lane.rank"),
        browser.number("bubblesOf(predictedSource)[0].from * 100 + bubblesOf(predictedSource)[0].lane.rank")
    );
    browser.key("0", "0");
    browser.click_at(0, 0.5);
    browser.key(".", ".");
    assert!(browser.text("#why h2").contains("0F1 on rank 0"));
    browser.key("Escape", "");
    assert!(browser.holds("chainsToDraw().length === 1"), "the critical path is shown");
    browser.key("c", "c");
    assert!(browser.holds("chainsToDraw().length === 0"));
    let before = browser.holds("view.showsMemory");
    browser.key("m", "m");
    assert_ne!(browser.holds("view.showsMemory"), before);
}

#[test]
fn the_what_if_panel_simulates_as_the_command_does() {
    let Some((_made, mut browser)) = open(SMALL, 1400) else { return };
    assert_eq!(browser.text("#whatif-unit"), "");
    let mut check = |selector: &str, value: &str, arguments: &str| {
        browser.enter(selector, value);
        let found = browser.number("whatIfSource.end * data.quantum");
        let expected = makespan(arguments);
        assert!((found / expected - 1.0).abs() < 1e-9, "{selector}={value}: {found}, not {expected}");
        assert!(browser.text("#whatif-outcome").contains("step"), "{selector}");
        assert!(browser.holds("ranks.length === 8 && ranks[1].tag === 'what if'"), "each rank has two lanes");
    };
    check("#whatif-F", "50", "1f1b --ranks 4 --microbatches 8 --cost F=0.5,I=1,W=1,hop=0.25");
    check("#whatif-hop", "1", "1f1b --ranks 4 --microbatches 8 --cost F=0.5,I=1,W=1,hop=1");
    check("#whatif-microbatches", "13", "1f1b --ranks 4 --microbatches 13 --cost F=0.5,I=1,W=1,hop=1");
    browser.click_on("#whatif-reset");
    assert!(browser.holds("whatIfSource === null && ranks.length === 4"));
    // One stage alone.
    browser.enter("#whatif-stage", "2");
    browser.enter("#whatif-I", "200");
    let found = browser.number("whatIfSource.end * data.quantum");
    let expected = makespan("1f1b --ranks 4 --microbatches 8 --cost F=1,I=1:1:2:1,hop=0.25");
    assert!((found / expected - 1.0).abs() < 1e-9, "{found}, not {expected}");
}

#[test]
fn names_letters_legend_and_help_fit_the_timelines_that_the_page_has() {
    let Some((_made, mut browser)) = open("1f1b --ranks 32 --microbatches 32", 1400) else { return };
    // Rows are too low for the name of the timeline.
    let texts = browser.texts();
    assert!(texts.contains(&"rank 0".to_owned()) && !texts.contains(&"rank 0 p".to_owned()), "{texts:?}");
    assert!(browser.text("#legend").contains("message"), "{}", browser.text("#legend"));
    assert!(
        browser.holds("document.getElementById('help-steps').hidden"),
        "a schedule has no recorded steps"
    );
    assert!(!browser.text("#help").contains("steps"), "{}", browser.text("#help"));
    browser.enter("#whatif-hop", "500");
    browser.resize(1400, 1500);
    browser.frame();
    let texts = browser.texts();
    assert!(["rank 0 p", "rank 0 w"].iter().all(|name| texts.iter().any(|text| text == name)), "{texts:?}");
    assert!(browser.text("#legend").contains("p: predicted, w: what if"), "{}", browser.text("#legend"));
    // No entry of the help is broken in two.
    for width in [700, 1000, 1300] {
        browser.resize(width, 800);
        assert!(browser.holds("[...document.querySelectorAll('#help span:not([hidden])')].every((entry) => new Set([...entry.getClientRects()].map(({ top }) => top)).size === 1)"), "{width}");
    }
}

#[test]
fn numbers_of_the_what_if_panel_are_not_cut() {
    let Some((_made, mut browser)) = open(SMALL, 1400) else { return };
    for number in ["834.1", "1.234", "0.00012"] {
        browser.value(&format!("hopBox.value = '{number}', 0"));
        assert!(browser.holds("hopBox.scrollWidth <= hopBox.clientWidth"), "{number}");
    }
    let factors = "[...document.querySelectorAll('#whatif-factors input')].every((box) => box.scrollWidth <= box.clientWidth)";
    assert!(browser.holds(factors));
    let unit = "document.getElementById('whatif-unit').getBoundingClientRect().right";
    assert!(
        browser.holds(&format!("{unit} <= document.getElementById('whatif').getBoundingClientRect().right"))
    );
}

#[test]
fn halves_of_an_overlap_are_separate_actions() {
    let Some((_made, mut browser)) = open("dualpipev --ranks 4 --microbatches 10 --cost hop=0.1", 1400)
    else {
        return;
    };
    // The message of the first half leaves before the second half ends, so a cause may be a half.
    assert!(browser.holds("ranks.every(({ cells }) => !cells.kind.includes(overlap))"));
    let halves = "(from) => ranks.some((lane) => lane.cells.start.some((start, at) => causeOf(lane, at).via === 'message'
        && data.kinds[causeOf(lane, at).lane.cells.kind[causeOf(lane, at).at]][0] === from))";
    assert!(browser.holds(&format!("({halves})('F') && ({halves})('I')")));
}

#[test]
fn exchanges_are_hatched_and_cannot_be_simulated() {
    // The first forward computes for 2 s, exchanges for 2 s, and computes for 2 s.
    let costs = "F=4,B=8,exchange=2,exchanges=1";
    let Some((_made, mut browser)) = open(&format!("1f1b --ranks 2 --microbatches 4 --cost {costs}"), 1400)
    else {
        return;
    };
    let colours = "(from, to) => { hovered = null; draw();
        const { top, bottom } = rowOf(0), y = Math.floor(axisHeight + top + Math.min((bottom - top) / 5, 6) / 2);
        const at = (seconds) => Math.round(gutter + xOf(seconds / data.quantum));
        const pixels = Array.from({ length: at(to) - at(from) }, (_, x) => [...paint.getImageData(at(from) + x, y, 1, 1).data].join());
        return [pixels.length, new Set(pixels).size]; }";
    let mut colours = |from: f64, to: f64| browser.value(&format!("({colours})({from}, {to})"));
    let [computed, exchanged] = [colours(0.3, 1.7), colours(2.3, 3.7)];
    assert!(computed[0].as_u64() > Some(8), "{computed}");
    assert_eq!(computed[1], 1, "a computation has one colour");
    assert!(exchanged[1].as_u64() > Some(1), "an exchange is hatched: {exchanged}");
    assert!(browser.text("#legend").contains("exchange of tokens"), "{}", browser.text("#legend"));
    let display = "getComputedStyle(document.getElementById('whatif')).display";
    assert_eq!(browser.value(display), "none");
    let Some((_made, mut without)) = open(SMALL, 1400) else { return };
    assert_ne!(without.value(display), "none");
    assert!(!without.text("#legend").contains("exchange"), "{}", without.text("#legend"));
}

#[test]
fn screen_readers_get_names_and_the_table() {
    let Some((_made, mut browser)) = open(SMALL, 1000) else { return };
    let nodes = browser.accessible();
    let says = |role: &str, text: &str| nodes.iter().any(|node| node.0 == role && node.1.contains(text));
    assert!(says("image", "Timeline of each rank") && says("cell", "0F0 0F1"), "{nodes:?}");
    assert!(
        says("searchbox", "Search") && says("checkbox", "critical path") && says("spinbutton", "F forward"),
        "{nodes:?}"
    );
}

/// The selection, as a text.
const SELECTION: &str = "selected && [selected.lane.name, selected.from, selected.to].join(' ')";
/// Whether the selection is in sight.
const IS_IN_SIGHT: &str = "selected.from >= view.left - 1e-6 && selected.to <= view.left + span() + 1e-6";

#[test]
fn zooming_keeps_the_selection_in_sight() {
    let Some((_made, mut browser)) = open("1f1b --ranks 16 --microbatches 64", 1400) else { return };
    browser.key("/", "/");
    browser.enter("#search", "9F40");
    browser.value("searchBox.blur(), fit(), draw(), 0");
    let selection = browser.value(SELECTION);
    for (key, presses) in [("+", 6), ("-", 2), ("+", 8)] {
        for _ in 0..presses {
            browser.key(key, key);
            assert_eq!(browser.value(SELECTION), selection);
        }
        assert!(browser.holds(IS_IN_SIGHT), "after {key}");
    }
    assert!(browser.number("view.zoom") > 50.0);
    // Also from another place, with the wheel, and back to everything.
    browser.key("ArrowRight", "");
    browser.value("view.left = 0, draw(), 0");
    browser.click_on("#zoom-in");
    assert!(browser.holds(IS_IN_SIGHT));
    browser.wheel([600.0, 400.0], [0.0, -300.0], CTRL);
    assert_eq!(browser.value(SELECTION), selection);
    let empty = browser.number("plot.getBoundingClientRect().y + axisHeight + 3");
    browser.click([600.0, empty], 2);
    assert_eq!(browser.number("view.zoom"), 1.0);
    assert_eq!(browser.value(SELECTION), selection, "a double click keeps it");
    browser.key("f", "f");
    let share = browser.number("(selected.to - selected.from) / span()");
    assert!(browser.holds(IS_IN_SIGHT) && (share - 0.8).abs() < 0.01, "{share}");
    browser.key("Escape", "");
    let zoom = browser.number("view.zoom");
    browser.key("f", "f");
    assert_eq!(browser.number("view.zoom"), zoom, "there is nothing to focus");
}

#[test]
fn a_range_has_sums_for_each_kind() {
    let Some((_made, mut browser)) = open(SMALL, 1400) else { return };
    let point = |browser: &mut Browser, rank: u32, time: f64| {
        let y = browser.number(&format!(
            "plot.getBoundingClientRect().y + axisHeight + (rowOf({rank}).top + rowOf({rank}).bottom) / 2"
        ));
        let x =
            browser.number(&format!("plot.getBoundingClientRect().x + gutter + xOf({time} / data.quantum)"));
        [x, y]
    };
    let (from, to) = (point(&mut browser, 0, 0.0), point(&mut browser, 1, 8.0));
    browser.held = SHIFT;
    browser.drag(from, to);
    browser.held = 0;
    assert!(browser.holds("view.zoom === 1 && selected.isRange && selected.lanes.length === 2"));
    // In 8 units, rank 0 runs four forwards and waits for 0B0; rank 1 has the first part of its first
    // backward.
    let expected = "(() => { const sums = new Map();
        for (const { cells, bars } of ranks.slice(0, 2)) cells.start.forEach((start, at) => {
            const time = Math.min(cells.end[at], selected.to) - Math.max(start, selected.from), [name] = data.kinds[cells.kind[at]];
            if (time > 0) sums.set(name, (sums.get(name) ?? 0) + time);
        });
        return [...sums].every(([name, time]) => Math.abs(sumsOf(selected.lanes, selected.from, selected.to).get(name) - time) < 1e-6) && sums.size === 2; })()";
    assert!(browser.holds(expected));
    let whole = "['F', 'I', 'bubble'].reduce((sum, name) => sum + sumsOf(selected.lanes, selected.from, selected.to).get(name), 0)
        / (2 * (selected.to - selected.from))";
    assert!((browser.number(whole) - 1.0).abs() < 1e-6);
    let text = browser.text("#why");
    for words in
        ["F forward", "I backward", "bubble", "messages, beside it", "rank 0 to rank 1, sums over the ranks"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    // Zooming keeps the range, `f` shows it, and Escape ends it.
    browser.key("+", "+");
    browser.key("f", "f");
    assert!(browser.holds("selected.isRange && selected.to <= view.left + span()"));
    browser.key("Escape", "");
    assert!(browser.text("#why").contains("Why it takes"));
    browser.key("0", "0");
    browser.key("r", "r");
    assert!(
        browser
            .holds("selected.lanes.length === ranks.length && selected.from === 0 && selected.to === whole")
    );
    // A range of a timeline that is no longer shown is forgotten.
    browser.enter("#whatif-F", "50");
    browser.key("r", "r");
    assert!(browser.text("#why").contains("what if: rank 0 to rank 3"), "{}", browser.text("#why"));
    browser.click_on("#whatif-reset");
    assert!(browser.holds("selected === null"));
    // A click with the Shift key selects as a click does.
    browser.held = SHIFT;
    browser.click_at(0, 0.5);
    assert!(browser.text("#why h2").contains("0F0 on rank 0"));
}
