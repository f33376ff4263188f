// Charts, by uPlot, with a legend of our own that tells the values under the cursor.

const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((x) => [x, 2 * x, 5 * x]); // distances of ticks

/**
 * A chart as an element; it is drawn when there is time.
 *
 * lines: `{label, series, points}`, each in a color of its own; `stack` lays them over one another.
 * limit: a number to draw as a dashed line. marks: `{step, text}`, vertical lines.
 * format: text of a value. cells: `paint(plot)` paints cells, the numbers of which are those of its `lines`; `rows`
 * are the limits of the y axis then.
 * names: those of the places on an x axis that has no steps. top: upper limit of the y axis. wide: extremes of
 * all that the chart may come to show. yNames: those of the places on the y axis, from the top.
 * axisFormat: text of a number at the y axis, if it is not one of the values. isLinear: never on a logarithmic axis.
 */
class Chart {
  constructor(options) {
    Object.assign(this, { lines: [], marks: [], limit: null, format: short, height: 11, note: "" }, options);
    this.plot = make(this.names ? "div.plot" : "div.plot.of-steps", {
      tabindex: "0",
      role: "group",
      "aria-label": this.described(),
      keydown: (e) => this.press(e),
    });
    this.legend = make("ul.legend");
    this.where = make("span.where");
    const title = make(
      "figcaption",
      {},
      make("strong", {}, this.title),
      this.note ? ` ${this.note}` : "",
      this.where,
    );
    this.box = make("figure.chart", {}, title, this.plot, this.legend, tableOf(this));
    this.plot.chart = this;
    this.plot.style.height = `${this.height}rem`;
    timeline.charts.add(this);
    resized.observe(this.plot);
    this.found = []; // what has no place in the plot, see `MARKS`
    this.tell(null); // so that it has its height from the first
    later(() => this.plotted || this.draw());
  }

  described() {
    const found = extremes((this.cells || this).lines.map(({ series }) => series.values));
    const range =
      found.high >= found.low ? `, from ${this.format(found.low)} to ${this.format(found.high)}` : "";
    return `Chart of ${this.title}${range}. Arrow keys move the cursor, + and − zoom, Escape shows everything.`;
  }

  /** Numbers as uPlot wants them; what it cannot draw becomes a mark. */
  read() {
    const found = this.wide || extremes(this.lines.map(({ series }) => series.values));
    this.isLog = !this.stack && !this.isLinear && isWide(found);
    this.found = [];
    const tables = this.lines.map(({ series }, line) => [
      series.steps,
      Array.from(series.values, (x, i) => {
        const kind = Number.isNaN(x)
          ? "nan"
          : x === Infinity
            ? "high"
            : x === -Infinity
              ? "low"
              : this.isLog && x <= 0
                ? "zero"
                : null;
        if (kind) this.found.push({ line, kind, step: series.steps[i] });
        return Number.isFinite(x) && kind !== "zero" ? x : null;
      }),
    ]);
    if (!tables.length) return [Array.from(this.cells.steps)];
    const [x, ...ys] = tables.length > 1 ? uPlot.join(tables) : [Array.from(tables[0][0]), tables[0][1]];
    this.values = ys;
    if (!this.stack) return [x, ...ys];
    const sum = new Array(x.length).fill(0);
    const layered = ys.map((values) => values.map((y, i) => (sum[i] += y || 0))).reverse();
    sum.forEach((y, i) => y > this.top && this.found.push({ line: 0, kind: "over", step: x[i] }));
    return [x, ...layered];
  }

