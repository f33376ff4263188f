// The strips beside the rows of the layer map: what they show, in which colors, and the value at a step.

const strips = {
  choice: null, // what is shown, one of `choicesOf`; null if nothing was recorded

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
    $("strip-step").textContent = step === null ? "latest" : `step ${whole(step)}`;
    for (const node of this.choice ? this.seen() : []) {
      node.querySelector(".value").textContent = this.valueText(this.choice.of(node.row), step);
    }
  },

  explain() {
    if (!this.choice) return;
    const note = this.choice.isCost
      ? make("p.key", {}, `longest bar: ${this.choice.format(this.scale.high)}`)
      : colorKey(this.scale);
    note.prepend(make("b", {}, this.choice.title), " ");
    if (layers.isFlat) note.append(make("span.soft", {}, ORDER_RULE));
    $("map-key").replaceChildren(note);
    const summary = foldLater("As a table", () => this.summary());
    summary.className = "behind";
    $("map-table").replaceChildren(summary);
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
