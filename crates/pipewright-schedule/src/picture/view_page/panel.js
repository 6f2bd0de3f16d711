
// The panel that explains the selection, or the whole step if nothing is selected.

const panel = document.getElementById("why");
const mostRuns = 12, mostListed = 5;
const aboutTimes = "Measured and predicted times here are those of the program, which runs the microbatches. The update after it is not part "
  + "of them; the report compares whole steps. If a step accumulates several batches, its last one is shown.";

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}

const paragraph = (text) => element("p", {}, text);
const rankOf = (lane) => `rank ${lane.rank}`;
const goTo = (text, action) => element("button", { type: "button", className: "go", onclick: action }, text);
const cellButton = (lane, at) => goTo(nameOfCell(lane, at), () => goToCell(lane, at));
const inThisStep = (source) => source.step ? " in this step" : "";
const nameOfSource = (source) => source.step ? `step ${source.step}, measured` : source.name;

// Returns why a rank did not start an action earlier, as nodes of a sentence. `free` is when the rank became free.
function sentenceOf(lane, at, cause, free) {
  const { cells } = lane, start = cells.start[at];
  if (cause.via === "start") return ["It is the first action of its rank and needs no message."];
  if (cause.via === "order") return ["It starts as soon as ", cellButton(cause.lane, cause.at), " before it ends."];
  if (cause.via === "delay")
    return ["No message is missing. The runtime or the machine took the time between the actions."];
  const made = cause.lane.cells.end[cause.at], inFlight = start - Math.max(made, free);
  const intro = [`It needs its ${cause.tensor}: the message of `, cellButton(cause.lane, cause.at), ` from ${rankOf(cause.lane)}. `];
  if (made < free) return [...intro, `That action ended at ${time(made)}, and the message arrived at ${time(start)}.`];
  return [...intro, `That action ends at ${time(made)}`, inFlight > 0 ? `; the message takes ${time(inFlight)}.` : "."];
}

// Returns a bar with the share of each kind of action, of messages and of gaps in the time of a chain.
function shareBar(times) {
  const all = [...times.values()].reduce((sum, time) => sum + time, 0) || 1;
  const sort = { F: 0, B: 1, I: 2, W: 3, overlap: 1, messages: 4, "communication at the end": 5 }, bar = element("div", { className: "shares" });
  const list = element("ul", { className: "keys" });
  for (const [name, spent] of [...times].sort((one, other) => other[1] - one[1]).filter(([, spent]) => spent > 0)) {
    const fill = name === "gaps" ? "var(--hatch)" : `var(--fill-${sort[name]}-0)`;
    const piece = element("i", { title: `${name}: ${time(spent)}` });
    piece.style.cssText = `width:${100 * spent / all}%;background:${fill}`;
    bar.append(piece);
    const key = element("i", {});
    key.style.background = fill;
    list.append(element("li", {}, key, `${name} ${time(spent)}, ${percentOf(spent, all)}`));
  }
  return element("div", {}, bar, list);
}

// Returns the chain as a list, from the selection back to the start. Actions of a rank without a pause are one entry.
function chainList(chain) {
  const runs = runsOf(chain), list = element("ol", { className: "chain" });
  const how = { message: "after a message from", delay: "after a pause on", start: "at the start of the step" };
  runs.slice(0, mostRuns).forEach(({ lane, first, last, cause }) => {
    const names = first === last ? [cellButton(lane, first)] : [cellButton(lane, first), " to ", cellButton(lane, last)];
    const source = cause.via === "start" ? "" : ` ${rankOf(cause.lane)}`;
    const count = first === last ? "" : `, ${last - first + 1} actions without a pause`;
    list.append(element("li", {}, element("b", {}, rankOf(lane)), " ", ...names,
      `${count}: ${time(lane.cells.start[first])} to ${time(lane.cells.end[last])}, ${how[cause.via]}${source}`));
  });
  if (runs.length > mostRuns) list.append(element("li", { className: "more" }, `and ${runs.length - mostRuns} more, back to the start of the step`));
  return list;
}

function explainBubble({ lane, next, from, to, chain }) {
  const title = `Bubble of ${time(to - from)} on ${rankOf(lane)}`;
  const nodes = [element("h2", {}, title), element("p", { className: "where" }, `${nameOfSource(lane.source)}: ${time(from)} to ${time(to)}`)];
  if (next < 0) {
    const { lane: last, at } = chain[0];
    const rest = timeAfterLast(lane.source), after = `; the step ends after ${time(rest)} of communication.`;
    nodes.push(element("p", {}, "The rank has no work left. ", rest ? "The last computation is " : "The step ends when ", cellButton(last, at),
      ` on ${rankOf(last)}${rest ? after : " ends."}`));
  } else {
    const cause = chain[0].cause;
    nodes.push(element("p", {}, "The rank waits until it can run ", cellButton(lane, next), ". ", ...sentenceOf(lane, next, cause, from)));
    if (next === 0 && cause.via === "message") nodes.push(paragraph("The pipeline is filling: the first microbatch has to pass the earlier stages."));
  }
  if (next < 0) return [...nodes, ...explainChain(chain, "The critical path of the step", timesOfStep(lane.source))];
  return [...nodes, ...explainChain(chain, "The chain of causes", timesOf(chain))];
}

