// Following a run that goes on: a file loads itself again, a page of a server draws new data in place.

const POLL = 1000; // milliseconds from one question to the server to the next
const FOCUSABLE = "a, button, input, select, summary, [tabindex]";

const follow = {
  key: `hookcb 1 ${location.pathname}`,
  isDragging: false,
  movedAt: 0,
  live: undefined, // what the server says beside the data: `ended`, null as long as the run goes on; `others`; `tag`
  isGone: false, // whether the server is
  next: null, // the newest data, if they are not drawn yet

  start(page) {
    history.scrollRestoration = "manual";
    addEventListener("pagehide", () => this.keep());
    if (!page.every && !this.live) return;
    addEventListener("pointerdown", () => {
      this.isDragging = true;
    });
    for (const type of ["pointerup", "pointercancel"])
      addEventListener(type, () => {
        this.isDragging = false;
      });
    for (const type of ["keydown", "input", ...(this.live ? ["pointermove", "wheel", "scroll"] : [])])
      addEventListener(type, () => this.move(), { capture: true, passive: true });
    this.page = page;
    if (!this.live) setTimeout(() => this.reload(), 1000 * Math.max(1, page.every));
    else if (this.live.ended === null) this.poll(Math.random().toString(36).slice(2));
  },

  /** Notes that somebody does something with the page. */
  move() {
    this.movedAt = performance.now();
  },

  /** Whether somebody types, drags, has selected text, or looks elsewhere. */
  isUsed() {
    return (
      this.isDragging ||
      document.hidden ||
      (this.movedAt && performance.now() - this.movedAt < 2000) ||
      (this.live && !getSelection().isCollapsed)
    );
  },

  /** Loads the page again, once nobody uses it. */
  reload() {
    if (this.isUsed()) {
      setTimeout(() => this.reload(), 500);
      return;
    }
    this.keep();
    location.reload();
  },

  /** Asks the server every second, as the page of this name, and draws new data once nobody uses the page. */
  async poll(name) {
    if (this.live.ended === null) await this.ask(name);
    try {
      if (this.next && !this.isUsed()) {
        const text = this.next;
        this.next = null;
        const page = await readPage(text);
        drawAnew(page, JSON.parse(text));
        this.page = page;
      }
      this.tell(this.page);
    } finally {
      if (this.live.ended === null || this.next)
        setTimeout(() => this.poll(name), this.isGone ? 5 * POLL : POLL);
    }
  },

  async ask(name) {
    try {
      const answer = await fetch("data", {
        headers: { "If-None-Match": this.live.tag, "Hookcb-Page": name },
        cache: "no-store",
        signal: AbortSignal.timeout(10 * POLL),
      });
      if (answer.status === 200) {
        this.next = await answer.text();
        this.live = JSON.parse(this.next).live;
      } else if (answer.status !== 304) throw new Error(answer.statusText);
      this.isGone = false;
    } catch {
      this.isGone = true;
    }
  },

  /** Says whether the run goes on, and how new the data are. */
  tell({ every, written }) {
    const date = new Date(written || NaN);
    const time = Number.isNaN(+date) ? "" : date.toLocaleTimeString();
    const { ended = null, others = [] } = this.live || {};
    let text = "";
    if (ended !== null) text = `ended ${ended}`.trim();
    else if (this.isGone) text = `the server is gone${time && `, last data of ${time}`}`;
    else if (this.live)
      text = `${!written || every ? "live" : "this training has ended, the script goes on"}${time && `, data of ${time}`}`;
    else if (every)
      text = `the run goes on: updates every ${short(every)} s${time && `, last written ${time}`}`;
    if (ended !== null && this.next) text += ", the last data are drawn once nothing is selected";
    const links = others.flatMap(([title, href], i) => [
      i ? ", " : " · also: ",
      make("a", { href }, title),
    ]);
    const parts = [text && $("facts").textContent ? "· " : "", text, ...links];
    const isSame = $("live").textContent === parts.map((part) => part.textContent ?? part).join("");
    if (!isSame) $("live").replaceChildren(...parts);
    $("live").hidden = !text;
  },

  state() {
    return {
      at: scrollY,
      map: layers.state(),
      zoom: timeline.kept(),
      folds: this.named("details").map(([key, node]) => [key, node.open]),
      depth: depth.kept(),
      run: switches.state,
      focus: document.activeElement?.id || "",
      row: document.activeElement?.dataset?.name ?? null,
      focused: this.named(FOCUSABLE).find(([, node]) => node === document.activeElement)?.[0],
    };
  },

  keep() {
    const text = JSON.stringify(this.state());
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

  /** Nodes by what is around them, which is the same after a reload. */
  named(what) {
    return [...document.querySelectorAll(what)].map((node) => {
      const title = node.closest("figure, .bars")?.querySelector("figcaption strong, h3")?.textContent || "";
      const text = `${node.closest("[id]")?.id} ${title} ${node.localName} ${(node.firstElementChild ?? node).textContent}`;
      return [text.replace(/\d+/g, "#"), node];
    });
  },

  restore(state) {
    if (!state) return;
    layers.restore(state.map);
    timeline.restore(state.zoom);
    depth.restore(state.depth);
    if (state.run) switches.restore(state.run);
    const folds = new Map(state.folds);
    for (const [key, node] of this.named("details")) {
      if (!folds.has(key) || folds.get(key) === node.open) continue;
      node.open = folds.get(key);
      node.dispatchEvent(new Event("toggle")); // now, so that its content has its height
    }
    if (state.row !== null) layers.focus(state.row);
    else if (state.focus) $(state.focus)?.focus({ preventScroll: true });
    else if (state.focused)
      this.named(FOCUSABLE)
        .find(([key]) => key === state.focused)?.[1]
        .focus({ preventScroll: true });
    scrollTo({ top: state.at, behavior: "instant" });
  },
};
