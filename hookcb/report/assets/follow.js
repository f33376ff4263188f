// Following a run that goes on: the page loads itself again, and keeps its place.

const follow = {
  key: `hookcb 1 ${location.pathname}`,
  isDragging: false,
  typedAt: 0,

  start(page) {
    history.scrollRestoration = "manual";
    addEventListener("pagehide", () => this.keep());
    if (!page.every) return;
    addEventListener("pointerdown", () => {
      this.isDragging = true;
    });
    for (const type of ["pointerup", "pointercancel"])
      addEventListener(type, () => {
        this.isDragging = false;
      });
    for (const type of ["keydown", "input"])
      addEventListener(type, () => {
        this.typedAt = Date.now();
      });
    setTimeout(() => this.reload(), 1000 * Math.max(1, page.every));
  },

  /** Loads the page again, once nobody types, drags, or looks elsewhere. */
  reload() {
    if (this.isDragging || document.hidden || Date.now() - this.typedAt < 2000) {
      setTimeout(() => this.reload(), 500);
      return;
    }
    this.keep();
    location.reload();
  },

  keep() {
    const state = {
      at: scrollY,
      map: layers.state(),
      zoom: timeline.kept(),
      open: this.folds()
        .filter(([, node]) => node.open)
        .map(([key]) => key),
      depth: depth.kept(),
      run: switches.state,
      focus: document.activeElement?.id || "",
      row: document.activeElement?.dataset?.name ?? null,
    };
    const text = JSON.stringify(state);
    try {
      sessionStorage.setItem(this.key, text);
    } catch {
      try {
        history.replaceState(null, "", `#${encodeURIComponent(text)}`);
      } catch {
        /* a page without an address of its own starts anew */
      }
    }
  },

  kept() {
    let text = null;
    try {
      text = sessionStorage.getItem(this.key);
    } catch {
      text = decodeURIComponent(location.hash.slice(1));
    }
    try {
      return JSON.parse(text);
    } catch {
      return null;
    }
  },

  /** Folds by what is around them, which is the same after a reload. */
  folds() {
    return [...document.querySelectorAll("details")].map((node) => {
      const title = node.closest("figure, .bars")?.querySelector("figcaption, h3")?.textContent || "";
      const text = `${node.closest("[id]").id} ${title} ${node.firstElementChild.textContent}`;
      return [text.replace(/\d+/g, "#"), node];
    });
  },

  restore() {
    const state = this.kept();
    if (!state) return;
    layers.restore(state.map);
    timeline.restore(state.zoom);
    depth.restore(state.depth);
    if (state.run) switches.restore(state.run);
    for (const [key, node] of this.folds()) if (state.open.includes(key)) node.open = true;
    if (state.row !== null) layers.focus(state.row);
    else if (state.focus) $(state.focus)?.focus({ preventScroll: true });
    scrollTo({ top: state.at, behavior: "instant" });
  },
};
