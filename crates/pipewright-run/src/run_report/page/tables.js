
// The tables: the figures of all runs side by side, the ranks of each run, the links, and the configurations.

const cell = (text, isNumber = true) => element("td", { className: isNumber ? "number" : "" }, text);
let isPrinting = false;
const rowHead = (text) => element("th", { scope: "row" }, text);

function runNames() {
  return runs.map((run, index) => {
    const mark = element("span", { className: "line" });
    mark.style.borderColor = colourOf(index);
    mark.style.borderTopStyle = dashOf(index) ? "dashed" : "solid";
    const button = element("button", { type: "button", onclick: () => switchRun(index, button) }, mark, run.name);
    button.setAttribute("aria-pressed", !isHidden(index));
    return element("li", {}, button);
  });
}

// Shows a run in the charts, or hides it.
function switchRun(index, button) {
  chosen.hidden = isHidden(index) ? chosen.hidden.filter((other) => other !== index) : [...chosen.hidden, index];
  button.setAttribute("aria-pressed", !isHidden(index));
  zoomTo(chosen.range);
}

// Returns how far a time is from a prediction.
function difference(measured, predicted) {
  const share = (measured / predicted - 1) * 100;
  return `${milliseconds(predicted)} (measured ${share < 0 ? "\u2212" : "+"}${Math.abs(share).toFixed(1)}\u00a0%)`;
}

// Returns the share of a run's time that was spent on steps that count, and what restarts and growths took.
function goodputWords({ share, paused_s, restarts, growths }) {
  const count = (number, what) => number ? [`${number} ${what}${number === 1 ? "" : "s"}`] : [];
  const pauses = [...count(restarts, "restart"), ...count(growths, "growth")].join(" and ");
  if (share === null) return `not known after ${pauses}`;
  return percent(share) + (pauses ? `, ${pauses} took ${elapsed(paused_s)}` : "");
}

function figureRows() {
  const format = (value, text) => value === null || value === undefined ? null : text(value), loss = (value) => value.toFixed(4);
  const best = (found) => `${loss(found.loss)} (step ${grouped(found.step)})`;
  return [
    ["steps", ({ steps }) => grouped(steps)],
    ["first loss", ({ first_loss }) => format(first_loss, loss)],
    ["best loss", ({ best_loss }) => format(best_loss, best)],
    ["last loss", ({ last_loss }) => format(last_loss, loss)],
    ["best validation loss", ({ best_validation_loss }) => format(best_validation_loss, best)],
    ["last validation loss", ({ validation_loss }) => format(validation_loss, loss)],
    ["last validation perplexity", ({ validation_perplexity }) => format(validation_perplexity, (value) => significant(value, 4))],
    ["last validation accuracy", ({ validation_accuracy }) => format(validation_accuracy, percent)],
    [counted, ({ tokens }) => format(tokens, grouped)],
    ["time", ({ seconds }) => format(seconds, elapsed)],
    ["goodput (share of the time on steps that count)", ({ goodput }) => format(goodput, goodputWords)],
    [`${counted} per second, median`, ({ tokens_per_second }) => format(tokens_per_second, grouped)],
    ["rate of computation, median", ({ model_tflops }) => format(model_tflops, operations)],
    ["MFU, median", ({ mfu }) => format(mfu, percent)],
    ["whole step, median", ({ step_ms }) => format(step_ms, milliseconds)],
    ["whole step, planned", ({ step_ms, planned_step_ms }) => format(planned_step_ms, (value) => difference(step_ms, value))],
    ["whole step, predicted", ({ step_ms, predicted_step_ms }) => format(predicted_step_ms, (value) => difference(step_ms, value))],
    ["bubble, median", ({ bubble }) => format(bubble, percent)],
    ["only communication, median", ({ exposed }) => format(exposed, percent)],
    ["exchange of experts, median", ({ expert_exchange_ms }) => format(expert_exchange_ms, milliseconds)],
    ["exchange of experts, not hidden", ({ exposed_expert_exchange_ms }) => format(exposed_expert_exchange_ms, milliseconds)],
    ["wait for other replicas of experts, median", ({ expert_wait_ms }) => format(expert_wait_ms, milliseconds)],
    ["gap between two steps, median", ({ gap_ms }) => format(gap_ms, milliseconds)],
    ["steps that repaired an early update", ({ repaired }) => format(repaired, ([count, all]) => `${grouped(count)} of ${grouped(all)}`)],
    ["utilisation (without the bubble)", ({ bubble }) => format(bubble, (share) => percent(1 - share))],
    ["memory, largest rank", ({ peak_bytes }) => peak_bytes.some((held) => held > 0) ? bytes(Math.max(...peak_bytes)) : null],
  ];
}

