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
 * all that the chart may come to show, which decide on its axis. yNames: those of the places on the y axis, from the top.
 * axisFormat: text of a number at the y axis, if it is not one of the values. isLinear: logarithmic only if asked for.
 * axis: "log", "linear", or "auto". smoothing: weight of the past in smoothed lines, 0 for none.
 */
class Chart {
  constructor(options) {
    const usual = {
      lines: [],
      marks: [],
      limit: null,
      format: short,
      height: 11,
      note: "",
      axis: "auto",
      smoothing: 0,
    };
    Object.assign(this, usual, options);
    this.plot = make(this.names ? "div.plot" : "div.plot.of-steps", {
      tabindex: "0",
      role: "group",
      "aria-label": this.described(),
      keydown: (e) => this.press(e),
    });
    this.legend = make("ul.legend");
    this.where = make("span.where");
    this.caption = make(
      "figcaption",
      {},
      make("strong", {}, this.title),
      this.note ? ` ${this.note}` : "",
      this.where,
    );
    const saved = saveButtons(this.title, { CSV: () => csvOf(this), PNG: () => pictureOf(this) });
    this.box = make("figure.chart", {}, this.caption, this.plot, this.legend, saved, tableOf(this));
    this.plot.chart = this;
    this.plot.style.height = `${this.height}rem`;
    timeline.charts.add(this);
    resized.observe(this.plot);
    this.found = []; // what has no place in the plot, see `MARKS`
    this.tell(null); // so that it has its height from the first
    later(() => this.draw());
  }

  described() {
    const found = extremes((this.cells || this).lines.map(({ series }) => series.values));
    const range =
      found.high >= found.low ? `, from ${this.format(found.low)} to ${this.format(found.high)}` : "";
    return `Chart of ${this.title}${range}. Arrow keys move the cursor, + and − zoom, Escape shows everything.`;
  }

  /** Numbers as uPlot wants them; what it cannot draw becomes a mark. */
  read() {
    const own = extremes(this.lines.map(({ series }) => series.values));
    this.isBlank = !this.cells && !(own.high >= own.low); // nothing has a place on the y axis
    this.isLog = this.wantsLog(this.wide || own);
    this.found = [];
    const isDrawn = (y) => Number.isFinite(y) && !(this.isLog && y <= 0);
    const tables = this.lines.map(({ series }, line) => [
      series.steps,
      Array.from(series.values, (x, i) => {
        if (isDrawn(x)) return x;
        this.found.push({ line, kind: kindOf(x), step: series.steps[i], value: x });
        return null;
      }),
    ]);
    const reach = this.names ? 1 : undefined;
    this.cuts = this.lines.map(({ series }) => cutsOf(series, isDrawn, reach));
    if (!tables.length) return [Array.from(this.cells.steps)];
    const [x, ...ys] = tables.length > 1 ? uPlot.join(tables) : [Array.from(tables[0][0]), tables[0][1]];
    this.values = ys;
    this.places = new Map(Array.from(x, (step, i) => [step, i]));
    this.averages = this.lines.map(({ series, points }) =>
      this.smoothing && !points && !this.stack ? this.averaged(series, isDrawn) : null,
    );
    if (!this.stack) return [x, ...ys, ...this.averages.filter(Boolean)];
    const all = cutsOf({ steps: x, values: x }, () => true); // an area is cut where nothing was measured
    this.cuts.fill(all);
    const sum = new Array(x.length).fill(0);
    const layered = ys.map((values) => values.map((y, i) => (sum[i] += y || 0))).reverse();
    sum.forEach((y, i) => y > this.top && this.found.push({ line: 0, kind: "over", step: x[i] }));
    return [x, ...layered];
  }

  wantsLog({ low, positive, high }) {
    if (this.stack || this.cells || this.axis === "linear") return false;
    return this.axis === "log" ? positive <= high : !this.isLinear && isWide({ low, positive, high });
  }

  /** The smoothed values of a series at the places of the x axis. */
  averaged({ steps, values }, isDrawn) {
    const found = new Array(this.places.size);
    smoothed(values, this.smoothing).forEach((y, i) => {
      found[this.places.get(steps[i])] = isDrawn(y) && isDrawn(values[i]) ? y : null;
    });
    return found;
  }

  hasEpochs() {
    return !this.names && timeline.epochs.length > 0;
  }

