
// Draws the selection and the chain of causes on top of the lanes: a frame around the actions of a rank that ran
// without a pause, and a line for each message or sum that leads from one rank to another.

const pathBox = document.getElementById("path");
let selected = null;

const nameOfCell = (lane, at) => nameOf(partsOf(lane, lane.cells, at));

// Returns the chains to draw: that of the selection, or the critical path of each timeline in sight.
function chainsToDraw() {
  if (selected) return [selected.chain];
  return pathBox.checked ? sourcesInSight().map(criticalPath) : [];
}

const edgesOf = (lane) => {
  const { top, bottom } = rowOf(lane.index);
  return { top: axisHeight + top, bottom: axisHeight + bottom, middle: axisHeight + (top + bottom) / 2 };
};

// Draws lines twice: wide in the colour of the page, then narrow in that of the text, so that they show on every fill.
// Frames of their own are drawn faster than as parts of a path.
function strokeTwice(frames, lines, width) {
  for (const [colour, wide] of [[theme.colours.page, width + 2.5], [theme.colours.ink, width]]) {
    paint.strokeStyle = colour;
    paint.lineWidth = wide;
    for (const frame of frames) paint.strokeRect(...frame);
    paint.beginPath();
    for (const [x, y, toX, toY] of lines) {
      paint.moveTo(x, y);
      paint.lineTo(toX, toY);
    }
    paint.stroke();
  }
}

// Adds the marks of a chain to the frames and lines to draw.
function addMarks(chain, frames, lines) {
  const [left, right] = [view.left, view.left + span()];
  for (const { lane, first, last, cause } of runsOf(chain)) {
    if (lane.index === undefined || ranks[lane.index] !== lane) continue;
    const [start, end] = [lane.cells.start[first], lane.cells.end[last]], { top, bottom, middle } = edgesOf(lane);
    if (end >= left && start <= right) {
      const [x, until] = [gutter + Math.max(xOf(start), -4), gutter + Math.min(xOf(end), plotWidth() + 4)];
      frames.push([x + 0.5, top + 1, Math.max(until - x - 1.5, 1), Math.max(bottom - top - 2, 1)]);
    }
    if (!cause.lane || cause.lane === lane || ranks[cause.lane.index] !== cause.lane) continue;
    const made = cause.lane.cells.end[cause.at];
    if (start < left || made > right) continue;
    const from = edgesOf(cause.lane), isDown = from.middle < middle;
    lines.push([gutter + xOf(made) - 0.5, isDown ? from.bottom : from.top, gutter + xOf(start) + 0.5, isDown ? top : bottom]);
  }
}

// Returns the frame of the selection: of an action, a bubble, or a range of some lanes; or none if it is out of sight.
function framesOfSelection() {
  const { lanes, from, to } = selected, shown = lanes.filter((lane) => ranks[lane.index] === lane);
  if (!shown.length) return [];
  const [top, bottom] = [edgesOf(shown[0]).top, edgesOf(shown.at(-1)).bottom];
  return [[gutter + xOf(from), top - 1, Math.max((to - from) / span() * plotWidth(), 2), bottom - top + 2]];
}

overlays.push(() => {
  const chains = chainsToDraw();
  if (!chains.length) return;
  paint.save();
  paint.beginPath();
  paint.rect(gutter, axisHeight, plotWidth(), plotHeight());
  paint.clip();
  const frames = [], lines = [];
  for (const chain of chains) addMarks(chain, frames, lines);
  strokeTwice(frames, lines, 1.5);
  if (selected) {
    paint.setLineDash([5, 3]);
    strokeTwice(framesOfSelection(), [], 2.5);
  }
  paint.restore();
});

// Selects an action of a lane, or the bubble before the action `next`. Nothing ends the selection.
function select(selection) {
  selected = selection;
  showPanel();
  requestDraw();
}

function selectCell(lane, at) {
  select({ lane, lanes: [lane], at, from: lane.cells.start[at], to: lane.cells.end[at], chain: chainTo(lane, at) });
}

function selectBubble(bubble) {
  const { lane, next } = bubble, path = criticalPath(lane.source);
  select({ ...bubble, lanes: [lane], isBubble: true, chain: next >= 0 ? chainTo(lane, next) : path });
}

function selectPlace(place) {
  if (!place) return select(null);
  if (place.at >= 0 && place.events === place.rank.cells) return selectCell(place.rank, place.at);
  const bubble = bubbleAt(place.rank, place.time);
  if (bubble) selectBubble(bubble); else select(null);
}

// The selections before the last two taps.
let beforeTaps = [null, null];

onTap.push((place) => {
  beforeTaps = [beforeTaps[1], selected];
  selectPlace(place);
});

// A double click shows everything, and keeps what was selected before its two clicks.
plot.addEventListener("dblclick", () => select(beforeTaps[0]));

// Moves the view so that a span of a lane can be seen with its surroundings.
function reveal(lane, from, to) {
  const pixels = (to - from) / span() * plotWidth();
  if (pixels < 24) view.zoom *= 24 / Math.max(pixels, 1e-6);
  if (pixels > 0.6 * plotWidth()) view.zoom *= 0.6 * plotWidth() / pixels;
  view.zoom = Math.min(Math.max(view.zoom, 1), zoomMost);
  const isInSight = from >= view.left && to <= view.left + span();
  const y = (lane.index - view.top + 0.5) * rowHeight(), isRowInSight = y > 0 && y < plotHeight();
  centreOn(isInSight ? view.left + span() / 2 : (from + to) / 2, isRowInSight ? view.top + plotHeight() / rowHeight() / 2 : lane.index + 0.5);
}

function goToCell(lane, at) {
  reveal(lane, lane.cells.start[at], lane.cells.end[at]);
  selectCell(lane, at);
}

function goToBubble(bubble) {
  reveal(bubble.lane, bubble.from, bubble.to);
  selectBubble(bubble);
}
