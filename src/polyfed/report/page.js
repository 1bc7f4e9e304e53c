"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const redraws = [];

  // elements: text is always text, never markup ------------------------------------------------------------------

  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
    }
    node.append(...children.filter((child) => child !== null && child !== ""));
    return node;
  }
  const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  const paragraph = (text, look = "") => (text ? make("p", { class: look }, text) : "");
  const title = (text) => make("h3", {}, text);
  const list = (notes) =>
    notes.length ? make("ul", { class: "notes" }, ...notes.map((note) => make("li", {}, note))) : "";
  const folded = (summary, open, ...inside) =>
    make("details", { open: open ? "" : null }, make("summary", {}, summary), ...inside);

  function choice(label, options, changed) {
    const select = make("select", { onchange: () => changed(select.value) });
    for (const [value, text] of options) select.append(make("option", { value }, text));
    return make("label", {}, label, select);
  }

  // numbers ------------------------------------------------------------------------------------------------------

  const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]; // prettier-ignore
  const TIMES = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]; // prettier-ignore
  const SCALES = { round: [[1, ""]], bytes: SIZES, seconds: TIMES, simulated: TIMES };

  const plain = (value) => String(Number(value.toPrecision(6)));
  // a share in percent, any other figure with four digits; factor: 100 for a share
  const figure = (value, factor) =>
    factor > 1 ? `${(factor * value).toFixed(2)} %` : plain(Number(value.toPrecision(4)));

  function human(value, axis) {
    const [size, unit] = SCALES[axis].find((scale) => value >= scale[0]) || SCALES[axis].at(-1);
    return `${Number((value / size).toPrecision(3))} ${unit}`.trim();
  }

  /** Round numbers within a range, at most about so many. */
  function ticks(low, high, most, whole = false) {
    const raw = Math.max((high - low) / most, 1e-12);
    const power = 10 ** Math.floor(Math.log10(raw));
    let step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * (1 - 1e-9));
    if (whole) step = Math.max(1, Math.ceil(step));
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1)
      found.push(Number((at * step).toPrecision(12)));
    return found;
  }

  // how a row looks: color, marker and dash at once, so that none is needed alone --------------------------------

  const DASHES = ["", "9 3", "9 3 2 3", "5 2.5", "14 3 2 3 2 3"]; // dots alone are Local's
  const MARKS = [
    "M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0",
    "M-3.2,-3.2h6.4v6.4h-6.4z",
    "M0,-4L3.9,3H-3.9z",
    "M0,-4.6L4,0L0,4.6L-4,0z",
    "M0,4L3.9,-3H-3.9z",
    "M-1.4,-4h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6v-2.8h2.6z",
    "M-4,-2.2L-2.2,-4L0,-1.8L2.2,-4L4,-2.2L1.8,0L4,2.2L2.2,4L0,1.8L-2.2,4L-4,2.2L-1.8,0z",
    "M-4,0L3,-3.9V3.9z",
    "M4,0L-3,-3.9V3.9z",
  ];
  const LOCAL = { color: "c-local", dash: "2 3", mark: "M-3.4,-3.4L3.4,3.4M-3.4,3.4L3.4,-3.4", open: " open" };

  function looksOf(section) {
    const cycle = (at) => ({
      color: `c${at % 20}`,
      dash: DASHES[at % DASHES.length],
      mark: MARKS[at % MARKS.length],
      open: "",
    });
    return new Map(section.rows.map((row) => [row.name, row.look < 0 ? LOCAL : cycle(row.look)]));
  }

  const mark = (look, x, y) =>
    draw("path", { class: `mark${look.open}`, d: look.mark, transform: `translate(${x.toFixed(1)},${y.toFixed(1)})` });

  function sample(look) {
    const line = draw("path", { class: "line", d: "M0,7H34", "stroke-dasharray": look.dash || null });
    return draw("svg", { class: look.color, width: 34, height: 14, "aria-hidden": "true" }, line, mark(look, 17, 7));
  }

  /** Buttons that switch rows on and off. */
  function legend(looks, shown, changed) {
    const buttons = [...shown].map((name) => {
      const click = () => {
        if (!shown.delete(name)) shown.add(name);
        button.setAttribute("aria-pressed", shown.has(name));
        changed();
      };
      const attributes = { type: "button", "aria-pressed": "true", "data-name": name, title: name, onclick: click };
      const button = make("button", attributes, sample(looks.get(name)), make("span", {}, name));
      return button;
    });
    return make("div", { class: "legend", role: "group", "aria-label": "Methods: shown or hidden" }, ...buttons);
  }

  // tables -------------------------------------------------------------------------------------------------------

  /** The rows in the order of a column; unknown values stay last. */
  function sorted(column, direction) {
    const order = column.order || column.cells;
    const isKnown = (row) => order[row] !== null && order[row] !== "";
    const compare = column.order
      ? (a, b) => order[a] - order[b]
      : (a, b) => order[a].localeCompare(order[b], "en", { numeric: true });
    return [...order.keys()].sort(
      (a, b) => isKnown(b) - isKnown(a) || (isKnown(a) ? direction * compare(a, b) : 0) || a - b,
    );
  }

  /** A table whose headings are buttons. looks: of rows, by their names. sortedBy(rows, heading) is called after. */
  function table(columns, label, { looks = new Map(), sortedBy = () => {} } = {}) {
    let now = [null, 1]; // the column sorted by, and the direction

    function turn(column) {
      const first = column.order ? -1 : 1; // numbers fall first, words rise
      now = [column, now[0] === column ? -now[1] : first];
      const rows = sorted(...now);
      body.append(...rows.map((row) => lines[row]));
      const sign = now[1] < 0 ? "descending" : "ascending";
      heads.forEach((head, at) => head.setAttribute("aria-sort", columns[at] === column ? sign : "none"));
      sortedBy(rows, `${column.heading} ${now[1] > 0 ? "rising" : "falling"}`);
    }
    const heads = columns.map((column) => {
      const attributes = { type: "button", title: column.about || null, onclick: () => turn(column) };
      const look = column.order ? null : "words";
      return make("th", { scope: "col", class: look }, make("button", attributes, column.heading));
    });
    const lines = columns[0].cells.map((name, row) => {
      const cells = columns.map((column, at) => {
        const look = `${column.order ? "" : "words"}${column.bold?.includes(row) ? " best" : ""}`;
        const icon = at === 0 && looks.has(name) ? sample(looks.get(name)) : "";
        const inside = column.nodes ? column.nodes[row] : column.cells[row];
        return make(at ? "td" : "th", { class: look || null, scope: at ? null : "row" }, icon, inside);
      });
      return make("tr", {}, ...cells);
    });
    const body = make("tbody", {}, ...lines);
    const node = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body);
    return make("div", { class: "wide", role: "region", tabindex: "0", "aria-label": label }, node);
  }

  // figures: drawn to the width at hand, with a note on what is under the pointer ----------------------------------

  const MARGIN = { left: 44, right: 16, top: 26, bottom: 42 };
  const BANDS = 6; // lines whose bands can be told apart; of more, only the one under the pointer shows it

  /**
   * A figure whose points can be walked over. describe(left, right) gives what is drawn now: the scale of its x axis,
   * labels, and lines with the points [x, value] in pixels and values, and what is said of each.
   */
  function plot(label, describe) {
    const holder = make("div");
    const tip = make("div", { class: "tip", role: "status", hidden: "" });
    const box = make("figure", {}, holder, tip);

    function paint() {
      const width = Math.max(260, box.clientWidth || 640);
      const height = Math.round(Math.min(430, Math.max(250, 0.48 * width)));
      const [left, right, bottom] = [MARGIN.left, width - MARGIN.right, height - MARGIN.bottom];
      const size = { viewBox: `0 0 ${width} ${height}`, width, height };
      const svg = draw("svg", { ...size, tabindex: "0", role: "group", "aria-label": label });
      holder.replaceChildren(svg);
      tip.hidden = true;
      const { x, lines, yLabel, factor } = describe(left, right);
      svg.append(draw("text", { x: 4, y: 13, "data-label": "y" }, yLabel));
      if (!lines.length) {
        svg.append(draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no method is switched on"));
        return;
      }
      const y = yScale(lines, bottom, factor);
      axes(svg, x, y, right, bottom);
      svg.classList.toggle("crowded", lines.length > BANDS);
      const groups = new Map(lines.map((line) => [line, drawLine(line, y.at)]));
      const ring = draw("circle", { class: "focus", r: 7, cx: -20, cy: -20 });
      svg.append(...groups.values(), ring);
      const points = lines.flatMap((line) =>
        line.points.map(([at, value], index) => ({ x: at, y: y.at(value), line, index })),
      );
      explore(svg, points, (point) => {
        for (const [line, group] of groups) {
          group.classList.toggle("faint", Boolean(point) && line !== point.line);
          group.classList.toggle("lit", line === point?.line);
        }
        ring.setAttribute("cx", point ? point.x : -20);
        ring.setAttribute("cy", point ? point.y : -20);
        say(point, width);
      });
    }

    function say(point, width) {
      tip.hidden = !point;
      if (!point) return;
      const [first, ...others] = point.line.about(point.index);
      tip.replaceChildren(make("b", {}, first), ...others.map((line) => make("div", {}, line)));
      tip.style.left = `${Math.min(Math.max(0, point.x + 14), Math.max(0, width - tip.offsetWidth))}px`;
      tip.style.top = `${point.y > tip.offsetHeight + 18 ? point.y - tip.offsetHeight - 12 : point.y + 16}px`;
    }
    redraws.push(paint);
    return { box, paint };
  }

  function yScale(lines, bottom, factor) {
    const values = lines.flatMap((line) => [...(line.low ?? []), ...(line.high ?? []), ...line.points.map((p) => p[1])]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const pad = Math.max(0.04 * (high - low), factor > 1 ? 0.004 : 0.004 * Math.abs(high));
    const from = low < 0 ? low - pad : Math.max(0, low - pad);
    const to = factor > 1 ? Math.min(1, high + pad) : high + pad;
    return {
      at: (value) => bottom - ((value - from) / (to - from || 1)) * (bottom - MARGIN.top),
      ticks: ticks(factor * from, factor * to, 7).map((value) => [value / factor, plain(value)]),
    };
  }

  function axes(svg, x, y, right, bottom) {
    for (const [value, text] of y.ticks) {
      svg.append(
        draw("path", { class: "grid", d: `M${MARGIN.left},${y.at(value)}H${right}` }),
        draw("text", { x: MARGIN.left - 7, y: y.at(value) + 4, "text-anchor": "end", class: "soft" }, text),
      );
    }
    for (const [value, text] of x.ticks) {
      svg.append(
        draw("path", { class: "axis", d: `M${x.at(value)},${bottom}v4` }),
        draw("text", { x: x.at(value), y: bottom + 17, "text-anchor": "middle", class: "soft" }, text),
      );
    }
    const label = { x: (MARGIN.left + right) / 2, y: bottom + 36, "text-anchor": "middle", "data-label": "x" };
    svg.append(
      draw("path", { class: "axis", d: `M${MARGIN.left},${MARGIN.top}V${bottom}H${right}` }),
      draw("text", label, x.label),
    );
  }

  /** A band, a line through the points where one is wanted, and markers. */
  function drawLine(line, up) {
    const group = draw("g", { class: line.look.color, "data-name": line.name });
    const xs = line.points.map(([x]) => x);
    const path = (values, places) =>
      places.map((x, index) => `${x.toFixed(1)},${up(values[index]).toFixed(1)}`).join("L");
    if (line.low) {
      const back = path([...line.low].reverse(), [...xs].reverse());
      group.append(draw("path", { class: "band", d: `M${path(line.high, xs)}L${back}z` }));
    }
    if (line.connected) {
      const d = `M${path(line.points.map(([, value]) => value), xs)}`;
      group.append(draw("path", { class: "line", d, "stroke-dasharray": line.look.dash || null }));
    }
    const every = line.connected ? Math.ceil(xs.length / 12) : 1;
    line.points.forEach(([x, value], index) => {
      if (index % every === 0 || index === xs.length - 1) group.append(mark(line.look, x, up(value)));
    });
    return group;
  }

  /** Lets pointer and arrow keys go over points; up and down change the line. show(point) or show(null). */
  function explore(svg, points, show) {
    let now = null;
    const go = (point) => {
      now = point;
      show(point);
    };
    const nearest = (among, far) => among.reduce((best, point) => (far(point) < far(best) ? point : best), among[0]);
    const under = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
      go(nearest(points, (point) => (point.x - x) ** 2 + (point.y - y) ** 2));
    };
    svg.addEventListener("pointermove", under);
    svg.addEventListener("pointerdown", under);
    svg.addEventListener("pointerleave", () => go(null));
    svg.addEventListener("blur", () => go(null));
    svg.addEventListener("keydown", (event) => {
      const [along, across] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[
        event.key
      ] ?? [0, 0];
      if (event.key === "Escape") go(null);
      if ((!along && !across) || !points.length) return;
      event.preventDefault();
      if (!now) go(points[0]);
      else if (along) go(points.find(({ line, index }) => line === now.line && index === now.index + along) ?? now);
      else {
        const lines = [...new Set(points.map(({ line }) => line))];
        const line = lines[(lines.indexOf(now.line) + across + lines.length) % lines.length];
        go(nearest(points.filter((point) => point.line === line), (point) => Math.abs(point.x - now.x)));
      }
    });
  }

  // curves -------------------------------------------------------------------------------------------------------

  function curves(section) {
    const { lines, metrics, titles, factors, note } = section.curves;
    const looks = looksOf(section);
    const shown = new Set(Object.keys(lines));
    const known = Object.entries(data.axes).filter(([axis]) => Object.values(lines).some((line) => line.axes[axis]));
    let [metric, axis] = [metrics[0], "round"];

    function xScale(places, left, right) {
      const high = Math.max(...places, 0);
      const low = axis === "round" ? Math.min(...places) : 0;
      const [size, unit] = SCALES[axis].find((scale) => high >= 2 * scale[0]) || SCALES[axis].at(-1);
      return {
        at: (value) => left + ((value - low) / (high - low || 1)) * (right - left),
        ticks: ticks(low / size, high / size, Math.max(2, (right - left) / 80), axis === "round").map((value) => [
          value * size,
          plain(value),
        ]),
        label: data.axes[axis] + (unit ? ` [${unit}]` : ""),
      };
    }

    function describe(left, right) {
      const drawn = [...shown].filter((name) => lines[name].metrics[metric] && lines[name].axes[axis]);
      const x = xScale(drawn.flatMap((name) => lines[name].axes[axis]), left, right);
      const factor = factors[metric];
      const found = drawn.map((name) => {
        const { seeds, axes: places, metrics: values } = lines[name];
        const { mean, low, high } = values[metric];
        const last = mean.length - 1;
        const silent = axis !== "round" && !(places[axis][last] > 0); // sends nothing: its last round, drawn across
        const at = silent ? [last, last] : [...mean.keys()];
        const across = silent ? [left, right] : at.map((index) => x.at(places[axis][index]));
        const spread = (index) =>
          seeds > 1 ? `${figure(low[index], factor)} to ${figure(high[index], factor)} over ${seeds} seeds` : "one seed";
        const place = (index) => {
          if (axis === "round") return "";
          return silent ? ", sends nothing" : `, ${human(places[axis][index], axis)}`;
        };
        return {
          name,
          look: looks.get(name),
          connected: true,
          points: at.map((index, position) => [across[position], mean[index]]),
          low: seeds > 1 ? at.map((index) => low[index]) : null,
          high: at.map((index) => high[index]),
          about: (position) => {
            const index = at[position];
            const where = `round ${plain(places.round[index])}${place(index)}`;
            return [name, where, figure(mean[index], factor), spread(index)];
          },
        };
      });
      return { x, lines: found, yLabel: `test ${titles[metric]}${factor > 1 ? " [%]" : ""}`, factor };
    }

    const { box, paint } = plot("Curves; arrow keys go from point to point", describe);
    const chooseMetric = (value) => {
      metric = value;
      paint();
    };
    const chooseAxis = (value) => {
      axis = value;
      paint();
    };
    const controls = make(
      "div",
      { class: "controls" },
      choice("Figure", metrics.map((name) => [name, titles[name]]), chooseMetric),
      choice("Axis", known, chooseAxis),
    );
    const several = Object.values(lines).some((line) => line.seeds > 1);
    const which = shown.size > BANDS ? ` (of the line under the pointer, while more than ${BANDS} are on)` : "";
    const legendOf = several ? `Line: mean over seeds; band: lowest to highest seed${which}. ` : "";
    return [
      title("Curves"),
      make("div", { class: "chart" }, controls, legend(looks, shown, paint), box),
      paragraph(legendOf + note, "soft"),
    ];
  }

  // clients ------------------------------------------------------------------------------------------------------

  function clients(section) {
    const { seeds, factor, axis, class_names: names } = section.clients;
    const looks = looksOf(section);
    const shown = new Set(section.rows.map((row) => row.name).filter((name) => seeds.some((one) => one.accuracy[name])));
    let [now, order, sorting] = [seeds[0], [], "client rising"];

    function describe(left, right) {
      const step = (right - left) / order.length;
      const at = (place) => left + (place + 0.5) * step;
      const every = Math.ceil(26 / step);
      const drawn = [...shown].filter((name) => now.accuracy[name]);
      const lines = drawn.map((name, number) => {
        const aside = (number - (drawn.length - 1) / 2) * Math.min(7, step / (drawn.length + 1));
        const known = order.map((client, place) => [client, place]);
        const scored = known.filter(([client]) => typeof now.accuracy[name][client] === "number");
        return {
          name,
          look: looks.get(name),
          points: scored.map(([client, place]) => [at(place) + aside, now.accuracy[name][client]]),
          about: (index) => {
            const client = scored[index][0];
            const called = now.columns.find((column) => column.heading === "name")?.cells[client];
            const of = called ? ` (${called})` : "";
            return [name, `client ${client}${of}: ${figure(now.accuracy[name][client], factor)}`];
          },
        };
      });
      const ticksAt = order.map((client, place) => [place, String(client)]).filter(([place]) => place % every === 0);
      const x = { at, ticks: ticksAt, label: `client, in the order of the table: ${sorting}` };
      return { x, lines: lines.filter((line) => line.points.length), yLabel: axis, factor };
    }

    const { box, paint } = plot("Accuracy of every client; arrow keys go from point to point", describe);
    const holder = make("div");

    function choose(seed) {
      now = seed;
      order = [...seed.columns[0].cells.keys()];
      const held = seed.labels.some(Boolean) ? [heldClasses(seed.labels)] : [];
      const sortedBy = (rows, heading) => {
        order = rows;
        sorting = heading;
        paint();
      };
      holder.replaceChildren(table([...seed.columns, ...held], section.clients.title, { sortedBy }));
      paint();
    }

    const nameOf = (label) => names[label] ?? String(label);
    const ofClass = (held) => Object.entries(held ?? {}).filter(([label, count]) => label >= 0 && count > 0);
    const labels = seeds.flatMap((seed) => seed.labels.flatMap(ofClass)).map(([label]) => Number(label));
    const classes = labels.reduce((most, label) => Math.max(most, label + 1), names.length);

    /** A column with a strip for each client: a cell for each class, the darker the more of its samples are of it. */
    function heldClasses(labels) {
      const held = labels.map(ofClass);
      return {
        heading: "classes",
        about:
          "Which classes a client holds: a cell for each, the first at the left, the darker the more of its training " +
          "samples are of it. Sorts by how many classes it has.",
        cells: labels.map(() => ""),
        order: held.map((one) => one.length || null),
        nodes: held.map((one) => (one.length ? strip(one) : "")),
      };
    }

    function strip(held) {
      const wide = Math.min(9, 180 / classes);
      const most = Math.max(...held.map(([, count]) => count));
      const text = held.map(([label, count]) => `${nameOf(label)}: ${count}`).join(", ");
      const size = { width: wide * classes + 2, height: 16 };
      const cells = held.map(([label, count]) =>
        draw("rect", {
          class: "held",
          x: 1 + label * wide,
          y: 1,
          width: Math.max(1, wide),
          height: 14,
          "fill-opacity": count / most,
        }),
      );
      const border = draw("rect", { class: "unknown", x: 0.5, y: 0.5, width: size.width - 1, height: 15 });
      const about = draw("title", {}, text);
      return draw("svg", { class: "strip", ...size, role: "img", "aria-label": text }, about, border, ...cells);
    }

    choose(now);
    const pick = choice("Seed", seeds.map((seed, at) => [at, seed.seed]), (value) => choose(seeds[value]));
    const all = [...Array(classes).keys()].map(nameOf).join(", ");
    return [
      title("Clients"),
      paragraph(`${section.clients.about} Sort the table to order the figure.`, "soft"),
      seeds.length > 1 ? make("div", { class: "controls" }, pick) : "",
      make("div", { class: "chart" }, legend(looks, shown, paint), box),
      folded(`${section.clients.title}, and what each holds`, order.length <= 30, holder),
      classes ? folded(`The ${classes} classes, from left to right`, classes <= 30, paragraph(all, "soft")) : "",
    ];
  }

  // heat maps: tables whose cells are shaded -----------------------------------------------------------------------

  function heatMaps(section) {
    const { maps, note } = section.heat_maps;
    const holder = make("div");

    function show(map) {
      const span = map.high - map.low || 1;
      const fine = map.columns.length > 30 ? " fine" : ""; // no room for numbers
      const cell = (value, row, column) => {
        const share = value === null ? 0 : (value - map.low) / span;
        const where = `${map.row_axis} ${map.rows[row]}, ${map.column_axis} ${map.columns[column]}`;
        const text = value === null ? "" : plain(value);
        const node = make("td", { class: share > 0.5 ? "over" : null, title: `${text || "not known"}: ${where}` }, text);
        if (value !== null) node.style.setProperty("--shade", `${4 + 96 * share}%`);
        return node;
      };
      const heads = map.columns.map((name) => make("th", { scope: "col" }, name));
      const rows = map.values.map((values, row) =>
        make("tr", {}, make("th", { scope: "row" }, map.rows[row]), ...values.map((v, column) => cell(v, row, column))),
      );
      const corner = make("td", {}, `${map.row_axis} / ${map.column_axis}`);
      const head = make("thead", {}, make("tr", {}, corner, ...heads));
      holder.replaceChildren(
        paragraph(map.about, "soft") || "",
        make("div", { class: `wide heat${fine}`, tabindex: "0" }, make("table", {}, head, make("tbody", {}, ...rows))),
      );
    }
    show(maps[0]);
    const pick = choice("Map", maps.map((map, at) => [at, map.title]), (value) => show(maps[value]));
    return [title("Heat maps"), make("div", { class: "controls" }, pick), holder, paragraph(note, "soft")];
  }

  // what did not count, and how to make it again --------------------------------------------------------------------

  function lost(section) {
    const { columns, reasons } = section.lost;
    const none = paragraph("No upload was refused or late, and nobody dropped out.");
    return [title("What did not count"), columns.length ? table(columns, "What did not count") : none, list(reasons)];
  }

  function again(section) {
    const recipes = section.recipes.map(({ name, text }) =>
      folded(`Recipe of ${name}`, false, text ? make("pre", {}, text) : paragraph("Its run folder holds no recipe.")),
    );
    const commands = section.commands.join("\n");
    const versions = section.versions.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
    return [
      title("Recipe, versions, commands"),
      ...(commands ? [paragraph("These runs were made by"), make("pre", {}, commands)] : []),
      ...recipes,
      versions.length ? make("dl", {}, ...versions) : "",
    ];
  }

  // the page -----------------------------------------------------------------------------------------------------

  function tables(section) {
    return [
      ...section.tables.flatMap((sheet, at) => [
        sheet.title ? title(sheet.title) : "",
        table(sheet.columns, sheet.title || "Comparison", at ? {} : { looks: looksOf(section) }),
      ]),
      list(section.notes),
      folded("What stages and columns mean", false, list(section.meanings)),
    ];
  }

  const main = document.querySelector("main");
  const nav = document.querySelector("nav");
  main.replaceChildren(...[list(data.notes)].filter(Boolean));
  for (const sheet of data.overview)
    main.append(make("section", {}, title(sheet.title), table(sheet.columns, sheet.title)));
  data.sections.forEach((section, number) => {
    const article = make("article", { id: `part-${number}` });
    main.append(article);
    if (data.sections.length > 1) {
      article.append(make("h2", {}, section.title));
      nav.append(make("a", { href: `#part-${number}` }, section.title));
    }
    article.append(paragraph(section.finding, "finding"), paragraph(section.caption, section.scaled ? "scaled" : ""));
    const parts = [
      ["Table", tables, true],
      ["Curves", curves, section.curves.metrics.length],
      ["Clients", clients, section.clients.seeds.length],
      ["Heat maps", heatMaps, section.heat_maps.maps.length],
      ["What did not count", lost, true],
      ["Recipe", again, true],
    ];
    parts
      .filter(([, , there]) => there)
      .forEach(([name, build], at) => {
        const id = `part-${number}-${at}`;
        article.append(make("section", { id }, ...build(section)));
        if (data.sections.length === 1) nav.append(make("a", { href: `#${id}` }, name));
      });
  });
  document.querySelector("footer").textContent =
    `Made by polyfed ${data.polyfed} from run folders. This page holds all of its data and loads nothing.`;

  const redraw = () => redraws.forEach((paint) => paint());
  redraw();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) redraw();
    width = innerWidth;
  });
})();