// Shows the settings that differ between the runs, then their figures.
function showFigures() {
  const head = element("tr", {}, element("td", {}), ...runs.map(({ name }) => element("th", { scope: "col" }, name)));
  const figures = figureRows().map(([name, text]) => [name, runs.map(({ figures }) => text(figures))]);
  const setting = (value) => value === null || typeof value === "string" ? value : JSON.stringify(value);
  const rows = [...data.differences.map(({ key, values }) => [element("code", {}, key), values.map(setting)]), ...figures];
  document.getElementById("figures").classList.toggle("single", runs.length === 1);
  const present = rows.filter(([, texts]) => texts.some((text) => text !== null));
  document.getElementById("figures").replaceChildren(element("thead", {}, head),
    element("tbody", {}, ...present.map(([name, texts]) => element("tr", {}, rowHead(name), ...texts.map((text) => cell(text ?? "\u2013", false))))));
}

// Returns for each rank that a run ever had whether it was in all its steps, and if not, in which, in words. Another number
// of ranks comes from a run that was resumed with another cut.
function presenceOf({ steps, bubble, memory }) {
  const series = bubble.length >= memory.length ? bubble : memory, known = steps.map((_, at) => at).filter((at) => series.some(({ mean }) => mean[at] !== null));
  return series.map(({ mean }) => {
    const own = known.filter((at) => mean[at] !== null), [first, last] = [own[0], own.at(-1)], words = [];
    if (first !== known[0]) words.push(`from step ${grouped(steps[first])}`);
    if (last !== known.at(-1)) words.push(`until step ${grouped(steps[last])}`);
    return words.join(" ");
  });
}

// Returns rows for the ranks without a value: those that the run has lost, and those that only another run has.
function absentRows(run, from, most) {
  const presence = presenceOf(run), rows = [];
  for (let rank = from; rank < Math.max(presence.length, most); ) {
    const words = rank < presence.length ? `only ${presence[rank] || "in some steps"}` : "not in this run";
    let end = rank + 1;
    while (end < Math.max(presence.length, most) && (end < presence.length) === (rank < presence.length) && presence[end] === presence[rank]) end++;
    const name = end === rank + 1 ? `rank ${rank}` : `ranks ${rank} to ${end - 1}`;
    rows.push(element("tr", { className: "absent" }, rowHead(name), element("td", { colSpan: 2 }, words)));
    rank = end;
  }
  return rows;
}

// Returns a table with a bar for each rank, and with a note on ranks that were not there.
function rankTable(run, title, values, text, most) {
  const bar = (value) => {
    const made = element("i", {});
    made.style.width = 100 * value / (most || 1) + "%";
    return element("td", { className: "bar" }, made);
  };
  const presence = presenceOf(run), name = (rank) => `rank ${rank}${presence[rank] ? ", " + presence[rank] : ""}`;
  const rows = values.map((value, rank) => element("tr", {}, rowHead(name(rank)), cell(text(value)), bar(value)));
  const absent = absentRows(run, values.length, Math.max(...runs.map(({ bubble, memory }) => Math.max(bubble.length, memory.length))));
  return element("div", {}, element("table", {}, element("caption", {}, title), element("tbody", {}, ...rows, ...absent)));
}

