
// Paints lanes whose cells are about as narrow as a pixel: a column of pixels shows which share of its time the rank spends in
// each sort of computation. From the bottom: forward, backward, backward of the inputs, of the weights; the bubble is above.

const computeSorts = messageSort;
// Cells that are wider have a line between them, so a mean colour at their edges is enough.
const narrowPixels = 4;

const areCellsNarrow = (lane, scale, edge) => lane.narrowCell * scale < narrowPixels * edge;

// The sort and the colour of each cell of a lane, with the present theme and highlights. Of an overlap it has the forward if
// `isUpper`, else the backward.
class Fills {
  constructor({ cells }, isUpper) {
    const { kind, chunk, microbatch, otherChunk, otherMicrobatch } = cells;
    this.sorts = new Uint8Array(kind.length);
    this.pixels = new Uint32Array(kind.length);
    // The sorts, one bit each.
    this.used = 0;
    for (let at = 0; at < kind.length; at++) {
      const isOverlap = kind[at] === overlap, isLower = isOverlap && !isUpper;
      const sort = isLower ? backwardSort : isOverlap ? forwardSort : sortOf(kind[at]);
      const colour = isLower ? fillOf(sort, otherChunk[at], otherMicrobatch[at]) : fillOf(sort, chunk[at], microbatch[at]);
      [this.sorts[at], this.pixels[at]] = [sort, colour.pixel];
      this.used |= 1 << sort;
    }
  }

  // Returns the fills of a lane, which are kept until the theme or the highlights change.
  static of(lane, isUpper) {
    if (lane.fills?.theme !== theme || lane.fills.hovered !== hovered) lane.fills = { theme, hovered };
    return lane.fills[isUpper] ??= new Fills(lane, isUpper);
  }
}

// The share of each sort of computation in each column of pixels, and its colour.
class Shares {
  constructor(width) {
    this.width = width;
    this.shares = Array.from({ length: computeSorts }, () => new Float32Array(width));
    this.colours = Array.from({ length: computeSorts }, () => new Uint32Array(width));
    // The sorts of the lane, one bit each.
    this.used = 0;
  }

  // Adds a cell that covers several columns, or that is in part outside of them.
  add(sort, from, to, pixel) {
    from = Math.max(from, 0);
    to = Math.min(to, this.width);
    const shares = this.shares[sort], colours = this.colours[sort];
    for (let x = Math.floor(from); x < to; x++) {
      const share = Math.min(to, x + 1) - Math.max(from, x);
      shares[x] += share;
      if (2 * share >= shares[x]) colours[x] = pixel;
    }
  }

  // Measures a lane between two times. Cells of one sort may have several colours; the one with most of the column counts.
  measure(lane, from, to, isUpper) {
    const { width, shares, colours } = this, { start, end } = lane.cells, scale = width / (to - from);
    const { sorts, pixels, used } = Fills.of(lane, isUpper), after = firstFrom(start, to);
    this.used = used;
    for (const list of shares) list.fill(0);
    for (let at = Math.max(firstFrom(start, from) - 1, 0); at < after; at++) {
      const left = (start[at] - from) * scale, right = (end[at] - from) * scale, x = Math.floor(left), sort = sorts[at];
      if (left < 0 || right > x + 1 || x >= width) this.add(sort, left, right, pixels[at]);
      else {
        const share = right - left, sum = shares[sort][x] + share;
        shares[sort][x] = sum;
        if (2 * share >= sum) colours[sort][x] = pixels[at];
      }
    }
  }

  // Paints the columns from `top` to `bottom`, the first sort lowest. `idle` has the pixels of a row of bubbles, each row one
  // pixel further.
  paint(surface, top, bottom, idle) {
    const { width } = this, { pixels, height } = surface, rows = bottom - top, [first, last] = [Math.max(top, 0), Math.min(bottom, height)];
    const [shares, colours] = [this.shares, this.colours].map((lists) => lists.filter((_, sort) => this.used >> sort & 1));
    for (let x = 0; x < width; x++) {
      let y = last - 1, at = y * width + x, sum = 0;
      for (let number = 0; number < shares.length; number++) {
        const share = shares[number][x];
        if (share === 0) continue;
        sum += share;
        const edge = Math.max(bottom - Math.round(Math.min(sum, 1) * rows), first), pixel = colours[number][x];
        for (; y >= edge; y--, at -= width) pixels[at] = pixel;
      }
      for (; y >= first; y--, at -= width) pixels[at] = idle[x + y];
    }
  }
}

function paintShares(surface, lane, from, to, top, bottom, idle) {
  const { shares } = surface, middle = lane.overlaps ? (top + bottom) >> 1 : bottom;
  shares.measure(lane, from, to, true);
  shares.paint(surface, top, middle, idle);
  if (!lane.overlaps) return;
  shares.measure(lane, from, to, false);
  shares.paint(surface, middle, bottom, idle);
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
