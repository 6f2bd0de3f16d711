
// Finds why an action did not start earlier, and follows the causes back to the start of the step.
//
// An action starts when its rank is free and its tensors have arrived. The later of the two is its cause: the previous
// action of the rank, what the rank waited for after it (`waits.js`), or the action that made the tensor. On a communicator
// with queues, the message may also have waited behind another operation (`blocking.js`). The chain of
// causes from the end of the step is the critical path: the step would be shorter only if something on it took less time.

// A gap of a measured timeline that is shorter than this share of the median action is the time of the runtime.
const noticeableGap = 0.05;

const partKey = (letter, stage, microbatch) => ("FBIW".indexOf(letter) * 8192 + stage) * 2097152 + microbatch;

// Returns the place of each computed part of a timeline: a map for each replica from the key to the lane and the index.
function placesOf(source) {
  if (source.places) return source.places;
  source.places = [];
  source.lengths = [];
  for (const lane of source.lanes) {
    const places = source.places[lane.replica] ??= new Map(), { cells } = lane;
    for (let at = 0; at < cells.start.length; at++) {
      source.lengths.push(cells.end[at] - cells.start[at]);
      for (const part of partsOf(lane, cells, at)) {
        // A forward that is computed again for its backward has sent its tensors the first time.
        const key = partKey(part.letter, part.stage, part.microbatch);
        if (!places.has(key)) places.set(key, { lane, at });
      }
    }
    lane.waits = waitsOf(lane);
  }
  source.lengths.sort((one, other) => one - other);
  source.slack = source.step ? noticeableGap * (source.lengths[source.lengths.length >> 1] ?? 0) : source.end * 1e-8;
  return source.places;
}

// Returns the stages from which a part gets tensors over skip connections.
function skipsTo({ letter, stage }) {
  const skips = data.view.costs.skips ?? [];
  return skips.flatMap(([from, to]) => letter === "F" ? (to === stage ? [from] : []) : (from === stage ? [to] : []));
}

// Returns the actions that make the tensors of a part, each with the tensor's name.
function producersOf(lane, { letter, stage, microbatch }) {
  const places = placesOf(lane.source)[lane.replica], isForward = letter === "F";
  if (letter === "W") return [];
  const find = (stage) => (isForward ? ["F"] : ["I", "B"]).map((letter) => places.get(partKey(letter, stage, microbatch))).find(Boolean);
  const skips = skipsTo({ letter, stage }).map(find).filter(Boolean);
  const neighbour = find(isForward ? stage - 1 : stage + 1), tensor = isForward ? "input" : "output gradient";
  return [...neighbour ? [{ tensor, ...neighbour }] : [], ...skips.map((place) => ({ tensor: "skip connection", ...place }))];
}

// Returns the end of the action before, or the start of the step.
const freeFrom = (lane, at) => at > 0 ? lane.cells.end[at - 1] : 0;

// Returns the parts of an action whose tensors it waits for. A forward that is computed again has its tensors, so it
// waits only for those of its backward, which follows it.
function partsToFeed(lane, at) {
  const places = placesOf(lane.source)[lane.replica];
  const isAgain = ({ letter, stage, microbatch }) => letter === "F" && places.get(partKey("F", stage, microbatch))?.at !== at;
  return partsOf(lane, lane.cells, at).map((part) => isAgain(part) ? { ...part, letter: "B" } : part);
}

// Returns whether a measured rank received a tensor of an action between two times.
function receives(lane, at, from, to) {
  const { bars, source: { slack } } = lane, parts = partsToFeed(lane, at);
  for (let bar = firstFrom(bars.start, from - slack); bar < bars.start.length && bars.start[bar] < to; bar++) {
    const direction = /^RECV_(?:SKIP_)?([FB])$/.exec(nameOfBar(lane, bar))?.[1];
    const isOwn = ({ letter, stage, microbatch }) =>
      direction === (letter === "F" ? "F" : "B") && stage === stageOfBar(lane, bar) && microbatch === bars.microbatch[bar];
    if (direction && parts.some(isOwn) && Math.min(bars.end[bar], to) - Math.max(bars.start[bar], from) > Math.min(slack, (to - from) / 2)) return true;
  }
  return false;
}

