
// The panel that explains the selection, or the whole step if nothing is selected.

const panel = document.getElementById("why");
const mostRuns = 12, mostListed = 5;
const aboutProgram = ["The program of a step", " lasts from its first action to its last one, on all ranks. If a step accumulates several batches, "
  + "its last one is shown. The change in brackets is against the predicted program."];
const aboutStep = ["The time per step", " lasts from the end of a step to the end of the next one, with the sums of gradients and the update: the "
  + "median of the run, which the report calls whole step. The program of a slow step can take longer, also because a rank begins it while others end the "
  + "step before."];
const aboutBubble = ["The bubble", " is the share of the program in which a rank computes nothing, a mean over the ranks."];
const aboutShares = ["Shares below a bar", " are parts of the chain of causes: of one rank after another, not of all ranks. In a range, they are parts of "
  + "the time of its ranks; messages run beside computation and are no part of it."];

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
const nameOfSource = (source) => source.step ? nameOfStep(source) + ", measured" : source.name;

const tookTheTime = " The runtime or the machine took the time before it.";

// Returns a sentence with the longest communication that a rank ran itself in most of a gap; nothing without one.
function ranBetween({ bars, stages }, from, to) {
  const inGap = (at) => Math.min(bars.end[at], to) - Math.max(bars.sent[at], from);
  const longest = bars.start.reduce((best, _, at) => best < 0 || inGap(at) > inGap(best) ? at : best, -1);
  if (longest < 0 || 2 * inGap(longest) < to - from) return "";
  return ` For most of it the rank ran ${nameOf(partsOf({ stages }, bars, longest))}, which took ${time(inGap(longest))}.`;
}

// Returns why a rank did not start an action earlier, as nodes of a sentence. `free` is when the rank became free.
function sentenceOf(lane, at, cause, free) {
  const { cells } = lane, start = cells.start[at];
  if (cause.via === "start") return ["It is the first action of its rank and needs no message." + (start > lane.source.slack ? tookTheTime : "")];
  if (cause.waiting) return sentenceOfWait(cause);
  if (cause.via === "order") return ["It starts as soon as ", cellButton(cause.lane, cause.at), " before it ends."];
  if (cause.via === "delay") return [`No message is missing.${tookTheTime}${ranBetween(lane, free, start)}`];
  const made = cause.lane.cells.end[cause.at], inFlight = start - Math.max(made, free);
  const intro = [`It needs its ${cause.tensor}: the message of `, cellButton(cause.lane, cause.at), ` from ${rankOf(cause.lane)}. `];
  if (cause.inLine) return [...intro, `That action ends at ${time(made)}. ${sentenceOfWaitInLine(cause.inLine)} The message arrives at ${time(start)}.`];
  if (made < free) return [...intro, `That action ended at ${time(made)}, and the message arrived at ${time(start)}.`];
  return [...intro, `That action ends at ${time(made)}`, inFlight > 0 ? `; the message takes ${time(inFlight)}.` : "."];
}

const endName = (name) => (name.includes("RECV") ? "receive " : "send ") + name;

// Returns what blocks a message, as a sentence.
function sentenceOfWaitInLine({ rank, action, behind, until }) {
  return `On rank ${rank}, ${endName(behind)} waits in front of ${action} on the same communicator (head-of-line blocking) until ${time(until)}.`;
}

// Returns the longest waits in line, the longest first.
function longestInLine(source) {
  return [...source.waits].sort((one, other) => other.until - other.from - (one.until - one.from));
}

// Returns what a wait is for, in a few words.
function purposeOfWait({ via, waiting, stage, lane, at }) {
  if (isOfDisk({ via, waiting })) return `for the disk, which reads the base of stage ${stage} from its file`;
  if (via === "gather") return `for the parameters of stage ${stage}`;
  if (via === "sum") return `for the sum of the gradients of stage ${stage} over the replicas`;
  return lane ? `until the message of ${nameOfCell(lane, at)} has left` : "until a message has left";
}

