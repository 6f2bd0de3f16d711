// Draws the page: lanes, labels, axis and rank names in the plot, and the whole timeline in the overview.

const overview = document.getElementById("overview");
const paint = plot.getContext("2d", { alpha: false }), paintOverview = overview.getContext("2d", { alpha: false });
const ratioOf = () => isPrinting ? 2 : window.devicePixelRatio || 1;
let surface = null, overviewImage = null, isDrawRequested = false;
// Functions that draw on top of the lanes; each gets the indices of the visible lanes.
const overlays = [];

// Returns the position of a rank in the plot, in CSS pixels below the axis.
function rowOf(index) {
  const height = rowHeight(), top = (index - view.top) * height, memory = height * memoryShare();
  const gap = height >= 10 ? Math.min(height * 0.15, 5) : height >= 3 ? 1 : 0;
  const lane = height - memory - (view.showsMemory ? gap / 2 : gap);
  return { top, bottom: top + lane, memoryTop: top + lane + 2, memoryBottom: top + height - gap };
}

function indicesInSight() {
  const first = Math.floor(view.top), last = Math.min(Math.ceil(rankAt(plotHeight())), ranks.length);
  return Array.from({ length: Math.max(last - first, 0) }, (_, at) => first + at);
}

// Sizes a canvas for the device. Returns the ratio of device pixels to CSS pixels.
function resize(canvas, context) {
  const ratio = ratioOf(), width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = theme.colours.page;
  context.fillRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  return ratio;
}

function drawLanes(ratio, indices) {
  const width = Math.max(Math.round(plotWidth() * ratio), 1), height = Math.max(Math.round(plotHeight() * ratio), 1);
  if (!surface || surface.width !== width || surface.height !== height) surface = new Surface(width, height);
  const place = (index) => {
    const row = rowOf(index), [top, bottom] = [Math.round(row.top * ratio), Math.round(row.bottom * ratio)];
    const bars = bottom - Math.max(Math.round(Math.min((bottom - top) / 5, 6 * ratio)), 1);
    const memory = view.showsMemory ? [row.memoryTop, row.memoryBottom].map((y) => Math.round(y * ratio)) : [0, 0];
    return { top, bottom: Math.max(bottom, top + 1), bars, memoryTop: memory[0], memoryBottom: memory[1] };
  };
  paintRanks(surface, view.left, view.left + span(), indices, place, ratio);
  paint.putImageData(surface.image, Math.round(gutter * ratio), Math.round(axisHeight * ratio));
}

// Draws the exchanges of tokens as hatched bars along the upper edge of their lanes. Exchanges that are closer to each other
// than a pixel are one bar.
function drawExchanges(indices) {
  const scale = plotWidth() / span();
  for (const index of indices) {
    const { exchanges } = ranks[index], { top, bottom } = rowOf(index), height = Math.min((bottom - top) / 5, 6);
    if (!exchanges?.start.length || height < 1) continue;
    let right = -Infinity;
    for (let at = Math.max(firstFrom(exchanges.start, view.left) - 1, 0); at < exchanges.start.length && exchanges.start[at] < view.left + span(); at++) {
      const from = Math.max((exchanges.start[at] - view.left) * scale, right, 0), to = Math.min((exchanges.end[at] - view.left) * scale, plotWidth());
      if (to - from < 0.5) continue;
      right = to;
      paint.fillStyle = theme.colours.page;
      paint.fillRect(gutter + from, axisHeight + top, to - from, height);
      paint.strokeStyle = theme.colours.ink;
      paint.lineWidth = 1;
      paint.save();
      paint.beginPath();
      paint.rect(gutter + from, axisHeight + top, to - from, height);
      paint.clip();
      paint.beginPath();
      for (let x = Math.floor((from - height) / 4) * 4; x < to; x += 4) {
        paint.moveTo(gutter + x, axisHeight + top + height);
        paint.lineTo(gutter + x + height, axisHeight + top);
      }
      paint.stroke();
      paint.restore();
    }
  }
}

// Draws times at round numbers, with a line through the lanes. Marks are far enough apart for their texts.
function drawAxis() {
  const most = Math.max(plotWidth() / 90, 1), power = 10 ** Math.floor(Math.log10(span() * data.quantum / most));
  const step = [1, 2, 5, 10].map((times) => times * power).find((step) => span() * data.quantum / step <= most) / data.quantum;
  paint.textAlign = "center";
  paint.font = fontOf(11);
  paint.fillStyle = theme.colours.faint;
  paint.strokeStyle = theme.colours.rule;
  paint.lineWidth = 1;
  paint.beginPath();
  for (let mark = Math.ceil(view.left / step - 1e-9); mark * step <= view.left + span() * (1 + 1e-9); mark++) {
    const x = gutter + xOf(mark * step);
    paint.moveTo(x, axisHeight - 6);
    paint.lineTo(x, axisHeight);
    paint.fillText(duration(mark * step), x, 10);
  }
  paint.stroke();
}

