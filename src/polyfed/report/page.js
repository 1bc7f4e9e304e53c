"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const redraws = [];
  let forcedWidth = 0; // of figures on paper
  let ids = 0;

  // elements: text is always text, never markup ------------------------------------------------------------------

  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
      else if (value !== null && value !== undefined && value !== false)
        node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== ""));
    return node;
  }
  const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  const LONG = 70; // characters of a name; a longer one is cut where it stands beside others, and told in full there
  const brief = (name) => (name.length > LONG ? `${name.slice(0, LONG - 1)}\u2026` : name);
  const inFull = (name) => (name.length > LONG ? name : null);
  const LETTER = 6.5; // pixels, about
  const fitted = (name, room) => {
    const most = Math.max(1, Math.floor(room / LETTER));
    return name.length > most ? `${name.slice(0, most - 1)}\u2026` : name;
  };
  const newId = () => `n${(ids += 1)}`;

  function choice(label, options, chosen, listener) {
    const select = make("select", { on: { change: () => listener(select.value) } });
    for (const [value, text] of options) select.append(make("option", { value }, text));
    select.value = chosen;
    return make("label", {}, label, select);
  }
  const paragraph = (text, look = "") => (text ? make("p", { class: look }, text) : "");
  const list = (notes) =>
    notes.length ? make("ul", { class: "notes" }, ...notes.map((note) => make("li", {}, note))) : "";

  // numbers ------------------------------------------------------------------------------------------------------

  const SIZES = [
    [2 ** 40, "TiB"],
    [2 ** 30, "GiB"],
    [2 ** 20, "MiB"],
    [2 ** 10, "KiB"],
    [1, "B"],
  ];
  const TIMES = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ];
  // a share in percent, any other figure with four digits; factor: 100 for a share
  const figure = (value, factor) => (factor > 1 ? `${(factor * value).toFixed(2)} %` : plain(Number(value.toPrecision(4))));
  const plain = (value) => String(Number(value.toPrecision(6)));

  function human(value, scales) {
    const [size, unit] = scales.find((scale) => value >= scale[0]) || scales[scales.length - 1];
    const number = value / size;
    return `${Number.isInteger(number) || number >= 1000 ? Math.round(number) : number.toFixed(1)} ${unit}`;
  }
  const AXES = {
    round: { scales: [[1, ""]], show: (value) => `round ${plain(value)}` },
    bytes: { scales: SIZES, show: (value) => human(value, SIZES) },
    seconds: { scales: TIMES, show: (value) => human(value, TIMES) },
    simulated: { scales: TIMES, show: (value) => human(value, TIMES) },
  };

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
    draw("path", {
      class: `mark${look.open}`,
      d: look.mark,
      transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`,
    });

  function sample(look, line = true) {
    const width = line ? 34 : 14;
    const stroke = line
      ? draw("path", { class: "line", d: `M0,7H${width}`, "stroke-dasharray": look.dash || null })
      : "";
    return draw(
      "svg",
      { class: look.color, width, height: 14, "aria-hidden": "true" },
      stroke,
      mark(look, width / 2, 7),
    );
  }

  function legend(section, shown, known, changed, line) {
    const looks = looksOf(section);
    const buttons = section.rows
      .filter((row) => known.has(row.name))
      .map((row) => {
        const button = make(
          "button",
          {
            type: "button",
            "aria-pressed": String(shown.has(row.name)),
            "data-name": row.name,
            title: inFull(row.name),
            on: {
              click: () => {
                if (!shown.delete(row.name)) shown.add(row.name);
                button.setAttribute("aria-pressed", String(shown.has(row.name)));
                changed();
              },
            },
          },
          sample(looks.get(row.name), line),
          brief(row.name),
        );
        return button;
      });
    return make("div", { class: "legend", role: "group", "aria-label": "Methods: shown or hidden" }, ...buttons);
  }

  // tables -------------------------------------------------------------------------------------------------------

  function sorted(column, direction, count) {
    const order = column.order || column.cells;
    const isKnown = (row) => order[row] !== null && order[row] !== "";
    const compare = column.order
      ? (a, b) => order[a] - order[b]
      : (a, b) => order[a].localeCompare(order[b], "en", { numeric: true });
    return [...Array(count).keys()].sort(
      (a, b) => isKnown(b) - isKnown(a) || (isKnown(a) ? direction * compare(a, b) : 0) || a - b,
    );
  }

  const WORD = 14; // letters of a heading's last word that stay on one line, with the sign of sorting

  /** The sign of sorting, which the style adds, stays with the last word. */
  function headingOf(text) {
    const last = text.lastIndexOf(" ") + 1;
    const long = text.length - last > WORD ? "broken" : "";
    return [text.slice(0, last), make("span", { class: long }, text.slice(last))];
  }

  const layouts = new WeakMap(); // of tables, by the element that holds one

  /**
   * A table whose headings are buttons; unknown values stay last. What does not fit side by side stands below, in a
   * table of its own with the first column again. sortedBy(rows, column, direction) is told.
   */
  function table(columns, label, options = {}) {
    const count = columns[0].cells.length;
    const every = columns.map((_, at) => at);
    const now = { order: [...Array(count).keys()], at: -1, direction: 1, width: -1 };
    const holder = make("div", { class: "wide", role: "region", tabindex: "0", "aria-label": label });
    let parts = [];

    function head(at) {
      const column = columns[at];
      const node = make("th", { scope: "col", class: column.order ? "" : "words" });
      const turn = () => {
        const falls = column.order ? now.at !== at || now.direction > 0 : now.at === at && now.direction > 0;
        sort(at, falls ? -1 : 1);
      };
      const told = [inFull(column.heading), column.about].filter(Boolean).join(": ");
      const inside = headingOf(brief(column.heading));
      node.append(make("button", { type: "button", title: told || null, on: { click: turn } }, ...inside));
      return node;
    }

    function cell(at, row) {
      const column = columns[at];
      const look = column.order ? "" : "words";
      const long = at === 0 && column.cells[row].length > 28 ? " long" : "";
      const icon = options.icon && at === 0 ? options.icon(column.cells[row]) : "";
      const best = column.bold && column.bold.includes(row) ? " best" : "";
      const isStage = column.heading === "stage" && options.stages;
      const about = isStage && options.stages.find((one) => one.startsWith(`${column.cells[row]}:`));
      return make(
        at ? "td" : "th",
        { class: look + long + best, scope: at ? null : "row", title: about || null },
        icon,
        column.node ? column.node(row) : column.cells[row],
      );
    }

    /** One table of these columns. */
    function part(shown) {
      const rows = [...Array(count).keys()].map((row) => make("tr", {}, ...shown.map((at) => cell(at, row))));
      const heads = shown.map(head);
      const body = make("tbody", {}, ...now.order.map((row) => rows[row]));
      const node = make("table", { "aria-label": label }, make("thead", {}, make("tr", {}, ...heads)), body);
      return { node, shown, heads, rows, body };
    }

    function mark() {
      const sign = now.direction < 0 ? "descending" : "ascending";
      for (const { shown, heads } of parts)
        shown.forEach((at, place) => heads[place].setAttribute("aria-sort", at === now.at ? sign : "none"));
    }

    function sort(at, direction) {
      [now.at, now.direction, now.order] = [at, direction, sorted(columns[at], direction, count)];
      for (const { rows, body } of parts) body.append(...now.order.map((row) => rows[row]));
      mark();
      if (options.sortedBy) options.sortedBy(now.order, at, direction);
    }

    /** The columns that fit beside the first, then the next ones. */
    function cut(width) {
      const whole = part(every);
      const measured = make("div", { class: "measured" }, whole.node);
      holder.append(measured);
      const widths = whole.heads.map((one) => one.getBoundingClientRect().width);
      measured.remove();
      const found = [[0]];
      let used = widths[0];
      for (const at of every.slice(1)) {
        if (used + widths[at] > width && found[found.length - 1].length > 1) {
          found.push([0]);
          used = widths[0];
        }
        found[found.length - 1].push(at);
        used += widths[at];
      }
      return found;
    }

    function show(groups) {
      parts = groups.map(part);
      holder.replaceChildren(...parts.map((one) => one.node));
      mark();
    }

    function layout() {
      const width = forcedWidth || holder.clientWidth;
      if (!width || width === now.width) return;
      now.width = width;
      show(cut(width));
    }
    show([every]);
    layouts.set(holder, layout);
    new ResizeObserver(layout).observe(holder);
    return { node: holder, sort };
  }

  // figures: drawn to the width at hand, with a note on what is under the pointer ----------------------------------

  function canvas(label) {
    const holder = make("div");
    const tip = make("div", { class: "tip", role: "status", hidden: true });
    const figure = make("figure", {}, holder, tip);
    let width = 0;
    function surface(height) {
      width = Math.max(260, forcedWidth || figure.clientWidth || 640);
      const shown = draw("svg", {
        viewBox: `0 0 ${width} ${height(width)}`,
        width,
        height: height(width),
        tabindex: "0",
        role: "group",
        "aria-label": label,
      });
      holder.replaceChildren(shown);
      tip.hidden = true;
      return { svg: shown, width, height: height(width) };
    }
    function say(x, y, lines) {
      tip.replaceChildren(
        make("b", {}, lines[0]),
        ...lines.slice(1).flatMap((line, at) => (at ? [make("br"), line] : [line])),
      );
      tip.hidden = false;
      tip.style.left = `${Math.min(Math.max(0, x + 14), Math.max(0, width - tip.offsetWidth))}px`;
      tip.style.top = `${y > tip.offsetHeight + 18 ? y - tip.offsetHeight - 12 : y + 16}px`;
    }
    return {
      figure,
      surface,
      say,
      hush: () => {
        tip.hidden = true;
      },
    };
  }

  /** Place of the pointer in the figure's own units. */
  function place(svg, event) {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  }

  /** Lets pointer and arrow keys go over points {x, y, row, at}; rows are walked by up and down. */
  function explore(svg, points, show, hide) {
    let now = -1;
    const nearest = (x, y) =>
      points.reduce(
        (best, point, at) => {
          const far = (point.x - x) ** 2 + (point.y - y) ** 2;
          return far < best[0] ? [far, at] : best;
        },
        [Infinity, -1],
      )[1];
    const go = (at) => {
      now = at;
      if (at >= 0) show(points[at]);
      else hide();
    };
    const point = (event) => go(nearest(...place(svg, event)));
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", () => go(-1));
    svg.addEventListener("blur", () => go(-1));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (event.key === "Escape") go(-1);
      if (!step || !points.length) return;
      event.preventDefault();
      if (now < 0) {
        go(0);
        return;
      }
      if (step[1]) {
        const next = now + step[1];
        if (points[next] && points[next].row === points[now].row) go(next);
        return;
      }
      const rows = [...new Set(points.map((one) => one.row))];
      const row = rows[(rows.indexOf(points[now].row) + step[0] + rows.length) % rows.length];
      const same = points.map((one, at) => at).filter((at) => points[at].row === row);
      go(
        same.reduce((best, at) =>
          Math.abs(points[at].x - points[now].x) < Math.abs(points[best].x - points[now].x) ? at : best,
        ),
      );
    });
  }

  function frame(area, margin, x, y, xLabel) {
    const { svg, width, height } = area;
    const right = width - margin.right;
    const bottom = height - margin.bottom;
    for (const [value, text] of y.ticks) {
      svg.append(
        draw("path", { class: "grid", d: `M${margin.left},${y.at(value)}H${right}` }),
        draw("text", { x: margin.left - 7, y: y.at(value) + 4, "text-anchor": "end", class: "soft" }, text),
      );
    }
    for (const [value, text] of x.ticks) {
      svg.append(
        draw("path", { class: "axis", d: `M${x.at(value)},${bottom}v4` }),
        draw("text", { x: x.at(value), y: bottom + 17, "text-anchor": "middle", class: "soft" }, text),
      );
    }
    svg.append(draw("path", { class: "axis", d: `M${margin.left},${margin.top}V${bottom}H${right}` }));
    svg.append(
      draw(
        "text",
        { x: (margin.left + right) / 2, y: height - 6, "text-anchor": "middle", "data-label": "x" },
        xLabel,
      ),
    );
  }

  const height = (width) => Math.round(Math.min(430, Math.max(250, 0.48 * width)));

  function yScale(low, high, top, bottom, factor) {
    const share = factor > 1;
    const pad = Math.max(0.04 * (high - low), share ? 0.004 : 0.004 * Math.abs(high));
    const [from, to] = [low < 0 ? low - pad : Math.max(0, low - pad), share ? Math.min(1, high + pad) : high + pad];
    const found = ticks(factor * from, factor * to, 7);
    return {
      at: (value) => bottom - ((value - from) / (to - from || 1)) * (bottom - top),
      ticks: found.map((value) => [value / factor, plain(value)]),
    };
  }

  // curves -------------------------------------------------------------------------------------------------------

  const BANDS = 6; // lines whose bands can be told apart; of more, only the one under the pointer shows it

  function curves(section) {
    const found = section.curves;
    const looks = looksOf(section);
    const state = { metric: found.metrics[0], axis: "round", log: false };
    const axes = Object.entries(data.axes).filter(([axis]) =>
      Object.values(found.lines).some((line) => line.axes[axis]),
    );
    const shown = new Set(Object.keys(found.lines));
    const area = canvas("Curves; arrow keys go from point to point");

    const shownAs = (value) => figure(value, found.factors[state.metric]);
    const yLabel = () => `test ${found.titles[state.metric]}${found.factors[state.metric] > 1 ? " [%]" : ""}`;

    function lineOf(name) {
      const line = found.lines[name];
      const values = line.metrics[state.metric];
      if (!values || !shown.has(name)) return null;
      const x = values[state.axis] || line.axes[state.axis];
      if (!x) return null; // its devices are not simulated
      return {
        name,
        look: looks.get(name),
        seeds: line.seeds,
        x,
        low: values.mean,
        high: values.mean,
        ...values,
        round: values.round || line.axes.round,
      };
    }

    function xScale(lines, left, right) {
      const axis = AXES[state.axis];
      const largest = Math.max(...lines.flatMap((line) => line.x), 0);
      const positive = lines.flatMap((line) => line.x).filter((value) => value > 0);
      if (state.log && state.axis !== "round" && positive.length) {
        const smallest = Math.min(...positive);
        const [from, to] = [Math.log(smallest), Math.log(largest * 1.0001)];
        const at = (value) =>
          left + ((Math.log(Math.max(value, smallest)) - from) / (to - from || 1)) * (right - left);
        const steps = axis.scales.flatMap(([size]) =>
          (size >= 1024 || state.axis === "bytes" ? [1, 4, 16, 64, 256] : [1, 2, 5, 10, 30]).map(
            (part) => part * size,
          ),
        );
        const inside = [...new Set(steps)]
          .sort((a, b) => a - b)
          .filter((value) => value >= smallest && value <= largest);
        const every = Math.ceil(inside.length / Math.max(2, (right - left) / 75));
        return {
          at,
          ticks: inside.filter((_, index) => index % every === 0).map((value) => [value, axis.show(value)]),
          unit: ", logarithmic",
        };
      }
      const low = state.axis === "round" ? Math.min(...lines.flatMap((line) => line.x), largest) : 0;
      const high = largest > low ? largest : low + 1;
      const [size, unit] =
        axis.scales.find((scale) => largest >= 2 * scale[0]) || axis.scales[axis.scales.length - 1];
      const places = ticks(low / size, high / size, Math.max(2, (right - left) / 80), state.axis === "round");
      return {
        at: (value) => left + ((value - low) / (high - low)) * (right - left),
        ticks: places.map((value) => [value * size, plain(value)]),
        unit: unit ? ` [${unit}]` : "",
      };
    }

    function paint() {
      const surface = area.surface(height);
      const { svg, width } = surface;
      const margin = { left: 44, right: 16, top: 26, bottom: 42 };
      const lines = Object.keys(found.lines).map(lineOf).filter(Boolean);
      svg.append(draw("text", { x: 4, y: 13, "data-label": "y" }, yLabel()));
      if (!lines.length) {
        svg.append(
          draw(
            "text",
            { x: width / 2, y: surface.height / 2, "text-anchor": "middle", class: "soft" },
            "no method is switched on",
          ),
        );
        return;
      }
      const [left, right, bottom] = [margin.left, width - margin.right, surface.height - margin.bottom];
      const x = xScale(lines, left, right);
      const y = yScale(
        Math.min(...lines.flatMap((line) => line.low)),
        Math.max(...lines.flatMap((line) => line.high)),
        margin.top,
        bottom,
        found.factors[state.metric],
      );
      frame(surface, margin, x, y, data.axes[state.axis] + x.unit);
      const points = [];
      const groups = new Map();
      for (const line of lines) {
        const silent = state.axis !== "round" && !(line.x[line.x.length - 1] > 0); // its last round, drawn across
        const at = silent ? [line.mean.length - 1] : line.mean.map((_, index) => index);
        const xs = silent ? [left, right] : at.map((index) => x.at(line.x[index]));
        const ys = (values) => (silent ? [at[0], at[0]] : at).map((index) => y.at(values[index]));
        const path = (across, up) =>
          across.map((value, index) => `${value.toFixed(1)},${up[index].toFixed(1)}`).join("L");
        const group = draw("g", { class: line.look.color, "data-name": line.name });
        if (line.seeds > 1)
          group.append(
            draw("path", {
              class: "band",
              d: `M${path(xs, ys(line.high))}L${path([...xs].reverse(), ys(line.low).reverse())}z`,
            }),
          );
        group.append(
          draw("path", {
            class: "line",
            d: `M${path(xs, ys(line.mean))}`,
            "stroke-dasharray": line.look.dash || null,
          }),
        );
        const every = Math.ceil(xs.length / 12);
        xs.forEach((value, index) => {
          if (index % every === 0 || index === xs.length - 1)
            group.append(mark(line.look, value, ys(line.mean)[index]));
          points.push({
            x: value,
            y: ys(line.mean)[index],
            row: line.name,
            line,
            at: at[Math.min(index, at.length - 1)],
            silent,
          });
        });
        groups.set(line.name, group);
        svg.append(group);
      }
      svg.classList.toggle("crowded", lines.length > BANDS);
      const ring = draw("circle", { class: "focus", r: 7, cx: -20, cy: -20 });
      svg.append(ring);
      explore(
        svg,
        points,
        (point) => {
          for (const [name, group] of groups) {
            group.classList.toggle("faint", name !== point.row);
            group.classList.toggle("lit", name === point.row);
          }
          ring.setAttribute("cx", point.x);
          ring.setAttribute("cy", point.y);
          const { line, at } = point;
          const spread =
            line.seeds > 1
              ? `${shownAs(line.low[at])} to ${shownAs(line.high[at])} over ${line.seeds} seeds`
              : "one seed";
          const where =
            state.axis === "round" ? "" : point.silent ? ", sends nothing" : `, ${AXES[state.axis].show(line.x[at])}`;
          area.say(point.x, point.y, [
            line.name,
            `round ${plain(line.round[at])}${where}`,
            shownAs(line.mean[at]),
            spread,
          ]);
        },
        () => {
          for (const group of groups.values()) group.classList.remove("faint", "lit");
          ring.setAttribute("cx", -20);
          area.hush();
        },
      );
    }

    const log = make(
      "label",
      { hidden: true },
      make("input", {
        type: "checkbox",
        on: {
          change: (event) => {
            state.log = event.target.checked;
            paint();
          },
        },
      }),
      "logarithmic",
    );
    const controls = make(
      "div",
      { class: "controls" },
      choice(
        "Figure",
        found.metrics.map((metric) => [metric, found.titles[metric]]),
        state.metric,
        (value) => {
          state.metric = value;
          paint();
        },
      ),
      choice("Axis", axes, state.axis, (value) => {
        state.axis = value;
        log.hidden = value === "round";
        paint();
      }),
      log,
    );
    redraws.push(paint);
    const several = Object.values(found.lines).some((line) => line.seeds > 1);
    const which = shown.size > BANDS ? ` (of the line under the pointer, while more than ${BANDS} are on)` : "";
    return [
      make("h3", {}, "Curves"),
      make("div", { class: "chart" }, controls, legend(section, shown, new Set(shown), paint, true), area.figure),
      paragraph(
        `${several ? `Line: mean over seeds; band: lowest to highest seed${which}. ` : ""}${found.note}`,
        "soft",
      ),
    ];
  }

  // clients ------------------------------------------------------------------------------------------------------

  function clients(section) {
    const looks = looksOf(section);
    const shown = new Set(section.rows.map((row) => row.name));
    const area = canvas(`${section.score.every_client}; arrow keys go from point to point`);
    const holder = make("div");
    const beside = make("div");
    let order = [];
    let now = section.clients.seeds[0];
    let sort = [0, 1];

    const names = section.clients.class_names;
    const cellOf = (value) =>
      section.score.factor > 1 ? (section.score.factor * value).toFixed(2) : plain(Number(value.toPrecision(4)));
    const nameOf = (label) => names[label] ?? String(label);
    const heldBy = (held) =>
      Object.entries(held ?? {})
        .map(([label, count]) => [Number(label), count])
        .filter(([label, count]) => Number.isInteger(label) && label >= 0 && count > 0);
    const everyLabel = section.clients.seeds.flatMap((seed) => seed.labels.flatMap(heldBy)).map(([label]) => label);
    const classes = everyLabel.reduce((most, label) => Math.max(most, label + 1), names.length);

    const words = (values) => values.map((value) => (value === null ? "" : String(value)));
    const isNumber = (values) => values.every((value) => value === null || typeof value === "number");
    const called = (client) => (now.names[client] ? ` (${brief(now.names[client])})` : "");
    function columnsOf(seed) {
      const count = seed.architecture.length;
      const numbers = [...Array(count).keys()];
      const about = [
        ["name", "What the client is called.", seed.names],
        ["architecture", "The client's network.", seed.architecture],
        ["samples", "That the client trains on.", seed.samples],
        ["test samples", "That the client is tested on.", seed.test_samples],
      ].filter(([, , values]) => values.some((value) => value !== null));
      return [
        { heading: "client", cells: words(numbers), order: numbers },
        ...about.map(([heading, told, values]) => ({
          heading,
          about: told,
          cells: words(values),
          order: isNumber(values) ? values : null,
        })),
        ...(seed.labels.some(Boolean) ? [heldClasses(seed.labels)] : []),
        ...Object.entries(seed.accuracy).map(([name, values]) => ({
          heading: name,
          cells: numbers.map((at) => (typeof values[at] === "number" ? cellOf(values[at]) : "")),
          order: numbers.map((at) => (typeof values[at] === "number" ? values[at] : null)),
        })),
      ];
    }

    /** A column with a strip for each client: a cell for each class, the darker the more of its samples are of it. */
    function heldClasses(labels) {
      const held = labels.map(heldBy);
      return {
        heading: "classes",
        about:
          "Which classes a client holds: a cell for each, the first at the left, the darker the more of its training " +
          "samples are of it. Sorts by how many classes it has.",
        cells: labels.map(() => ""),
        order: held.map((one) => one.length || null),
        node: (row) => (held[row].length ? strip(held[row]) : ""),
      };
    }

    const SHADES = 5; // of a strip; one path each, however many classes there are

    function strip(held) {
      const wide = Math.min(9, 180 / classes);
      const thick = Math.max(1, wide).toFixed(2);
      const most = Math.max(...held.map(([, count]) => count));
      const text = held.map(([label, count]) => `${nameOf(label)}: ${count}`).join(", ");
      const shown = draw(
        "svg",
        { class: "strip", width: wide * classes + 2, height: 16, role: "img", "aria-label": text },
        draw("title", {}, text),
        draw("rect", { class: "unknown", x: 0.5, y: 0.5, width: wide * classes + 1, height: 15 }),
      );
      for (let shade = 1; shade <= SHADES; shade += 1) {
        const cells = held.filter(([, count]) => Math.ceil((SHADES * count) / most) === shade);
        const path = cells.map(([label]) => `M${(1 + label * wide).toFixed(2)},1h${thick}v14h-${thick}z`).join("");
        if (path) shown.append(draw("path", { class: "held", d: path, "fill-opacity": shade / SHADES }));
      }
      return shown;
    }

    /** Which networks there are, how large, and whose. */
    function networksOf(seed) {
      const found = new Map();
      seed.architecture.forEach((name, client) => {
        if (name !== null) found.set(name, [...(found.get(name) ?? []), client]);
      });
      const rows = [...found].map(([name, clients]) => ({ name, clients, size: seed.parameters[clients[0]] }));
      if (!rows.length) return "";
      const sizes = rows.map((row) => row.size);
      const counts = rows.map((row) => row.clients.length);
      const column = (heading, told, cells, order) => ({ heading, about: told, cells, order });
      const columns = [
        column("network", "As it is called in the recipe.", rows.map((row) => row.name), null),
        column(
          "parameters",
          "Numbers in it that are trained.",
          sizes.map((size) => (typeof size === "number" ? size.toLocaleString("en") : (size ?? ""))),
          sizes.map((size) => (typeof size === "number" ? size : null)),
        ),
        column("clients", "How many have it.", words(counts), counts),
        column("which", "Their numbers.", rows.map((row) => numbered(row.clients)), null),
      ];
      const known = columns.filter(({ cells }) => cells.some(Boolean));
      return make("div", {}, make("h4", {}, "Networks"), table(known, "Networks").node);
    }

    const LISTED = 40; // numbers of clients in a cell

    function numbered(clients) {
      const more = clients.length - LISTED;
      return clients.slice(0, LISTED).join(", ") + (more > 0 ? ` and ${more} more` : "");
    }

    function classNames(seed) {
      if (!seed.labels.some(Boolean)) return "";
      const all = [...Array(classes).keys()].map(nameOf).join(", ");
      return make(
        "details",
        { open: classes <= 30 },
        make("summary", {}, `The ${classes} classes, from left to right`),
        paragraph(all, "soft"),
      );
    }

    /** Clients of one architecture stand side by side: its name over them, a line between. */
    function networks(svg, at, step, bottom) {
      const name = (index) => now.architecture[order[index]];
      const starts = order.map((_, index) => index).filter((index) => index === 0 || name(index) !== name(index - 1));
      starts.forEach((start, which) => {
        const room = at((starts[which + 1] ?? order.length) - 1) - at(start) + step;
        if (start) svg.append(draw("path", { class: "axis", d: `M${at(start) - step / 2},24V${bottom}` }));
        if (name(start))
          svg.append(
            draw(
              "text",
              { class: "soft", x: at(start) - step / 2 + 4, y: 34 },
              fitted(name(start), room - 6),
            ),
          );
      });
    }

    function paint() {
      const surface = area.surface(height);
      const heading = columnsOf(now)[sort[0]].heading;
      const margin = { left: 44, right: 16, top: heading === "architecture" ? 42 : 26, bottom: 42 };
      const { svg, width } = surface;
      const names = Object.keys(now.accuracy).filter((name) => shown.has(name));
      const values = names.flatMap((name) => now.accuracy[name]).filter((value) => value !== null);
      svg.append(draw("text", { x: 4, y: 13 }, section.score.axis));
      if (!values.length) return;
      const bottom = surface.height - margin.bottom;
      const step = (width - margin.left - margin.right) / order.length;
      const at = (index) => margin.left + (index + 0.5) * step;
      const every = Math.ceil(26 / step);
      const y = yScale(Math.min(...values), Math.max(...values), margin.top, bottom, section.score.factor);
      order.forEach((client, index) => {
        if (index % 2 && step > 8)
          svg.append(
            draw("rect", {
              class: "stripe",
              x: at(index) - step / 2,
              y: margin.top,
              width: step,
              height: bottom - margin.top,
            }),
          );
      });
      if (heading === "architecture") networks(svg, at, step, bottom);
      frame(
        surface,
        margin,
        {
          at,
          ticks: order.map((client, index) => [index, String(client)]).filter((_, index) => index % every === 0),
        },
        y,
        `client, in the order of the table: ${heading} ${sort[1] > 0 ? "rising" : "falling"}`,
      );
      const points = [];
      for (const name of names) {
        const look = looks.get(name);
        const group = draw("g", { class: look.color, "data-name": name });
        order.forEach((client, index) => {
          const value = now.accuracy[name][client];
          if (value === null || value === undefined) return;
          const x =
            at(index) + (names.indexOf(name) - (names.length - 1) / 2) * Math.min(7, step / (names.length + 1));
          group.append(mark(look, x, y.at(value)));
          points.push({ x, y: y.at(value), row: name, client, value });
        });
        svg.append(group);
      }
      const ring = draw("circle", { class: "focus", r: 7, cx: -20, cy: -20 });
      svg.append(ring);
      explore(
        svg,
        points,
        (point) => {
          ring.setAttribute("cx", point.x);
          ring.setAttribute("cy", point.y);
          const [network, samples] = [now.architecture[point.client], now.samples[point.client]];
          area.say(
            point.x,
            point.y,
            [
              point.row,
              `client ${point.client}${called(point.client)}: ${figure(point.value, section.score.factor)}`,
              [network, samples === null ? "" : `${samples} training samples`].filter(Boolean).join(", "),
            ].filter(Boolean),
          );
        },
        () => {
          ring.setAttribute("cx", -20);
          area.hush();
        },
      );
    }

    function choose(seed) {
      now = seed;
      const made = table(columnsOf(seed), section.score.per_client, {
        sortedBy: (found, at, direction) => {
          order = found;
          sort = [at, direction];
          paint();
        },
      });
      holder.replaceChildren(made.node);
      beside.replaceChildren(...[networksOf(seed), classNames(seed)].filter(Boolean));
      made.sort(...sort);
    }
    const seeds = section.clients.seeds;
    const control =
      seeds.length > 1
        ? make(
            "div",
            { class: "controls" },
            choice(
              "Seed",
              seeds.map((seed, at) => [String(at), String(seed.seed)]),
              "0",
              (value) => choose(seeds[Number(value)]),
            ),
          )
        : "";
    choose(now);
    redraws.push(paint);
    const known = new Set(seeds.flatMap((seed) => Object.keys(seed.accuracy)));
    return [
      make("h3", {}, "Clients"),
      paragraph(`${section.clients.about} Sort the table to order the figure.`, "soft"),
      control,
      make("div", { class: "chart" }, legend(section, shown, known, paint, false), area.figure),
      make(
        "details",
        { open: now.architecture.length <= 30 },
        make("summary", {}, `${section.score.per_client}, and what each holds`),
        holder,
      ),
      beside,
      paragraph(section.clients.note, "soft"),
    ];
  }

  // heat maps ----------------------------------------------------------------------------------------------------

  function heatMaps(section) {
    const maps = section.heat_maps.maps;
    const area = canvas("Heat map; arrow keys go from cell to cell");
    const about = make("p", { class: "soft" });
    let now = maps[0];

    function paint() {
      about.textContent = now.about;
      const [rows, columns] = [now.rows.length, now.columns.length];
      const most = Math.min(150, forcedWidth ? 150 : 0.32 * (area.figure.clientWidth || 640));
      const room = (texts) => Math.min(most, 10 + LETTER * Math.max(...texts.map((text) => text.length)));
      const longest = Math.max(...now.columns.map((name) => name.length));
      const high = Math.min(30, Math.max(4, 560 / rows));
      const sizeFor = (width) =>
        Math.min(rows === columns ? (4 / 3) * high : 40, (width - margin.left - margin.right) / columns);
      const leans = longest > 4; // column names that are no numbers stand aslant
      const under = leans ? 0.7 * room(now.columns) + 4 : 10;
      const left = Math.max(room(now.rows) + 22, leans ? under + 8 : 0);
      const margin = { left, top: 26, right: 16, bottom: under + 68 };
      const surface = area.surface((width) =>
        Math.round(margin.top + margin.bottom + rows * Math.min(sizeFor(width), high)),
      );
      const { svg, width } = surface;
      const wide = sizeFor(width);
      const tall = Math.min(wide, high);
      const scale = (value) => (now.high > now.low ? (value - now.low) / (now.high - now.low) : 1);
      const [x, y] = [(at) => margin.left + at * wide, (at) => margin.top + at * tall];
      const numbers = wide >= 30 && tall >= 18;
      const points = [];
      now.values.forEach((row, down) =>
        row.forEach((value, across) => {
          const share = value === null ? 0 : scale(value);
          const cell = draw("rect", {
            class: value === null ? "unknown" : tall < 8 ? "cell fine" : "cell",
            x: x(across).toFixed(1),
            y: y(down).toFixed(1),
            width: wide.toFixed(1),
            height: tall.toFixed(1),
            "fill-opacity": value === null ? null : (0.04 + 0.96 * share).toFixed(3),
          });
          svg.append(cell);
          if (numbers && value !== null) {
            const text = Number.isInteger(value) ? String(value) : value.toFixed(2);
            svg.append(
              draw(
                "text",
                { class: `number${share > 0.5 ? " over" : ""}`, x: x(across + 0.5), y: y(down + 0.5) + 4 },
                text,
              ),
            );
          }
          points.push({ x: x(across + 0.5), y: y(down + 0.5), row: down, across, value });
        }),
      );
      const everyRow = Math.ceil(14 / tall);
      now.rows.forEach((name, down) => {
        if (down % everyRow === 0)
          svg.append(
            draw(
              "text",
              { x: margin.left - 6, y: y(down + 0.5) + 4, "text-anchor": "end", class: "soft" },
              fitted(name, room(now.rows) - 10),
            ),
          );
      });
      const everyColumn = Math.ceil((leans ? 14 : 8 + LETTER * longest) / wide);
      now.columns.forEach((name, across) => {
        if (across % everyColumn) return;
        const spot = [x(across + 0.5), y(rows) + 14];
        const turned = leans
          ? { "text-anchor": "end", transform: `rotate(-45 ${spot[0]} ${spot[1]})` }
          : { "text-anchor": "middle" };
        const told = fitted(name, room(now.columns) - 10);
        svg.append(draw("text", { x: spot[0], y: spot[1], class: "soft", ...turned }, told));
      });
      const foot = y(rows) + under + 18;
      svg.append(
        draw("text", { x: margin.left + (columns * wide) / 2, y: foot, "text-anchor": "middle" }, now.column_axis),
      );
      svg.append(draw("text", { x: 4, y: 13 }, now.row_axis));
      for (let at = 0; at < 10; at += 1) {
        svg.append(
          draw("rect", {
            class: "cell",
            x: 64 + 12 * at,
            y: foot + 16,
            width: 12,
            height: 10,
            "fill-opacity": 0.04 + (0.96 * at) / 9,
          }),
        );
      }
      svg.append(
        draw(
          "text",
          { x: 58, y: foot + 25, "text-anchor": "end", class: "soft" },
          plain(Number(now.low.toPrecision(3))),
        ),
        draw("text", { x: 190, y: foot + 25, class: "soft" }, plain(Number(now.high.toPrecision(3)))),
      );
      const ring = draw("rect", { class: "focus", width: wide, height: tall, x: -99, y: -99 });
      svg.append(ring);
      explore(
        svg,
        points,
        (point) => {
          ring.setAttribute("x", point.x - wide / 2);
          ring.setAttribute("y", point.y - tall / 2);
          area.say(point.x, point.y, [
            point.value === null ? "not known" : plain(point.value),
            `${now.row_axis} ${now.rows[point.row]}`,
            `${now.column_axis} ${now.columns[point.across]}`,
          ]);
        },
        () => {
          ring.setAttribute("x", -99);
          area.hush();
        },
      );
    }
    redraws.push(paint);
    const control = make(
      "div",
      { class: "controls" },
      choice(
        "Map",
        maps.map((map, at) => [String(at), map.title]),
        "0",
        (value) => {
          now = maps[Number(value)];
          paint();
        },
      ),
    );
    return [make("h3", {}, "Heat maps"), control, about, area.figure, paragraph(section.heat_maps.note, "soft")];
  }

  // what did not count, and how to make it again --------------------------------------------------------------------

  function lost(section) {
    const { columns, reasons } = section.lost;
    const counts = columns.length
      ? table(columns, "What did not count").node
      : paragraph("No upload was refused or late, and nobody dropped out.");
    return [make("h3", {}, "What did not count"), counts, list(reasons)];
  }

  function again(section) {
    const recipes = section.recipes.map((recipe) => {
      const link = make(
        "a",
        { href: `data:text/plain;charset=utf-8,${encodeURIComponent(recipe.text)}`, download: recipe.file },
        `save as ${recipe.file}`,
      );
      return make(
        "details",
        {},
        make("summary", {}, `Recipe of ${recipe.name}`),
        ...(recipe.text
          ? [make("pre", {}, recipe.text), make("p", {}, link)]
          : [paragraph("Its run folder holds no recipe.")]),
      );
    });
    const { compared, single } = section.commands;
    const versions = section.versions.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
    return [
      make("h3", {}, "Recipe, versions, commands"),
      ...(compared.length ? [paragraph("These runs were made by"), make("pre", {}, compared.join("\n"))] : []),
      single.length
        ? make(
            "details",
            {},
            make("summary", {}, "Commands that make each run again"),
            paragraph("From the run folders' recipes, which are also below.", "soft"),
            make("pre", {}, single.join("\n")),
          )
        : "",
      ...recipes,
      versions.length ? make("dl", {}, ...versions) : "",
    ];
  }

  // the page -----------------------------------------------------------------------------------------------------

  /** What the tooltips tell, for those who have no pointer. */
  function meanings(section) {
    const told = new Map(section.tables.flatMap(({ columns }) => columns.map((one) => [one.heading, one.about])));
    const known = [...told].filter(([, about]) => about);
    const columns = known.flatMap(([name, about]) => [make("dt", {}, name), make("dd", {}, about)]);
    return make(
      "details",
      {},
      make("summary", {}, "What stages and columns mean"),
      list(section.stages),
      make("dl", {}, ...columns),
    );
  }

  const main = document.querySelector("main");
  const nav = document.querySelector("nav");
  main.replaceChildren();
  if (data.notes.length) main.append(list(data.notes));
  for (const sheet of data.overview)
    main.append(make("section", {}, make("h3", {}, sheet.title), table(sheet.columns, sheet.title).node));
  for (const section of data.sections) {
    const id = newId();
    const looks = looksOf(section);
    const article = make("article", { id });
    main.append(article);
    const parts = [
      [
        "Table",
        () => [
          ...section.tables.map((sheet, at) =>
            make(
              "div",
              {},
              sheet.title ? make("h3", {}, sheet.title) : "",
              table(sheet.columns, sheet.title || "Comparison", {
                icon: (name) => (looks.has(name) && !at ? sample(looks.get(name)) : ""),
                stages: section.stages,
              }).node,
            ),
          ),
          list(section.notes),
          meanings(section),
        ],
      ],
    ];
    if (section.curves.metrics.length) parts.push(["Curves", () => curves(section)]);
    if (section.clients.seeds.length) parts.push(["Clients", () => clients(section)]);
    if (section.heat_maps.maps.length) parts.push(["Heat maps", () => heatMaps(section)]);
    parts.push(["What did not count", () => lost(section)], ["Recipe", () => again(section)]);
    if (data.sections.length > 1) {
      article.append(make("h2", {}, section.title));
      nav.append(make("a", { href: `#${id}` }, section.title));
    }
    article.append(paragraph(section.finding, "finding"), paragraph(section.caption, section.scaled ? "scaled" : ""));
    for (const [name, build] of parts) {
      const part = make("section", { id: newId() });
      article.append(part);
      part.append(...build().filter(Boolean));
      if (data.sections.length === 1) nav.append(make("a", { href: `#${part.id}` }, name));
    }
  }
  document.querySelector("footer").textContent =
    `Made by polyfed ${data.polyfed} from run folders. This page holds all of its data and loads nothing.`;

  const redraw = () => {
    document.querySelectorAll(".wide").forEach((node) => layouts.get(node)());
    redraws.forEach((paint) => paint());
  };
  redraw();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      redraw();
    }
  });
  addEventListener("beforeprint", () => {
    forcedWidth = 1000;
    redraw();
  });
  addEventListener("afterprint", () => {
    forcedWidth = 0;
    redraw();
  });
})();
