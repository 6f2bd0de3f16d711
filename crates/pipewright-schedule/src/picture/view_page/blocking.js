
// Finds messages that wait in line on a communicator with queues: an operation in front of a send or a receive has not
// ended (head-of-line blocking).

const nameOfAction = ({ kind, stage, microbatch }) => stage + kind + microbatch;
const waitKey = (rank, name) => rank + " " + name;

// Returns the waits of a timeline by the rank and the name of the operation that waited.
function waitsInLine(source) {
  return source.inLine ??= new Map((source.waits ?? []).map((wait) => [waitKey(wait.rank, wait.action), wait]));
}

// Returns the names of both ends of a message from a part, with their ranks. The ranks are those of one replica.
function endsOf({ lane, at }, receiver, isForward) {
  const part = partsOf(lane, lane.cells, at).find(({ letter }) => isForward ? letter === "F" : "IB".includes(letter));
  if (!part) return [];
  const { stage, microbatch } = part, [kind, to] = isForward ? ["F", stage + 1] : ["B", stage - 1];
  return [{ rank: lane.rank, name: `${stage}SEND_${kind}${microbatch}` }, { rank: receiver.rank, name: `${to}RECV_${kind}${microbatch}` }];
}

// Returns when a message began to move to a lane: the start of its receive, or `start` if it took no time.
function movesFrom(lane, name, start) {
  const { bars } = lane;
  for (let bar = firstFrom(bars.start, start) - 1; bar >= 0; bar--)
    if (nameOf(partsOf(lane, bars, bar)) === name) return bars.start[bar];
  return start;
}

// Returns the wait in line that delayed the message of an action to another lane, which used it at `start`; null if no
// operation in front of it did.
function waitInLine(producer, lane, isForward, start) {
  const waits = waitsInLine(lane.source), { slack } = lane.source;
  if (!waits.size) return null;
  const [send, receive] = endsOf(producer, lane, isForward);
  if (!receive) return null;
  const from = movesFrom(lane, receive.name, start), made = producer.lane.cells.end[producer.at];
  const own = [send, receive].map(({ rank, name }) => waits.get(waitKey(rank, name))).filter(Boolean);
  return own.find(({ until }) => Math.abs(until - from) <= slack && until > made + slack) ?? null;
}

const endName = (name) => (name.includes("RECV") ? "receive " : "send ") + name;

// Returns what blocks a message, as a sentence.
function sentenceOfWaitInLine({ rank, action, behind, until }) {
  return `On rank ${rank}, ${endName(behind)} waits in front of ${action} on the same communicator (head-of-line blocking) until ${time(until)}.`;
}

// Returns the longest waits in line, the longest first.
function longestInLine(source) {
  return [...source.waits ?? []].sort((one, other) => other.until - other.from - (one.until - one.from));
}
