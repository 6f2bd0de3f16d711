
// Keeps what the reader has chosen when the page loads itself again, because the run goes on.

const stateName = "pipewright report " + location.pathname;
const openDetails = () => [...document.querySelectorAll("details")].map(({ open }) => open);

function saveState() {
  try {
    sessionStorage.setItem(stateName, JSON.stringify({ ...chosen, details: openDetails() }));
  } catch {
    // Without storage, the page begins anew.
  }
}

function savedState() {
  try {
    return JSON.parse(sessionStorage.getItem(stateName)) ?? {};
  } catch {
    return {};
  }
}

// Takes over what was chosen before, as far as this page has it.
function restoreChoices({ axis, log, smooth, range, hidden }) {
  const isRange = Array.isArray(range) && range.length === 2 && range.every(Number.isFinite);
  if (Object.hasOwn(axisText, axis)) chosen.axis = axis;
  Object.assign(chosen, { log: log === true, smooth: Number.isFinite(smooth) ? smooth : 0, range: isRange ? range : null });
  if (Array.isArray(hidden)) chosen.hidden = hidden.filter((index) => index in runs);
}

function restoreDetails({ details }) {
  document.querySelectorAll("details").forEach((node, at) => { node.open = details?.[at] ?? node.open; });
}

// Loads the page again, but not while the reader drags.
function reload() {
  if (pressed) return setTimeout(reload, 500);
  saveState();
  location.reload();
}

function follow() {
  if (data.reload === null) return;
  const words = `The run goes on; this page loads itself again every ${significant(data.reload / 1000)} s.`;
  document.getElementById("following").textContent = words;
  setTimeout(reload, data.reload);
}
