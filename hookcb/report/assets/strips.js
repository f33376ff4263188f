// The strips beside the rows of the layer map: what they show, in which colors, and the value at a step.

const strips = {
  choice: null, // what is shown, one of `choicesOf`; null if nothing was recorded
  under: null, // the row under the pointer

  start() {
    layers.place.addEventListener("scroll", () => this.paintSeen());
    timeline.strips.add(() => this.repaint());
    timeline.cursors.add((step) => this.tell(step));
    new ResizeObserver(() => this.repaint()).observe(layers.place);
  },

  /** Takes one scale of colors for all rows. */
  show(choice) {
    this.choice = choice;
    const own = [...layers.rows.values()].map((row) => choice.of(row)).filter((x) => x !== null);
    this.all = new Set(choice.isCost ? [] : own.map(({ steps }) => steps)); // of most layers they are the same
    this.scale = colorScale(choice.isCost ? [own] : own.map(({ values }) => values), choice.isShare);
  },

  repaint() {
    this.width = null;
    for (const node of layers.shown) node.isPainted = false;
    this.paintSeen();
    this.axis();
  },

  /** The rows that are scrolled into the map, and some around them; on paper all. */
  seen() {
    if (!layers.shown.length || document.documentElement.dataset.print) return layers.shown;
    const { scrollTop, clientHeight } = layers.place;
    const height = layers.shown[0].offsetHeight || 24;
    return layers.shown.slice(
      Math.max(0, Math.floor(scrollTop / height) - 4),
      Math.ceil((scrollTop + clientHeight) / height) + 4,
    );
  },

  paintSeen() {
    for (const node of this.seen()) this.paint(node);
  },

  /** Paints a strip; that of a folded row has a line for each row in it. */
  paint(node) {
    if (node.isPainted || !this.choice || !node.isConnected) return;
    node.isPainted = true;
    const { row } = node;
    const canvas = node.querySelector("canvas");
    const own = this.choice.of(row);
    this.width ||= clamp(Math.round(canvas.clientWidth * devicePixelRatio), 64, 2048);
    const isFolded = node.getAttribute("aria-expanded") === "false";
    const rows = this.choice.isCost
      ? []
      : own !== null || !isFolded
        ? [own]
        : [...layers.inside(row)].map(this.choice.of).filter(Boolean);
    if (this.choice.isCost) this.bar(canvas, own);
    else raster(rows, timeline.range, this.width, this.scale, canvas);
    canvas.classList.toggle("many", rows.length > 1);
    canvas.classList.toggle(
      "has",
      rows.some((series) => series !== null),
    );
    node.querySelector(".value").textContent = this.valueText(own, null);
  },

  bar(canvas, number) {
    [canvas.width, canvas.height] = [this.width, 1];
    const pen = canvas.getContext("2d");
    pen.fillStyle = color("--blue");
    pen.fillRect(0, 0, Math.round(((number || 0) / (this.scale.high || 1)) * this.width), 1);
  },

  valueText(own, step) {
    const format = this.choice?.format || short;
    if (own === null) return "";
    if (typeof own === "number") return format(own);
    const i = step === null ? own.values.length - 1 : nearest(own.steps, step);
    return i < 0 ? "" : format(own.values[i]);
  },

  /** Writes the values at a step beside the strips, and draws a line there. */
  tell(step) {
    const [first, last] = timeline.range;
    const share = step === null ? -1 : (step - first) / (last - first);
    const pointer = $("strip-pointer");
    pointer.hidden =
      !(share >= 0 && share <= 1) || !layers.shown.length || !this.choice || this.choice.isCost;
    if (!pointer.hidden) {
      const strip = layers.shown[0].querySelector("canvas").getBoundingClientRect();
      pointer.style.left = `${strip.left - pointer.parentNode.getBoundingClientRect().left + share * strip.width}px`;
    }
    this.tellWhy(pointer.hidden ? null : step, pointer.style.left);
    $("strip-step").textContent = step === null ? "latest" : `step ${whole(step)}`;
    for (const node of this.choice ? this.seen() : []) {
      node.querySelector(".value").textContent = this.valueText(this.choice.of(node.row), step);
    }
  },

  /** Says beside the pointer why a cell is gray. */
  tellWhy(step, left) {
    this.tip ||= $("map").appendChild(make("div.tip", { "aria-hidden": "true" }));
    const own = step !== null && this.under?.isConnected ? this.choice.of(this.under.row) : null;
    const why = own?.steps ? whyGray(own.steps, this.all, Math.round(step)) : null;
    this.tip.hidden = !why;
    this.tip.textContent = why?.text ?? "";
    if (!why) return;
    const map = $("map").getBoundingClientRect();
    this.tip.style.top = `${this.under.getBoundingClientRect().bottom - map.top + 2}px`;
    this.tip.style.left = `${clamp(parseFloat(left), 0, Math.max(0, map.width - this.tip.offsetWidth - 4))}px`;
  },

  explain() {
    if (!this.choice) return;
    const note = this.choice.isCost
      ? make("p.key", {}, `longest bar: ${this.choice.format(this.scale.high)}`)
      : colorKey(this.scale);
    note.prepend(make("b", {}, this.choice.title), " ");
    const gray = this.choice.isCost ? "" : grayKey(this.all);
    if (gray) note.append(make("span.missing", {}, gray));
    if (layers.isFlat) note.append(make("span.soft", {}, ORDER_RULE));
    $("map-key").replaceChildren(note);
    const summary = foldLater("As a table", () => this.summary());
    summary.className = "behind";
    const saved = saveButtons(`${this.choice.title} by layer`, {
      CSV: () => this.csv(),
      PNG: () => pictureOfMap(layers, this, [...note.children].slice(1).map(partOf)),
    });
    $("map-table").replaceChildren(saved, summary);
  },

  /** The numbers of all layers, a column for each, or of costs a row. */
  csv() {
    const own = layers.sorted.filter((row) => this.choice.of(row) !== null);
    if (this.choice.isCost)
      return csvByName(
        ["total"],
        own.map((row) => [row.name, this.choice.of(row)]),
      );
    return csvOf({
      lines: own.map((row) => ({ label: row.name || row.label, series: this.choice.of(row) })),
    });
  },

  summary() {
    const { of, format = short, isCost, title } = this.choice;
    const own = layers.sorted.filter((row) => of(row) !== null);
    const [shown, said] = thinned(own);
    const head = isCost
      ? ["layer", "total"]
      : ["layer", "records", "smallest", "median", "largest", "latest", "NaN or inf"];
    return table(
      head,
      shown.map((row) => {
        const x = of(row);
        if (isCost) return [row.name, format(x)];
        const { low, high } = extremes([x.values]);
        const n = x.values.filter((y) => !Number.isFinite(y)).length;
        return [
          row.name,
          whole(x.values.length),
          ...[low, median(x.values), high, x.values.at(-1)].map((y) => format(y)),
          whole(n),
        ];
      }),
      `${title}. ${said}`.trim(),
    );
  },

  axis() {
    const [first, last] = timeline.ends();
    $("strip-first").textContent = this.choice?.isCost ? "0" : `step ${whole(first)}`;
    $("strip-last").textContent = this.choice?.isCost ? this.choice.format(this.scale.high) : whole(last);
  },
};