  draw() {
    if (!this.box.isConnected || !this.plot.clientWidth) return; // another layer was chosen, or it is folded
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
    const font = `${12 * rem}px system-ui, sans-serif`;
    const axis = {
      stroke: color("--soft"),
      font,
      labelFont: font,
      grid: { stroke: color("--line"), width: 1 },
      ticks: { stroke: color("--line"), width: 1, size: 4 },
    };
    const order = this.lines.map((_, i) => i);
    if (this.stack) order.reverse();
    const data = this.read();
    this.plotted?.destroy();
    this.plotted = new uPlot(
      {
        ...this.size(),
        padding: [
          (this.marks.some(({ text }) => text) ? 18 : 6) * rem,
          (this.names ? 12 : 34) * rem,
          0,
          60 * rem,
        ],
        legend: { show: false },
        scales: {
          x: { time: false, range: () => (this.names ? [-0.5, this.names.length - 0.5] : timeline.range) },
          y: {
            distr: this.isLog ? 3 : 1,
            dir: this.yNames ? -1 : 1,
            range: (_, low, high) => this.limits(low, high),
          },
        },
        axes: [
          {
            ...axis,
            size: 26 * rem,
            values: (_, at) => at.map((x) => this.placeName(x)),
            space: (this.names ? 90 : 60) * rem,
            incrs: WHOLE,
          },
          { show: false },
        ],
        series: [{}, ...order.map((i) => this.seriesStyle(i, rem))],
        cursor: {
          y: false,
          drag: { x: !this.names, y: false, setScale: false },
          points: { show: !this.stack && !this.cells },
        },
        hooks: {
          drawAxes: [(u) => drawAxis(this, u, rem), (u) => this.cells?.paint(u)],
          draw: [(u) => drawMarks(this, u, rem)],
          setCursor: [(u) => this.moved(u)],
          setSelect: [(u) => this.selected(u)],
        },
      },
      data,
      this.plot,
    );
    this.plotted.over.addEventListener("dblclick", () => this.names || timeline.zoom(...timeline.full));
    this.tell(null);
  }

  seriesStyle(i, rem) {
    const { points = false } = this.lines[i];
    const stroke = lineColor(i);
    return {
      stroke,
      dash: i < PALETTE.length ? undefined : [6, 4],
      width: this.stack ? 0 : 1.75 * rem,
      fill: this.stack ? stroke : undefined,
      points: { show: points || this.lines[i].series.steps.length <= 30, size: 5 * rem, fill: stroke },
    };
  }

  size() {
    return { width: Math.max(160, this.plot.clientWidth), height: this.plot.clientHeight };
  }

  limits(low, high) {
    if (this.rows) return this.rows;
    if (low === null) [low, high] = [0, 1];
    if (this.wide?.high >= this.wide?.low)
      [low, high] = [this.isLog ? this.wide.positive : this.wide.low, this.wide.high];
    if (this.limit !== null && (!this.isLog || this.limit > 0)) {
      [low, high] = [Math.min(low, this.limit), Math.max(high, this.limit)];
    }
    if (this.isLog) return [low / 1.3, high * 1.3];
    if (this.stack) return [0, Math.min(high, this.top ?? high) * 1.05 || 1];
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    return [low >= 0 && low < room ? 0 : low - room, high + room];
  }

  placeName(x) {
    if (!this.names) return whole(x);
    return cut(this.names[x] ?? "", 12);
  }

  show([first, last]) {
    if (this.names) return;
    this.plotted?.setScale("x", { min: first, max: last });
  }

  /** Moves the cursor to a step of another chart. */
  point(step) {
    const u = this.plotted;
    if (!u || this.names) return;
    const left = step === null ? -10 : u.valToPos(step, "x");
    u.setCursor({ left, top: left < 0 ? -10 : 1 }, false);
    this.tell(u.cursor.idx);
  }

  moved(u) {
    const { idx, left } = u.cursor;
    this.tell(left < 0 ? null : idx);
    if (!this.names) timeline.point(left < 0 ? null : u.posToVal(left, "x"), this);
  }

