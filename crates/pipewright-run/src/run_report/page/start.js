
// Makes the charts and connects the controls.

const keys = [...new Set(runs.flatMap((run) => Object.keys(run.series)))];
const auxiliary = keys.filter((key) => key.startsWith("auxiliary ")), sources = keys.filter((key) => key.startsWith("validation "));
const preference = keys.filter((key) => key.startsWith("preference ")).map((key) => key.replace("preference ", ""));
const lossUnit = counted === "tokens" && preference.length === 0 && !keys.includes("accuracy") ? "nats per token; " : "";
const line = (name, key, dash = "") => ({ name, key, dash });
const specs = [
  { title: "Loss", note: lossUnit + "dashed: validation, dotted: total", canBeLog: true, format: short,
    lines: [line("training", "loss"), line("validation", "validation_loss", "7 4"), line("total", "total", "2 3")] },
  { title: "Accuracy", note: "share of the sequences whose label the model predicts", format: percent, isFromZero: true, lines: [line("accuracy", "accuracy")] },
  { title: "Validation accuracy", note: "share of the targets that the model predicts", format: percent, isFromZero: true, lines: [line("validation accuracy", "validation_accuracy")] },
  ...preference.map((name) => ({ title: `Preference: ${name}`, note: "dashed: validation", format: short,
    lines: [line("training", `preference ${name}`), line("validation", `preference_validation ${name}`, "7 4")] })),
  { title: "Gradient norm", note: "before clipping", format: short, canBeLog: true, lines: [line("gradient norm", "grad_norm")] },
  { title: "Throughput", note: `${counted} per second`, format: short, isFromZero: true, lines: [line(`${counted} per second`, "tokens_per_second")] },
  { title: "Step time", note: "whole steps; dashed: predicted from the first steps, dotted: planned", format: milliseconds, isFromZero: true,
    lines: [line("measured", "step_ms"), line("predicted from the first steps", "predicted_step_ms", "7 4"), line("planned", "planned_step_ms", "2 3")] },
  { title: "Bubble", note: "mean of ranks; dashed: only communication", format: percent, isFromZero: true,
    lines: [line("bubble", "bubble_fraction"), line("only communication", "exposed_comm_fraction", "7 4")] },
  { title: "Gap between steps", note: "before each step; dashed: sums and update", format: milliseconds, isFromZero: true,
    lines: [line("gap", "gap_ms"), line("sums and update", "gap_sums_and_update_ms", "7 4")] },
  { title: "Learning rate", format: (value) => value > 0 && value < 0.001 ? value.toExponential(1) : significant(value, 3), isFromZero: true, lines: [line("learning rate", "learning_rate")] },
  ...sources.map((key) => ({ title: key.replace("validation ", "Validation loss of "), note: lossUnit.replace("; ", ""), format: short, canBeLog: true, lines: [line(key, key)] })),
  ...auxiliary.map((key) => ({ title: key.replace("auxiliary ", "Auxiliary loss "), format: short, lines: [line(key, key)] })),
];

const hasLine = ({ lines }) => runs.some((run) => lines.some(({ key }) => run.series[key]));
// A note says what the dashes mean, so it is left out if there is no second line.
const withNote = (spec) => {
  const present = spec.lines.filter(({ key }) => runs.some((run) => run.series[key]));
  const parts = (spec.note ?? "").split(/; |, /).filter((part) => !/^(dashed|dotted): /.test(part) || present.some(({ name }) => part.endsWith(name)));
  return { ...spec, note: parts.join(", "), lines: present };
};

const drawAll = () => charts.forEach((chart) => chart.draw());

function listen() {
  // A part of one axis is no part of another.
  document.getElementById("axis").addEventListener("change", ({ target }) => { chosen.axis = target.value; zoomTo(null); });
  document.getElementById("zoom-all").addEventListener("click", () => zoomTo(null));
  document.getElementById("log").addEventListener("change", ({ target }) => { chosen.log = target.checked; drawAll(); });
  document.getElementById("smooth").addEventListener("input", ({ target }) => { chosen.smooth = +target.value; drawAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showRanks);
  for (const [type, isNow] of [["beforeprint", true], ["afterprint", false]])
    addEventListener(type, () => { isPrinting = isNow; showRanks(); });
  new ResizeObserver(drawAll).observe(document.getElementById("charts"));
}

document.getElementById("title").textContent = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
document.title = (runs.length === 1 ? runs[0].name : `${runs.length} runs`) + " \u2013 Pipewright";
const before = savedState();
restoreChoices(before);
document.querySelector("#axis option[value=tokens]").textContent = counted;
document.getElementById("axis").value = chosen.axis;
document.getElementById("log").checked = chosen.log;
document.getElementById("smooth").value = chosen.smooth;
document.getElementById("runs").replaceChildren(...(runs.length > 1 ? runNames() : []));
document.getElementById("charts").append(...specs.filter(hasLine).map((spec) => new Chart(withNote(spec)).figure));
showFigures();
showEvents();
showSamples();
showRanks();
showTimelines();
showConfig();
restoreDetails(before);
zoomTo(chosen.range);
listen();
follow();
