
// Connects the controls of the page and shows the first picture.

const stepBox = document.getElementById("step");

function showStep(at) {
  stepAt = Math.min(Math.max(at, 0), recorded.length - 1);
  const slowest = recorded.reduce((slow, { makespan, before }, at) => !before && makespan > recorded[slow].makespan ? at : slow, 0);
  stepBox.value = stepAt;
  const single = recorded.filter(({ before }) => !before).length, step = recorded[stepAt];
  const note = single > 2 && stepAt === slowest ? ", the slowest" : "";
  const place = step.before ? "on one time axis" : `${stepAt + 1} of ${single} recorded${note}`;
  document.getElementById("step-name").textContent = `${nameOfStep(step)} (${place})`;
  changeSources();
}

// Shows other timelines. The selection belongs to a timeline, so it ends with it.
function changeSources() {
  if (selected && !selected.lanes.every(({ source }) => sourcesInSight().includes(source))) selected = null;
  forgetMatches();
  showSources();
  showFigures();
  showPanel();
}

Object.assign(keys, {
  "/": () => { searchBox.focus(); searchBox.select(); return true; },
  n: () => { goToMatch(matchAt + 1); return true; },
  N: () => { goToMatch(matchAt - 1); return true; },
  b: () => { goToBubbleBy(1); return true; },
  B: () => { goToBubbleBy(-1); return true; },
  c: () => { pathBox.checked = !pathBox.checked; if (selected) select(null); return true; },
  m: () => { view.showsMemory = memoryBox.checked = !memoryBox.checked; return true; },
  f: focusSelection,
  r: selectSight,
  ",": () => goToNeighbour(-1),
  ".": () => goToNeighbour(1),
  "[": () => { if (recorded.length) showStep(stepAt - 1); return true; },
  "]": () => { if (recorded.length) showStep(stepAt + 1); return true; },
  Escape: () => { select(null); return true; },
});

for (const name of ["predicted", "measured", "what-if"]) {
  const box = document.getElementById("show-" + name), key = name.replace("-", " ");
  box.checked = shown[key];
  box.addEventListener("change", () => { shown[key] = box.checked; changeSources(); });
}
document.getElementById("show-what-if").disabled = true;
// With exchanges of tokens inside actions, no other costs can be tried.
const hasPrograms = data.view.programs.length > 0;
document.getElementById("whatif").hidden = !hasPrograms;
document.getElementById("choose-measured").hidden = recorded.length === 0;
for (const id of ["steps", "help-steps"]) document.getElementById(id).hidden = recorded.length < 2;
stepBox.max = recorded.length - 1;
stepBox.addEventListener("input", () => showStep(+stepBox.value));
isNarrow.addEventListener("change", showSources);
pathBox.addEventListener("change", () => select(null));

if (hasPrograms) listenToWhatIf();
if (recorded.length) showStep(stepAt);
if (hasPrograms) resetWhatIf(); else changeSources();
view.showsMemory = memoryBox.checked = data.memoryLane || ranks.length * (laneMost + memoryMost) <= plotHeight();
draw();