  selected(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    u.setSelect({ left: 0, width: 0 }, false);
    timeline.zoom(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
  }

  press(event) {
    const u = this.plotted;
    if (!u || event.target !== this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const n = u.data[0].length;
    const at = u.cursor.idx ?? (event.key === "ArrowLeft" ? n : -1);
    const far = event.shiftKey ? Math.ceil(n / 20) : 1;
    const middle = u.data[0][clamp(at, 0, n - 1)];
    const [first, last] = timeline.range;
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      const i = clamp(at + (event.key === "ArrowRight" ? far : -far), 0, n - 1);
      u.setCursor({ left: u.valToPos(u.data[0][i], "x"), top: 1 });
    } else if (event.key === "Escape") timeline.zoom(...timeline.full);
    else if (this.names) return;
    else if (event.key === "+") timeline.zoom(middle - (middle - first) / 2, middle + (last - middle) / 2);
    else if (event.key === "-")
      timeline.zoom(middle - (middle - first) * 2 - 1, middle + (last - middle) * 2 + 1);
    else return;
    event.preventDefault();
    $("said").textContent = `${this.where.textContent} ${this.legend.textContent}`;
  }

  /** Writes the legend, with the values at a place of the x axis, or else the latest. */
  tell(idx) {
    const x = this.plotted?.data[0][idx ?? -1] ?? null;
    const place =
      x !== null ? (this.names ? this.names[x] : `step ${whole(x)}`) : this.hasLatest() ? "latest" : "";
    const isPlain = this.lines.length === 1 && this.lines[0].label === this.title; // the title is the legend
    this.where.replaceChildren(place, " ", ...(isPlain ? [make("b", {}, this.valueText(0, x, idx))] : []));
    const entries = isPlain ? [] : this.lines.map((line, i) => this.entry(line, i, x, idx));
    const kinds = Object.entries(Object.groupBy(this.found, ({ kind }) => kind)).map(([kind, found]) => {
      const { sign, text, value } = MARKS[kind];
      return make(Number.isFinite(value) ? "li" : "li.nonfinite", {}, `${sign} ${text} (${found.length}×)`);
    });
    this.legend.replaceChildren(...entries, ...kinds);
  }

  hasLatest() {
    return !this.names && this.lines.length > 0;
  }

  entry({ label }, i, x, idx) {
    const key = make("span.line", { "aria-hidden": "true" });
    key.style.background = `var(${paletteName(i)})`;
    return make("li", {}, key, `${label} `, make("b", {}, this.valueText(i, x, idx)));
  }

  valueText(i, x, idx) {
    if (x === null) return !this.hasLatest() ? "" : this.format(this.lines[i].series.values.at(-1));
    const value = this.values[i][idx];
    if (value !== null && value !== undefined) return this.format(value);
    const mark = this.found.find((own) => own.line === i && own.step === x);
    return mark ? this.format(MARKS[mark.kind].value) : "";
  }
}

/** The element of a chart, see `Chart`. */
const chart = (options) => new Chart(options).box;

/** A chart of cells: a row for each of `painted`, from the top; `lines` are their numbers for the table. */
function heatChart({ painted, lines, scale, range, ...options }) {
  const paint = ({ ctx: pen, bbox: { left, top, width, height } }) => {
    const image = raster(painted, timeline.range, Math.max(1, Math.round(width)), scale);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(image, left, top, width, height);
  };
  const { steps } = painted.find((series) => series.steps.length);
  const box = chart({ ...options, rows: range, cells: { steps, paint, lines } });
  box.querySelector("figcaption").after(colorKey(scale, options.format));
  return box;
}

/** Charts of `lines` by title, and a sentence on those whose numbers are one and the same. */
function partlySame(all, drawn, named = (title) => title) {
  const charts = [];
  const same = [];
  for (const [title, lines] of all) {
    const { low, high, isFinite } = extremes(lines.map(({ series }) => series.values));
    const n = Math.max(...lines.map(({ series }) => series.steps.length));
    if (isFinite && low === high && n > 1) same.push(`${named(title)} = ${short(low)}`);
    else charts.push(drawn(title, lines));
  }
  return [
    charts,
    same.length ? make("p.soft", {}, `The same at all recorded steps: ${same.join(", ")}.`) : "",
  ];
}

const resized = new ResizeObserver((entries) => {
  for (const { target } of entries)
    if (!target.isConnected || !target.clientWidth) continue;
    else if (target.chart.plotted) target.chart.plotted.setSize(target.chart.size());
    else target.chart.draw();
});

/** Draws all charts again, after the colors or the size of the page have changed. */
function redraw() {
  for (const own of timeline.live()) own.draw();
  for (const paint of timeline.strips) paint();
}
