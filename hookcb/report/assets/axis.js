// The axes of a chart: lines and labels at round numbers, of any size, and the ends of epochs.

/** At most about `most` round numbers from `low` to `high`, and their distance, which is at least `least`. */
function linearTicks(low, high, most, least = 0) {
  const wanted = Math.max((high - low) / most, least);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 2.5, 5, 10].map((x) => x * power).find((x) => x >= 0.999 * wanted);
  if (!(step > 0)) return { ticks: [low], step: 1 }; // nothing between them
  const first = Math.ceil(low / step);
  const n = Math.floor(high / step) - first + 1;
  return { ticks: Array.from({ length: clamp(n, 0, most + 1) }, (_, i) => (first + i) * step), step };
}

const IN_DECADES = [
  [0.12, [1, 1.5, 2, 3, 5, 7]], // the least distance of two of them, in decades
  [0.3, [1, 2, 5]],
  [1, [1]],
];

/** Round numbers within decades, or powers of ten only; evenly spaced numbers if the ends are near to one another. */
function logTicks(low, high, most) {
  const span = Math.log10(high / low);
  if (span < 0.48) return linearTicks(low, high, most);
  const [, parts] = IN_DECADES.find(([least]) => (least / span) * most > 0.7) || IN_DECADES.at(-1);
  const first = Math.floor(Math.log10(low));
  const every = Math.max(1, Math.ceil(span / most));
  const n = Math.floor((Math.log10(high) - first) / every) + 1;
  const ticks = Array.from({ length: n }, (_, i) => parts.map((x) => +`${x}e${first + i * every}`)).flat();
  return { ticks: ticks.filter((x) => x >= low && x <= high), step: 0 };
}

function ticksOf(chart, { min, max }, most) {
  if (chart.isBlank) return { ticks: [], step: 0 };
  if (chart.yNames) return linearTicks(min, max, most, 1);
  if (chart.isLog) return logTicks(min, max, most);
  return linearTicks(min, max, most);
}

/** Text of a tick, with as many digits as tell ticks apart. */
function tickText(chart, y, step, { min, max }) {
  if (chart.yNames) return chart.yNames[y] ?? "";
  const format = chart.axisFormat || chart.format;
  if (!step) return format(y);
  if (format === short && y && max < 0.01 && min > -0.01) return power(y, 3);
  return format(y, Math.max(3, 2 + Math.floor(Math.log10(Math.abs(y / step) || 1))));
}

/** Ticks of the y axis and their texts, for a plot of this height in CSS pixels. */
function labels(chart, { min, max }, height, rem) {
  const most = Math.max(2, Math.floor(height / ((chart.yNames ? 14 : 24) * rem)));
  const { ticks, step } = ticksOf(chart, { min, max }, most);
  return ticks.map((tick) => [tick, tickText(chart, tick, step, { min, max })]);
}

/** Room for the texts of the y axis. */
function axisRoom(chart, u, rem) {
  const { min, max } = u.scales?.y || {};
  if (!(max > min)) return 60 * rem;
  u.ctx.font = `${12 * rem}px system-ui, sans-serif`;
  const texts = labels(chart, { min, max }, u.height - chart.below(rem), rem).map(([, text]) => text);
  return Math.max(60 * rem, ...texts.map((text) => u.ctx.measureText(text).width + 10 * rem));
}

function drawAxis(chart, u, rem) {
  const { left, top, width, height } = u.bbox;
  const px = devicePixelRatio * rem;
  const pen = u.ctx;
  pen.save();
  pen.font = `${12 * px}px system-ui, sans-serif`;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.lineWidth = devicePixelRatio;
  pen.strokeStyle = color("--line");
  pen.fillStyle = color("--soft");
  for (const [tick, text] of labels(chart, u.scales.y, height / devicePixelRatio, rem)) {
    const y = Math.round(u.valToPos(tick, "y", true));
    drawLine(pen, [left, y], [left + width, y]);
    pen.fillText(text, left - 6 * px, Math.max(y, top + 4 * px));
  }
  if (chart.hasEpochs()) drawEpochs(u, px);
  pen.restore();
}

/** A tick where an epoch ends, with its number on the left, in a row below the steps; few of many epochs. */
function drawEpochs(u, px) {
  const { left, top, width, height } = u.bbox;
  const pen = u.ctx;
  const seen = timeline.epochs
    .map((step, i) => ({ x: Math.round(u.valToPos(step + 0.5, "x", true)), n: i + 1 }))
    .filter(({ x }) => x >= left && x <= left + width + 1);
  const room = seen.length > 1 ? (seen.at(-1).x - seen[0].x) / (seen.length - 1) : width;
  const every = WHOLE.find((n) => n * room >= 34 * px) || 1;
  const y = top + height + 33 * px;
  pen.strokeStyle = color("--soft");
  let end = left - 60 * px; // of the text before
  for (const { x, n } of seen.filter((own) => own.n % every === 0)) {
    drawLine(pen, [x, y - 7 * px], [x, y + 6 * px]);
    const text = [`epoch ${n}`, whole(n)].find(
      (own) => x - 4 * px - pen.measureText(own).width > end + 6 * px,
    );
    if (text) pen.fillText(text, x - 4 * px, y);
    end = x;
  }
}