  /** Room for the texts below the plot. */
  below(rem) {
    return (this.hasEpochs() ? 40 : 26) * rem;
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
    this.plot.classList.toggle("with-epochs", this.hasEpochs());
    const styles = order.map((i) => this.seriesStyle(i, rem));
    this.averages?.forEach((own, i) => own && styles.push(this.averageStyle(i, styles[i])));
    this.plotted?.destroy();
    this.plotted = new uPlot(
      {
        ...this.size(),
        padding: [
          (this.marks.some(({ text }) => text) ? 18 : 6) * rem,
          (this.names ? 12 : 34) * rem,
          0,
          (u) => axisRoom(this, u, rem),
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
            size: this.below(rem),
            values: (_, at) => at.map((x) => this.placeName(x)),
            space: (this.names ? 90 : 60) * rem,
            incrs: WHOLE,
          },
          { show: false },
        ],
        series: [{}, ...styles],
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
    const isFew = points || this.lines[i].series.steps.length <= 30;
    return {
      stroke,
      alpha: this.averages?.[i] ? 0.3 : 1,
      dash: i < PALETTE.length ? undefined : [6, 4],
      width: this.stack ? 0 : 1.75 * rem,
      fill: this.stack ? stroke : undefined,
      gaps: (u) => this.cuts[i].cuts.map((steps) => steps.map((step) => u.valToPos(step, "x", true))),
      points: {
        show: isFew,
        filter: () => (isFew ? null : Array.from(this.cuts[i].lone, (step) => this.places.get(step))),
        size: 5 * rem,
        fill: stroke,
      },
    };
  }

  averageStyle(i, style) {
    const filter = () => Array.from(this.cuts[i].lone, (step) => this.places.get(step));
    const points = { ...style.points, show: false, filter };
    return { ...style, alpha: 1, width: 1.3 * style.width, points };
  }

  size() {
    return { width: Math.max(160, this.plot.clientWidth), height: this.plot.clientHeight };
  }

  limits(low, high) {
    if (this.rows) return this.rows;
    const hasLimit = this.limit !== null && (!this.isLog || this.limit > 0);
    if (low === null) [low, high] = hasLimit ? [this.limit, this.limit] : this.isLog ? [1, 10] : [0, 1];
    if (hasLimit) [low, high] = [Math.min(low, this.limit), Math.max(high, this.limit)];
    if (this.isLog) {
      const room = high > low ? clamp((high / low) ** 0.08, 1.001, 2) : 1.3;
      return [low / room, high * room];
    }
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
    if ($("said")) $("said").textContent = `${this.where.textContent} ${this.legend.textContent}`;
  }

  /** Writes the legend, with the values at a place of the x axis, or else the latest with their steps. */
  tell(idx) {
    const x = this.plotted?.data[0][idx ?? -1] ?? null;
    this.hold(x !== null);
    const ends = new Set(this.names ? [] : this.lines.map(({ series }) => series.steps.at(-1)));
    const [end] = ends;
    const at = (step) => (this.names ? this.names[step] : `step ${whole(step)}`);
    const place = x !== null ? at(x) : ends.size === 1 ? `latest, ${at(end)}` : "";
    const isPlain = this.lines.length === 1 && this.lines[0].label === this.title; // the title is the legend
    const text = (i) => (x === null && this.names ? "" : this.valueText(i, x, idx));
    this.where.replaceChildren(place, " ", ...(isPlain ? [make("b", {}, text(0))] : []));
    const since = (i) => (x === null && ends.size > 1 ? ` at ${at(this.lines[i].series.steps.at(-1))}` : "");
    const entries = isPlain ? [] : this.lines.map((line, i) => this.entry(line, i, text(i), since(i)));
    const kinds = Object.entries(Object.groupBy(this.found, ({ kind }) => kind)).map(([kind, found]) => {
      const { sign, text, isBad } = MARKS[kind];
      return make(isBad ? "li.nonfinite" : "li", {}, `${sign} ${text} (${found.length}×)`);
    });
    this.legend.replaceChildren(...entries, ...kinds);
  }

  /** Keeps the height of texts while values under the pointer are told, so that nothing moves under it. */
  hold(isHeld) {
    if (isHeld === this.isHeld) return;
    this.isHeld = isHeld;
    for (const node of [this.caption, this.legend])
      node.style.minHeight = isHeld ? `${node.getBoundingClientRect().height}px` : "";
  }

  entry({ label }, i, value, since) {
    const key = make("span.line", { "aria-hidden": "true" });
    key.style.background = `var(${paletteName(i)})`;
    return make("li", {}, key, `${label} `, make(since ? "b.tight" : "b", {}, value), since);
  }

  /** The value of a line at `x`, or its latest, and the smoothed one beside it. */
  valueText(i, x, idx) {
    const { steps, values } = this.lines[i].series;
    const at = x === null ? this.places?.get(steps.at(-1)) : idx;
    const mean = this.averages?.[i]?.[at];
    const also = mean === null || mean === undefined ? "" : `, smoothed ${this.format(mean)}`;
    if (x === null) return steps.length ? this.format(values.at(-1)) + also : "";
    const value = this.values[i][idx];
    if (value !== null && value !== undefined) return this.format(value) + also;
    const mark = this.found.find((own) => own.line === i && own.step === x && own.kind !== "over");
    return mark ? this.format(mark.value) : "";
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
