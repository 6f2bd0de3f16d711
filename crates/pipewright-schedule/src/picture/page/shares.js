
// Paints lanes whose cells are about as narrow as a pixel: a column of pixels shows which share of its time the rank spends in
// each sort of computation. From the bottom: forward, backward, backward of the inputs, of the weights; the bubble is above.

const computeSorts = messageSort;
// Cells that are wider have a line between them, so a mean colour at their edges is enough.
const narrowPixels = 4;

const areCellsNarrow = (lane, scale, edge) => lane.narrowCell * scale < narrowPixels * edge;

// The share of each sort of computation in each column of pixels, and its colour.
class Shares {
  constructor(width) {
    this.width = width;
    this.shares = Array.from({ length: computeSorts }, () => new Float32Array(width));
    this.colours = Array.from({ length: computeSorts }, () => new Uint32Array(width));
    // The sorts that have a share of some column, as bits.
    this.used = 0;
  }

  clear() {
    for (const shares of this.shares) shares.fill(0);
    this.used = 0;
  }

  // Adds a cell. Cells of one sort may have several colours; the one with most of the column counts.
  add(sort, from, to, pixel) {
    from = Math.max(from, 0);
    to = Math.min(to, this.width);
    const shares = this.shares[sort], colours = this.colours[sort];
    this.used |= 1 << sort;
    for (let x = Math.floor(from); x < to; x++) {
      const share = Math.min(to, x + 1) - Math.max(from, x);
      shares[x] += share;
      if (2 * share >= shares[x]) colours[x] = pixel;
    }
  }

  // Paints the columns from `top` to `bottom`, with the bubble hatched.
  paint(surface, top, bottom, hatching) {
    const { width, shares, colours } = this, { pixels, height } = surface, rows = bottom - top;
    const [first, last] = [Math.max(top, 0), Math.min(bottom, height)];
    const { hatchPixel, bubblePixel } = theme, sorts = shares.map((_, sort) => sort).filter((sort) => this.used >> sort & 1);
    for (let x = 0; x < width; x++) {
      let y = last - 1, at = y * width + x, sum = 0;
      for (let index = 0; index < sorts.length; index++) {
        const sort = sorts[index], share = shares[sort][x];
        if (share === 0) continue;
        sum += share;
        const edge = Math.max(bottom - Math.round(Math.min(sum, 1) * rows), first), colour = colours[sort][x];
        for (; y >= edge; y--, at -= width) pixels[at] = colour;
      }
      for (; y >= first; y--, at -= width) pixels[at] = (x + y) % hatching === 0 ? hatchPixel : bubblePixel;
    }
  }
}

// Adds the cells of a rank between two times. Of an overlap it adds the forward if `isUpper`, else the backward.
function addShares(shares, rank, from, to, isUpper) {
  const { kind, start, end, chunk, microbatch, otherChunk, otherMicrobatch } = rank.cells, scale = shares.width / (to - from);
  const { width, shares: sums, colours } = shares, first = Math.max(firstFrom(start, from) - 1, 0), after = firstFrom(start, to);
  shares.clear();
  for (let at = first; at < after; at++) {
    const left = (start[at] - from) * scale, right = (end[at] - from) * scale, x = Math.floor(left);
    // Most cells are inside of one column.
    if (kind[at] !== overlap && left >= 0 && right <= x + 1 && right <= width) {
      const sort = sortOf(kind[at]), share = right - left, sum = sums[sort][x] += share;
      shares.used |= 1 << sort;
      if (2 * share >= sum) colours[sort][x] = fillOf(sort, chunk[at], microbatch[at]).pixel;
      continue;
    }
    const isOverlap = kind[at] === overlap, isLower = isOverlap && !isUpper;
    const sort = isLower ? backwardSort : isOverlap ? forwardSort : sortOf(kind[at]);
    const colour = isLower ? fillOf(sort, otherChunk[at], otherMicrobatch[at]) : fillOf(sort, chunk[at], microbatch[at]);
    shares.add(sort, left, right, colour.pixel);
  }
}

function paintShares(surface, rank, from, to, top, bottom, hatching) {
  const { shares } = surface, middle = rank.overlaps ? (top + bottom) >> 1 : bottom;
  addShares(shares, rank, from, to, true);
  shares.paint(surface, top, middle, hatching);
  if (!rank.overlaps) return;
  addShares(shares, rank, from, to, false);
  shares.paint(surface, middle, bottom, hatching);
}

// Returns the time that a lane spends between two times in each kind of action, in messages, in other communication and in
// its bubble, by name. The parts of an overlap run at the same time, which counts as its forward and its backward in halves.
function timesBetween(lane, from, to) {
  const times = new Map(), { cells, bars } = lane, add = (name, time) => times.set(name, (times.get(name) ?? 0) + time);
  let busy = 0;
  for (let at = Math.max(firstFrom(cells.start, from) - 1, 0); at < cells.start.length && cells.start[at] < to; at++) {
    const time = Math.min(cells.end[at], to) - Math.max(cells.start[at], from), parts = partsOf(lane, cells, at);
    if (time <= 0) continue;
    busy += time;
    for (const { letter } of parts) add(letter, time / parts.length);
  }
  if (to - from > busy) add("bubble", to - from - busy);
  for (let at = firstFrom(bars.start, from - lane.longestBar); at < bars.start.length && bars.start[at] < to; at++) {
    const time = Math.min(bars.end[at], to) - Math.max(bars.sent[at], from);
    if (time > 0) add({ [messageSort]: "messages", [offloadSort]: "offload, reload" }[sortOf(bars.kind[at])] ?? "gather, reduce", time);
  }
  return times;
}
