// Handles the reader's input: wheel, pointers, keys, buttons.

const tip = document.getElementById("tip"), memoryBox = document.getElementById("memory");
const pointers = new Map(), tapTravel = 4;
let travelled = 0;
// Functions that run at a click or a tap on a point of the plot, and functions that add text to the tip of a point.
const onTap = [], describers = [];
// Functions that run while the reader drags over a range with the Shift key, with the points of its corners.
const onRange = [];
let rangeFrom = null;

const inPlot = (event) => [event.offsetX - gutter, event.offsetY - axisHeight];

// The wheel scrolls and, with Ctrl, zooms. The page scrolls if the plot cannot.
function onWheel(wheel) {
  const unit = wheel.deltaMode === WheelEvent.DOM_DELTA_LINE ? 20 : 1, [x, y] = inPlot(wheel);
  let [across, down] = [wheel.deltaX * unit, wheel.deltaY * unit];
  if (wheel.ctrlKey || wheel.metaKey) {
    wheel.preventDefault();
    // A pinch on a touch pad arrives as small steps.
    zoomBy(Math.exp(-down * (Math.abs(down) < 50 ? 0.01 : 0.003)), x, y);
    return requestDraw();
  }
  if (across === 0 && (wheel.shiftKey || !canScrollDown())) [across, down] = [down, 0];
  if (panBy(across, down)) {
    wheel.preventDefault();
    hideTip();
    requestDraw();
  }
}

// Returns the middle of the pressed pointers, and their mean distance from it.
function grip() {
  const all = [...pointers.values()], mean = (at) => all.reduce((sum, point) => sum + point[at], 0) / all.length;
  const [x, y] = [mean(0), mean(1)];
  return { x, y, spread: all.reduce((sum, point) => sum + Math.hypot(point[0] - x, point[1] - y), 0) / all.length };
}

function onPointerDown(event) {
  if (event.button !== 0) return;
  if (pointers.size === 0) travelled = 0;
  pointers.set(event.pointerId, inPlot(event));
  rangeFrom = event.shiftKey && onRange.length && pointers.size === 1 ? inPlot(event) : null;
  plot.setPointerCapture(event.pointerId);
  plot.classList.add("moving");
  hideTip();
}

// One pointer drags. Two pointers zoom by their distance, and drag by their middle.
function onPointerMove(event) {
  if (!pointers.has(event.pointerId)) return event.pointerType === "touch" ? undefined : showTip(event);
  const before = grip();
  pointers.set(event.pointerId, inPlot(event));
  const after = grip();
  travelled += Math.hypot(after.x - before.x, after.y - before.y);
  if (rangeFrom) {
    if (travelled >= tapTravel) onRange.forEach((use) => use(rangeFrom, inPlot(event)));
    return requestDraw();
  }
  if (pointers.size > 1 && before.spread > 0 && after.spread > 0) zoomBy(after.spread / before.spread, before.x, before.y);
  panBy(before.x - after.x, before.y - after.y);
  requestDraw();
}

function onPointerUp(event) {
  const isTap = pointers.size === 1 && travelled < tapTravel && event.type === "pointerup";
  pointers.delete(event.pointerId);
  if (pointers.size === 0) plot.classList.remove("moving");
  if (isTap && event.pointerType === "touch") showTip(event);
  if (isTap) onTap.forEach((use) => use(found(inPlot(event))));
}

const keys = {
  ArrowLeft: () => panBy(-plotWidth() / 10, 0),
  ArrowRight: () => panBy(plotWidth() / 10, 0),
  ArrowUp: () => panBy(0, -plotHeight() / 10),
  ArrowDown: () => panBy(0, plotHeight() / 10),
  "+": () => { zoomMiddle(1.5); return true; },
  "=": () => { zoomMiddle(1.5); return true; },
  "-": () => { zoomMiddle(1 / 1.5); return true; },
  0: () => { fit(); return true; },
};

// Zooms around the middle, or around the point that `anchorOf` returns.
let anchorOf = () => [plotWidth() / 2, plotHeight() / 2];
const zoomMiddle = (factor) => zoomBy(factor, ...anchorOf());

function onKey(event) {
  const isTyping = event.target instanceof Element && event.target.matches("[type=search], [type=number], [type=range], select");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
  if (!keys[event.key]()) return;
  event.preventDefault();
  hideTip();
  requestDraw();
}

// Returns the rank at a point of the plot, and the event with its part at that point.
function found([x, y]) {
  const index = Math.floor(rankAt(y)), rank = ranks[index], time = timeAt(x);
  if (!rank || x < 0 || x > plotWidth() || y < 0) return null;
  const { top, bottom } = rowOf(index), place = { index, rank, time };
  if (y > bottom) return place;
  const isInBars = y > bottom - Math.max(Math.min((bottom - top) / 5, 6), 1);
  const bar = isInBars ? eventAt(rank.bars, time, rank.longestBar) : -1;
  const [events, at] = bar >= 0 ? [rank.bars, bar] : [rank.cells, eventAt(rank.cells, time, 0)];
  if (at < 0) return place;
  const parts = partsOf(rank, events, at), part = parts[Math.min(Math.floor((y - top) / (bottom - top) * parts.length), parts.length - 1)];
  return { ...place, events, at, parts, part };
}