// Draws the names of as many ranks as fit, and the peaks of their memory.
function drawNames(indices) {
  const every = Math.ceil(13 / rowHeight());
  paint.textAlign = "right";
  for (const index of indices.filter((index) => index % every === 0)) {
    const { top, bottom, memoryTop, memoryBottom } = rowOf(index);
    const { name, tag, letter } = ranks[index], middle = (top + bottom) / 2, hasTag = tag && bottom - top >= 22;
    drawName(letter && !hasTag ? `${name} ${letter}` : name, hasTag ? middle - 6 : middle, 11, theme.colours.ink);
    if (hasTag) drawName(tag, middle + 6, 10, theme.colours.faint);
    if (!view.showsMemory || rowHeight() < 26) continue;
    const held = amount(ranks[index].peak).replace(/activations?/, "act.");
    drawName(held, (memoryTop + memoryBottom) / 2, 9, theme.colours.memoryEdge);
  }
}

function drawName(text, y, size, colour) {
  if (y < 0) return;
  paint.font = fontOf(size);
  paint.fillStyle = colour;
  paint.fillText(text, gutter - 8, axisHeight + y);
}

// Covers the part of a partly visible row that is above the plot.
function coverAxis() {
  paint.fillStyle = theme.colours.page;
  paint.fillRect(gutter, 0, plot.clientWidth - gutter, axisHeight);
}

function draw() {
  if (!theme) readTheme();
  measurePlot();
  clampView();
  const indices = indicesInSight(), ratio = resize(plot, paint);
  paint.textBaseline = "middle";
  drawLanes(ratio, indices);
  drawExchanges(indices);
  drawLabels(paint, indices, (index) => {
    const { top, bottom } = rowOf(index);
    return { top: axisHeight + top, bottom: axisHeight + bottom };
  });
  overlays.forEach((drawOverlay) => drawOverlay(indices));
  drawNames(indices);
  coverAxis();
  drawAxis();
  drawOverview();
}

// Paints the whole timeline on an image that is kept: two rows of pixels for each rank, one for each half of its lane.
function paintOverviewImage(width) {
  overviewImage = document.createElement("canvas");
  Object.assign(overviewImage, { width, height: Math.max(2 * ranks.length, 1) });
  const small = new Surface(width, overviewImage.height), row = small.rows[0];
  ranks.forEach((rank, index) => {
    for (const half of [0, 1])
      small.pixels.set(paintCells(row, rank, 0, whole, half === 0, width), (2 * index + half) * width);
  });
  overviewImage.getContext("2d").putImageData(small.image, 0, 0);
}

// Draws the overview with a frame around the part that the plot shows.
function drawOverview() {
  const ratio = resize(overview, paintOverview), [left, width, height] = [gutter, plotWidth(), overview.clientHeight - 8];
  const pixels = Math.max(Math.round(width * ratio), 1);
  if (!overviewImage || overviewImage.width !== pixels) paintOverviewImage(pixels);
  // A smooth picture of few ranks would be blurred.
  paintOverview.imageSmoothingEnabled = 2 * ranks.length > height * ratio;
  paintOverview.drawImage(overviewImage, left, 4, width, height);
  const rows = Math.max(ranks.length, 1), seen = Math.min(plotHeight() / rowHeight(), rows - view.top);
  const frame = [left + view.left / whole * width, 4 + view.top / rows * height, width / view.zoom, seen / rows * height];
  paintOverview.fillStyle = theme.colours.page;
  paintOverview.globalAlpha = 0.6;
  paintOverview.beginPath();
  paintOverview.rect(left, 4, width, height);
  paintOverview.rect(...frame);
  paintOverview.fill("evenodd");
  paintOverview.globalAlpha = 1;
  paintOverview.strokeStyle = theme.colours.ink;
  paintOverview.lineWidth = 1.5;
  paintOverview.strokeRect(frame[0], frame[1], Math.max(frame[2], 2), Math.max(frame[3], 2));
}

// Draws once before the next frame, even if it is requested several times.
function requestDraw() {
  if (isDrawRequested) return;
  isDrawRequested = true;
  requestAnimationFrame(() => {
    isDrawRequested = false;
    draw();
  });
}