// Returns the message that arrived last for an action whose rank was free from `free` on; null if none was missing. In a
// measured timeline, a message is the cause only if the rank was receiving it, or if its tensor was made so late that it
// was still on its way at that time.
function messageBefore(lane, at, free) {
  const { slack, step } = lane.source, isReceived = !step || receives(lane, at, free, lane.cells.start[at]);
  let latest = isReceived ? -1 : free - slack - data.view.costs.latency / data.quantum, cause = null;
  for (const producer of partsToFeed(lane, at).flatMap((part) => producersOf(lane, part))) {
    if (producer.lane === lane) continue;
    const made = producer.lane.cells.end[producer.at];
    if (made <= latest || made > lane.cells.start[at] + slack) continue;
    latest = made;
    cause = { via: "message", lane: producer.lane, at: producer.at, tensor: producer.tensor };
  }
  const inLine = cause && cause.tensor !== "skip connection" ? waitInLine(cause, lane, cause.tensor === "input", lane.cells.start[at]) : null;
  return inLine ? { ...cause, via: "queue", inLine } : cause;
}

// Returns the cause of an action's start: `via` is "message" from another rank, "queue" if that message waited in line, "order" after the action before,
// "gather", "sum" or "send" if the rank waited for one of these, "delay" if a gap has no cause in the timeline, or
// "start" of the step. The action that led to it is `at` of `lane`; without one, the chain ends.
function causeOf(lane, at) {
  placesOf(lane.source);
  const start = lane.cells.start[at], free = freeFrom(lane, at), { slack } = lane.source;
  if (start - free <= slack) return at > 0 ? { via: "order", lane, at: at - 1 } : { via: "start" };
  const bar = waitBefore(lane, at), until = bar < 0 ? free : lane.bars.end[bar];
  const message = bar < 0 || start - until > slack ? messageBefore(lane, at, until) : null;
  if (message) return message;
  if (bar >= 0) return causeOfWait(lane, bar);
  return at > 0 ? { via: "delay", lane, at: at - 1 } : { via: "start" };
}

// Returns the actions that led to an action, from it back to the start of the step. Each has the `cause` of its start.
function chainTo(lane, at) {
  const chain = [];
  for (let limit = lane.source.lanes.reduce((sum, { cells }) => sum + cells.start.length, 1); limit > 0; limit--) {
    const cause = causeOf(lane, at);
    chain.push({ lane, at, cause });
    if (!cause.lane) break;
    ({ lane, at } = cause);
  }
  return chain;
}

// Returns the last computation of a timeline, and in `cause` the wait that ends the step, if it ends after that.
function endOfStep(source) {
  placesOf(source);
  let last = null, longest = null;
  for (const lane of source.lanes) {
    const at = lane.cells.end.length - 1, { waits } = lane, bar = waits.bar.at(-1);
    if (at >= 0 && (!last || lane.cells.end[at] > last.lane.cells.end[last.at])) last = { lane, at };
    if (bar !== undefined && (!longest || waits.end.at(-1) > longest.lane.bars.end[longest.bar])) longest = { lane, bar };
  }
  if (!last || !longest || longest.lane.bars.end[longest.bar] - last.lane.cells.end[last.at] <= source.slack) return last;
  return { ...last, cause: causeOfWait(longest.lane, longest.bar) };
}

// Returns the chain of causes that ends with the step: with its last computation, or with the wait that follows it.
function criticalPath(source) {
  if (source.path) return source.path;
  const last = endOfStep(source), from = last?.cause?.lane ? last.cause : last;
  source.path = last ? chainTo(from.lane, from.at) : [];
  return source.path;
}

