
// Runs a program of the page at other costs. For each time, the page has the earlier times on which it depends: a node is a cost after
// another node, or the latest of several nodes. A pass over all nodes gives the times, and the node that won each
// maximum gives the causes.

// Repeats the parts of a list that repeat earlier ones: [distance, count].
function unpack(pieces) {
  const list = [];
  for (const piece of pieces) {
    if (typeof piece === "number") list.push(piece);
    else for (let [distance, count] = piece; count > 0; count--) list.push(list[list.length - distance]);
  }
  return list;
}

// Reads the numbers of a rank. A reference has another rank relative to this one, and the distance from the last reference to that
// rank in the same column.
function numbersOf(pieces, rank, ranks) {
  const list = unpack(pieces), last = [];
  let at = 0;
  const next = () => list[at++];
  const place = (column, number) => {
    const shift = (number % ranks + ranks) % ranks, other = (rank + shift) % ranks, key = column * ranks + other;
    last[key] = (last[key] ?? 0) + (number - shift) / ranks;
    return [other, last[key]];
  };
  // Returns the key of a node. That of the start of the step is 0.
  const node = (column) => {
    const number = next();
    if (number === 0) return 0;
    const [other, index] = place(column, number > 0 ? number - 1 : number);
    return index * ranks + other + 1;
  };
  return { hasMore: () => at < list.length, next, node, place: (column) => place(column, next()) };
}

function readNodes(pieces, rank, ranks) {
  const numbers = numbersOf(pieces, rank, ranks), heads = [], nodes = [];
  while (numbers.hasMore()) {
    const head = numbers.next();
    heads.push(head);
    if (head >= 0) nodes.push(numbers.node(0));
    for (let column = 1; column <= -head; column++) nodes.push(numbers.node(column));
  }
  return { heads, nodes };
}

function readDependentEvents(pieces, rank, ranks) {
  const numbers = numbersOf(pieces, rank, ranks), { next, node, place } = numbers, events = [];
  let number = 0;
  while (numbers.hasMore()) {
    const index = events.length, [kind, stage] = [next(), next()], column = data.view.columns * kind;
    number += next();
    const [start, end] = [node(column), node(column + 1)], memory = [next(), next()];
    const messages = Array.from({ length: next() }, () => ({ tensor: next(), maker: place(column + 2), arrival: node(column + 3), ends: [next(), next()] }));
    const count = next(), given = count ? node(column + 4) : 0, behind = Array.from({ length: count }, () => index - next());
    const name = stage + data.kinds[kind][0] + (number < 0 ? "" : number);
    events.push({ rank, index, kind, stage, microbatch: number, start, end, memory, messages, given, behind, name });
  }
  return events;
}

function readProgram({ costs, nodes, events }) {
  const ranks = nodes.length, lists = nodes.map((pieces, rank) => readNodes(pieces, rank, ranks));
  const size = lists.reduce((most, { heads }) => Math.max(most, heads.length), 0) * ranks + 1;
  return { costs, ranks, lists, size, events: events.map((pieces, rank) => readDependentEvents(pieces, rank, ranks)) };
}

// Returns the time of each node, and the node that led to it. Ranks take turns, each as far as the nodes are known.
function timesAt({ ranks, lists, size }, seconds) {
  const times = new Float64Array(size).fill(NaN), winners = new Int32Array(size), next = lists.map(() => ({ at: 0, from: 0 }));
  times[0] = 0;
  const run = ({ heads, nodes }, rank) => {
    let { at, from } = next[rank];
    for (; at < heads.length; at++) {
      const head = heads[at], until = from + (head < 0 ? -head : 1);
      let winner = nodes[from];
      for (let one = from; one < until; one++) {
        const time = times[nodes[one]];
        if (Number.isNaN(time)) return Object.assign(next[rank], { at, from });
        if (time > times[winner]) winner = nodes[one];
      }
      const key = at * ranks + rank + 1;
      winners[key] = winner;
      times[key] = times[winner] + (head < 0 ? 0 : seconds[head]);
      from = until;
    }
    Object.assign(next[rank], { at, from });
  };
  const passed = () => next.reduce((sum, { at }) => sum + at, 0);
  for (let before = -1; passed() > before;) {
    before = passed();
    lists.forEach(run);
  }
  return { times, winners };
}

// Returns the memory of a rank over time, from the changes at the starts and the ends of its events.
function memoryOf(events) {
  const memory = { start: [], held: [] };
  const changes = events.flatMap(({ from, to, memory: [first, last] }) => [[from, first], [to, last]]).filter(([, change]) => change !== 0);
  let held = 0;
  for (const [time, change] of changes.sort((one, other) => one[0] - other[0])) {
    held += change;
    memory.start.push(time);
    memory.held.push(held);
  }
  return memory;
}

