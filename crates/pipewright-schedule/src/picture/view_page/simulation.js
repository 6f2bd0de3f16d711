
// The timed simulation of the schedule crate in JavaScript: the same rules in the same order, so that all times are
// equal. Times are in seconds.

const actionText = /^(?:(\d+)([A-Z_]+?)(\d*)|\((\d+)F(\d+);(\d+)B(\d+)\)OVERLAP_F_B)$/;

function parseAction(text) {
  const [, stage, kind, microbatch, ...both] = actionText.exec(text);
  if (kind) return { kind, stage: +stage, microbatch: microbatch === "" ? -1 : +microbatch };
  const [forwardStage, forwardMicrobatch, backwardStage, backwardMicrobatch] = both.map(Number);
  return { kind: "OVERLAP_F_B", parts: [
    { kind: "F", stage: forwardStage, microbatch: forwardMicrobatch },
    { kind: "B", stage: backwardStage, microbatch: backwardMicrobatch },
  ] };
}

// Reads a program in CSV: one row for each rank.
function parseProgram(text) {
  const rows = text.split("\n").filter((row) => row !== "").map((row) => row.split(",").map(parseAction)), owner = [];
  rows.forEach((row, rank) => row.flatMap((action) => action.parts ?? [action]).forEach(({ stage }) => { owner[stage] = rank; }));
  const microbatches = rows.flat().flatMap((action) => action.parts ?? [action]).reduce((most, { microbatch }) => Math.max(most, microbatch + 1), 0);
  return { rows, owner, stages: owner.length, microbatches };
}

const tensorKey = (isGradient, stage, microbatch) => (stage * 2 + (isGradient ? 1 : 0)) * 4194304 + microbatch;
// The tensor of a skip connection has a negative key.
const skipKey = (isGradient, skip, microbatch) => -1 - tensorKey(isGradient, skip, microbatch);

class Simulation {
  constructor(program, costs) {
    Object.assign(this, { program, costs, slices: data.slices, arrivals: new Map(), links: new Map(), gathered: [], reduced: [], reloaded: new Map() });
    const { transport } = data.view;
    Object.assign(this, { transport, delivered: new Map(), queues: transport ? new Queues(transport, program.rows.length) : null });
    this.ranks = program.rows.map(() => ({ next: 0, free: 0, collectives: 0, transfers: 0, exposed: 0, waitsFor: null, firstHalf: null, events: [] }));
    this.ready = program.rows.map((_, rank) => rank).reverse();
  }

  run() {
    while (this.ready.length) {
      const rank = this.ready.pop();
      while (this.step(rank));
      this.runQueues(rank);
    }
    this.ranks.forEach(({ events }) => {
      if (!this.queues) events.filter(({ kind }) => kind === "RECV_F" || kind === "RECV_B").forEach((event) => this.setTimesOfReceive(event));
      events.sort((one, other) => one.start - other.start);
    });
    return Object.assign(this.ranks.map(({ events }) => events), { waits: this.queues?.waits ?? [] });
  }

  // Runs the next action of a rank. Returns whether there was one that could run.
  step(rank) {
    const state = this.ranks[rank], action = this.program.rows[rank][state.next];
    if (!action) return false;
    if (this.give(rank, action)) {
      state.next++;
      return true;
    }
    const awaited = this.queues && /^WAIT_SEND/.test(action.kind) ? this.messageOf(action)?.key : undefined;
    if (awaited !== undefined && !this.delivered.has(awaited)) {
      state.waitsFor = awaited;
      return false;
    }
    if (action.parts || "FBIW".includes(action.kind)) {
      const missing = this.compute(rank, action);
      if (missing !== null) {
        state.waitsFor = missing;
        return false;
      }
    } else {
      const [start, end] = this.act(rank, action, state.free);
      state.events.push({ ...action, start, end });
    }
    state.next++;
    return true;
  }

