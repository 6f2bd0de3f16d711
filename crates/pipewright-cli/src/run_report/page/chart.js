
// Line charts: every chart has the same axis, and the cursor of one is shown in all.

// The namespace of SVG, which is a name and not an address.
const svgNames = "http://www.w3.org/2000/svg";
const margins = { left: 52, right: 10, top: 8, bottom: 22 };
const tip = document.getElementById("tip"), charts = [];

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

// Returns round numbers between two values.
function ticksOf(least, most, count) {
  const power = 10 ** Math.floor(Math.log10((most - least) / count));
  const step = [1, 2, 5, 10].map((times) => times * power).find((step) => (most - least) / step <= count) ?? power * 10;
  const first = Math.ceil(least / step - 1e-9);
  return Array.from({ length: Math.max(Math.floor(most / step + 1e-9) - first + 1, 0) }, (_, at) => (first + at) * step);
}

// Returns the range of the values. The first steps of a run are often far slower than all others, so values far above
// nearly all others do not stretch the range.
function rangeOf(lines, isFromZero) {
  const values = lines.flatMap(({ values }) => values.filter((value) => value !== null)).sort((one, other) => one - other);
  if (!values.length) return [0, 1];
  const usual = values[Math.floor((values.length - 1) * 0.98)], top = values.at(-1) > 2 * usual && usual > 0 ? usual * 1.15 : values.at(-1);
  const bottom = isFromZero ? Math.min(0, values[0]) : values[0];
  return top > bottom ? [bottom, top + (top - bottom) * 0.04] : [bottom - Math.abs(bottom || 1) * 0.1, bottom + Math.abs(bottom || 1) * 0.1];
}

// A chart of some series of all runs. `lines` are { name, key, dash }; `format` turns a value into text.
class Chart {
  constructor({ title, note, lines, format, isFromZero, canBeLog }) {
    const picture = svg("svg", { tabindex: 0, role: "img", "aria-label": title });
    Object.assign(this, { picture, format, isFromZero, canBeLog, specs: lines });
    this.figure = element("figure", {}, element("figcaption", {}, title, element("span", {}, note ? ` ${note}` : "")), picture);
    picture.addEventListener("pointermove", (event) => this.hover(event));
    picture.addEventListener("pointerleave", () => moveCursor(null));
    picture.addEventListener("keydown", (event) => this.key(event));
    picture.addEventListener("blur", () => moveCursor(null));
    charts.push(this);
  }

  // Reads the lines that the runs have.
  read() {
    const isLog = chosen.log && this.canBeLog, scale = (value) => value === null ? null : isLog ? (value > 0 ? Math.log10(value) : null) : value;
    this.lines = runs.flatMap((run, index) => this.specs.filter(({ key }) => run.series[key]).map(({ name, key, dash }) => {
      const { mean, least, most } = run.series[key];
      return { run, index, name, dash: dash || dashOf(index), isSparse: mean.filter((value) => value !== null).length < mean.length / 3,
        positions: positionsOf(run), values: smoothed(mean).map(scale), raw: mean, least: least.map(scale), most: most.map(scale) };
    }));
    this.isLog = isLog;
    [this.bottom, this.top] = rangeOf(this.lines, this.isFromZero && !isLog);
    const all = this.lines.flatMap(({ positions }) => [positions[0], positions.at(-1)]).filter((value) => value !== null && value !== undefined);
    [this.first, this.last] = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
    if (this.last <= this.first) this.last = this.first + 1;
  }

  draw() {
    this.read();
    Object.assign(this, { width: this.picture.clientWidth || 400, height: this.picture.clientHeight || 220 });
    this.x = (value) => margins.left + (value - this.first) / (this.last - this.first) * (this.width - margins.left - margins.right);
    this.y = (value) => margins.top + (this.top - value) / (this.top - this.bottom) * (this.height - margins.top - margins.bottom);
    const clip = "clip-" + charts.indexOf(this);
    const region = svg("clipPath", { id: clip });
    region.append(svg("rect", { x: margins.left, y: 0, width: Math.max(this.width - margins.left - margins.right + 2, 1), height: this.height - margins.bottom + 1 }));
    this.cursor = svg("line", { class: "cursor", y1: margins.top, y2: this.height - margins.bottom, visibility: "hidden" });
    const lines = svg("g", { "clip-path": `url(#${clip})` });
    lines.append(...this.lines.flatMap((line) => this.trace(line)));
    this.picture.replaceChildren(region, ...this.axes(), lines, this.cursor);
  }

  axes() {
    const marks = [], right = this.width - margins.right, bottom = this.height - margins.bottom;
    for (const value of ticksOf(this.bottom, this.top, 5)) {
      const y = this.y(value), shown = this.isLog ? 10 ** value : value;
      marks.push(svg("line", { class: "grid", x1: margins.left, x2: right, y1: y, y2: y }));
      marks.push(svg("text", { x: margins.left - 6, y: y + 4, "text-anchor": "end" }, this.format(shown)));
    }
    const ticks = ticksOf(this.first, this.last, Math.max(Math.floor(this.width / 110), 1));
    for (const value of ticks) {
      const text = chosen.axis === "seconds" ? clock(value) : short(value);
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
    if (isSparse || points.length === 1) shapes.push(...points.map(([cx, cy]) => svg("circle", { cx, cy, r: 3, style: `fill:${colourOf(index)}` })));
    return shapes;
  }

  hover(event) {
    const box = this.picture.getBoundingClientRect(), share = (event.clientX - box.left - margins.left) / (this.width - margins.left - margins.right);
    this.point(this.first + Math.min(Math.max(share, 0), 1) * (this.last - this.first), event.clientX, event.clientY);
  }

  // The arrow keys move the cursor by a hundredth of the axis.
  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
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
