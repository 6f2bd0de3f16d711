
// The timelines that the page can show: the prediction, the recorded steps, and the simulation of the what-if panel.
// Each has one lane for each rank. All start with their first action and share one scale.

const pipelineRanks = data.view.ranks, recorded = data.view.steps;
const shown = { predicted: true, measured: recorded.length > 0, "what if": false };
const readSteps = new Map();
const isNarrow = matchMedia("(max-width: 1099px)");
// Several steps on one time axis come last; the page opens with a single step, which the prediction is of.
let whatIfSource = null, stepAt = recorded.findLastIndex(({ before }) => !before);

// Names the lanes of a timeline. Its `end` is that of its last action, which may be a wait after the last computation.
function completeSource(source) {
  source.lanes.forEach((lane, rank) => {
    Object.assign(lane, { source, rank, name: "rank " + rank, tag: source.name, replica: Math.floor(rank / pipelineRanks) });
  });
  return source;
}

function readSource(name, { step, before, quantum, makespan, uncertainty, waits, causes, ranks }) {
  const scale = quantum / data.quantum, end = makespan / data.quantum;
  const inQuanta = ([rank, action, behind, from, until]) => ({ rank, action, behind, from: from / data.quantum, until: until / data.quantum });
  const source = { name, step, before, uncertainty, end, waits: waits.map(inQuanta), lanes: findSends(ranks.map((rank, index) => readRank(rank, index, scale))) };
  return readCauses(completeSource(source), causes);
}

// Returns the name of a recorded step, or of several on one time axis.
const nameOfStep = ({ step, before }) => before ? `steps ${step - before} to ${step}` : `step ${step}`;

const predictedSource = readSource("predicted", data.view.predicted);
whole = predictedSource.end || 1;

// Returns the timeline of the step that the slider shows. A page may have many steps, so each is read when it is shown.
function measuredSource() {
  if (stepAt < 0) return null;
  if (!readSteps.has(stepAt)) readSteps.set(stepAt, readSource("measured", recorded[stepAt]));
  return readSteps.get(stepAt);
}

function sourcesInSight() {
  const all = [shown.measured && measuredSource(), shown.predicted && predictedSource, shown["what if"] && whatIfSource];
  return all.filter(Boolean);
}

// The timeline that the panel describes if nothing is selected.
const mainSource = () => sourcesInSight()[0] ?? predictedSource;

// Puts the lanes of the shown timelines below each other: all lanes of rank 0, then all of rank 1. Replicas of a
// pipeline have the same prediction, which is shown for the first one only.
function showSources() {
  const sources = sourcesInSight(), count = Math.max(...sources.map(({ lanes }) => lanes.length), 0);
  const seen = view.zoom > 1 ? { from: view.left, to: view.left + span() } : null;
  ranks = Array.from({ length: count }, (_, rank) => sources.map(({ lanes }) => lanes[rank])).flat().filter(Boolean);
  // A letter in front of the names tells the timelines apart where rows are too low for the tag; the legend explains it.
  ranks.forEach((lane, index) => Object.assign(lane, { index, letter: sources.length > 1 ? lane.tag[0] : "" }));
  document.getElementById("letters").textContent = sources.length > 1 ? sources.map(({ name }) => `${name[0]}: ${name}`).join(", ") : "";
  whole = Math.max(...sources.map(({ end }) => end), 0) || 1;
  peak = ranks.reduce((most, lane) => Math.max(most, lane.peak), 1);
  overviewImage = null;
  showWaitingInLegend();
  // On a narrow page the explanation is below the plot, which then is only as high as its lanes.
  const lanes = axisHeight + ranks.length * (laneMost + memoryMost) + 8;
  plot.style.height = isNarrow.matches ? Math.min(Math.max(lanes, 260), Math.max(innerHeight * 0.6, 260)) + "px" : "";
  if (seen) [view.zoom, view.left] = [whole / (seen.to - seen.from), seen.from];
  clampView();
  requestDraw();
}

// Draws a line above the first lane of each rank, if ranks have several lanes.
overlays.push((indices) => {
  if (sourcesInSight().length < 2 || rowHeight() < 8) return;
  paint.fillStyle = theme.colours.rule;
  for (const index of indices)
    if (index > 0 && ranks[index].rank !== ranks[index - 1].rank) paint.fillRect(8, Math.round(axisHeight + rowOf(index).top) - 2, plot.clientWidth - 16, 1);
});

const percentOf = (part, all) => (all > 0 ? 100 * part / all : 0).toFixed(1) + "\u00a0%";

// Returns the share of a timeline in which its ranks do not compute, from its start to its end.
function bubbleShare(source) {
  const sums = source.lanes.map(({ cells }) => cells.start.reduce((sum, start, at) => sum + cells.end[at] - start, 0));
  return 1 - sums.reduce((sum, busy) => sum + busy, 0) / (source.end * source.lanes.length || 1);
}

// Returns the time from the end of a step to the end of the next, as the report has it; nothing for a schedule. The program of
// a step may take longer, because ranks begin a step while others end the one before.
function wholeStepItem() {
  const { wholeStep } = data.view;
  if (!wholeStep) return null;
  const item = document.createElement("li"), name = document.createElement("b");
  name.textContent = "time per step";
  const timeOf = (seconds) => time(seconds / data.quantum);
  const predicted = wholeStep.predicted === null ? "" : `, predicted ${timeOf(wholeStep.predicted)}`;
  item.append(name, ` ${timeOf(wholeStep.measured)}, median${predicted}`);
  return item;
}

// Shows the times and bubbles of all timelines in the header.
function showFigures() {
  const list = document.getElementById("figures"), measured = measuredSource();
  const difference = (source) => {
    const change = (source.end / predictedSource.end - 1) * 100;
    return source === predictedSource || source.before ? "" : ` (${change < 0 ? "\u2212" : "+"}${Math.abs(change).toFixed(1)}\u00a0%)`;
  };
  const items = [predictedSource, measured, whatIfSource].filter(Boolean).map((source) => {
    const item = document.createElement("li"), name = document.createElement("b"), own = source.step ? nameOfStep(source) : source.name;
    // A recorded run also has the time per step, so these are called those of the program.
    name.textContent = data.view.wholeStep ? `program of ${source.step ? own : "a step, " + own}` : own;
    item.append(name, ` ${time(source.end)}${difference(source)}, bubble ${percentOf(bubbleShare(source), 1)}`);
    return item;
  });
  list.replaceChildren(...[wholeStepItem(), ...items].filter(Boolean));
}

// Formats a time for people, with four digits in the unit that suits it.
function time(quanta) {
  const size = quanta * data.quantum, [factor, unit] = unitOf(Math.abs(size));
  return `${+(size * factor).toPrecision(4)} ${unit}`.trim();
}