/** Index of the record nearest to a step, -1 if there is none within its cell. */
function nearest(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && step - steps[low - 1] < Math.abs(steps[low] - step)) low -= 1;
  return Math.abs(steps[low] - step) <= Math.max(1, 0.75 * usualGap(steps)) ? low : -1;
}

/** The steps before and after `step`, infinite at the ends; null if what lies between may have been left out by us. */
function holeAt(steps, step) {
  let [low, high] = [0, steps.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] > step) high = middle;
    else low = middle + 1;
  }
  const [before, after] = [steps[low - 1] ?? -Infinity, steps[low] ?? Infinity];
  const size = low && low < steps.length ? after - before : Math.min(step - before, after - step);
  return size > 2 * usualGap(steps) ? [before, after] : null; // see `thinned` in data.py
}

/**
 * Why a layer recorded at `steps` has no cell at `step`: whether others have a record there, and a sentence; null if it
 * has one, or if it is not known. `all` are the steps of each layer.
 */
function whyGray(steps, all, step) {
  const hole = nearest(steps, step) < 0 && holeAt(steps, step);
  if (!hole) return null;
  let [first, last] = [-Infinity, Infinity]; // where no layer has a record
  for (const others of all) {
    const other = others[nearest(others, step)];
    if (other > hole[0] && other < hole[1]) {
      return { isOwn: true, text: `other layers have a record of step ${whole(other)}, this one has none` };
    }
    const [before, after] = holeAt(others, step) || [NaN, NaN];
    first = Math.max(first, before); // NaN stays
    last = Math.min(last, after);
  }
  if (Number.isNaN(first)) return null;
  const ends = Number.isFinite(first) && Number.isFinite(last);
  const where = ends
    ? `between steps ${whole(first)} and ${whole(last)}`
    : Number.isFinite(first)
      ? `after step ${whole(first)}`
      : `before step ${whole(last)}`;
  return { isOwn: false, text: `no batch ${where} was inspected for this` };
}

/** What gray cells stand for, as far as it is known; "" if there are none. */
function grayKey(all) {
  const [start, end] = timeline.full;
  const found = [...all].slice(0, 50).flatMap((steps) => {
    const ends = [start, ...steps, end];
    const holes = ends
      .flatMap((step, i) => (i && step - ends[i - 1] > 2 ? [[ends[i - 1], step]] : []))
      .slice(0, 60);
    const places = holes.flatMap(([from, to]) => [0.1, 0.5, 0.9].map((share) => from + share * (to - from)));
    return places.map((step) => whyGray(steps, all, Math.round(step)));
  });
  const has = (isOwn) => found.some((own) => own?.isOwn === isOwn);
  const said = [
    has(false) && "no batch was inspected",
    has(true) && "this layer has no record, but others have",
  ];
  const text = said.filter(Boolean).join(", or ");
  return text && `gray: ${text}`;
}
