// Paints lanes pixel by pixel. A timeline may have a hundred thousand cells, and most are thinner than a pixel; a column of
// pixels then shows the shares of what it covers (`shares.js`). All lengths are in pixels of the device.

const isDark = matchMedia("(prefers-color-scheme: dark)");
let theme = null, hovered = null, isPrinting = false;

const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
const packed = ([red, green, blue]) => (0xff000000 | blue << 16 | green << 8 | red) >>> 0;
const light = ([red, green, blue]) => ({ red, green, blue, pixel: packed([red, green, blue]) });
const towards = (from, to, share) => from.map((value, at) => Math.round(value + (to[at] - value) * share));

// Reads the theme of the page. Colours that are not highlighted are paler.
function readTheme() {
  const colours = data.themes[isDark.matches && !isPrinting ? 1 : 0], page = channels(colours.page);
  const lit = colours.fills.map((shades) => shades.map(([fill]) => light(channels(fill))));
  const pale = colours.fills.map((shades) => shades.map(([fill]) => light(towards(channels(fill), page, 0.75))));
  theme = { colours, lit, pale, page: light(page), bubble: light(channels(colours.bubble)) };
  for (const name of ["page", "bubble", "hatch", "memory", "memoryEdge"]) theme[name + "Pixel"] = packed(channels(colours[name]));
}

const isLit = (number) => hovered === null || hovered === microbatchOf(number);

function fillOf(sort, chunk, microbatch) {
  const shades = (isLit(microbatch) ? theme.lit : theme.pale)[sort];
  return shades[Math.min(chunk, shades.length - 1)];
}

// Sums of red, green and blue for each pixel of a row, each weighted by how much of the pixel it covers.
class Row {
  constructor(width) {
    this.width = width;
    [this.red, this.green, this.blue, this.covered] = [0, 1, 2, 3].map(() => new Float32Array(width));
    this.pixels = new Uint32Array(width);
  }

  clear() {
    for (const sums of [this.red, this.green, this.blue, this.covered]) sums.fill(0);
  }

  add(pixel, share, colour) {
    this.red[pixel] += colour.red * share;
    this.green[pixel] += colour.green * share;
    this.blue[pixel] += colour.blue * share;
    this.covered[pixel] += share;
  }

  // Covers whole pixels that nothing else covers.
  cover(first, end, colour) {
    this.red.fill(colour.red, first, end);
    this.green.fill(colour.green, first, end);
    this.blue.fill(colour.blue, first, end);
    this.covered.fill(1, first, end);
  }

  fill(from, to, colour) {
    from = Math.max(from, 0);
    to = Math.min(to, this.width);
    if (to <= from) return;
    const first = Math.floor(from), last = Math.min(Math.floor(to), this.width - 1);
    if (first === last) return this.add(first, to - from, colour);
    this.add(first, first + 1 - from, colour);
    if (last > first + 1) this.cover(first + 1, last, colour);
    this.add(last, to - last, colour);
  }

  // Returns the mean colours. Pixels that nothing covers are bubbles.
  finish() {
    const { red, green, blue, covered, pixels } = this, bubble = theme.bubble;
    for (let at = 0; at < this.width; at++) {
      const share = covered[at], idle = Math.max(1 - share, 0), scale = share > 1 ? 1 / share : 1;
      pixels[at] = share === 0 ? bubble.pixel : 0xff000000 | (blue[at] * scale + bubble.blue * idle) << 16
        | (green[at] * scale + bubble.green * idle) << 8 | (red[at] * scale + bubble.red * idle);
    }
    return pixels;
  }
}

// Paints the computation of a rank between two times as a row of pixels. Of an overlap it has the forward if `isUpper`,
// else the backward. Cells that are wide enough have a line of the page's colour between them.
function paintCells(row, rank, from, to, isUpper, edge) {
  const { kind, start, end, chunk, microbatch, otherChunk, otherMicrobatch } = rank.cells;
  const scale = row.width / (to - from);
  row.clear();
  for (let at = Math.max(firstFrom(start, from) - 1, 0); at < start.length && start[at] < to; at++) {
    const left = (start[at] - from) * scale, right = (end[at] - from) * scale;
    if (right <= 0) continue;
    const isLower = kind[at] === overlap && !isUpper;
    const colour = isLower ? fillOf(backwardSort, otherChunk[at], otherMicrobatch[at])
      : fillOf(kind[at] === overlap ? forwardSort : sortOf(kind[at]), chunk[at], microbatch[at]);
    const gap = right - left > 4 * edge ? edge : 0;
    row.fill(left, right - gap, colour);
    if (gap) row.fill(right - gap, right, theme.page);
  }
  return row.finish();
}

