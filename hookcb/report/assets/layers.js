// The layer map: modules as a tree that folds, a heat strip for each.

const layers = {
  MAX_ROWS: 60, // more are folded at first

  start(page) {
    this.page = page;
    this.rows = modelOf(page);
    this.choices = choicesOf(page);
    this.place = $("layers");
    $("layers-section").hidden = !this.rows.size;
    if (!this.rows.size) return;
    $("layer-controls").hidden = !this.choices.length;
    if (!this.choices.length) {
      this.place.before(
        make("p.soft", {}, "No numbers of layers were recorded; add ActivationStats() or Diagnose()."),
      );
    }
    const groups = Map.groupBy(this.choices, ({ group }) => group);
    $("stat").append(
      ...[...groups].map(([label, own]) =>
        make(
          "optgroup",
          { label },
          ...own.map((choice) => make("option", { value: choice.key }, choice.label)),
        ),
      ),
    );
    const shown = page.verdict?.findings[0]?.shown_by; // what the first finding is about is shown first
    const keys =
      shown?.of === "params"
        ? [`param ${shown.stat}`, shown.stat]
        : shown?.of === "layers"
          ? [shown.stat]
          : [];
    const first = this.choices.find(({ key }) => keys.includes(key));
    if (first) $("stat").value = first.key;
    $("order").title = ORDER_RULE;
    this.folded = new Set();
    this.foldAtFirst();
    this.chosen = null;
    this.nodes = new Map([...this.rows.values()].map((row) => [row, this.nodeOf(row)]));
    this.place.addEventListener("scroll", () => this.paintSeen());
    $("stat").addEventListener("change", () => this.rank());
    $("order").addEventListener("change", () => this.rank());
    $("find").addEventListener("input", () => this.list());
    for (const type of ["click", "keydown", "pointermove", "pointerleave"])
      this.place.addEventListener(type, this);
    timeline.strips.add(() => this.repaint());
    timeline.cursors.add((step) => this.tell(step));
    new ResizeObserver(() => this.repaint()).observe(this.place);
    this.rank();
    const concerned = [...this.rows.values()]
      .filter(({ findings }) => findings.length)
      .sort((a, b) => a.findings[0] - b.findings[0]);
    if (concerned.length) this.choose(concerned[0].name);
  },

  /** Folds the innermost containers until few rows are left, but none that has a finding inside. */
  foldAtFirst() {
    const depth = (row) => (row ? 1 + depth(row.parent) : 0);
    const open = new Set(
      [...this.rows.values()]
        .filter(({ findings }) => findings.length)
        .flatMap((row) => [...this.above(row)]),
    );
    const containers = [...this.rows.values()].filter((row) => row.children.length && !open.has(row));
    containers.sort((a, b) => depth(b) - depth(a));
    for (const row of containers) {
      if (this.visible().length <= this.MAX_ROWS) break;
      this.folded.add(row);
    }
  },

  *above(row) {
    for (let own = row.parent; own; own = own.parent) yield own;
  },

  nodeOf(row) {
    const alarm = row.findings.length
      ? make("span.alarm", {}, counted(row.findings.length, "finding"))
      : null;
    const node = make(
      "div.row",
      {
        role: "treeitem",
        "data-name": row.name,
        tabindex: "-1",
        "aria-selected": "false",
        title: `${row.name} ${row.about}`,
      },
      make(
        "span.name",
        {},
        make("span.twig", { "aria-hidden": "true" }),
        make("span.label"),
        make("span.type", {}, row.type),
        alarm,
      ),
      make("canvas.strip", { "aria-hidden": "true" }),
      make("span.value"),
    );
    node.row = row;
    return node;
  },

  /** Sorts the rows and colors them for another statistic or order. */
  rank() {
    this.choice = this.choices.find(({ key }) => key === $("stat").value) || this.choices[0];
    if (this.choice) {
      const own = [...this.rows.values()].map((row) => this.choice.of(row)).filter((x) => x !== null);
      this.scale = colorScale(
        this.choice.isCost ? [own] : own.map(({ values }) => values),
        this.choice.isShare,
      );
    }
    this.isFlat = $("order").value === "worst" && this.choice !== undefined;
    const all = [...this.rows.values()];
    this.sorted = this.isFlat
      ? worstFirst(
          all.filter((row) => this.choice.of(row) !== null),
          this.choice,
        )
      : all;
    this.list();
    this.explain();
  },

  visible() {
    const wanted = $("find").value.trim().toLowerCase();
    const isFound = (row) =>
      row.name.toLowerCase().includes(wanted) || row.type.toLowerCase().includes(wanted);
    if (this.isFlat) return this.sorted.filter(isFound);
    const all = [...this.rows.values()];
    const shown = wanted ? new Set(all.filter(isFound).flatMap((row) => [row, ...this.above(row)])) : null;
    const found = [];
    const visit = (row) => {
      if (shown && !shown.has(row)) return;
      found.push(row);
      if (shown || !this.folded.has(row)) row.children.forEach(visit);
    };
    all.filter(({ parent }) => !parent).forEach(visit);
    return found;
  },

  /** Shows the rows that are neither folded nor filtered away. */
  list() {
    const rows = this.visible();
    const hasFocus = this.place.contains(document.activeElement) && document.activeElement.row;
    this.shown = rows.map((row) => this.nodes.get(row));
    this.shown.forEach((node, i) => this.label(node, rows[i]));
    if (
      this.shown.some((node, i) => node !== this.place.children[i]) ||
      this.shown.length !== this.place.childElementCount
    ) {
      this.place.replaceChildren(...this.shown);
    }
    this.place.hidden = !rows.length;
    $("found").textContent = $("find").value.trim() ? `${counted(rows.length, "row")} found.` : "";
    const target =
      (hasFocus && this.shown.includes(this.nodes.get(hasFocus)) && this.nodes.get(hasFocus)) ||
      this.nodes.get(this.chosen);
    this.enter(this.shown.includes(target) ? target : this.shown[0], Boolean(hasFocus));
    this.repaint();
  },

  label(node, row) {
    const depth = this.isFlat ? 0 : [...this.above(row)].length;
    const isOpen = Boolean($("find").value.trim()) || !this.folded.has(row);
    node.setAttribute("aria-level", depth + 1);
    if (row.children.length && !this.isFlat) node.setAttribute("aria-expanded", isOpen);
    else node.removeAttribute("aria-expanded");
    node.style.setProperty("--depth", depth);
    node.querySelector(".label").textContent = this.isFlat ? row.name || row.label : row.label;
  },

  repaint() {
    this.width = null;
    for (const node of this.shown) node.isPainted = false;
    this.paintSeen();
    this.axis();
  },

  /** The rows that are scrolled into the map, and some around them; on paper all. */
  seen() {
    if (!this.shown.length || document.documentElement.dataset.print) return this.shown;
    const { scrollTop, clientHeight } = this.place;
    const height = this.shown[0].offsetHeight || 24;
    return this.shown.slice(
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
        : [...this.inside(row)].map(this.choice.of).filter(Boolean);
    if (this.choice.isCost) this.bar(canvas, own);
    else raster(rows, timeline.range, this.width, this.scale, canvas);
    canvas.classList.toggle("many", rows.length > 1);
    node.querySelector(".value").textContent = this.valueText(own, null);
  },

  bar(canvas, number) {
    [canvas.width, canvas.height] = [this.width, 1];
    const pen = canvas.getContext("2d");
    pen.fillStyle = color("--blue");
    pen.fillRect(0, 0, Math.round(((number || 0) / (this.scale.high || 1)) * this.width), 1);
  },

  *inside(row) {
    for (const child of row.children) {
      yield child;
      yield* this.inside(child);
    }
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
    pointer.hidden = !(share >= 0 && share <= 1) || !this.shown.length || !this.choice || this.choice.isCost;
    if (!pointer.hidden) {
      const strip = this.shown[0].querySelector("canvas").getBoundingClientRect();
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
    if (this.isFlat) note.append(make("span.soft", {}, ORDER_RULE));
    $("map-key").replaceChildren(note);
    const summary = foldLater("As a table", () => this.summary());
    summary.className = "behind";
    $("map-table").replaceChildren(summary);
  },

  summary() {
    const { of, format = short, isCost, title } = this.choice;
    const own = this.sorted.filter((row) => of(row) !== null);
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

  handleEvent(event) {
    const node = event.target.closest?.(".row");
    if (event.type === "click" && node) {
      this.enter(node, true);
      if (event.target.closest(".twig") && node.hasAttribute("aria-expanded")) this.turn(node.row);
      else this.choose(node.row.name);
    } else if (event.type === "keydown" && node) this.press(event, node);
    else if (event.type === "pointermove" && event.target.matches("canvas")) {
      const box = event.target.getBoundingClientRect();
      const [first, last] = timeline.range;
      timeline.point(first + (last - first) * clamp((event.clientX - box.left) / box.width, 0, 1));
    } else if (event.type === "pointerleave") timeline.point(null);
  },

  press(event, node) {
    const { row } = node;
    const at = this.shown.indexOf(node);
    const expanded = node.getAttribute("aria-expanded");
    const go = (to) => this.enter(this.shown[clamp(to, 0, this.shown.length - 1)], true);
    const keys = {
      ArrowDown: () => go(at + 1),
      ArrowUp: () => go(at - 1),
      Home: () => go(0),
      End: () => go(this.shown.length - 1),
      ArrowRight: () => (expanded === "false" ? this.turn(row) : expanded && go(at + 1)),
      ArrowLeft: () =>
        expanded === "true" ? this.turn(row) : row.parent && this.enter(this.nodes.get(row.parent), true),
      Enter: () => this.choose(row.name),
      " ": () => this.choose(row.name),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  },

  /** Makes a row the one that the Tab key goes to, and moves the focus there. */
  enter(node, hasFocus) {
    if (!node) return;
    for (const other of this.place.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    node.tabIndex = 0;
    if (hasFocus) node.focus({ preventScroll: !node.isConnected });
  },

  /** Scrolls the map, not the page, so that a row is seen. */
  reveal({ offsetTop: top, offsetHeight: height }) {
    const { scrollTop, clientHeight } = this.place;
    if (top < scrollTop || top + height > scrollTop + clientHeight)
      this.place.scrollTop = top - clientHeight / 2;
  },

  focus(name) {
    const node = this.nodes?.get(this.rows.get(name));
    if (node?.isConnected) this.enter(node, true);
  },

  turn(row) {
    if (!this.folded.delete(row)) this.folded.add(row);
    this.list();
  },

  /** Shows the curves of a layer, or folds a row that has none. */
  choose(name, isFromAfar = false) {
    const row = this.rows.get(name) || this.rows.get(this.page.params[name]?.module);
    if (!row) return;
    if (!row.layer && !row.params.length && row.children.length && !isFromAfar) return this.turn(row);
    for (const own of this.above(row)) this.folded.delete(own);
    const old = this.nodes.get(this.chosen);
    if (old) old.setAttribute("aria-selected", "false");
    this.chosen = row;
    this.nodes.get(row).setAttribute("aria-selected", "true");
    if (!this.nodes.get(row).isConnected) this.list();
    this.reveal(this.nodes.get(row));
    if (isFromAfar) {
      if (!this.visible().includes(row)) $("find").value = "";
      this.list();
      this.reveal(this.nodes.get(row));
      $("layers-section").scrollIntoView();
      this.enter(this.nodes.get(row), true);
    }
    showLayer(this.page, row);
  },

  state() {
    const folded = [...(this.folded || [])].map(({ name }) => name);
    return {
      stat: $("stat").value,
      order: $("order").value,
      find: $("find").value,
      folded,
      chosen: this.chosen?.name,
      at: $("layers").scrollTop,
    };
  },

  restore({ stat, order, find, folded, chosen, at }) {
    if (!this.rows.size) return;
    for (const [id, value] of [
      ["stat", stat],
      ["order", order],
    ]) {
      if ([...$(id).options].some((option) => option.value === value)) $(id).value = value;
    }
    $("find").value = find;
    this.folded = new Set(folded.map((name) => this.rows.get(name)));
    this.rank();
    if (this.rows.has(chosen)) this.choose(chosen);
    this.place.scrollTop = at;
  },
};

/** Index of the record nearest to a step, -1 if there is none within its cell. */
function nearest(steps, step) {
  let best = -1;
  for (let i = 0; i < steps.length; i += 1) {
    if (best < 0 || Math.abs(steps[i] - step) < Math.abs(steps[best] - step)) best = i;
  }
  return best >= 0 && Math.abs(steps[best] - step) <= Math.max(1, 0.75 * usualGap(steps)) ? best : -1;
}
