
// The part of the axis that all charts show.

// The least distance in pixels that a pointer is dragged to choose a part of the axis.
const leastDrag = 6;
// The chart that a pointer is pressed on, and where.
let pressed = null;

// Returns the first and the last position of the runs that are shown.
function wholeAxis() {
  const all = runs.filter((_, index) => !isHidden(index)).flatMap((run) => positionsOf(run).filter((position) => position !== null));
  return all.length ? [all.reduce((least, position) => Math.min(least, position)), all.reduce((most, position) => Math.max(most, position))] : [0, 1];
}

// Shows a part of the axis in all charts; nothing shows all of it.
function zoomTo(range) {
  const [first, last] = wholeAxis();
  const [from, to] = [...range ?? [first, last]].sort((one, other) => one - other).map((position) => Math.min(Math.max(position, first), last));
  // Steps are whole, so a part without two of them would be empty; the part stays as it is.
  const least = chosen.axis === "steps" ? 1 : (last - first) * 1e-6;
  if (range && to - from < least) return drawAll();
  chosen.range = range && (from > first || to < last) ? [from, to] : null;
  document.getElementById("zoom-all").disabled = !chosen.range;
  drawAll();
}

// Makes the shown part of the axis longer by a factor, around a position that keeps its place.
function zoomAround(position, factor) {
  zoomTo((chosen.range ?? wholeAxis()).map((end) => position + (end - position) * factor));
}

function moveCharts(distance) {
  if (!chosen.range) return;
  const [first, last] = wholeAxis(), [from, to] = chosen.range, moved = Math.min(Math.max(distance, first - from), last - to);
  zoomTo([from + moved, to + moved]);
}
