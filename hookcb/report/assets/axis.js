// The y axis of a chart: lines and labels at round numbers, of any size.

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

/** Powers of ten, or round numbers if there are fewer than two of them. */
function logTicks(low, high, most) {
  const first = Math.ceil(Math.log10(low));
  const n = Math.floor(Math.log10(high)) - first + 1;
  if (n < 2) return linearTicks(low, high, most);
  const every = Math.ceil(n / most);
  return {
    ticks: Array.from({ length: Math.ceil(n / every) }, (_, i) => 10 ** (first + i * every)),
    step: 0,
  };
}

function ticksOf(chart, { min, max }, most) {
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
  const most = Math.max(2, Math.floor(height / ((chart.yNames ? 14 : 24) * px)));
  const { ticks, step } = ticksOf(chart, u.scales.y, most);
  for (const tick of ticks) {
    const y = Math.round(u.valToPos(tick, "y", true));
    drawLine(pen, [left, y], [left + width, y]);
    pen.fillText(tickText(chart, tick, step, u.scales.y), left - 6 * px, Math.max(y, top + 4 * px));
  }
  pen.restore();
}