// Returns when a wait ends and why, as nodes of a sentence.
function sentenceOfWait(cause) {
  const { via, waiting, name, lane, at } = cause, { source } = waiting, until = time(cause.until);
  const action = lane ? cellButton(lane, at) : null, ended = lane ? `, which ends at ${time(lane.cells.end[at])}` : "";
  const nodes = [`${via === "gather" ? "It waits" : `The program waits (${name})`} ${via === "send" ? "until the message of " : purposeOfWait(cause)}`];
  if (via === "send") return [...nodes, action ?? "an earlier action", `${ended}, has left. That is at ${until}.`];
  const begins = action ? [" after ", action, ` on ${rankOf(lane)}${ended},`] : [" at the start of the step"];
  if (isOfDisk(cause)) return source.step ? [...nodes, ` until ${until}.`] : [...nodes, ". The read begins", ...begins, ` and ends at ${until}.`];
  const alone = " The other replicas are not in this picture; the prediction assumes that they are as far as this one.";
  if (!source.step) return [...nodes, ". The communication begins", ...begins, ` and ends at ${until}.${alone}`];
  if (!hasReplicas(source)) return [...nodes, ` until ${until}. The other replicas are not in this picture.`];
  if (via === "gather") return [...nodes, ` until ${until}. The other replicas send their shares of them; the recording does not say which one is last.`];
  return [...nodes, `. The last replica begins to add its gradients`, ...begins, ` and the sum is complete at ${until}.`];
}

// Returns a bar with the share of each kind of action, of messages and of gaps in the time of a chain.
function shareBar(times, hasKeys = true) {
  const all = [...times.values()].reduce((sum, time) => sum + time, 0) || 1;
  const sort = { F: 0, B: 1, I: 2, W: 3, overlap: 1, messages: 4, "messages in line": 5, "gather, reduce": 5, disk: 5, "communication at the end": 5, "offload, reload": 6 }, bar = element("div", { className: "shares" });
  const list = element("ul", { className: "keys" });
  for (const [name, spent] of [...times].sort((one, other) => other[1] - one[1]).filter(([, spent]) => spent > 0)) {
    const fill = name === "gaps" || name === "bubble" ? "var(--hatch)" : `var(--fill-${sort[name]}-0)`;
    const piece = element("i", { title: `${name}: ${time(spent)}` });
    piece.style.cssText = `width:${100 * spent / all}%;background:${fill}`;
    bar.append(piece);
    const key = element("i", {});
    key.style.background = fill;
    list.append(element("li", {}, key, `${name} ${time(spent)}, ${percentOf(spent, all)}`));
  }
  return element("div", {}, bar, hasKeys ? list : null);
}

// Returns the chain as a list, from the selection back to the start. Actions of a rank without a pause are one entry.
function chainList(chain) {
  const runs = runsOf(chain), list = element("ol", { className: "chain" });
  const how = { message: "after a message from", queue: "after a message that waited in line, from", delay: "after a pause on", start: "at the start of the step",
    gather: "after parameters were gathered on", sum: "after gradients were summed over the replicas, at last those of", send: "after a message left" };
  runs.slice(0, mostRuns).forEach(({ lane, first, last, cause }) => {
    const names = first === last ? [cellButton(lane, first)] : [cellButton(lane, first), " to ", cellButton(lane, last)];
    const source = cause.via === "start" ? "" : ` ${rankOf(cause.lane ?? cause.waiting)}`;
    const after = isOfDisk(cause) ? "after the disk had read a base on" : how[cause.via];
    const count = first === last ? "" : `, ${last - first + 1} actions without a pause`;
    list.append(element("li", {}, element("b", {}, rankOf(lane)), " ", ...names,
      `${count}: ${time(lane.cells.start[first])} to ${time(lane.cells.end[last])}, ${after}${source}`));
  });
  if (runs.length > mostRuns) list.append(element("li", { className: "more" }, `and ${runs.length - mostRuns} more, back to the start of the step`));
  return list;
}

// Returns when the step ends and why, as nodes of a sentence.
function sentenceOfEnd(source) {
  const { lane, at, cause } = endOfStep(source), rest = timeAfterLast(source);
  if (cause) return [`The step ends with a wait of ${rankOf(cause.waiting)}. `, ...sentenceOfWait(cause)];
  if (!rest) return ["The step ends when ", cellButton(lane, at), ` on ${rankOf(lane)} ends.`];
  return ["The last computation is ", cellButton(lane, at), ` on ${rankOf(lane)}; the step ends after ${time(rest)} of communication.`];
}