  // Returns the message of a send, a receive or a wait for a send; nothing if it stays on its rank.
  messageOf({ kind, stage, microbatch }) {
    const isGradient = kind.endsWith("B"), isReceive = kind.startsWith("RECV"), step = isGradient ? -1 : 1;
    const from = isReceive ? stage - step : stage, to = from + step, [sender, receiver] = [this.program.owner[from], this.program.owner[to]];
    if (sender === undefined || receiver === undefined || sender === receiver) return undefined;
    const sizes = this.costs.outputs, boundary = Math.min(from, to);
    return { key: tensorKey(isGradient, to, microbatch), sender, receiver, boundary, bytes: sizes[Math.min(boundary, sizes.length - 1)] ?? 0 };
  }

  // Gives a send or a receive to its queue, if there are queues. Returns whether the action is one.
  give(rank, action) {
    if (!this.queues) return false;
    const message = /^(SEND|RECV)_[FB]$/.test(action.kind) ? this.messageOf(action) : undefined;
    if (!message) {
      this.queues.endGroup(rank);
      return false;
    }
    const { key, sender, receiver, boundary, bytes } = message, { free, firstHalf, events } = this.ranks[rank];
    const isSend = action.kind.startsWith("SEND"), isHalf = isSend && !this.transport.grouped && firstHalf?.key === key;
    const name = sender + " " + receiver, link = this.costs.links?.[name] ?? this.costs, given = isHalf ? firstHalf.end : free;
    const event = { ...action, start: given, end: given };
    events.push(event);
    this.queues.give({ rank, action: nameOfAction(action), isSend, isEager: isSend && this.transport.eager[boundary], peer: isSend ? receiver : sender,
      key, link: name, given, occupied: Math.ceil(bytes / this.slices) / (link.bandwidth ?? Infinity), latency: link.latency, event });
    return true;
  }

  // Runs the queues after a rank has given operations, and wakes the ranks that wait for their ends.
  runQueues(rank) {
    if (!this.queues) return;
    for (const { rank: own, isSend, key, arrival, event: { stage } } of this.queues.run(rank)) {
      if (!isSend) {
        this.arrive(key, stage, arrival);
        continue;
      }
      this.delivered.set(key, arrival);
      this.wake(own, key);
    }
  }

  // Runs an action that does not compute. Returns its start and its end.
  act(rank, { kind, stage, microbatch }, now) {
    const costs = this.costOf(stage);
    switch (kind) {
      case "SEND_F": case "SEND_B": return this.send(rank, kind === "SEND_B", stage, microbatch, now);
      case "WAIT_SEND_F": case "WAIT_SEND_B": return this.wait(rank, now, this.sent(kind === "WAIT_SEND_B", stage, microbatch)?.at ?? now);
      case "UNSHARD": return this.collective(rank, now, costs.unshard, this.gathered, stage);
      case "REDUCE_GRAD": return this.collective(rank, now, costs.reduce, this.reduced, stage);
      case "WAIT_REDUCE_GRAD": return this.wait(rank, now, this.reduced[stage] ?? 0);
      case "OFFLOAD": return this.transfer(rank, now, stage, 0);
      case "RELOAD": {
        const [issued, at] = this.transfer(rank, now, stage, 1);
        this.reloaded.set(tensorKey(true, stage, microbatch), { issued, at });
        return [issued, at];
      }
      default: return [now, now];
    }
  }

  costOf(stage) { return this.costs.stages[Math.min(stage, this.costs.stages.length - 1)]; }

  // Returns the time of a part. A slice has its share of the time of its microbatch, and its share of attention grows with
  // the keys before it.
  timeOf({ kind, stage, microbatch }) {
    const { slices, costs: { attention } } = this, cost = this.costOf(stage);
    if (slices === 1) return cost[kind];
    const factor = (1 - attention + attention * ((2 * (microbatch % slices) + 1) / slices)) / slices;
    const times = { F: cost.F * factor, I: cost.I * factor, W: cost.W / slices }, halves = cost.I + cost.W;
    return kind === "B" ? cost.B * (halves > 0 ? (times.I + times.W) / halves : factor) : times[kind];
  }

