// What is drawn over the lines of a chart: findings, the limit, and numbers that cannot be drawn at their place.

// What cannot be drawn at its place, and whether it is drawn at the top or at the bottom.
const MARKS = {
  nan: { text: "NaN", isBad: true, sign: "×", atTop: false },
  high: { text: "infinite", isBad: true, sign: "▲", atTop: true },
  low: { text: "−infinite", isBad: true, sign: "▼", atTop: false },
  zero: { text: "zero, which has no place on a logarithmic axis", sign: "▾", atTop: false },
  negative: { text: "negative, which has no place on a logarithmic axis", sign: "▿", atTop: false },
  over: { text: "above the range shown", sign: "▴", atTop: true },
};

/** The mark of a number that has no place. */
function kindOf(x) {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "high" : "low";
  return x < 0 ? "negative" : "zero";
}

/** Draws all of them on the canvas of `u`, uPlot's part of `chart`; `rem` is the size of text relative to 16 px. */
function drawMarks(chart, u, rem) {
  const pen = u.ctx;
  const px = devicePixelRatio * rem;
  pen.save();
  pen.font = `${11.5 * px}px system-ui, sans-serif`;
  pen.textBaseline = "alphabetic";
  pen.textAlign = "left";
  pen.lineWidth = 1.5 * px;
  drawSteps(chart, u, px);
  drawFound(chart, u, px);
  pen.textAlign = "left";
  if (chart.limit !== null && (!chart.isLog || chart.limit > 0)) drawLimit(chart, u, px); // its text over signs
  pen.restore();
}

/** Vertical lines; their texts are in rows, as far as they would overlap. */
function drawSteps(chart, u, px) {
  const { left, top, width, height } = u.bbox;
  const ends = []; // where the texts of each row end
  for (const { step, text } of chart.marks) {
    const x = Math.round(u.valToPos(step, "x", true));
    if (x < left || x > left + width) continue;
    u.ctx.strokeStyle = color("--soft");
    u.ctx.globalAlpha = 0.7;
    drawLine(u.ctx, [x, top], [x, top + height]);
    u.ctx.globalAlpha = 1;
    if (!text) continue;
    const shown = fitted(u.ctx, text, width - 14 * px);
    const room = u.ctx.measureText(shown).width + 10 * px;
    let row = ends.findIndex((end) => end < x);
    if (row < 0) row = ends.push(0) - 1;
    ends[row] = Math.min(x, left + width - room) + room;
    if (row < 4) drawLabel(u, shown, x, top + (15 * row - 5) * px, "--ink", px); // the first row is above the plot
  }
}

/** The beginning of a text that is no wider than `width`. */
function fitted(pen, text, width) {
  let n = text.length;
  while (n > 1 && pen.measureText(n < text.length ? `${text.slice(0, n)}…` : text).width > width) n -= 1;
  return n < text.length ? `${text.slice(0, n)}…` : text;
}

function drawLimit(chart, u, px) {
  const { left, top, width } = u.bbox;
  const y = Math.round(u.valToPos(chart.limit, "y", true));
  u.ctx.strokeStyle = color("--bad");
  u.ctx.setLineDash([6 * px, 4 * px]);
  drawLine(u.ctx, [left, y], [left + width, y]);
  u.ctx.setLineDash([]);
  const isAtTop = y < top + 18 * px;
  drawLabel(u, `limit ${chart.format(chart.limit)}`, left + width, y + (isAtTop ? 14 : -4) * px, "--bad", px);
}

/** Signs of numbers that have no place in the plot. */
function drawFound(chart, u, px) {
  const { top, height } = u.bbox;
  u.ctx.textAlign = "center";
  let last = null; // the sign before; those that would cover one another are left out
  for (const { line, kind, step } of chart.found) {
    const x = u.valToPos(step, "x", true);
    if (last && last.line === line && last.kind === kind && Math.abs(x - last.x) < 8 * px) continue;
    last = { line, kind, x };
    const { sign, atTop, isBad } = MARKS[kind];
    u.ctx.fillStyle = isBad ? color("--alarm") : chart.stack ? color("--ink") : lineColor(line);
    u.ctx.fillText(sign, x, atTop ? top + 11 * px : top + height - 3 * px);
  }
}

function drawLine(pen, from, to) {
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
}

/** Text on the color of the page, kept inside the plot. */
function drawLabel({ ctx: pen, bbox: { left, width } }, text, x, y, ink, px) {
  const room = pen.measureText(text).width;
  const at = clamp(x, left + 2 * px, left + width - room - 2 * px);
  pen.fillStyle = color("--paper");
  pen.globalAlpha = 0.85;
  pen.fillRect(at - 2 * px, y - 11 * px, room + 4 * px, 14 * px);
  pen.globalAlpha = 1;
  pen.fillStyle = color(ink);
  pen.fillText(text, at, y);
}