// Returns the place of the event that runs at a time, or -1. No event is longer than `longest`, if that is not 0.
function eventAt(events, time, longest) {
  for (let at = Math.max(firstFrom(events.start, time - longest) - 1, 0); at < events.start.length; at++) {
    if (events.start[at] > time) return -1;
    if (time <= events.end[at]) return at;
  }
  return -1;
}

function lightUp(microbatch) {
  if (microbatch === hovered) return;
  hovered = microbatch;
  requestDraw();
}

function describe(place) {
  return [...describeAction(place), ...describeShares(place), ...describers.flatMap((more) => more(place))];
}

function describeAction({ rank, time, events, at, parts }) {
  const held = rank.memory.held[firstFrom(rank.memory.start, time + Number.EPSILON) - 1] ?? 0, limits = rank.source?.step ? ", computed for activations only" : "";
  const holds = "holds " + amount(held) + limits;
  if (!parts) return [`${rank.name}, at ${duration(time)}`, holds];
  const meaning = (part) => data.kinds.find(([name]) => name === part.letter)[1];
  const words = parts.map((part) => `${meaning(part)}: ${placeOfPart(part)}`);
  const [start, sent, end] = [events.start[at], events.sent[at], events.end[at]];
  const waits = sent > start ? [`waits from ${duration(start)} until the message is sent`] : [];
  return [`${nameOf(parts)} on ${rank.name}`, ...words, ...waits, `${duration(sent)} to ${duration(end)}, takes ${duration(end - sent)}`, holds];
}

// Returns the shares of what a column of pixels shows, if cells are too narrow to be seen.
function describeShares({ rank, time }) {
  const pixel = span() / plotWidth() / ratioOf();
  if (!areCellsNarrow(rank, 1 / pixel, Math.max(Math.round(ratioOf()), 1))) return [];
  const from = Math.floor((time - view.left) / pixel) * pixel + view.left, times = timesBetween(rank, from, from + pixel);
  const shown = [...times].filter(([name]) => name === "bubble" || name.length === 1);
  return [`this column of pixels: ${shown.map(([name, time]) => `${name} ${Math.round(100 * time / pixel)}\u00a0%`).join(", ")}`];
}

function showTip(event) {
  const place = found(inPlot(event));
  lightUp(place && place.part && place.part.microbatch >= 0 ? microbatchOf(place.part.microbatch) : null);
  if (!place) { tip.style.display = "none"; return; }
  tip.textContent = describe(place).join("\n");
  tip.style.display = "block";
  tip.style.left = Math.max(Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), 0) + "px";
  tip.style.top = Math.max(Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8), 0) + "px";
}

// The legend explains the dotted lines of receives that wait, if there are any.
function showWaitingInLegend() {
  document.getElementById("waiting").hidden = !ranks.some(({ bars }) => bars.sent.some((sent, at) => sent > bars.start[at]));
}

function hideTip() {
  tip.style.display = "none";
  lightUp(null);
}

// Pressing the overview moves the view to that place.
function onOverview(event) {
  if (event.buttons !== 1) return;
  const share = (event.offsetY - 4) / (overview.clientHeight - 8);
  centreOn((event.offsetX - gutter) / plotWidth() * whole, share * ranks.length);
  requestDraw();
}

function onTheme() {
  readTheme();
  overviewImage = null;
  requestDraw();
}

function afterwards(change) {
  return () => {
    change();
    requestDraw();
  };
}

function listen() {
  plot.addEventListener("wheel", onWheel, { passive: false });
  plot.addEventListener("pointerdown", onPointerDown);
  plot.addEventListener("pointermove", onPointerMove);
  for (const type of ["pointerup", "pointercancel"]) plot.addEventListener(type, onPointerUp);
  plot.addEventListener("pointerleave", () => pointers.size || hideTip());
  plot.addEventListener("dblclick", afterwards(fit));
  for (const type of ["pointerdown", "pointermove"]) overview.addEventListener(type, onOverview);
  addEventListener("keydown", onKey);
  document.getElementById("zoom-in").addEventListener("click", afterwards(() => zoomMiddle(1.5)));
  document.getElementById("zoom-out").addEventListener("click", afterwards(() => zoomMiddle(1 / 1.5)));
  document.getElementById("fit").addEventListener("click", afterwards(fit));
  memoryBox.addEventListener("change", afterwards(() => { view.showsMemory = memoryBox.checked; }));
  isDark.addEventListener("change", onTheme);
  new ResizeObserver(requestDraw).observe(plot);
}

// Memory is shown if it is asked for, or if all ranks have room for it.
view.showsMemory = data.memoryLane || ranks.length * (laneMost + memoryMost) <= plotHeight();
memoryBox.checked = view.showsMemory;
showWaitingInLegend();
listen();
draw();