function explainChain(chain, title, times) {
  return [element("h3", {}, title), shareBar(times), chainList(chain)];
}

function explainCell({ lane, at, from, to, chain }) {
  const parts = partsOf(lane, lane.cells, at), median = medianOf(lane, at);
  const meaning = (part) => `${data.kinds.find(([name]) => name === part.letter)[1]}: ${placeOfPart(part)}`;
  const nodes = [element("h2", {}, `${nameOf(parts)} on ${rankOf(lane)}`),
    element("p", { className: "where" }, `${nameOfSource(lane.source)}: ${time(from)} to ${time(to)}`), ...parts.map(meaning).map(paragraph)];
  const ratio = (to - from) / median, isUnusual = Math.abs(ratio - 1) > 0.02;
  nodes.push(paragraph(`It takes ${time(to - from)}` + (isUnusual ? `, ${ratio.toFixed(2)} times the median of its stage${inThisStep(lane.source)}.` : ", as usual for its stage.")));
  const cause = chain[0].cause, free = freeFrom(lane, at), before = bubbleAt(lane, (free + from) / 2);
  nodes.push(element("p", {}, ...sentenceOf(lane, at, cause, free)));
  if (before && from - free > lane.source.slack)
    nodes.push(element("p", {}, goTo(`The bubble of ${time(from - free)} before it`, () => goToBubble(before))));
  const twin = lane.source !== predictedSource && placesOf(predictedSource)[0].get(partKey(parts[0].letter, parts[0].stage, parts[0].microbatch));
  if (twin) {
    const { start, end } = twin.lane.cells, late = from - start[twin.at];
    nodes.push(paragraph(`Predicted: ${time(start[twin.at])} to ${time(end[twin.at])}. It starts ${time(Math.abs(late))} ${late < 0 ? "earlier" : "later"}.`));
  }
  return [...nodes, ...explainChain(chain, "The chain of causes", timesOf(chain))];
}

function listOf(title, entries, none) {
  const items = entries.map((nodes) => element("li", {}, ...nodes));
  return [element("h3", {}, title), items.length ? element("ol", {}, ...items) : paragraph(none)];
}

// Describes the whole step: where its time goes, and the places to look at first.
function explainStep(source) {
  const bubbles = bubblesOf(source).slice(0, mostListed), slow = slowActions(source).slice(0, mostListed);
  const spends = timeAfterLast(source) ? "It and the communication after it spend their time in:" : "It spends its time in:";
  const bubbleEntry = (bubble) => [goTo(`${time(bubble.to - bubble.from)} on ${rankOf(bubble.lane)}`, () => goToBubble(bubble)), ` from ${time(bubble.from)}`];
  const slowEntry = ({ lane, at, loss }) => [cellButton(lane, at), ` on ${rankOf(lane)}: ${time(loss)} longer than the median of its stage in this step, ${time(medianOf(lane, at))}`];
  return [
    element("h2", {}, `Why it takes ${time(source.end)}`), element("p", { className: "where" }, nameOfSource(source)),
    paragraph(`The critical path is the chain of causes that ends with the last computation. ${spends}`), shareBar(timesOfStep(source)),
    ...listOf("Longest bubbles", bubbles.map(bubbleEntry), "None: every rank computes all the time."),
    ...source.step ? listOf("Slowest against the medians of this step", slow.map(slowEntry), "None takes 1.2 times the median of its stage and kind.") : [],
    ...source.uncertainty ? [paragraph(`The clocks of the processes agree within ${time(source.uncertainty / data.quantum)}.`)] : [],
    paragraph("Click an action or a bubble to see its cause."),
    ...recorded.length ? [element("p", { className: "more" }, aboutTimes)] : [],
  ];
}

function showPanel() {
  const nodes = !selected ? explainStep(mainSource()) : selected.isBubble ? explainBubble(selected) : explainCell(selected);
  if (selected) nodes.unshift(element("button", { type: "button", id: "close", onclick: () => select(null) }, "back to the whole step"));
  panel.replaceChildren(...nodes);
}

// The tip says of a bubble what it waits for.
describers.push((place) => {
  if (place.parts) return [];
  const bubble = bubbleAt(place.rank, place.time);
  if (!bubble) return [];
  const length = `bubble of ${time(bubble.to - bubble.from)}`;
  if (bubble.next < 0) return [`${length}: no work is left`];
  const { lane, next } = bubble, cause = causeOf(lane, next), name = nameOfCell(lane, next);
  if (cause.via !== "message") return [`${length} before ${name}: no message is missing`];
  return [`${length}: ${name} waits for the message of ${nameOfCell(cause.lane, cause.at)} from ${rankOf(cause.lane)}`];
});
