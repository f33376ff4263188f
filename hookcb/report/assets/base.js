"use strict";
// Helpers for elements, text and time. Text reaches the page only through textContent.

const $ = (id) => document.getElementById(id);

/** An element: `make("p.soft", {title: "…"}, "text", node)`; an attribute that is a function is a listener. */
function make(what, attributes = {}, ...children) {
  const [name, ...classes] = what.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value !== null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}

const list = (kind, items) => make(kind, {}, ...items.map((item) => make("li", {}, item)));
const fold = (title, ...children) => make("details", {}, make("summary", {}, title), ...children);
/** An object with changed values; it has no prototype, as a layer may be called "constructor". */
function mapped(object, change = (value) => value) {
  const made = Object.create(null);
  for (const [key, value] of Object.entries(object)) made[key] = change(value);
  return made;
}
const counted = (n, noun, plural = `${noun}s`) => `${whole(n)} ${n === 1 ? noun : plural}`;
const whole = (n) => Math.round(n).toLocaleString("en-US");
const words = (name) => name.replaceAll("_", " ");
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

/** A number with three digits, or `digits`. */
function short(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  return size && (size < 1e-3 || size >= 1e5)
    ? power(x, digits)
    : String(+x.toPrecision(digits)).replace("-", "−");
}
const power = (x, digits) =>
  x
    .toExponential(digits - 1)
    .replace(/\.?0*e\+?/, "e")
    .replaceAll("-", "−");

/** A number with the largest of `units` that leaves at least one of it. */
function scaled(x, units, digits) {
  const [size, unit] = units.find(([least]) => Math.abs(x) >= least) || units.at(-1);
  return Number.isFinite(x) ? `${short(x / size, digits)} ${unit}` : short(x);
}
const SECONDS = Object.entries({ s: 1, ms: 1e-3, µs: 1e-6 }).map(([unit, size]) => [size, unit]);
const BYTES = ["TB", "GB", "MB", "kB", "B"].map((unit, i) => [1000 ** (4 - i), unit]);
const seconds = (x, digits) => (x === 0 ? "0 s" : scaled(x, SECONDS, digits));
const bytes = (x, digits) => scaled(x, BYTES, digits);

/** `names` without the dotted parts with which all of them begin; one part stays. */
function withoutPrefix(names) {
  const parts = names.map((name) => name.split("."));
  let n = 0;
  while (names.length > 1 && parts.every((x) => x.length > n + 1 && x[n] === parts[0][n])) n += 1;
  return parts.map((x) => x.slice(n).join("."));
}

/** Whether a part of an element is in the window. */
function isInSight(node) {
  const { top, bottom } = node.getBoundingClientRect();
  return bottom > 0 && top < innerHeight;
}

/** `name` with its end kept, which is where names differ. */
const cut = (name, room) => (name.length > room ? `…${name.slice(1 - room)}` : name);

// Work that can wait is done in slices after the next frame, so that a click is answered at once.
const waiting = [];
function later(work) {
  if (waiting.push(work) === 1) requestAnimationFrame(() => setTimeout(workOn));
}
async function workOn() {
  const end = performance.now() + 12;
  while (waiting.length && performance.now() < end) {
    waiting.shift()();
    await null; // uPlot draws in a microtask
  }
  if (waiting.length) setTimeout(workOn);
}
function workOff() {
  while (waiting.length) waiting.shift()();
}
