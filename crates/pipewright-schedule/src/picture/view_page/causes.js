
// Reads the causes that the schedule crate has found, and follows them back to the start of the step: the chain of causes
// from the end of the step is the critical path.

const { tensors } = data.view;

// Returns the end of the action before, or the start of the step.
const freeFrom = (lane, at) => at > 0 ? lane.cells.end[at - 1] : 0;

const nameOfBar = ({ bars }, bar) => data.kinds[bars.kind[bar]][0];
const hasReplicas = (source) => source.lanes.length > pipelineRanks;

// Returns a wait of a rank: `via` is "gather", "sum" or "send". The action that led to its end is `at` of `lane`, if there is one.
function waitOf(waiting, kind, stage, until, after) {
  const name = data.kinds[kind][0], via = name === "UNSHARD" ? "gather" : name === "WAIT_REDUCE_GRAD" ? "sum" : "send";
  return { via, waiting, name, stage, until, ...after };
}

// Returns whether a wait is for the disk. A program that sums no gradients has no replicas that send their shares of parameters,
// so its `UNSHARD` reads the frozen base of a stage from its file.
const isOfDisk = ({ via, waiting }) => via === "gather" && (data.view.readsBase || !sumsGradients(waiting.source));
const sumsGradients = (source) => source.sumsGradients ??= source.lanes.some((lane) => lane.bars.kind.some((_, bar) => nameOfBar(lane, bar) === "REDUCE_GRAD"));

// Adds the causes to a timeline. A cause has `via`: "message" from another rank, "queue" if that message waited in line, "order"
// after the action before, "delay" if a gap has no cause in the timeline, "start" of the step, or a wait. The action that led to it
// is `at` of `lane`; without one, the chain ends.
function readCauses(source, { slack, causes, ends, last, lastWait }) {
  const cell = (place) => place && { lane: source.lanes[place[0]], at: place[1] };
  const wait = (one) => one && waitOf(source.lanes[one[0]], one[1], one[2], one[3] / data.quantum, cell(one[4]));
  const read = (lane, at, cause) => {
    if (!cause) return { via: "delay", lane, at: at - 1 };
    if (cause.length === 5) return wait(cause);
    const [rank, from, tensor, line] = cause, inLine = line === null ? null : source.waits[line];
    return { via: inLine ? "queue" : "message", ...cell([rank, from]), tensor: tensors[tensor], inLine };
  };
  source.slack = slack / data.quantum;
  source.lanes.forEach((lane, rank) => {
    lane.causes = new Map(causes[rank].map(([at, cause]) => [at, read(lane, at, cause)]));
    lane.waitAtEnd = wait(ends[rank]);
  });
  source.last = last && { ...cell(last), cause: wait(lastWait) };
  return source;
}

const causeOf = (lane, at) => lane.causes.get(at) ?? (at > 0 ? { via: "order", lane, at: at - 1 } : { via: "start" });

// Returns the last computation of a timeline, and in `cause` the wait that ends the step, if it ends after that.
const endOfStep = (source) => source.last;

// Returns the last wait of a rank after all its actions, if there is one, and whether the step ends with it.
function waitAtEnd({ waitAtEnd: wait, source: { end, slack } }) {
  return { wait, isLast: wait !== null && end - wait.until <= slack };
}

// Returns the computation of a part in the first replica of a timeline.
function cellOf(source, part) {
  const key = ({ letter, stage, microbatch }) => [letter, stage, microbatch].join(" ");
  if (!source.cellOfPart) {
    source.cellOfPart = new Map();
    for (const lane of source.lanes.slice(0, pipelineRanks))
      lane.cells.kind.forEach((_, at) => partsOf(lane, lane.cells, at).forEach((one) => source.cellOfPart.has(key(one)) || source.cellOfPart.set(key(one), { lane, at })));
  }
  return source.cellOfPart.get(key(part));
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
    add(isOfDisk(cause) ? "disk" : { message: "messages", queue: "messages in line", send: "messages", gather: "gather, reduce", sum: "gather, reduce" }[cause.via] ?? "gaps", Math.max(cells.start[at] - since, 0));
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