  // Computes the parts of an action. Returns the key of a tensor that is missing, or null.
  compute(rank, action) {
    const parts = action.parts ?? [action], state = this.ranks[rank];
    const missing = parts.flatMap((part) => this.needs(part)).find((key) => !this.arrivals.has(key));
    if (missing !== undefined) return missing;
    let firstHalf = null;
    for (const part of parts) {
      const end = this.computePart(rank, part), made = action.parts ? this.makes(part) : null;
      if (made) firstHalf ??= { key: made.key, end };
    }
    state.firstHalf = firstHalf;
    return null;
  }

  // Returns the keys of the tensors that a part takes from a neighbouring stage and from skip connections.
  needs({ kind, stage, microbatch }) {
    if (kind === "W") return [];
    const isGradient = kind !== "F", hasNeighbour = isGradient ? stage + 1 < this.program.stages : stage > 0;
    const skips = (this.costs.skips ?? []).flatMap(([from, to], skip) =>
      (isGradient ? from : to) === stage ? [skipKey(isGradient, skip, microbatch)] : []);
    return hasNeighbour ? [tensorKey(isGradient, stage, microbatch), ...skips] : skips;
  }

  // Returns the tensor that a part makes for a neighbouring stage, or null.
  makes({ kind, stage, microbatch }) {
    if (kind === "W") return null;
    const isGradient = kind !== "F", to = isGradient ? stage - 1 : stage + 1;
    return to < 0 || to >= this.program.stages ? null : { key: tensorKey(isGradient, to, microbatch), to };
  }

  computePart(rank, part) {
    const state = this.ranks[rank], now = state.free;
    let latest = { issued: now, at: now };
    const arrivals = this.needs(part).map((key) => this.arrivals.get(key)), gathered = { issued: now, at: this.gathered[part.stage] ?? 0 };
    // A recorded row has the forward that is computed again, which needs the tensors too.
    const reloaded = "FBI".includes(part.kind) ? this.reloaded.get(tensorKey(true, part.stage, part.microbatch)) : undefined;
    for (const one of [...arrivals, gathered, ...(reloaded ? [reloaded] : [])]) if (one.at > latest.at) latest = one;
    const start = latest.at, end = start + this.timeOf(part);
    state.exposed += start - Math.max(latest.issued, now);
    state.free = end;
    const made = this.makes(part);
    if (made && this.program.owner[made.to] === rank) this.arrive(made.key, made.to, { issued: end, at: end });
    this.sendSkips(rank, part, end);
    state.events.push({ ...part, start, end });
    return end;
  }

  // Sends a tensor. Returns when the message begins and ceases to occupy its link.
  send(rank, isGradient, stage, microbatch, now) {
    const to = isGradient ? stage - 1 : stage + 1, receiver = this.program.owner[to];
    if (receiver === undefined || receiver === rank) return [now, now];
    const key = tensorKey(isGradient, to, microbatch), { firstHalf } = this.ranks[rank];
    const from = firstHalf?.key === key ? firstHalf.end : now, sizes = this.costs.outputs;
    return this.transmit(rank, key, to, sizes[Math.min(isGradient ? to : stage, sizes.length - 1)] ?? 0, from);
  }

  // Sends the output of a part over the skip connections.
  sendSkips(rank, { kind, stage, microbatch }, end) {
    if (kind === "W") return;
    const isGradient = kind !== "F";
    (this.costs.skips ?? []).forEach(([from, to, bytes], skip) => {
      if ((isGradient ? to : from) !== stage) return;
      const user = isGradient ? from : to, key = skipKey(isGradient, skip, microbatch);
      if (this.program.owner[user] === rank) this.arrive(key, user, { issued: end, at: end });
      else this.transmit(rank, key, user, bytes, end);
    });
  }

  // Puts a message on the link to the rank of a stage as soon as the link is free.
  transmit(rank, key, stage, bytes, now) {
    const name = rank + " " + this.program.owner[stage], link = this.costs.links?.[name] ?? this.costs;
    const start = Math.max(this.links.get(name) ?? 0, now), end = start + Math.ceil(bytes / this.slices) / (link.bandwidth ?? Infinity);
    this.links.set(name, end);
    this.arrive(key, stage, { issued: now, at: end + link.latency });
    return [start, end];
  }

