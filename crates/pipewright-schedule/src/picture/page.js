"use strict";
const data = "{{data}}";
const plot = document.getElementById("plot"), tip = document.getElementById("tip");
const paint = plot.getContext("2d");
const left = 70, right = 20, axis = 30, laneHeight = 34, memoryHeight = 30, gap = 6;
const overlap = data.kinds.findIndex((kind) => kind[0] === "OVERLAP_F_B");
const isCompute = (kind) => kind < 4 || kind === overlap;
const whole = [data.start, data.start + (data.makespan || 1)];
let view = whole.slice(), showsMemory = true, hovered = null, dragged = null;

for (const rank of data.ranks) {
  rank.compute = rank.events.filter((event) => isCompute(event[0]));
  rank.beside = rank.events.filter((event) => !isCompute(event[0]) && event[2] > event[1]);
  rank.longest = rank.beside.reduce((most, event) => Math.max(most, event[2] - event[1]), 0);
  rank.peak = rank.memory.reduce((most, step) => Math.max(most, step[1]), 0);
}
const peak = data.ranks.reduce((most, rank) => Math.max(most, rank.peak), 1);

function hatch() {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const ink = tile.getContext("2d");
  ink.fillStyle = data.bubble[0];
  ink.fillRect(0, 0, 8, 8);
  ink.strokeStyle = data.bubble[1];
  ink.lineWidth = 1.2;
  for (const at of [-8, 0, 8]) { ink.moveTo(at, 8); ink.lineTo(at + 8, 0); }
  ink.stroke();
  return paint.createPattern(tile, "repeat");
}
const bubble = hatch();

const font = (size) => size + "px system-ui, 'DejaVu Sans', sans-serif";
const laneOf = () => laneHeight + (showsMemory ? memoryHeight : 0) + gap;
const topOf = (rank) => axis + rank * laneOf();
const width = () => plot.clientWidth - left - right;
const x = (time) => left + (time - view[0]) / (view[1] - view[0]) * width();
const timeAt = (pixel) => view[0] + (pixel - left) / width() * (view[1] - view[0]);

function duration(seconds, longest) {
  const [factor, unit] = longest >= 1 ? [1, "s"] : longest >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
  return +(seconds * factor).toPrecision(6) + " " + unit;
}

function amount(held) {
  if (data.unit !== "bytes") return held + " activation" + (held === 1 ? "" : "s");
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (held >= size) return (held / size).toFixed(2) + " " + unit;
  return held + " B";
}

function name(event) {
  const kind = data.kinds[event[0]][0];
  if (event[0] === overlap) return `(${event[3]}F${event[4]};${event[5]}B${event[6]})${kind}`;
  return event[3] + kind + (event[4] < 0 ? "" : event[4]);
}

// The stages and microbatches that an event computes, each with how it looks.
function parts(event) {
  if (event[0] !== overlap) return [[data.kinds[event[0]], event[3], event[4]]];
  return [[data.kinds[0], event[3], event[4]], [data.kinds[3], event[5], event[6]]];
}

// The first event, of a list sorted by starts, that starts at or after a time.
function firstFrom(events, time) {
  let low = 0, high = events.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (events[middle][1] < time) low = middle + 1; else high = middle;
  }
  return low;
}

function drawCell(event, top) {
  const from = Math.max(x(event[1]), left), to = Math.min(x(event[2]), left + width());
  const all = parts(event), height = laneHeight / all.length;
  all.forEach(([look, stage, microbatch], place) => {
    const y = top + place * height, lit = hovered === null || hovered === microbatch;
    if (!lit) {
      paint.fillStyle = "#fff";
      paint.fillRect(from, y, Math.max(to - from, 0.6), height);
    }
    paint.globalAlpha = lit ? 1 : 0.3;
    paint.fillStyle = look[2];
    paint.fillRect(from, y, Math.max(to - from - (to - from > 3 ? 0.8 : 0), 0.6), height - 0.8);
    const texts = [[stage + look[0] + microbatch, 11], [stage + look[0] + microbatch, 9], ["" + microbatch, 9]];
    const fitting = texts.find(([text, size]) => text.length * size * 0.61 + 4 < to - from);
    if (fitting && height > 11) {
      const [text, size] = fitting;
      paint.font = font(size);
      paint.fillStyle = look[3];
      paint.fillText(text, (from + to) / 2, y + height / 2);
      paint.font = font(11);
    }
  });
  paint.globalAlpha = 1;
}

