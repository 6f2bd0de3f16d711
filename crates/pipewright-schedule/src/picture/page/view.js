// The visible part of the timeline, in CSS pixels of the plot.
const gutter = data.gutter ?? 70, rightMargin = 16, axisHeight = 26;
const laneMost = 38, memoryMost = 30, rowLeast = 2, zoomMost = 1e6;
const plot = document.getElementById("plot");

// `left` is the first visible time, `top` the first visible rank, with a fraction. At zoom 1 everything fits.
const view = { zoom: 1, left: 0, top: 0, showsMemory: false };

// The size of the plot in the last drawing. To ask the element for it takes longer than to place a mark.
const plotSize = { width: 0, height: 0 };
const plotWidth = () => Math.max(plotSize.width - gutter - rightMargin, 1);
const plotHeight = () => Math.max(plotSize.height - axisHeight, 1);
const span = () => whole / view.zoom;
const rowMost = () => laneMost + (view.showsMemory ? memoryMost : 0);
const rowThatFits = () => Math.max(plotHeight() / Math.max(ranks.length, 1), rowLeast);
// The height of a rank with its memory and the space below. Few ranks share the height of the plot. The rows of many ranks
// grow with the zoom up to a size for labels.
const rowHeight = () => Math.max(Math.min(rowThatFits() * view.zoom, rowMost()), rowThatFits());
const memoryShare = () => view.showsMemory ? memoryMost / rowMost() : 0;

const xOf = (time) => (time - view.left) / span() * plotWidth();
const timeAt = (x) => view.left + x / plotWidth() * span();
const rankAt = (y) => view.top + y / rowHeight();

function measurePlot() {
  [plotSize.width, plotSize.height] = [plot.clientWidth, plot.clientHeight];
}

measurePlot();

function clampView() {
  view.zoom = Math.min(Math.max(view.zoom, 1), zoomMost);
  view.left = Math.min(Math.max(view.left, 0), whole - span());
  view.top = Math.max(Math.min(view.top, ranks.length - plotHeight() / rowHeight()), 0);
}

// Zooms around a point of the plot, which keeps its time and its rank.
function zoomBy(factor, x, y) {
  const time = timeAt(x), rank = rankAt(y);
  view.zoom = Math.min(Math.max(view.zoom * factor, 1), zoomMost);
  view.left = time - x / plotWidth() * span();
  view.top = rank - y / rowHeight();
  clampView();
}

// Moves by a distance in pixels. Returns whether there was anything to move to.
function panBy(x, y) {
  const { left, top } = view;
  view.left += x / plotWidth() * span();
  view.top += y / rowHeight();
  clampView();
  return view.left !== left || view.top !== top;
}

const canScrollDown = () => ranks.length * rowHeight() > plotHeight() + 0.5;

function centreOn(time, rank) {
  view.left = time - span() / 2;
  view.top = rank - plotHeight() / rowHeight() / 2;
  clampView();
}

function fit() {
  view.zoom = 1;
  clampView();
}

