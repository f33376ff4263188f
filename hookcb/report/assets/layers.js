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
    this.folded = new Set();
    this.chosen = null;
    this.nodes = new Map([...this.rows.values()].map((row) => [row, this.nodeOf(row)]));
    this.foldAtFirst();
    this.offer();
    for (const type of ["click", "keydown", "pointermove", "pointerleave"])
      this.place.addEventListener(type, this);
    strips.start();
    showHistograms();
    this.rank();
    const concerned = [...this.rows.values()].filter(({ findings }) => findings.length);
    concerned.sort((a, b) => a.findings[0] - b.findings[0]);
    if (concerned.length) this.choose(concerned[0].name);
  },

  /** Offers what can be shown; what the first finding is about is shown first. */
  offer() {
    $("layer-controls").hidden = !this.choices.length;
    if (!this.choices.length) {
      const text = "No numbers of layers were recorded.";
      $("map").before(make("p.soft", {}, text));
    }
    for (const [label, choices] of Map.groupBy(this.choices, ({ group }) => group)) {
      const options = choices.map((choice) => make("option", { value: choice.key }, choice.label));
      $("stat").append(make("optgroup", { label }, ...options));
    }
    const { of: group, stat } = this.page.verdict?.findings[0]?.shown_by || {};
    const keys = { params: [`param ${stat}`, stat], layers: [stat] }[group] || [];
    const first = this.choices.find(({ key }) => keys.includes(key));
    if (first) $("stat").value = first.key;
    $("order").title = ORDER_RULE;
    $("stat").addEventListener("change", () => this.rank());
    $("order").addEventListener("change", () => this.rank());
    $("find").addEventListener("input", () => this.list());
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
    const choice = this.choices.find(({ key }) => key === $("stat").value) || this.choices[0];
    if (choice) strips.show(choice);
    const all = [...this.rows.values()];
    this.isFlat = $("order").value === "worst" && choice !== undefined;
    this.sorted = this.isFlat
      ? worstFirst(
          all.filter((row) => choice.of(row) !== null),
          choice,
        )
      : all;
    this.list();
    strips.explain();
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
    const wanted = [hasFocus, this.chosen].map((row) => this.nodes.get(row));
    this.enter(wanted.find((node) => this.shown.includes(node)) || this.shown[0], Boolean(hasFocus));
    strips.repaint();
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

  *inside(row) {
    for (const child of row.children) {
      yield child;
      yield* this.inside(child);
    }
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
      strips.under = node;
      timeline.point(first + (last - first) * clamp((event.clientX - box.left) / box.width, 0, 1));
    } else if (event.type === "pointerleave") {
      strips.under = null;
      timeline.point(null);
    }
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
    if (this.current) this.current.tabIndex = -1;
    this.current = node;
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
      $("layers-section").open = true;
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
    for (const [id, value] of Object.entries({ stat, order })) {
      if ([...$(id).options].some((option) => option.value === value)) $(id).value = value;
    }
    $("find").value = find;
    this.folded = new Set(folded.map((name) => this.rows.get(name)).filter(Boolean));
    this.rank();
    if (this.rows.has(chosen)) this.choose(chosen);
    this.place.scrollTop = at;
  },
};
