
// The what-if panel: changes the time of actions, the time of a message, or the number of microbatches, simulates the
// schedule again, and shows the result below the other timelines.

const kindNames = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights" };
const whatIf = { stage: -1, factors: [], latency: data.view.latency, microbatches: 0 };
const readPrograms = new Map();
const [stageBox, hopBox, microbatchBox] = ["stage", "hop", "microbatches"].map((name) => document.getElementById("whatif-" + name));
const factorBoxes = document.getElementById("whatif-factors"), outcome = document.getElementById("whatif-outcome");
// The unit in which the time of a message is shown. If messages take no time, it is the unit of the shortest action.
const shortest = Math.min(...data.view.costs.flat().filter((cost) => cost > 0));
const [hopFactor, hopUnit] = unitOf(data.view.latency || shortest);

function programFor(microbatches) {
  if (!readPrograms.has(microbatches))
    readPrograms.set(microbatches, readProgram(data.view.programs.find((one) => one.microbatches === microbatches)));
  return readPrograms.get(microbatches);
}

const kindsOf = ({ costs }) => Object.keys(kindNames).filter((kind) => costs.some(([, , of]) => of === kind));

// Returns the seconds of each cost of a program.
function costsOfWhatIf({ costs }) {
  return costs.map(([seconds, stage, of]) => of === "hop" ? whatIf.latency : stage < 0 ? seconds : seconds * whatIf.factors[stage][of]);
}

const isChanged = () => whatIf.latency !== data.view.latency || whatIf.microbatches !== data.view.microbatches
  || whatIf.factors.some((factors) => Object.values(factors).some((factor) => factor !== 1));

function change(from, to) {
  const share = (to / from - 1) * 100;
  return `${time(from)} \u2192 ${time(to)} (${share < 0 ? "\u2212" : "+"}${Math.abs(share).toFixed(1)}\u00a0%)`;
}

function showOutcome() {
  outcome.replaceChildren();
  if (!whatIfSource) return outcome.append(paragraph("Change a number to simulate the schedule again."));
  const [before, after] = [predictedSource, whatIfSource], [was, is] = [data.view.microbatches, whatIf.microbatches];
  const row = (name, text) => element("div", {}, element("dt", {}, name), element("dd", {}, text));
  outcome.append(element("dl", {}, row("step", change(before.end, after.end)),
    row("per microbatch", change(before.end / was, after.end / is)),
    row("bubble", `${percentOf(bubbleShare(before), 1)} \u2192 ${percentOf(bubbleShare(after), 1)}`)));
}

// Simulates the changed schedule and shows it; without a change, removes it.
function simulateWhatIf() {
  const wasShown = whatIfSource !== null;
  const program = isChanged() ? programFor(whatIf.microbatches) : null;
  whatIfSource = program && runProgram("what if", program, costsOfWhatIf(program));
  const box = document.getElementById("show-what-if");
  if (wasShown !== (whatIfSource !== null)) shown["what if"] = box.checked = whatIfSource !== null;
  box.disabled = !whatIfSource;
  if (selected && selected.lanes.some(({ source }) => source.name === "what if")) selected = null;
  showSources();
  showFigures();
  showOutcome();
  showPanel();
}

// Shows the factors of the chosen stage, with the times that they give: for all stages, the mean of those that have
// such an action.
function showFactors() {
  const stages = whatIf.stage < 0 ? whatIf.factors.map((_, stage) => stage) : [whatIf.stage], first = stages[0];
  const { costs } = data.view, costOf = (stage, kind) => costs[Math.min(stage, costs.length - 1)]["FBIW".indexOf(kind)] / data.quantum;
  factorBoxes.replaceChildren(...kindsOf(programFor(whatIf.microbatches)).map((kind) => {
    const text = element("output", {}), show = () => {
      const using = stages.filter((stage) => costOf(stage, kind) > 0), mean = (factor) => using.reduce((sum, stage) => sum + costOf(stage, kind) * factor(stage), 0) / using.length;
      const [before, after] = using.length ? [mean(() => 1), mean((stage) => whatIf.factors[stage][kind])] : [0, 0];
      text.textContent = !using.length ? "no such action" : time(before) + (after === before ? "" : ` \u2192 ${time(after)}`);
    };
    const input = element("input", { type: "number", min: 0, max: 1000, step: 5, value: +(whatIf.factors[first][kind] * 100).toFixed(3), id: "whatif-" + kind });
    input.addEventListener("input", () => {
      const factor = Math.min(Math.max(+input.value || 0, 0), 1000) / 100;
      for (const stage of stages) whatIf.factors[stage][kind] = factor;
      show();
      simulateWhatIf();
    });
    show();
    return element("label", {}, element("span", {}, `${kind} ${kindNames[kind]}`), element("span", { className: "unit" }, input, " %"), text);
  }));
}

function resetWhatIf() {
  const one = () => ({ F: 1, B: 1, I: 1, W: 1 });
  Object.assign(whatIf, { factors: Array.from({ length: data.view.stages }, one), latency: data.view.latency, microbatches: data.view.microbatches });
  hopBox.value = +(whatIf.latency * hopFactor).toPrecision(4);
  microbatchBox.value = whatIf.microbatches;
  showFactors();
  simulateWhatIf();
}

function listenToWhatIf() {
  const option = (value, text) => element("option", { value }, text);
  stageBox.append(option(-1, "all stages"), ...Array.from({ length: data.view.stages }, (_, stage) => option(stage, "stage " + stage)));
  const counts = data.view.programs.map(({ microbatches }) => microbatches).sort((one, other) => one - other);
  microbatchBox.append(...counts.map((count) => option(count, count)));
  microbatchBox.disabled = counts.length < 2;
  document.getElementById("whatif-unit").textContent = hopUnit;
  const isFirstUsed = recorded.length < 2 || recorded[0].step > 1;
  document.getElementById("whatif-base").textContent = recorded.length
    ? `Times are medians over all recorded steps${isFirstUsed ? "" : " but the first"}.` : "";
  stageBox.addEventListener("change", () => { whatIf.stage = +stageBox.value; showFactors(); });
  hopBox.addEventListener("input", () => { whatIf.latency = Math.max(+hopBox.value || 0, 0) / hopFactor; simulateWhatIf(); });
  microbatchBox.addEventListener("change", () => { whatIf.microbatches = +microbatchBox.value; simulateWhatIf(); });
  document.getElementById("whatif-reset").addEventListener("click", resetWhatIf);
}