function drawLane(rank, index) {
  const top = topOf(index);
  paint.fillStyle = bubble;
  const from = Math.max(x(whole[0]), left), to = Math.min(x(whole[1]), left + width());
  if (to > from) paint.fillRect(from, top, to - from, laneHeight);
  paint.textAlign = "center";
  for (let at = Math.max(firstFrom(rank.compute, view[0]) - 1, 0); at < rank.compute.length; at++) {
    const event = rank.compute[at];
    if (event[1] > view[1]) break;
    if (event[2] >= view[0]) drawCell(event, top);
  }
  for (let at = firstFrom(rank.beside, view[0] - rank.longest); at < rank.beside.length; at++) {
    const event = rank.beside[at];
    if (event[1] > view[1]) break;
    if (event[2] < view[0]) continue;
    const begin = Math.max(x(event[1]), left), end = Math.min(x(event[2]), left + width());
    paint.fillStyle = data.kinds[event[0]][2];
    paint.fillRect(begin, top + laneHeight - 6, Math.max(end - begin, 0.6), 5);
  }
  paint.fillStyle = "#343a40";
  paint.textAlign = "right";
  paint.fillText("rank " + index, left - 10, top + laneHeight / 2);
  if (showsMemory) drawMemory(rank, top + laneHeight + 2, memoryHeight - 4);
}

function drawMemory(rank, top, height) {
  const y = (held) => top + height - held / peak * height;
  let at = x(whole[0]), held = 0;
  paint.beginPath();
  paint.moveTo(Math.max(at, left), y(0));
  for (const [time, next] of rank.memory.concat([[whole[1], 0]])) {
    at = Math.min(Math.max(x(time), left), left + width());
    paint.lineTo(at, y(held));
    paint.lineTo(at, y(next));
    held = next;
  }
  paint.closePath();
  paint.fillStyle = "#dcd3ea";
  paint.fill();
  paint.strokeStyle = "#6a4c93";
  paint.lineWidth = 1;
  paint.stroke();
  paint.fillStyle = "#6a4c93";
  paint.textAlign = "right";
  paint.fillText(data.unit === "bytes" ? amount(rank.peak) : rank.peak + " act.", left - 10, top + height / 2);
}

function drawAxis(bottom) {
  const span = view[1] - view[0], power = 10 ** Math.floor(Math.log10(span / 12));
  const step = [1, 2, 5, 10].map((times) => times * power).find((step) => span / step <= 12);
  paint.strokeStyle = "#e9ecef";
  paint.fillStyle = "#495057";
  paint.textAlign = "center";
  paint.beginPath();
  for (let mark = Math.ceil((view[0] - whole[0]) / step); whole[0] + mark * step <= view[1] + 1e-12; mark++) {
    const at = x(whole[0] + mark * step);
    paint.moveTo(at, axis - 6);
    paint.lineTo(at, bottom);
    paint.fillText(duration(mark * step, data.makespan), at, 13);
  }
  paint.stroke();
}

function draw() {
  const ratio = window.devicePixelRatio || 1, height = topOf(data.ranks.length) + 10;
  plot.style.width = "100%";
  plot.style.height = height + "px";
  plot.width = plot.clientWidth * ratio;
  plot.height = height * ratio;
  paint.setTransform(ratio, 0, 0, ratio, 0, 0);
  paint.font = font(11);
  paint.textBaseline = "middle";
  drawAxis(height - 10);
  data.ranks.forEach(drawLane);
}

