"use strict";

// The runs, the colours of their lines, and the formats of numbers.
const data = "{{data}}";
const { runs } = data, mostColours = 6;
// What the runs count.
const units = [...new Set(runs.map(({ unit }) => unit))], counted = units.length === 1 ? units[0] : "inputs";
// What the reader has chosen. `range` is the part of the axis that the charts show, or null for all of it; `hidden` has the
// indices of the runs that are switched off.
const chosen = { axis: "steps", log: false, smooth: 0, range: null, hidden: [] };
const isHidden = (index) => chosen.hidden.includes(index);

const colourOf = (index) => `var(--run-${index % mostColours})`;
// Runs after the sixth share the colours of the first ones and are dashed.
const dashOf = (index) => index < mostColours ? "" : "6 3";

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const significant = (value, digits = 4) => String(+value.toPrecision(digits));
const grouped = (value) => Math.round(value).toLocaleString("en-US");
const percent = (share) => (share * 100).toFixed(1) + "\u00a0%";

function short(value) {
  const unit = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= size * 0.9995);
  return unit && Math.abs(value) >= 1e4 ? significant(value / unit[0], 3) + " " + unit[1] : significant(value);
}

function bytes(value) {
  const unit = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([size]) => value >= size);
  return unit ? (value / unit[0]).toFixed(value / unit[0] < 100 ? 1 : 0) + " " + unit[1] : value + " B";
}

// Formats a rate in 10^12 operations per second.
const operations = (value) => value >= 1 ? significant(value, 3) + " TFLOP/s" : significant(value * 1e3, 3) + " GFLOP/s";
const milliseconds = (value) => value >= 1e3 ? significant(value / 1e3) + " s" : significant(value) + " ms";

function clock(seconds) {
  const whole = Math.floor(seconds), two = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

// Formats a duration. A clock shows too little of one that is shorter than ten seconds.
const elapsed = (seconds) => seconds < 10 ? significant(seconds, 2) + " s" : clock(seconds);

// Formats a time of an axis whose marks are this many seconds apart.
const clockMark = (seconds, step) => step < 1 ? significant(seconds) + " s" : clock(Math.round(seconds));

// The position of each group of steps on the axis that the reader chose.
const positionsOf = (run) => run[chosen.axis];
const axisText = { steps: (value) => "step " + grouped(value), tokens: (value) => `${short(value)} ${counted}`, seconds: elapsed };
