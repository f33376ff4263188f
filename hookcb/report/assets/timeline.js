// One range of steps and one cursor for all charts and strips; a drag zooms, a double click shows everything.

const timeline = {
  full: [0, 1],
  range: [0, 1],
  epochs: [], // the last step of each epoch
  charts: new Set(), // those on the page
  strips: new Set(), // functions to call when the range has changed
  cursors: new Set(), // functions to call with the step under the cursor, or null

  zoom(first, last) {
    const [low, high] = this.full;
    this.range = last - first < 1 ? this.full : [Math.max(low, first), Math.min(high, last)];
    for (const chart of this.live()) chart.show(this.range);
    for (const paint of this.strips) paint();
    $("zoomed").hidden = this.range[0] <= low && this.range[1] >= high;
    $("zoomed-range").textContent = `Steps ${this.ends().map(whole).join(" to ")} are shown.`;
  },

  /** First and last step that are shown. */
  ends() {
    return [Math.ceil(this.range[0]) + 0, Math.floor(this.range[1])]; // no negative zero
  },

  point(step, source = null) {
    for (const chart of this.live()) if (chart !== source) chart.point(step);
    for (const tell of this.cursors) tell(step);
  },

  /** What is shown, null if that is everything; an end at the newest step stays there. */
  kept() {
    const [first, last] = this.range;
    return first <= this.full[0] && last >= this.full[1] ? null : [first, last >= this.full[1] ? null : last];
  },

  restore(kept) {
    if (kept) this.zoom(kept[0], kept[1] ?? this.full[1]);
  },

  *live() {
    for (const chart of this.charts) {
      if (chart.box.isConnected) yield chart;
      else {
        this.charts.delete(chart);
        chart.plotted?.destroy();
      }
    }
  },
};
