"use strict";

// The data of the timeline, which is read into lists that are fast to search.
// Times are numbers of quanta since the start of the timeline.
const data = "{{data}}";
let whole = data.makespan || 1;
const overlap = data.kinds.findIndex(([name]) => name === "OVERLAP_F_B");
const firstSkip = data.kinds.findIndex(([name]) => name === "SEND_SKIP_F");
const [forwardSort, backwardSort, messageSort, offloadSort] = [0, 1, 4, 6];
const sortOf = (kind) => data.kinds[kind][2];
const isCompute = (kind) => sortOf(kind) < messageSort;

// One list for each property of some events. An overlap has its forward in `chunk` and `microbatch` and its backward in
// `otherChunk` and `otherMicrobatch`. A message of a skip connection has its other end in `peer`. A receive may begin before
// its message is sent; `sent` is the time from which the message is on its way, and equals `start` for other events.
const noEvents = () => ({ kind: [], start: [], sent: [], end: [], chunk: [], microbatch: [], otherChunk: [], otherMicrobatch: [], peer: [] });

// Reads the events that `isWanted` chooses. `scale` converts times to quanta of the page.
function readEvents(rank, isWanted, scale) {
  const events = noEvents();
  let start = 0, overlaps = 0, skips = 0;
  for (let at = 0; at < rank.kinds.length; at++) {
    start += rank.starts[at];
    const kind = rank.kinds.charCodeAt(at) - 65;
    const [otherChunk, otherMicrobatch] = kind === overlap ? rank.backwards[overlaps++] : [0, -1];
    const peer = kind >= firstSkip ? rank.peers[skips++] : "";
    if (!isWanted(kind)) continue;
    events.kind.push(kind);
    events.start.push(start * scale);
    events.sent.push(start * scale);
    events.end.push((start + rank.lengths[at]) * scale);
    events.chunk.push(rank.chunks.length ? rank.chunks[at] : 0);
    events.microbatch.push(rank.microbatches[at]);
    events.otherChunk.push(otherChunk);
    events.otherMicrobatch.push(otherMicrobatch);
    events.peer.push(peer);
  }
  return events;
}

function readMemory(steps, scale) {
  const memory = { start: [], held: [] };
  let time = 0;
  for (const [since, held] of steps) {
    time += since;
    memory.start.push(time * scale);
    memory.held.push(held);
  }
  return memory;
}

// Reads the exchanges of tokens; most timelines have none.
function readExchanges(exchanges, scale) {
  const read = { start: [], end: [] };
  let start = 0;
  for (const [since, length] of exchanges) {
    start += since;
    read.start.push(start * scale);
    read.end.push((start + length) * scale);
  }
  return read;
}

// Adds to a lane what drawing and searching need.
function completeLane(lane) {
  const longestOf = ({ start, end }) => start.reduce((most, start, at) => Math.max(most, end[at] - start), 0);
  const [longestCell, longestBar] = [lane.cells, lane.bars].map(longestOf);
  const peak = lane.memory.held.reduce((most, held) => Math.max(most, held), 0);
  return Object.assign(lane, { longestCell, longestBar, peak, narrowCell: narrowOf(lane.cells), overlaps: lane.cells.kind.includes(overlap) });
}

// Returns the mean length of the cells of the shortest sort.
function narrowOf({ kind, start, end }) {
  const sums = new Map();
  kind.forEach((kind, at) => {
    const sum = sums.get(kind) ?? [0, 0];
    sums.set(kind, [sum[0] + end[at] - start[at], sum[1] + 1]);
  });
  return [...sums.values()].reduce((least, [length, count]) => length > 0 ? Math.min(least, length / count) : least, Infinity);
}

// Returns a name that a send and the receive of its message share, with the replica of their lanes.
function nameOfMessage(lane, replica, at) {
  const { kind, chunk, microbatch, peer } = lane.bars, stage = lane.stages[chunk[at]];
  const [, direction, skip, letter] = /^(SEND|RECV)_(SKIP_)?([FB])$/.exec(data.kinds[kind[at]][0]) ?? [];
  if (!direction) return null;
  const other = skip ? +peer[at].replace(/\D+/, "") : stage + ((direction === "SEND") === (letter === "F") ? 1 : -1);
  const [from, to] = direction === "SEND" ? [stage, other] : [other, stage];
  return { direction, name: [replica, skip, letter, from, to, microbatch[at]].join(" ") };
}

