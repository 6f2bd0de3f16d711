
// The queues of a communicator in the timed simulation: the rules of the schedule crate (`simulate/queues.rs`). A queue
// runs its operations one after another, or one group after another, in the order of the row.

class Queues {
  constructor({ name, grouped }, ranks) {
    Object.assign(this, { name, grouped, queues: new Map(), links: new Map(), halfway: new Map(), idle: [], ended: [], waits: [] });
    this.groups = Array.from({ length: ranks }, () => 0);
    this.own = Array.from({ length: ranks }, () => []);
  }

  // Appends an operation: { rank, action, isSend, isEager, peer, key, link, given, occupied, latency, event }.
  give(operation) {
    const { rank, peer, isSend } = operation;
    const name = rank + { edge: ` ${peer} ${isSend}`, pair: ` ${peer}`, rank: "" }[this.name];
    if (!this.queues.has(name)) {
      this.queues.set(name, { waiting: [], next: 0, running: 0, free: 0, last: null });
      this.own[rank].push(this.queues.get(name));
    }
    this.queues.get(name).waiting.push({ ...operation, group: this.groups[rank] });
    if (!this.grouped) this.groups[rank]++;
  }

  // Ends a group, because the rank has reached an action that is not a send or a receive.
  endGroup(rank) { this.groups[rank]++; }

  // Runs what can run after a rank has given operations. Returns the operations that end.
  run(rank) {
    this.idle.push(...this.own[rank]);
    while (this.idle.length) this.beginGroup(this.idle.pop());
    return this.ended.splice(0);
  }

  beginGroup(queue) {
    const { waiting, running, free, last } = queue, begun = [];
    if (running || queue.next === waiting.length) return;
    const { group } = waiting[queue.next];
    while (waiting[queue.next]?.group === group) {
      const operation = waiting[queue.next++];
      begun.push({ ...operation, queue, since: Math.max(operation.given, free) });
    }
    queue.running = begun.length;
    for (const { rank, action, given } of begun)
      if (last && given < last.end) this.waits.push({ rank, action, behind: last.action, from: given, until: last.end });
    begun.filter(({ isEager }) => isEager).forEach((send) => this.sendAtOnce(send));
    begun.filter(({ isEager }) => !isEager).forEach((operation) => this.meet(operation));
  }

  sendAtOnce(send) {
    const { start, left, at } = this.occupyLink(send, send.since), arrival = { issued: send.given, at };
    this.end(send, start, left, arrival, left);
    const receive = this.halfway.get(send.key);
    if (receive) this.receiveSent(receive, start, arrival);
    else this.halfway.set(send.key, { start, arrival });
  }

  // Moves the message of an operation if its other end runs too, or has sent it.
  meet(one) {
    const other = this.halfway.get(one.key);
    if (!other) return this.halfway.set(one.key, one);
    if (other.arrival) return this.receiveSent(one, other.start, other.arrival);
    const { start, at } = this.occupyLink(one, Math.max(one.since, other.since));
    const arrival = { issued: (one.isSend ? one : other).given, at };
    for (const end of [one, other]) this.end(end, start, at, arrival, at);
  }

  receiveSent(receive, start, arrival) {
    const at = Math.max(arrival.at, receive.since);
    this.end(receive, Math.max(start, receive.since), at, { ...arrival, at }, at);
  }

  occupyLink({ link, occupied, latency }, from) {
    const start = Math.max(this.links.get(link) ?? 0, from), left = start + occupied;
    this.links.set(link, left);
    return { start, left, at: left + latency };
  }

  // Ends an operation, whose queue is free of it from `free` on.
  end(operation, start, end, arrival, free) {
    const { queue, action, event } = operation;
    if (!queue.last || queue.last.end <= free) queue.last = { action, end: free };
    queue.free = Math.max(queue.free, free);
    if (--queue.running === 0) this.idle.push(queue);
    Object.assign(event, { start, end });
    this.ended.push({ ...operation, arrival });
  }
}
