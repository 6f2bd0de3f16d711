
// Finds what a rank waits for apart from its tensors: parameters that are gathered, gradients that are summed over
// replicas, and messages that have to leave.
//
// A prediction has one replica, and its collectives run one after another beside the computation. Measured timelines have
// all replicas. They record a gathering from the time when an action needs it, so when it began is not known.

const nameOfBar = ({ bars }, bar) => data.kinds[bars.kind[bar]][0];
const stageOfBar = ({ bars, stages }, bar) => stages[bars.chunk[bar]];
const hasReplicas = (source) => source.lanes.length > pipelineRanks;

// Returns the bars of a lane that its actions may wait for, by their ends.
function waitsOf(lane) {
  const { bars } = lane, isWait = bars.kind.map((kind) => /^(UNSHARD|WAIT_.*)$/.test(data.kinds[kind][0]));
  const bar = bars.kind.map((_, at) => at).filter((at) => isWait[at]).sort((one, other) => bars.end[one] - bars.end[other]);
  return { bar, end: bar.map((at) => bars.end[at]) };
}

// Returns the last wait in the gap before an action, or, for the index after the last action, before the end of the step;
// -1 if the rank waits for none.
function waitBefore(lane, at) {
  const { cells, bars, waits, source: { slack, end } } = lane, free = freeFrom(lane, at), to = cells.start[at] ?? end;
  const stages = at < cells.start.length ? partsOf(lane, cells, at).map(({ stage }) => stage) : [];
  for (let place = firstFrom(waits.end, to + slack) - 1; place >= 0 && waits.end[place] > free + slack; place--) {
    const bar = waits.bar[place];
    const isNeeded = nameOfBar(lane, bar) !== "UNSHARD" || stages.includes(stageOfBar(lane, bar));
    if (isNeeded && waits.end[place] - Math.max(bars.start[bar], free) > slack) return bar;
  }
  return -1;
}

// Returns the last action of a lane that has ended at a time; nothing if there is none.
function endedBy(lane, time) {
  const at = firstFrom(lane.cells.end, time + lane.source.slack) - 1;
  return at < 0 ? null : { lane, at };
}

// Returns the action after which a collective of a prediction began. It may have waited for the collectives before it.
function issuedAfter(lane, bar) {
  const { bars, source: { slack } } = lane, start = bars.start[bar], ended = endedBy(lane, start);
  if (ended && start - lane.cells.end[ended.at] <= slack) return ended;
  const isBefore = (other) => Math.abs(bars.end[other] - start) <= slack && bars.start[other] < start;
  const before = bars.kind.map((_, other) => other).filter(isBefore);
  const queued = before.find((other) => /^(UNSHARD|REDUCE_GRAD)$/.test(nameOfBar(lane, other)));
  if (queued !== undefined) return issuedAfter(lane, queued);
  const sent = before.find((other) => nameOfBar(lane, other).startsWith("WAIT_SEND"));
  return sent === undefined ? ended : sentBy(lane, sent);
}

// Returns the action that made the message of a `WAIT_SEND`.
function sentBy(lane, bar) {
  const letters = nameOfBar(lane, bar) === "WAIT_SEND_F" ? ["F"] : ["I", "B"], places = placesOf(lane.source)[lane.replica];
  const place = letters.map((letter) => places.get(partKey(letter, stageOfBar(lane, bar), lane.bars.microbatch[bar]))).find(Boolean);
  return place ?? endedBy(lane, lane.bars.start[bar]);
}

// Returns the `REDUCE_GRAD` of the replica that adds its gradients of a stage last before a time; null without one.
function lastToAdd(lane, stage, until) {
  let last = null;
  for (const other of lane.source.lanes) {
    if (other.rank % pipelineRanks !== lane.rank % pipelineRanks) continue;
    other.bars.start.forEach((start, bar) => {
      const isSum = nameOfBar(other, bar) === "REDUCE_GRAD" && stageOfBar(other, bar) === stage && start < until;
      if (isSum && (!last || start > last.lane.bars.start[last.bar])) last = { lane: other, bar };
    });
  }
  return last;
}

// Returns the cause of the end of a wait, with the wait itself: its lane in `waiting`, its `bar`, and its `stage`.
function causeOfWait(waiting, bar) {
  const { bars, source } = waiting, stage = stageOfBar(waiting, bar), name = nameOfBar(waiting, bar), wait = { waiting, bar, stage };
  if (name.startsWith("WAIT_SEND")) return { ...wait, via: "send", ...sentBy(waiting, bar) };
  const began = name === "UNSHARD" ? { lane: waiting, bar } : lastToAdd(waiting, stage, bars.end[bar]);
  const after = !began ? endedBy(waiting, bars.start[bar])
    : source.step ? endedBy(began.lane, began.lane.bars.start[began.bar]) : issuedAfter(began.lane, began.bar);
  return { ...wait, via: name === "UNSHARD" ? "gather" : "sum", ...after };
}

// Returns the last wait of a rank after all its actions, if there is one, and whether the step ends with it.
function waitAtEnd(lane) {
  const bar = waitBefore(lane, lane.cells.start.length), { end, slack } = lane.source;
  return bar < 0 ? { wait: null, isLast: false } : { wait: causeOfWait(lane, bar), isLast: end - lane.bars.end[bar] <= slack };
}

// Returns what a wait is for, in a few words.
function purposeOfWait({ via, stage, lane, at }) {
  if (via === "gather") return `for the parameters of stage ${stage}`;
  if (via === "sum") return `for the sum of the gradients of stage ${stage} over the replicas`;
  return lane ? `until the message of ${nameOfCell(lane, at)} has left` : "until a message has left";
}

// Returns when a wait ends and why, as nodes of a sentence.
function sentenceOfWait(cause) {
  const { via, waiting, bar, lane, at } = cause, { source } = waiting, until = time(waiting.bars.end[bar]);
  const action = lane ? cellButton(lane, at) : null, ended = lane ? `, which ends at ${time(lane.cells.end[at])}` : "";
  const nodes = [`${via === "gather" ? "It waits" : `The program waits (${nameOfBar(waiting, bar)})`} ${via === "send" ? "until the message of " : purposeOfWait(cause)}`];
  if (via === "send") return [...nodes, action ?? "an earlier action", `${ended}, has left. That is at ${until}.`];
  const begins = action ? [" after ", action, ` on ${rankOf(lane)}${ended},`] : [" at the start of the step"];
  const alone = " The other replicas are not in this picture; the prediction assumes that they are as far as this one.";
  if (!source.step) return [...nodes, ". The communication begins", ...begins, ` and ends at ${until}.${alone}`];
  if (!hasReplicas(source)) return [...nodes, ` until ${until}. The other replicas are not in this picture.`];
  if (via === "gather") return [...nodes, ` until ${until}. The other replicas send their shares of them; the recording does not say which one is last.`];
  return [...nodes, `. The last replica begins to add its gradients`, ...begins, ` and the sum is complete at ${until}.`];
}