// Adds when the tensors of a lane were made, for messages whose sends take no time and are no bars.
function addMade(sends, lane, replica) {
  const { cells } = lane;
  cells.kind.forEach((_, at) => {
    for (const { letter, stage, microbatch } of partsOf(lane, cells, at)) {
      const name = [replica, "", letter === "F" ? "F" : "B", stage, stage + (letter === "F" ? 1 : -1), microbatch].join(" ");
      if (letter !== "W" && !sends.has(name)) sends.set(name, cells.end[at]);
    }
  });
}

// Sets when the messages of the receives of a timeline were sent. Replicas have lanes with the same stages.
function findSends(lanes) {
  const sends = new Map(), receives = [], replicas = new Map(), replicaOf = [];
  for (const lane of lanes) {
    const first = lane.stages[0], replica = replicas.get(first) ?? 0;
    replicas.set(first, replica + 1);
    replicaOf.push(replica);
    lane.bars.kind.forEach((_, at) => {
      const message = nameOfMessage(lane, replica, at);
      if (message?.direction === "SEND") sends.set(message.name, lane.bars.start[at]);
      if (message?.direction === "RECV") receives.push([lane.bars, at, message.name]);
    });
  }
  if (receives.some(([, , name]) => !sends.has(name))) lanes.forEach((lane, index) => addMade(sends, lane, replicaOf[index]));
  for (const [bars, at, name] of receives)
    bars.sent[at] = Math.min(Math.max(sends.get(name) ?? bars.start[at], bars.start[at]), bars.end[at]);
  return lanes;
}

function readRank(rank, index, scale) {
  const cells = readEvents(rank, isCompute, scale), bars = readEvents(rank, (kind) => !isCompute(kind), scale);
  return completeLane({ name: "rank " + index, stages: rank.stages, cells, bars, memory: readMemory(rank.memory, scale), exchanges: readExchanges(rank.exchanges ?? [], scale) });
}

// The lanes of the picture, from top to bottom. Most pages have one lane for each rank.
let ranks = findSends(data.ranks.map((rank, index) => readRank(rank, index, 1)));
let peak = ranks.reduce((most, rank) => Math.max(most, rank.peak), 1);

// Returns the place of the first of the ascending starts that is at or after a time.
function firstFrom(starts, time) {
  let low = 0, high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle] < time) low = middle + 1; else high = middle;
  }
  return low;
}

// Returns the actions that an event runs: one, or both of an overlap, the upper one first.
function partsOf(rank, events, at) {
  const peer = events.peer[at];
  const part = (sort, letter, chunk, microbatch) => ({ sort, letter, chunk, stage: rank.stages[chunk], microbatch, peer });
  const kind = events.kind[at];
  if (kind !== overlap) return [part(sortOf(kind), data.kinds[kind][0], events.chunk[at], events.microbatch[at])];
  return [
    part(forwardSort, "F", events.chunk[at], events.microbatch[at]),
    part(backwardSort, "B", events.otherChunk[at], events.otherMicrobatch[at]),
  ];
}

// If microbatches are cut into slices, the number of a microbatch is that of a slice.
const microbatchOf = (number) => Math.floor(number / data.slices), sliceOf = (number) => number % data.slices;

// Returns the name of a microbatch, or of a slice such as `3.1`.
const nameOfNumber = (number) => microbatchOf(number) + (data.slices > 1 ? "." + sliceOf(number) : "");

const nameOfPart = (part) => part.stage + part.letter + (part.microbatch < 0 ? "" : nameOfNumber(part.microbatch)) + part.peer;

// Returns the stage, the microbatch and the slice of a part in words.
function placeOfPart({ stage, microbatch }) {
  if (microbatch < 0) return `stage ${stage}`;
  return `stage ${stage}, microbatch ${microbatchOf(microbatch)}` + (data.slices > 1 ? `, slice ${sliceOf(microbatch)}` : "");
}

function nameOf(parts) {
  return parts.length === 1 ? nameOfPart(parts[0]) : `(${parts.map(nameOfPart).join(";")})OVERLAP_F_B`;
}

// Returns the factor and the name of the unit for times like this one. Costs that are not seconds have no unit.
function unitOf(time) {
  if (!data.seconds) return [1, ""];
  return time >= 1 || time === 0 ? [1, "s"] : time >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
}

// Formats a duration in a unit that suits the whole timeline.
function duration(quanta) {
  const [factor, unit] = unitOf(whole * data.quantum);
  return `${+(quanta * data.quantum * factor).toPrecision(6)} ${unit}`.trim();
}

function amount(held) {
  if (data.unit !== "bytes") return held + " activation" + (held === 1 ? "" : "s");
  const found = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([size]) => held >= size);
  return found ? (held / found[0]).toFixed(2) + " " + found[1] : held + " B";
}

