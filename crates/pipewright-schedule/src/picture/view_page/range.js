
// The selection and the view: zooming keeps the selection in sight, `f` fills the plot with it, and a range of time has sums.

// Zooms around the middle of the selection, which is moved into sight first.
anchorOf = () => {
  const middle = [plotWidth() / 2, plotHeight() / 2];
  if (!selected) return middle;
  const { lanes, from, to } = selected, time = (from + to) / 2, row = (lanes[0].index + lanes.at(-1).index + 1) / 2;
  const place = () => [xOf(time), (row - view.top) * rowHeight()];
  const [x, y] = place();
  if (x < 0 || x > plotWidth() || y < 0 || y > plotHeight()) centreOn(time, row);
  return place();
};

// Fills most of the plot with the selection. Returns whether there is one.
function focusSelection() {
  if (!selected) return false;
  const { lanes, from, to } = selected, share = 0.8;
  view.zoom = Math.min(Math.max(share * whole / Math.max(to - from, whole / zoomMost), 1), zoomMost);
  centreOn((from + to) / 2, (lanes[0].index + lanes.at(-1).index + 1) / 2);
  return true;
}

// Selects the time between two points on the lanes between them.
function selectRange([x, y], [otherX, otherY]) {
  const [from, to] = [x, otherX].sort((one, other) => one - other).map((x) => Math.min(Math.max(timeAt(x), 0), whole));
  const rows = [y, otherY].sort((one, other) => one - other).map((y) => Math.min(Math.max(Math.floor(rankAt(y)), 0), ranks.length - 1));
  if (to > from) select({ isRange: true, lanes: ranks.slice(rows[0], rows[1] + 1), lane: ranks[rows[0]], from, to, chain: [] });
}

onRange.push(selectRange);

// Selects what is in sight.
function selectSight() {
  selectRange([0, 0.5], [plotWidth(), plotHeight() - 0.5]);
  return true;
}

// Returns the sums of some lanes over the range.
function sumsOf(lanes, from, to) {
  const sums = new Map();
  for (const lane of lanes)
    for (const [name, time] of timesBetween(lane, from, to)) sums.set(name, (sums.get(name) ?? 0) + time);
  return sums;
}

// Returns a table with the time of each kind of action, and its share of the time of the lanes. Messages and collectives run
// beside the computation, so they are no part of the whole and have no share.
function sumTable(lanes, from, to) {
  const sums = sumsOf(lanes, from, to), all = (to - from) * lanes.length, order = ["F", "B", "I", "W", "bubble", "messages", "gather, reduce", "offload, reload"];
  const names = { ...kindNames, messages: "messages, beside it", "gather, reduce": "gathering and reducing, beside it", "offload, reload": "offloading and reloading, beside it" };
  const isPart = (name) => name.length === 1 || name === "bubble";
  const rows = order.filter((name) => sums.has(name)).map((name) => element("tr", {}, element("th", { scope: "row" }, name.length === 1 ? `${name} ${names[name]}` : names[name] ?? name),
    element("td", {}, time(sums.get(name))), element("td", {}, isPart(name) ? percentOf(sums.get(name), all) : "")));
  const inside = new Map([...sums].filter(([name]) => isPart(name)));
  return [shareBar(inside, false), element("table", { className: "sums" }, element("tbody", {}, ...rows))];
}

function explainRange({ lanes, from, to }) {
  const sources = [...new Set(lanes.map(({ source }) => source))], nodes = [element("h2", {}, `${time(to - from)} from ${time(from)} to ${time(to)}`)];
  for (const source of sources) {
    const own = lanes.filter((lane) => lane.source === source), [first, last] = [own[0], own.at(-1)];
    const where = first === last ? rankOf(first) : `${rankOf(first)} to ${rankOf(last)}`;
    nodes.push(element("p", { className: "where" }, `${nameOfSource(source)}: ${where}, sums over the ranks`), ...sumTable(own, from, to));
  }
  return nodes;
}