function eventAt(pixelX, pixelY) {
  const index = Math.floor((pixelY - axis) / laneOf()), rank = data.ranks[index];
  if (!rank || pixelX < left) return null;
  const time = timeAt(pixelX), inLane = pixelY - topOf(index);
  if (inLane > laneHeight) return { index, rank, time };
  const covers = (event) => event[1] <= time && time <= event[2];
  const list = inLane >= laneHeight - 7 ? rank.beside : rank.compute;
  const event = list.find(covers) || rank.compute.find(covers);
  return { index, rank, time, event };
}

function showTip(mouse) {
  const found = eventAt(mouse.offsetX, mouse.offsetY), event = found && found.event;
  const lights = event ? event[4] : null;
  if (lights !== hovered) { hovered = lights; draw(); }
  if (!found) { tip.style.display = "none"; return; }
  const step = found.rank.memory.filter((step) => step[0] <= found.time).pop();
  const since = (time) => duration(time - whole[0], data.makespan);
  const lines = [`rank ${found.index}, at ${since(found.time)}`, "holds " + amount(step ? step[1] : 0)];
  if (event) {
    lines[0] = `${name(event)} on rank ${found.index}`;
    for (const [look, stage, microbatch] of parts(event))
      lines.push(`${look[1]}: stage ${stage}` + (microbatch < 0 ? "" : `, microbatch ${microbatch}`));
    lines.push(`${since(event[1])} to ${since(event[2])}, takes ${duration(event[2] - event[1], data.makespan)}`);
  }
  tip.textContent = lines.join("\n");
  tip.style.display = "block";
  tip.style.left = Math.min(mouse.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(mouse.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

function look(from, to) {
  const span = Math.min(Math.max(to - from, (whole[1] - whole[0]) * 1e-6), whole[1] - whole[0]);
  const start = Math.min(Math.max(from, whole[0]), whole[1] - span);
  view = [start, start + span];
  draw();
}

plot.addEventListener("wheel", (wheel) => {
  if (wheel.ctrlKey || !wheel.shiftKey) {
    wheel.preventDefault();
    const time = timeAt(wheel.offsetX), factor = Math.exp(wheel.deltaY * 0.0015);
    look(time - (time - view[0]) * factor, time + (view[1] - time) * factor);
  }
}, { passive: false });
plot.addEventListener("pointerdown", (mouse) => {
  dragged = { at: mouse.offsetX, view: view.slice() };
  plot.setPointerCapture(mouse.pointerId);
  plot.classList.add("moving");
});
plot.addEventListener("pointermove", (mouse) => {
  if (!dragged) return showTip(mouse);
  const moved = (mouse.offsetX - dragged.at) / width() * (dragged.view[1] - dragged.view[0]);
  look(dragged.view[0] - moved, dragged.view[1] - moved);
});
plot.addEventListener("pointerup", () => { dragged = null; plot.classList.remove("moving"); });
plot.addEventListener("pointerleave", () => { tip.style.display = "none"; if (hovered !== null) { hovered = null; draw(); } });
plot.addEventListener("dblclick", () => look(...whole));
document.getElementById("memory").addEventListener("change", (change) => { showsMemory = change.target.checked; draw(); });
window.addEventListener("resize", draw);

function addLegend(meaning, fill) {
  const entry = document.createElement("span"), swatch = document.createElement("canvas");
  swatch.width = swatch.height = 13;
  const ink = swatch.getContext("2d");
  ink.fillStyle = fill;
  ink.fillRect(0, 0, 13, 13);
  entry.append(swatch, meaning);
  document.getElementById("legend").append(entry);
}
const used = new Set(data.ranks.flatMap((rank) => rank.events.flatMap((event) => parts(event).map((part) => part[0][1]))));
const looks = new Map(data.kinds.map((kind) => [kind[1], kind[2]]));
for (const [meaning, fill] of looks) if (used.has(meaning)) addLegend(meaning, fill);
addLegend(`bubble, ${(data.bubbleFraction * 100).toFixed(1)} %`, bubble);
draw();