// A rectangle of pixels to paint on; `rows[0]` and `rows[1]` hold the upper and the lower half of a lane.
class Surface {
  constructor(width, height) {
    Object.assign(this, { width, height, image: new ImageData(width, height) });
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.rows = [new Row(width), new Row(width)];
    this.shares = new Shares(width);
    this.level = new Int32Array(width);
  }

  block(left, right, top, bottom, pixel) {
    const { pixels, width } = this, first = Math.max(left, 0), count = Math.min(right, width) - first;
    for (let y = Math.max(top, 0), until = Math.min(bottom, this.height); y < until; y++) {
      const begin = y * width + first;
      // For a few pixels, the call takes longer than they do.
      if (count > 16) pixels.fill(pixel, begin, begin + count);
      else for (let at = begin; at < begin + count; at++) pixels[at] = pixel;
    }
  }

  // Repeats the rows of a lane's halves from `top` to `bottom`, and hatches its bubbles.
  lane(upper, lower, top, bottom, hatching) {
    const middle = (top + bottom) >> 1;
    for (let y = Math.max(top, 0); y < Math.min(bottom, this.height); y++) {
      const row = y < middle ? upper : lower, offset = y * this.width;
      this.pixels.set(row, offset);
      for (let x = (hatching - y % hatching) % hatching; x < this.width; x += hatching)
        if (row[x] === theme.bubblePixel) this.pixels[offset + x] = theme.hatchPixel;
    }
  }
}

// Paints messages and collectives as thin bars along the lower edge of the lane. A receive whose message has not been sent
// is a dotted line.
function paintBars(surface, rank, from, to, top, bottom, edge) {
  const { kind, start, sent, end, microbatch } = rank.bars, scale = surface.width / (to - from), middle = (top + bottom - edge) >> 1;
  for (let at = firstFrom(start, from - rank.longestBar); at < start.length && start[at] < to; at++) {
    const until = Math.round((sent[at] - from) * scale), right = Math.max(Math.round((end[at] - from) * scale), until + 1);
    if (right <= 0) continue;
    const left = Math.round((start[at] - from) * scale), { pixel } = fillOf(sortOf(kind[at]), 0, microbatch[at]);
    for (let x = Math.max(left, left % (4 * edge)); x < Math.min(until, surface.width); x += 4 * edge)
      surface.block(x, Math.min(x + 2 * edge, until), middle, middle + edge, pixel);
    surface.block(until, right, top, bottom, pixel);
  }
}

// Paints the memory of the rank as an area. A pixel has the height of the most memory in its time.
function paintMemory(surface, rank, from, to, top, bottom, edge) {
  const { width, pixels } = surface, level = surface.level.fill(bottom);
  raiseLevel(level, rank.memory, from, to, (held) => bottom - Math.max(Math.round(held / peak * (bottom - top)), 1));
  for (let y = Math.max(top, 0); y < Math.min(bottom, surface.height); y++)
    for (let x = 0, at = y * width; x < width; x++, at++)
      if (y >= level[x]) pixels[at] = y < level[x] + edge ? theme.memoryEdgePixel : theme.memoryPixel;
}

// Sets the upper edge of the memory for each pixel of a row; `edgeOf` gives the edge of an amount.
function raiseLevel(level, { start, held }, from, to, edgeOf) {
  const scale = level.length / (to - from);
  for (let at = Math.max(firstFrom(start, from) - 1, 0); at < start.length && start[at] < to; at++) {
    if (held[at] === 0) continue;
    const left = Math.max(Math.floor((start[at] - from) * scale), 0), y = edgeOf(held[at]);
    const right = Math.min(((start[at + 1] ?? whole) - from) * scale, level.length);
    for (let x = left; x < right; x++) if (level[x] > y) level[x] = y;
  }
}

// Paints the visible ranks. `place(index)` returns the position of each: the edges of its lane, its bars and its
// memory.
function paintRanks(surface, from, to, indices, place, ratio) {
  const edge = Math.max(Math.round(ratio), 1), [upperRow, lowerRow] = surface.rows;
  surface.pixels.fill(theme.pagePixel);
  const idle = Uint32Array.from({ length: surface.width + surface.height }, (_, at) => at % (6 * edge) ? theme.bubblePixel : theme.hatchPixel);
  for (const index of indices) {
    const rank = ranks[index], { top, bottom, bars, memoryTop, memoryBottom } = place(index);
    if (areCellsNarrow(rank, surface.width / (to - from), edge)) paintShares(surface, rank, from, to, top, bottom, idle);
    else {
      const upper = paintCells(upperRow, rank, from, to, true, edge);
      const lower = rank.overlaps ? paintCells(lowerRow, rank, from, to, false, edge) : upper;
      surface.lane(upper, lower, top, bottom, 6 * edge);
    }
    paintBars(surface, rank, from, to, bars, bottom, edge);
    if (memoryBottom > memoryTop) paintMemory(surface, rank, from, to, memoryTop, memoryBottom, edge);
  }
}