// Joins neighbours of a chain that ran on one rank without a pause: { lane, first, last, cause }, the latest first.
function runsOf(chain) {
  const runs = [];
  for (const { lane, at, cause } of chain) {
    const run = runs.at(-1);
    if (run && run.cause.via === "order" && run.lane === lane) Object.assign(run, { first: at, cause });
    else runs.push({ lane, first: at, last: at, cause });
  }
  return runs;
}

// Returns the time that a chain spends in each kind of action, in messages, in collectives, and in gaps without a cause.
function timesOf(chain) {
  const times = new Map(), add = (name, time) => times.set(name, (times.get(name) ?? 0) + time);
  for (const { lane, at, cause } of chain) {
    const { cells } = lane, kind = cells.kind[at];
    add(data.kinds[kind][0] === "OVERLAP_F_B" ? "overlap" : data.kinds[kind][0], cells.end[at] - cells.start[at]);
    if (cause.via === "order") continue;
    const since = cause.lane ? cause.lane.cells.end[cause.at] : 0;
    add({ message: "messages", queue: "messages in line", send: "messages", gather: "gather, reduce", sum: "gather, reduce" }[cause.via] ?? "gaps", Math.max(cells.start[at] - since, 0));
  }
  return times;
}

// Returns the time from the end of the critical path's last computation to the end of the step. In this time ranks wait
// for messages, or for the sums of gradients over the replicas.
function timeAfterLast(source) {
  const last = criticalPath(source)[0], rest = last ? source.end - last.lane.cells.end[last.at] : 0;
  return rest > source.slack ? rest : 0;
}

// Returns the time that a step spends in each part of its critical path, and after it.
function timesOfStep(source) {
  return timesOf(criticalPath(source)).set("communication at the end", timeAfterLast(source));
}

// Returns the bubble of a lane at a time: its start, its end, and the action that follows, or -1 after the last one.
function bubbleAt(lane, time) {
  const { start, end } = lane.cells, next = firstFrom(start, time), from = next > 0 ? end[next - 1] : 0;
  if (time < from) return null;
  return next < start.length ? { lane, next, from, to: start[next] } : { lane, next: -1, from, to: lane.source.end };
}

// Returns all bubbles of a timeline, the longest first.
function bubblesOf(source) {
  if (source.bubbles) return source.bubbles;
  placesOf(source);
  source.bubbles = [];
  for (const lane of source.lanes) {
    const { start, end } = lane.cells;
    for (let next = 0; next <= start.length; next++) {
      const from = freeFrom(lane, next), to = next < start.length ? start[next] : source.end;
      if (to - from > source.slack) source.bubbles.push({ lane, next: next < start.length ? next : -1, from, to });
    }
  }
  source.bubbles.sort((one, other) => other.to - other.from - (one.to - one.from));
  return source.bubbles;
}

// Returns the median time of each kind of action of each stage in this timeline alone, by kind and stage.
function mediansOf(source) {
  if (source.medians) return source.medians;
  const times = new Map();
  for (const lane of source.lanes) {
    lane.cells.kind.forEach((kind, at) => {
      const key = kind * 8192 + lane.stages[lane.cells.chunk[at]];
      if (!times.has(key)) times.set(key, []);
      times.get(key).push(lane.cells.end[at] - lane.cells.start[at]);
    });
  }
  source.medians = new Map([...times].map(([key, all]) => [key, all.sort((one, other) => one - other)[all.length >> 1]]));
  return source.medians;
}

const medianOf = (lane, at) => mediansOf(lane.source).get(lane.cells.kind[at] * 8192 + lane.stages[lane.cells.chunk[at]]);

// Returns the actions that took much longer than the median of their stage and kind, the greatest loss first.
function slowActions(source) {
  if (source.slow) return source.slow;
  source.slow = [];
  for (const lane of source.lanes) {
    lane.cells.start.forEach((start, at) => {
      const loss = lane.cells.end[at] - start - medianOf(lane, at);
      if (loss > 0.2 * medianOf(lane, at)) source.slow.push({ lane, at, loss });
    });
  }
  source.slow.sort((one, other) => other.loss - one.loss);
  return source.slow;
}
