
// Finds actions by name, rank, stage or microbatch, and the longest bubbles or slowest actions.

const searchBox = document.getElementById("search"), searchCount = document.getElementById("found");
let matches = [], matchAt = -1;

// Returns a test of a part for a query such as `1F3`, `1F3.1`, `1F`, `F`, `stage 1`, `microbatch 3` or `rank 0`; null if
// the query is none of these.
function queryTest(query) {
  const field = /^(rank|stage|microbatch|mb)\s*(\d+)$/i.exec(query), name = /^(\d*)([FBIW])([\d.]*)$/i.exec(query);
  if (field) {
    const [key, wanted] = [field[1].toLowerCase(), +field[2]];
    return (part, lane) => ({ rank: lane.rank, stage: part.stage, microbatch: microbatchOf(part.microbatch), mb: microbatchOf(part.microbatch) })[key] === wanted;
  }
  if (!name) return null;
  const [stage, letter, microbatch] = [name[1], name[2].toUpperCase(), name[3]];
  const isNamed = (number) => microbatch === "" || microbatchOf(number) === +microbatch || nameOfNumber(number) === microbatch;
  return (part) => part.letter === letter && (stage === "" || part.stage === +stage) && isNamed(part.microbatch);
}

function findMatches(query) {
  const sources = sourcesInSight();
  if (/^bubbles?$/i.test(query)) return sources.slice(0, 1).flatMap(bubblesOf);
  if (/^slow/i.test(query)) return sources.slice(0, 1).flatMap(slowActions);
  const isWanted = queryTest(query), found = [];
  if (!isWanted) return found;
  for (const lane of sources.flatMap(({ lanes }) => lanes))
    for (let at = 0; at < lane.cells.start.length; at++)
      if (partsOf(lane, lane.cells, at).some((part) => isWanted(part, lane))) found.push({ lane, at, from: lane.cells.start[at] });
  return found.sort((one, other) => one.from - other.from);
}

function goToMatch(at) {
  matchAt = matches.length ? (at + matches.length) % matches.length : -1;
  searchCount.textContent = matches.length ? `${matchAt + 1} of ${matches.length}` : searchBox.value.trim() ? "nothing found" : "";
  if (matchAt < 0) return;
  const match = matches[matchAt];
  if (match.next !== undefined) goToBubble(match); else goToCell(match.lane, match.at);
}

function search() {
  matches = findMatches(searchBox.value.trim());
  goToMatch(0);
}

// Forgets the matches when other timelines are shown.
function forgetMatches() {
  matches = [];
  matchAt = -1;
  searchCount.textContent = "";
}

// Goes to another of the longest bubbles.
function goToBubbleBy(step) {
  const bubbles = bubblesOf(mainSource()), is = ({ lane, from }) => selected?.isBubble && lane === selected.lane && from === selected.from;
  const at = bubbles.findIndex(is);
  if (bubbles.length) goToBubble(bubbles[at < 0 ? 0 : (at + step + bubbles.length) % bubbles.length]);
}

// Goes to the action before or after the selected one on its rank.
function goToNeighbour(step) {
  if (!selected || selected.isRange) return false;
  const { lane, at, next } = selected, count = lane.cells.start.length;
  const target = selected.isBubble ? (step > 0 ? next : (next < 0 ? count : next) - 1) : at + step;
  if (target < 0 || target >= count) return false;
  goToCell(lane, target);
  return true;
}

searchBox.addEventListener("input", search);
searchBox.addEventListener("keydown", (event) => {
  if (event.key === "Enter") goToMatch(matchAt + (event.shiftKey ? -1 : 1));
  if (event.key === "Escape") searchBox.blur();
});
