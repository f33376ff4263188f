// The model as a tree of rows, and what can be shown of a row.

/** Rows by name: modules, and outputs recorded under another name than their module's. */
function modelOf(page) {
  const rows = new Map();
  const add = (name, about) => {
    const row = {
      name,
      label: name,
      type: "",
      about: "",
      parent: null,
      children: [],
      layer: null,
      params: [],
      findings: [],
      ...about,
    };
    rows.set(name, row);
    return row;
  };
  const parentOf = (name) => {
    for (let at = name.lastIndexOf("."); at > 0; at = name.lastIndexOf(".", at - 1)) {
      if (rows.has(name.slice(0, at))) return rows.get(name.slice(0, at));
    }
    return null;
  };
  const attach = (row, parent) => {
    row.parent = parent;
    row.label =
      parent && row.name.startsWith(`${parent.name}.`) ? row.name.slice(parent.name.length + 1) : row.name;
    if (parent) parent.children.push(row);
  };
  for (const { name, type, about, n_params: n } of page.modules) {
    const row = add(name, { type, about: about || type, nParams: n });
    if (name) attach(row, parentOf(name));
  }
  for (const [name, { module }] of Object.entries(page.layers)) {
    if (!rows.has(name)) {
      const parent = name === module ? parentOf(name) : rows.get(module) || parentOf(module);
      attach(add(name), parent?.name ? parent : null);
    }
    rows.get(name).layer = page.layers[name];
  }
  for (const [name, { module }] of Object.entries(page.params)) {
    if (!rows.has(module)) attach(add(module), parentOf(module));
    rows.get(module).params.push(name);
  }
  const root = rows.get("");
  if (root && !root.layer && !root.params.length && rows.size > 1) rows.delete("");
  else if (root) root.label = "(the model)";
  (page.verdict?.findings || []).forEach((finding, i) => {
    const row = rows.get(finding.layer) || rows.get(page.params[finding.param]?.module);
    if (row) row.findings.push(i);
  });
  return rows;
}

/** What can be shown of rows: `{key, label, group, of(row)}`; `of` gives a series, a number, or null. */
function choicesOf(page) {
  const output = (stat) => ({
    key: stat,
    label: statName(stat),
    group: "Outputs",
    isShare: SHARES.has(stat),
    title: `${statName(stat)} of the output`,
    of: ({ layer }) => (layer?.stats[stat]?.steps.length ? layer.stats[stat] : null),
  });
  const cache = new Map(); // the largest of several parameters is computed once
  const ofParams = (row, stat) => {
    const key = `${stat} ${row.name}`;
    if (!cache.has(key)) {
      const weight = `${row.name && `${row.name}.`}weight`;
      const names = row.params.includes(weight) ? [weight] : row.params;
      const all = names.map((name) => page.params[name].stats[stat]).filter((series) => series?.steps.length);
      cache.set(key, all.length ? largest(all) : null);
    }
    return cache.get(key);
  };
  const outputs = statsOf(Object.values(page.layers)).map(output);
  const params = statsOf(Object.values(page.params)).map((stat) => ({
    key: outputs.some(({ key }) => key === stat) ? `param ${stat}` : stat,
    label: statName(stat, true),
    group: "Parameters",
    isShare: SHARES.has(stat),
    of: (row) => ofParams(row, stat),
    title: `${statName(stat, true)} of the weight, or the largest of the parameters`,
  }));
  const sum = (numbers) => numbers.reduce((total, x) => total + (x || 0), 0);
  const cost = (key, group, format, title) => ({
    key,
    label: key,
    group: "Cost",
    isCost: true,
    format,
    title,
    of: ({ name }) => (group[name] ? sum(group[name]) : null),
  });
  const costs = [];
  if (Object.keys(page.memory?.layers || {}).length) {
    costs.push(cost("memory", page.memory.layers, bytes, `memory: ${page.memory.columns.join(", ")}`));
  }
  if (Object.keys(page.time?.layers || {}).length) {
    costs.push(
      cost(
        "time",
        page.time.layers,
        seconds,
        "time of a forward, and of a backward if it is known, without layers inside",
      ),
    );
  }
  return [...outputs, ...params, ...costs];
}

/** Rows with what sets them apart: findings first, then values that are not finite, then distance. */
function worstFirst(rows, choice) {
  const latest = (row) => {
    const own = choice.of(row);
    return typeof own === "number"
      ? own
      : median(own.values.slice(-Math.max(1, Math.ceil(own.values.length / 10))));
  };
  const isLargeBad = choice.isShare || choice.isCost || choice.key.endsWith("nonfinite");
  const numbers = rows.map(latest);
  const bend = numbers.every((x) => !(x < 0)) ? (x) => Math.log(x + 1e-30) : (x) => x;
  const middle = median(numbers.map(bend));
  const far = (x) => (isLargeBad ? x : Math.abs(bend(x) - middle));
  const rank = new Map(
    rows.map((row, i) => {
      const isBad =
        typeof choice.of(row) !== "number" && choice.of(row).values.some((x) => !Number.isFinite(x));
      return [row, [row.findings[0] ?? Infinity, isBad ? 0 : 1, -far(numbers[i]) || 0]];
    }),
  );
  return [...rows].sort((a, b) => {
    const [x, y] = [rank.get(a), rank.get(b)];
    const i = x.findIndex((own, k) => own !== y[k]);
    return i < 0 ? 0 : x[i] - y[i];
  });
}
const ORDER_RULE =
  "Layers with findings first, then those with NaN or inf, then those whose latest values are farthest " +
  "from the median of all layers; shares, memory and time: largest first.";