  // Returns the arrival of the message that a stage sends to its neighbour on another rank.
  sent(isGradient, stage, microbatch) {
    const to = isGradient ? stage - 1 : stage + 1, receiver = this.program.owner[to];
    const arrivals = this.queues ? this.delivered : this.arrivals;
    return receiver === undefined || receiver === this.program.owner[stage] ? undefined : arrivals.get(tensorKey(isGradient, to, microbatch));
  }

  arrive(key, stage, arrival) {
    this.arrivals.set(key, arrival);
    this.wake(this.program.owner[stage], key);
  }

  // Wakes a rank if it waits for a tensor.
  wake(rank, key) {
    const state = this.ranks[rank];
    if (state.waitsFor !== key) return;
    state.waitsFor = null;
    this.ready.push(rank);
  }

  wait(rank, now, until) {
    const state = this.ranks[rank], end = Math.max(until, now);
    state.exposed += end - now;
    state.free = end;
    return [now, end];
  }

  // Runs a collective beside the computation.
  collective(rank, now, duration, ends, stage) {
    const state = this.ranks[rank], start = Math.max(state.collectives, now);
    state.collectives = start + duration;
    ends[stage] = state.collectives;
    return [start, state.collectives];
  }

  // Moves the tensors of a stage out of memory (0) or back (1) beside the computation.
  transfer(rank, now, stage, way) {
    const state = this.ranks[rank], transfers = this.costs.transfers ?? [], start = Math.max(state.transfers, now);
    state.transfers = start + (transfers[Math.min(stage, transfers.length - 1)]?.[way] ?? 0);
    return [start, state.transfers];
  }

  setTimesOfReceive(event) {
    const isGradient = event.kind === "RECV_B", from = event.stage + (isGradient ? 1 : -1);
    const arrival = this.sent(isGradient, from, event.microbatch);
    if (from < 0 || from >= this.program.stages || !arrival) return;
    const posted = event.start;
    event.start = Math.max(posted, arrival.issued);
    event.end = Math.max(posted, arrival.at);
  }
}

// Returns the events of each rank, in the order of their starts.
const simulate = (program, costs) => new Simulation(program, costs).run();

// Returns the memory of a rank over time, from the events of its computation.
function memoryOf(events, sizes) {
  const memory = { start: [], held: [] }, graded = new Set(), forwards = new Map();
  let held = 0;
  const change = (time, more, less) => {
    const next = Math.max(held + more - less, 0);
    if (next === held) return;
    held = next;
    memory.start.push(time);
    memory.held.push(held);
  };
  const computed = events.filter(({ kind }) => "FBIW".includes(kind)), idOf = ({ stage, microbatch }) => stage + " " + microbatch;
  for (const event of computed.filter(({ kind }) => kind === "F")) forwards.set(idOf(event), event);
  // The stages that run backward, and those with weight gradients of their own. A frozen stage may have neither.
  const stagesWith = (kinds) => new Set(computed.filter(({ kind }) => kinds.includes(kind)).map(({ stage }) => stage));
  const backward = stagesWith("BIW"), split = stagesWith("W");
  for (const event of computed) {
    const { kind, stage, start, end } = event, [activation, stash, gradient, keysValues] = sizes[Math.min(stage, sizes.length - 1)] ?? [0, 0, 0, 0];
    const slice = sliceOf(event.microbatch);
    // Of a forward that is computed again, only the last one keeps its activation.
    if (kind === "F" && forwards.get(idOf(event)) === event) change(start, activation, 0);
    if ("BW".includes(kind) && !graded.has(stage)) change(start, gradient, 0);
    if ("BW".includes(kind)) graded.add(stage);
    // The gradients of the keys and values of the slices before.
    if ("BI".includes(kind)) change(start, slice * keysValues, 0);
    if (kind === "F" && !backward.has(stage)) change(end, 0, activation);
    if (kind === "B") change(end, 0, activation);
    if (kind === "I") change(end, split.has(stage) ? stash : 0, activation);
    if (kind === "W") change(end, 0, stash);
    // They are added to their sums, and those of the slice itself are used.
    if ("BI".includes(kind) && slice < data.slices - 1) change(end, 0, (slice + 1) * keysValues);
  }
  return memory;
}
