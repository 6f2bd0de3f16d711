
// Line charts: every chart has the same axis, and the cursor of one is shown in all.

// The namespace of SVG, which is a name and not an address.
const svgNames = "http://www.w3.org/2000/svg";
const margins = { left: 52, right: 10, top: 8, bottom: 22 };
const pointRadius = 3, tip = document.getElementById("tip"), charts = [];

function svg(tag, attributes, text) {
  const made = document.createElementNS(svgNames, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Returns the values as means over neighbours. The width of the mean grows with the slider, up to a fifth of the run.
function smoothed(values) {
  const reach = Math.round(chosen.smooth / 100 * values.length / 10);
  if (!reach) return values;
  return values.map((value, at) => {
    const near = values.slice(Math.max(at - reach, 0), at + reach + 1).filter((value) => value !== null);
    return value === null || !near.length ? value : near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

// Returns distances of ticks, ascending: 1, 2 or 5 times a power of ten, around a length.
function decimalSteps(length) {
  const power = 10 ** Math.floor(Math.log10(length));
  return [0.1, 0.2, 0.5, 1, 2, 5, 10].map((times) => times * power);
}

// As `decimalSteps`, for seconds: distances of a minute and more are round on a clock.
function clockSteps(length) {
  const round = [1, 60, 3600].flatMap((unit) => [1, 2, 5, 10, 15, 30].map((times) => times * unit)), longest = round.at(-1);
  return [...decimalSteps(length).filter((step) => step < 1), ...round, ...[2, 5, 10, 20, 50, 100].map((times) => times * longest)];
}

// Returns round numbers between two values, and their distance: at most `count` numbers, but not fewer than two.
function ticksOf(least, most, count, stepsOf = decimalSteps) {
  const steps = stepsOf((most - least) / count), marks = (step) => {
    const first = Math.ceil(least / step - 1e-9), last = Math.floor(most / step + 1e-9);
    return Array.from({ length: Math.max(last - first + 1, 0) }, (_, at) => +((first + at) * step).toPrecision(12));
  };
  let at = steps.findIndex((step) => (most - least) / step <= count);
  if (at < 0) at = steps.length - 1;
  while (at > 0 && marks(steps[at]).length < 2) at--;
  return { ticks: marks(steps[at]), step: steps[at] };
}

// Returns the logarithms of round numbers, for an axis between two logarithms: 1, 2 and 5 times powers of ten or, for a
// range of less than a decade, numbers at equal distances.
function logTicksOf(bottom, top, count) {
  if (top - bottom < 1) return ticksOf(10 ** bottom, 10 ** top, count).ticks.map(Math.log10);
  const digits = top - bottom < 2 ? [1, 2, 5] : [1], every = Math.ceil((top - bottom) / count), ticks = [];
  for (let power = Math.floor(bottom / every) * every; power <= top; power += every)
    ticks.push(...digits.map((digit) => power + Math.log10(digit)).filter((tick) => tick >= bottom - 1e-9 && tick <= top + 1e-9));
  return ticks;
}

// Returns the range of the values, with room for the points at its ends. The first steps of a run are often far slower than all others, so values far above
// nearly all others do not stretch the range.
function rangeOf(lines, isFromZero) {
  const shown = (isShown) => lines.flatMap(({ values, isInSight }) => values.filter((value, at) => value !== null && isShown(isInSight, at)));
  const inSight = shown((isInSight, at) => isInSight(at)), values = (inSight.length ? inSight : shown(() => true)).sort((one, other) => one - other);
  if (!values.length) return [0, 1];
  const usual = values[Math.floor((values.length - 1) * 0.98)], top = values.at(-1) > 2 * usual && usual > 0 ? usual * 1.15 : values.at(-1);
  const bottom = isFromZero ? Math.min(0, values[0]) : values[0], room = (top - bottom) * 0.04;
  return top > bottom ? [isFromZero && bottom === 0 ? 0 : bottom - room, top + room] : [bottom - Math.abs(bottom || 1) * 0.1, bottom + Math.abs(bottom || 1) * 0.1];
}

// A chart of some series of all runs. `lines` are { name, key, dash }; `format` turns a value into text.
class Chart {
  constructor({ title, note, lines, format, isFromZero, canBeLog }) {
    const picture = svg("svg", { tabindex: 0, role: "img", "aria-label": title });
    Object.assign(this, { picture, format, isFromZero, canBeLog, specs: lines });
    this.figure = element("figure", {}, element("figcaption", {}, title, element("span", {}, note ? ` ${note}` : "")), picture);
    picture.addEventListener("pointerdown", (event) => this.press(event));
    picture.addEventListener("pointermove", (event) => this.hover(event));
    picture.addEventListener("pointerup", (event) => this.release(event));
    picture.addEventListener("pointercancel", () => this.stretch(null));
    picture.addEventListener("pointerleave", () => moveCursor(null));
    picture.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    picture.addEventListener("dblclick", () => zoomTo(null));
    picture.addEventListener("keydown", (event) => this.key(event));
    picture.addEventListener("blur", () => moveCursor(null));
    charts.push(this);
  }

  // Reads the lines that the runs have.
  read() {
    const isLog = chosen.log && this.canBeLog, scale = (value) => value === null ? null : isLog ? (value > 0 ? Math.log10(value) : null) : value;
    this.lines = runs.flatMap((run, index) => this.specs.filter(({ key }) => run.series[key] && !isHidden(index)).map(({ name, key, dash }) => {
      const { mean, least, most } = run.series[key];
      return { run, index, name, dash: dash || dashOf(index), isSparse: mean.filter((value) => value !== null).length < mean.length / 3,
        positions: positionsOf(run), values: smoothed(mean).map(scale), raw: mean, least: least.map(scale), most: most.map(scale) };
    }));
    this.isLog = isLog;
    [this.first, this.last] = chosen.range ?? wholeAxis();
    if (this.last <= this.first) this.last = this.first + 1;
    for (const line of this.lines) line.isInSight = (at) => line.positions[at] >= this.first && line.positions[at] <= this.last;
    [this.bottom, this.top] = rangeOf(this.lines, this.isFromZero && !isLog);
  }

  draw() {
    this.read();
    Object.assign(this, { width: this.picture.clientWidth || 400, height: this.picture.clientHeight || 220 });
    this.x = (value) => margins.left + (value - this.first) / (this.last - this.first) * (this.width - margins.left - margins.right);
    this.y = (value) => margins.top + (this.top - value) / (this.top - this.bottom) * (this.height - margins.top - margins.bottom);
    const clip = "clip-" + charts.indexOf(this);
    const region = svg("clipPath", { id: clip });
    // The region has room for half a point on each side.
    const width = Math.max(this.width - margins.left - margins.right, 1) + 2 * pointRadius;
    region.append(svg("rect", { x: margins.left - pointRadius, y: 0, width, height: this.height - margins.bottom + pointRadius }));
    this.cursor = svg("line", { class: "cursor", y1: margins.top, y2: this.height - margins.bottom, visibility: "hidden" });
    const lines = svg("g", { "clip-path": `url(#${clip})` });
    lines.append(...this.events(), ...this.lines.flatMap((line) => this.trace(line)));
    this.stretched = svg("rect", { class: "stretched", y: margins.top, height: this.height - margins.top - margins.bottom, visibility: "hidden" });
    // On paper the chart may have another width.
    this.picture.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.picture.replaceChildren(region, ...this.axes(), this.stretched, lines, ...this.above(), this.cursor);
  }

  // Returns a note on the values above the chart.
  above() {
    const drawn = ({ values, most }) => most.length ? most : values;
    const above = this.lines.flatMap((line) => drawn(line).filter((value, at) => value !== null && value > this.top && line.isInSight(at)));
    if (!above.length) return [];
    const highest = Math.max(...above), shown = this.format(this.isLog ? 10 ** highest : highest);
    const place = { class: "above", x: this.width - margins.right, y: margins.top + 10, "text-anchor": "end" };
    return [svg("text", place, `↑ ${above.length} above the chart, up to ${shown}`)];
  }

  // Returns a mark at each step after which an event occurred, such as a restart.
  events() {
    return [...new Set(this.lines.map(({ run }) => run))].flatMap((run) => run.events.filter(({ group }) => group !== null).map(({ group, text }) => {
      const x = this.x(positionsOf(run)[group]), mark = svg("line", { class: "event", x1: x, x2: x, y1: margins.top, y2: this.height - margins.bottom });
      mark.append(svg("title", {}, text));
      return mark;
    }));
  }

  axes() {
    const marks = [], right = this.width - margins.right, bottom = this.height - margins.bottom;
    for (const value of this.isLog ? logTicksOf(this.bottom, this.top, 5) : ticksOf(this.bottom, this.top, 5).ticks) {
      const y = this.y(value), shown = this.isLog ? 10 ** value : value;
      marks.push(svg("line", { class: "grid", x1: margins.left, x2: right, y1: y, y2: y }));
      marks.push(svg("text", { x: margins.left - 6, y: y + 4, "text-anchor": "end" }, this.format(shown)));
    }
    // Steps and tokens are whole numbers.
    const isTime = chosen.axis === "seconds", stepsOf = isTime ? clockSteps : (length) => decimalSteps(Math.max(length, 1)).filter((step) => step >= 1);
    const { ticks, step } = ticksOf(this.first, this.last, Math.max(Math.floor(this.width / 110), 2), stepsOf);
    for (const value of ticks) {
      const text = isTime ? clockMark(value, step) : short(value);
      marks.push(svg("line", { class: "grid", x1: this.x(value), x2: this.x(value), y1: bottom, y2: bottom + 4 }));
      marks.push(svg("text", { x: this.x(value), y: this.height - 5, "text-anchor": this.x(value) > right - 16 ? "end" : "middle" }, text));
    }
    return marks;
  }

  // Returns the area between the least and the most of each group, and the line of the means.
  trace({ index, dash, positions, values, least, most, isSparse }) {
    const point = (value, at) => value === null || positions[at] === null ? null : [this.x(positions[at]), this.y(value)];
    const path = (points) => points.reduce((text, at) => text + (text ? "L" : "M") + at.map((side) => side.toFixed(1)).join(" "), "");
    const present = (values) => values.map(point).filter(Boolean), shapes = [];
    if (least.length) {
      const area = path([...present(most), ...present(least).reverse()]);
      if (area) shapes.push(svg("path", { class: "range", d: area, style: `fill:${colourOf(index)}` }));
    }
    const points = present(values);
    if (points.length) shapes.push(svg("path", { d: path(points), style: `stroke:${colourOf(index)}`, "stroke-dasharray": dash }));
    if (isSparse || points.length === 1) shapes.push(...points.map(([cx, cy]) => svg("circle", { cx, cy, r: pointRadius, style: `fill:${colourOf(index)}` })));
    return shapes;
  }

  // Returns the position on the axis below the pointer.
  positionAt(event) {
    const box = this.picture.getBoundingClientRect(), share = (event.clientX - box.left - margins.left) / (this.width - margins.left - margins.right);
    return this.first + Math.min(Math.max(share, 0), 1) * (this.last - this.first);
  }

  hover(event) {
    const position = this.positionAt(event);
    if (pressed?.chart === this) this.stretch([pressed.position, position]);
    this.point(position, event.clientX, event.clientY);
  }

  // A mouse or a pen that is dragged chooses a part of the axis. A finger moves the cursor, or the page.
  press(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    this.picture.setPointerCapture(event.pointerId);
    pressed = { chart: this, position: this.positionAt(event), x: event.clientX };
  }

  release(event) {
    if (pressed?.chart !== this) return;
    const from = pressed;
    this.stretch(null);
    if (Math.abs(event.clientX - from.x) >= leastDrag) zoomTo([from.position, this.positionAt(event)]);
  }

  // Shows the part of the axis that is being chosen; nothing ends the choice.
  stretch(range) {
    if (!range) pressed = null;
    const [from, to] = (range ?? [this.first, this.first]).map((position) => this.x(position)).sort((one, other) => one - other);
    this.stretched.setAttribute("visibility", range ? "visible" : "hidden");
    this.stretched.setAttribute("x", from);
    this.stretched.setAttribute("width", to - from);
  }

  // The wheel zooms with Ctrl; without it, the page scrolls.
  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomAround(this.positionAt(event), Math.exp(event.deltaY * 0.003));
  }

  // The arrow keys move the cursor by a hundredth of the axis, or with Shift the charts; + and - zoom, and 0 shows all.
  key(event) {
    const middle = cursorAt ?? (this.first + this.last) / 2, factor = { "+": 1 / 1.5, "=": 1 / 1.5, "-": 1.5 }[event.key];
    if (factor && !event.ctrlKey && !event.metaKey) return zoomAround(middle, factor);
    if (event.key === "0") return zoomTo(null);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && event.shiftKey) {
      event.preventDefault();
      return moveCharts(step * (this.last - this.first) / 10);
    }
    if (!step) return;
    event.preventDefault();
    const from = cursorAt ?? this.first, at = Math.min(Math.max(from + step * (this.last - this.first) / 100, this.first), this.last);
    const box = this.picture.getBoundingClientRect();
    this.point(at, box.left + this.x(at), box.top + 30);
  }

  point(position, x, y) {
    moveCursor(position);
    const rows = this.lines.map((line) => {
      const at = nearest(line, position), value = at < 0 ? null : line.raw[at];
      if (value === null) return null;
      const mark = element("span", { className: "line" });
      mark.style.borderColor = colourOf(line.index);
      mark.style.borderTopStyle = line.dash ? "dashed" : "solid";
      const name = [runs.length > 1 ? line.run.name : "", this.specs.length > 1 ? line.name : ""].filter(Boolean).join(", ");
      return element("div", {}, mark, `${axisText[chosen.axis](line.positions[at])}${name ? ", " + name : ""}: ${this.format(value)}`);
    });
    tip.replaceChildren(...rows.filter(Boolean));
    tip.style.display = tip.childElementCount ? "block" : "none";
    tip.style.left = Math.max(Math.min(x + 14, innerWidth - tip.offsetWidth - 8), 0) + "px";
    tip.style.top = Math.max(Math.min(y + 14, innerHeight - tip.offsetHeight - 8), 0) + "px";
  }
}

// Returns the place of the value of a line that is nearest to a position, or -1.
function nearest({ positions, raw }, position) {
  let best = -1;
  positions.forEach((at, index) => {
    if (at === null || raw[index] === null) return;
    if (best < 0 || Math.abs(at - position) < Math.abs(positions[best] - position)) best = index;
  });
  return best;
}

let cursorAt = null;

// Shows the cursor of all charts at a position; nothing hides it.
function moveCursor(position) {
  cursorAt = position;
  if (position === null) tip.style.display = "none";
  for (const chart of charts) {
    const x = position === null ? 0 : chart.x(position);
    chart.cursor.setAttribute("visibility", position === null ? "hidden" : "visible");
    chart.cursor.setAttribute("x1", x);
    chart.cursor.setAttribute("x2", x);
  }
}
