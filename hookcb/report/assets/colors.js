// Colors: those of page.css for lines, viridis for strips. NaN and inf have a color of their own.

const PALETTE = ["--blue", "--orange", "--green", "--pink", "--sky", "--soft", "--missing"];
const VIRIDIS = [
  "440154",
  "482878",
  "3e4a89",
  "31688e",
  "26828e",
  "1f9e89",
  "35b779",
  "6ece58",
  "b5de2b",
  "fde725",
];

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const paletteName = (i) => PALETTE[i % PALETTE.length];
const lineColor = (i) => color(paletteName(i));

const rgb = (hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
const pixel = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
const TINTS = Uint32Array.from({ length: 256 }, (_, i) => {
  const at = Math.min((i / 255) * (VIRIDIS.length - 1), VIRIDIS.length - 1.001);
  const low = Math.floor(at);
  const [from, to] = [rgb(VIRIDIS[low]), rgb(VIRIDIS[low + 1])];
  return pixel(from.map((c, k) => Math.round(c + (at - low) * (to[k] - c))));
});
const NONFINITE = pixel(rgb("d55e00"));

/** Smallest, smallest positive and largest of finite values, and whether there are others. */
function extremes(arrays) {
  const found = { low: Infinity, positive: Infinity, high: -Infinity, isFinite: true };
  for (const values of arrays) {
    for (const x of values) {
      if (!Number.isFinite(x)) found.isFinite = false;
      else {
        if (x < found.low) found.low = x;
        if (x > found.high) found.high = x;
        if (x > 0 && x < found.positive) found.positive = x;
      }
    }
  }
  return found;
}

/** Whether values with these `extremes` are shown on a logarithmic scale: none negative, over two decades. */
const isWide = ({ low, positive, high }) => low >= 0 && high > 100 * positive;

/** A color scale for all of `arrays`: `at(x)` is 0 at its low end and 1 at its high end. */
function colorScale(arrays, isShare = false) {
  const found = extremes(arrays);
  const isLog = !isShare && isWide(found);
  let { low, high } = isShare ? { low: 0, high: 1 } : found;
  if (isLog) low = Math.max(found.positive, high * 1e-12);
  const bend = isLog ? (x) => Math.log(Math.max(x, low)) : (x) => x;
  const from = bend(low);
  const span = bend(high) - from;
  const isCut = isLog && found.low < low;
  return {
    low,
    high,
    isLog,
    isCut,
    isFinite: found.isFinite,
    isEmpty: !(high >= low),
    at: (x) => (span > 0 ? clamp((bend(x) - from) / span, 0, 1) : 0.5),
  };
}

/** Usual distance of steps; half of it lies on each side of a cell. */
const gaps = new WeakMap();
function usualGap(steps) {
  if (!gaps.has(steps)) {
    const all = Array.from(steps.subarray(1), (step, i) => step - steps[i]).sort((a, b) => a - b);
    gaps.set(steps, all.length ? all[all.length >> 1] : 1);
  }
  return gaps.get(steps);
}

/**
 * Paints series on a canvas: a row for each, `width` columns for the steps from `first` to `last`. Records that share
 * a column are averaged, unless one is not finite; columns without a record are transparent.
 */
function raster(rows, [first, last], width, scale, canvas = make("canvas")) {
  [canvas.width, canvas.height] = [width, Math.max(1, rows.length)];
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const image = pen.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  const sums = new Float64Array(width);
  const counts = new Uint32Array(width);
  const bad = new Uint8Array(width);
  const perStep = width / (last - first);
  rows.forEach((series, row) => {
    if (!series) return;
    const { steps, values } = series;
    const reach = 0.75 * usualGap(steps);
    [sums, counts, bad].forEach((own) => own.fill(0));
    for (let i = 0; i < steps.length; i += 1) {
      const step = steps[i];
      const from = Math.max(step - reach, i ? (steps[i - 1] + step) / 2 : -Infinity);
      const to = Math.min(step + reach, i + 1 < steps.length ? (steps[i + 1] + step) / 2 : Infinity);
      const left = Math.max(0, Math.floor((from - first) * perStep));
      const right = Math.min(width, Math.max(left + 1, Math.floor((to - first) * perStep)));
      const isBad = !Number.isFinite(values[i]);
      const share = isBad ? 0 : scale.at(values[i]);
      for (let x = left; x < right; x += 1) {
        sums[x] += share;
        counts[x] += 1;
        bad[x] |= isBad;
      }
    }
    for (let x = 0; x < width; x += 1) {
      if (counts[x])
        pixels[row * width + x] = bad[x] ? NONFINITE : TINTS[Math.round((255 * sums[x]) / counts[x])];
    }
  });
  pen.putImageData(image, 0, 0);
  return canvas;
}

/** Which colors stand for which numbers. */
function colorKey(scale, format = short) {
  const ramp = make("canvas.ramp", { "aria-hidden": "true" });
  [ramp.width, ramp.height] = [256, 1];
  const pen = ramp.getContext("2d");
  const image = pen.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(TINTS);
  pen.putImageData(image, 0, 0);
  return make(
    "p.key",
    {},
    scale.isEmpty ? null : make("span", {}, `${scale.isCut ? "≤ " : ""}${format(scale.low)}`),
    scale.isEmpty ? null : ramp,
    scale.isEmpty ? null : make("span", {}, format(scale.high) + (scale.isLog ? ", logarithmic" : "")),
    scale.isFinite ? null : make("span.nonfinite", {}, "NaN or infinite"),
  );
}