function explainBubble({ lane, next, from, to, chain }) {
  const title = `Bubble of ${time(to - from)} on ${rankOf(lane)}`;
  const nodes = [element("h2", {}, title), element("p", { className: "where" }, `${nameOfSource(lane.source)}: ${time(from)} to ${time(to)}`)];
  if (next < 0) {
    const { wait, isLast } = waitAtEnd(lane);
    if (wait) nodes.push(element("p", {}, "The rank has computed all its actions. ", ...sentenceOfWait(wait)));
    nodes.push(element("p", {}, ...isLast ? ["The step ends then."] : ["The rank has no work left. ", ...sentenceOfEnd(lane.source)]));
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
  const twin = lane.source !== predictedSource && cellOf(predictedSource, parts[0]);
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
  const lineEntry = ({ rank, action, behind, from, until }) => [`${time(until - from)} on rank ${rank}: ${endName(behind)} in front of ${action}, until ${time(until)}`];
  return [
    element("h2", {}, `Why it takes ${time(source.end)}`), element("p", { className: "where" }, nameOfSource(source)),
    paragraph(`The critical path is the chain of causes that ends with the step. ${spends}`), shareBar(timesOfStep(source)),
    ...listOf("Longest bubbles", bubbles.map(bubbleEntry), "None: every rank computes all the time."),
    ...source.step ? listOf("Slowest against the medians of this step", slow.map(slowEntry), "None takes 1.2 times the median of its stage and kind.") : [],
    ...source.waits?.length ? listOf("Longest waits in line (head-of-line blocking)", longestInLine(source).slice(0, mostListed).map(lineEntry), "") : [],
    ...source.uncertainty ? [paragraph(`The clocks of the processes agree within ${time(source.uncertainty / data.quantum)}.`)] : [],
    paragraph("Click an action or a bubble to see its cause. Drag with the Shift key to sum up a range."),
    ...aboutFigures(),
  ];
}

// Says what the times of the page are, and of what each percentage is a part.
function aboutFigures() {
  const about = [...recorded.length ? [aboutProgram] : [], ...data.view.wholeStep ? [aboutStep] : [], aboutBubble, aboutShares];
  const items = about.map(([name, text]) => element("li", {}, element("b", {}, name), text));
  return [element("h3", {}, "What the figures are of"), element("ul", { className: "about" }, ...items)];
}

function showPanel() {
  const explain = !selected ? null : selected.isRange ? explainRange : selected.isBubble ? explainBubble : explainCell;
  const nodes = explain ? explain(selected) : explainStep(mainSource());
  if (selected) nodes.unshift(element("button", { type: "button", id: "close", onclick: () => select(null) }, "back to the whole step"));
  panel.replaceChildren(...nodes);
}

// Returns what the rank waits for in a bubble, in a few words.
function reasonOf({ lane, next }) {
  if (next < 0) {
    const { wait, isLast } = waitAtEnd(lane), { lane: last, at, cause } = endOfStep(lane.source);
    const own = wait ? `it waits ${purposeOfWait(wait)}` : "no work is left", end = cause ? `${rankOf(cause.waiting)} has waited ${purposeOfWait(cause)}` : `${nameOfCell(last, at)} on ${rankOf(last)} ends`;
    return `: ${own}; the step ends ${isLast ? "then" : `when ${end}`}`;
  }
  const cause = causeOf(lane, next), name = nameOfCell(lane, next);
  if (cause.inLine) return `: ${name} waits for the message of ${nameOfCell(cause.lane, cause.at)} from ${rankOf(cause.lane)}; ${endName(cause.inLine.behind)} waits in front of ${cause.inLine.action} on the same communicator`;
  if (cause.via === "message") return `: ${name} waits for the message of ${nameOfCell(cause.lane, cause.at)} from ${rankOf(cause.lane)}`;
  return cause.waiting ? ` before ${name}: it waits ${purposeOfWait(cause)}` : ` before ${name}: no message is missing, the runtime or the machine took the time`;
}

// The tip says of a bubble what it waited for.
describers.push((place) => {
  const bubble = place.parts ? null : bubbleAt(place.rank, place.time);
  return bubble ? [`bubble of ${time(bubble.to - bubble.from)}${reasonOf(bubble)}`] : [];
});