// Turns the events of a rank into a lane like those of the data.
function laneOf(events) {
  const stages = [...new Set(events.map(({ stage }) => stage))].sort((one, other) => one - other);
  const lane = { stages, cells: noEvents(), bars: noEvents(), memory: memoryOf(events) };
  for (const event of events) {
    const { kind, stage, microbatch, from, to } = event, into = isCompute(kind) ? lane.cells : lane.bars;
    if (into === lane.bars && to <= from) continue;
    Object.assign(event, { lane, at: into.kind.length });
    const values = { kind, start: from, sent: from, end: to, chunk: Math.max(stages.indexOf(stage), 0), microbatch, otherChunk: 0, otherMicrobatch: -1, peer: "" };
    for (const name of Object.keys(values)) into[name].push(values[name]);
  }
  return completeLane(lane);
}

// Returns the events that waited in line, and adds the wait to each.
function waitsInLine(events, times) {
  const waits = [];
  for (const event of events.flat().filter(({ behind }) => behind.length)) {
    const last = event.behind.map((at) => events[event.rank][at]).reduce((last, other) => other.to >= last.to ? other : last);
    const from = times[event.given] / data.quantum;
    event.inLine = from < last.to ? { rank: event.rank, action: event.name, behind: last.name, from, until: last.to } : null;
    if (event.inLine) waits.push(event.inLine);
  }
  return waits;
}

// Returns the timeline of a program at other costs, with its causes.
function runProgram(name, program, seconds) {
  const { times, winners } = timesAt(program, seconds);
  const events = program.events.map((own) => own.map((event) => ({ ...event, from: times[event.start] / data.quantum, to: times[event.end] / data.quantum })));
  const lanes = events.map((own) => laneOf([...own].sort((one, other) => one.from - other.from)));
  const end = events.flat().reduce((last, { to }) => Math.max(last, to), 0);
  const source = completeSource({ name, end, slack: end * predictedSource.slack / (predictedSource.end || 1), waits: waitsInLine(events, times), lanes });
  addCauses(source, events, times, winners);
  return source;
}

// Adds the causes to a timeline: the nodes that won lead from each action after a gap to the wait that delayed it; without one, the
// cause is the message that arrived then.
function addCauses(source, events, times, winners) {
  const { slack, lanes } = source, all = events.flat(), cells = all.filter(({ kind }) => isCompute(kind));
  const waits = all.filter(({ kind, from, to }) => to > from && /^(UNSHARD|WAIT_.*)$/.test(data.kinds[kind][0]));
  const [cellEnds, waitEnds] = [cells, waits].map((events) => new Map(events.map((event) => [event.end, event])));
  // Follows the winners from a node until one of these events or a computation ends.
  const ledTo = (node, ends) => {
    while (node > 0 && !ends.has(node) && !cellEnds.has(node)) node = winners[node];
    return ends.get(node);
  };
  const causeOfWait = ({ lane, kind, stage, to, end }) => {
    const after = ledTo(end, cellEnds);
    return waitOf(lane, kind, stage, to, after && { lane: after.lane, at: after.at });
  };
  const causeOfMessage = (cell, { tensor, maker: [rank, index], ends: [toSend, toReceive] }) => {
    const made = events[rank][index], [send, receive] = [events[rank][index - toSend], events[cell.rank][cell.index - toReceive]];
    const moves = receive !== cell && receive.to > receive.from ? receive.from : cell.from;
    const isCause = ({ inLine }) => inLine && Math.abs(inLine.until - moves) <= slack && inLine.until > made.to + slack;
    const inLine = [send, receive].find(isCause)?.inLine ?? null;
    return { via: inLine ? "queue" : "message", lane: made.lane, at: made.at, tensor: tensors[tensor], inLine };
  };
  lanes.forEach((lane) => Object.assign(lane, { causes: new Map(), waitAtEnd: null }));
  for (const cell of cells) {
    const { lane, at, from, rank } = cell;
    if (from - freeFrom(lane, at) <= slack) continue;
    const wait = ledTo(cell.start, waitEnds), isLate = wait && wait.rank === rank && from - wait.to <= slack;
    const message = cell.messages.find(({ arrival }) => Math.abs(times[arrival] / data.quantum - from) <= slack);
    if (isLate) lane.causes.set(at, causeOfWait(wait));
    else if (message) lane.causes.set(at, causeOfMessage(cell, message));
    else if (at > 0) lane.causes.set(at, { via: "delay", lane, at: at - 1 });
  }
  const latest = (events) => events.reduce((last, event) => last && last.to >= event.to ? last : event, null);
  const last = latest(cells), lastWait = latest(waits);
  for (const wait of waits) {
    const { lane } = wait, ended = lane.cells.end.at(-1) ?? 0, isLonger = !lane.waitAtEnd || wait.to > lane.waitAtEnd.until;
    if (data.kinds[wait.kind][0] !== "UNSHARD" && wait.to > ended + slack && isLonger) lane.waitAtEnd = causeOfWait(wait);
  }
  source.last = last && { lane: last.lane, at: last.at, cause: lastWait && lastWait.to > last.to + slack ? causeOfWait(lastWait) : null };
}
