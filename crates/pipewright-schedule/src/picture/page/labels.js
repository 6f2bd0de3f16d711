// Writes labels on the cells that have room for them.

const fontOf = (size) => size + "px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
const sizesOfLabels = [11, 9];
const letterWidths = new Map();

// Returns the widths by which texts are measured: every letter has the width of a digit, except W, which is wider.
// Measuring takes time, so it happens once for each size.
function widthsOf(paint, size) {
  if (!letterWidths.has(size)) {
    paint.font = fontOf(size);
    const [digit, wide] = ["0", "W"].map((letter) => paint.measureText(letter).width);
    letterWidths.set(size, { digit, more: wide - digit });
  }
  return letterWidths.get(size);
}

const widthOf = (text, { digit, more }) => text.length * digit + (text.includes("W") ? more : 0);

// Returns the label of a part, as lines and a size: the whole name, smaller, or the microbatch alone. Where ranks have
// several chunks, the stage comes before the microbatch, on a line of its own. Nothing if there is no room.
function labelOf(part, width, height, hasChunks, widths) {
  const [large, small] = sizesOfLabels, room = width - 3, name = nameOfPart(part);
  if (height < small) return null;
  if (widthOf(name, widths[0]) <= room && height >= large) return [[name], large];
  if (widthOf(name, widths[1]) <= room) return [[name], small];
  const microbatch = part.microbatch < 0 ? "" : nameOfNumber(part.microbatch), stage = part.stage + part.letter;
  const fits = (text) => widthOf(text, widths[1]) <= room;
  const upper = hasChunks && height >= 2 * small && [stage, String(part.stage)].find(fits);
  if (upper && fits(microbatch)) return [[upper, microbatch], small];
  return microbatch && fits(microbatch) ? [[microbatch], small] : null;
}

// Calls `use` for each visible label of a rank, with its part and its centre in the lane.
function eachLabel(rank, lane, widths, use) {
  const { start, end } = rank.cells, hasChunks = rank.stages.length > 1;
  const width = plotWidth(), scale = width / span(), narrowest = widths[1].digit + 3, until = view.left + span();
  if (rank.longestCell * scale < narrowest || lane.bottom - lane.top < sizesOfLabels[1]) return;
  for (let at = Math.max(firstFrom(start, view.left) - 1, 0); at < start.length && start[at] < until; at++) {
    if ((end[at] - start[at]) * scale < narrowest) continue;
    const left = Math.max((start[at] - view.left) * scale, 0), right = Math.min((end[at] - view.left) * scale, width);
    const parts = partsOf(rank, rank.cells, at), height = (lane.bottom - lane.top) / parts.length;
    parts.forEach((part, place) => {
      const label = isLit(part.microbatch) && labelOf(part, right - left, height, hasChunks, widths);
      if (label) use(part, label, (left + right) / 2, lane.top + (place + 0.5) * height);
    });
  }
}

// Returns all visible labels by size and colour, because changing either takes time.
function labelsInSight(paint, indices, laneOf) {
  const widths = sizesOfLabels.map((size) => widthsOf(paint, size)), groups = new Map();
  for (const index of indices) {
    eachLabel(ranks[index], laneOf(index), widths, (part, [lines, size], x, y) => {
      const shades = theme.colours.fills[part.sort], ink = shades[Math.min(part.chunk, shades.length - 1)][1];
      if (!groups.has(size + ink)) groups.set(size + ink, { size, ink, labels: [] });
      groups.get(size + ink).labels.push([lines, x, y]);
    });
  }
  return groups.values();
}

// Draws each label in the centre of the visible part of its cell. `laneOf` gives the edges of a lane in CSS pixels.
function drawLabels(paint, indices, laneOf) {
  paint.textAlign = "center";
  for (const { size, ink, labels } of labelsInSight(paint, indices, laneOf)) {
    paint.font = fontOf(size);
    paint.fillStyle = ink;
    for (const [lines, x, y] of labels)
      lines.forEach((text, line) => paint.fillText(text, gutter + x, y + (line - (lines.length - 1) / 2) * size + 0.5));
  }
}