// Draws the bubble of each rank over the steps: a row for each rank, the darker the more idle.
function heatMap(run) {
  const height = Math.min(Math.max(run.bubble.length * 16, 32), 320), canvas = element("canvas", { width: run.steps.length, height: run.bubble.length });
  canvas.style.height = height + "px";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Bubble of each rank over the steps");
  const paint = canvas.getContext("2d"), most = Math.max(...run.bubble.flatMap(({ mean }) => mean.filter((value) => value !== null)), 0.01);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(isPrinting ? `--${name}-on-paper` : `--${name}`);
  const [ink, absent] = [colour("bar"), colour("rule")], isKnown = (at) => run.bubble.some(({ mean }) => mean[at] !== null);
  let hasAbsent = false;
  run.bubble.forEach(({ mean }, rank) => mean.forEach((value, at) => {
    if (value === null && !isKnown(at)) return;
    hasAbsent ||= value === null;
    paint.globalAlpha = value === null ? 1 : value / most;
    paint.fillStyle = value === null ? absent : ink;
    paint.fillRect(at, rank, 1, 1);
  }));
  const grey = hasAbsent ? " Grey: the run had fewer ranks." : "";
  const words = `Bubble of each rank, from rank 0 at the top, over the steps. Empty: 0 %, full colour: ${percent(most)}.${grey}`;
  return element("div", { className: "heat" }, element("p", {}, words), canvas);
}

function showRanks() {
  document.getElementById("ranks").replaceChildren(...runs.map((run) => {
    const { utilisation, peak_bytes } = run.figures;
    return element("div", { className: "run-ranks" }, element("h3", {}, run.name),
      utilisation.length ? rankTable(run, "utilisation, median over the steps", utilisation, percent, 1) : null,
      peak_bytes.some((held) => held > 0) ? rankTable(run, "most memory", peak_bytes, bytes, Math.max(...peak_bytes)) : null,
      run.bubble.length ? heatMap(run) : null);
  }));
}

// Lists the events of each run, such as restarts.
function showEvents() {
  const section = document.getElementById("events"), disturbed = runs.filter(({ events }) => events.length);
  section.hidden = !disturbed.length;
  section.lastElementChild.replaceChildren(...disturbed.map(({ name, events }) => {
    const rows = events.map(({ step, text }) => element("tr", {}, rowHead(`step ${grouped(step)}`), cell(text, false)));
    return element("div", {}, element("h3", {}, name), element("table", {}, element("tbody", {}, ...rows)));
  }));
}

// Lists the texts by which each run continued its prompts, the latest ones first.
function showSamples() {
  const section = document.getElementById("samples"), sampled = runs.filter(({ samples }) => samples.length);
  section.hidden = !sampled.length;
  section.lastElementChild.replaceChildren(...sampled.map(({ name, samples }) => {
    const rows = samples.toReversed().flatMap(([step, texts]) => texts.map(({ prompt, text }) =>
      element("tr", {}, rowHead(`step ${grouped(step)}`), cell(prompt, false), cell(text, false))));
    return element("div", {}, element("h3", {}, name), element("table", {}, element("tbody", {}, ...rows)));
  }));
}

function showTimelines() {
  document.getElementById("timelines").replaceChildren(...runs.map(({ name, links }) => {
    const files = links.timelines.map(([step, href]) => element("a", { href, download: "" }, `step ${grouped(step)}`));
    const view = links.view ? element("p", {}, element("a", { href: links.view }, "predicted and measured timelines"), " in this browser") : null;
    return element("div", {}, element("h3", {}, name), view,
      element("p", {}, links.view ? "To make this page again: " : "To see and explain them in a browser: ", element("code", {}, links.command)),
      files.length ? element("p", {}, "For Perfetto: ", ...files) : element("p", {}, "The run has not written a timeline yet."));
  }));
}

// Shows each configuration as a whole.
function showConfig() {
  document.getElementById("config").replaceChildren(...runs.map(({ name, config }) =>
    element("details", { open: runs.length === 1 }, element("summary", {}, name), element("pre", {}, config || "The run has no configuration."))));
}
