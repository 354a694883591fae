"use strict";
// Small helpers for the page: elements, numbers, and line plots with a legend beside them.

const el = (tag, options = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASHES = [undefined, [9, 4], [2, 3], [10, 3, 2, 3]];
// Colour and dash of a line: neighbours differ in both, and 32 lines differ in one.
const seriesLook = (i) => ({ colour: `--c${i % 8}`, dash: DASHES[(i + Math.floor(i / 8)) % DASHES.length] });

const shown = (value, digits = 3) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(digits));
  const size = Math.abs(rounded);
  if (size >= 10 ** (digits - 1)) return Math.round(rounded).toLocaleString("en");
  return size < 0.001 ? rounded.toExponential(1) : String(rounded);
};
const counted = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
const percentage = (value) => (value === null || value === undefined ? "–" : `${shown(100 * value, 2)} %`);
const duration = (s) => {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${shown(1000 * s)} ms`;
  if (s < 120) return `${shown(s)} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
};

// One unit of time for the x axis of all plots of a page.
const timeUnit = (seconds) => {
  if (seconds > 3 * 3600) return { name: "h", size: 3600 };
  if (seconds > 600) return { name: "min", size: 60 };
  return { name: "s", size: 1 };
};

const drawn = []; // what has to be drawn again when the width or the colours change

const forget = () => {
  for (const thing of drawn.splice(0)) thing.destroy();
};

const redrawAll = (width) => {
  for (const thing of drawn) thing.draw(width);
};

// From a number with one digit, at which ticks begin, to a little above the largest value.
const rangeOfLog = (u, low, high) => {
  if (low === null) return [1, 10];
  const unit = 10 ** Math.floor(Math.log10(low) + 1e-9);
  return [unit * Math.max(Math.floor(low / unit), 1), 1.08 * Math.max(high, low)];
};

// Whether the largest value is more than so many times the smallest positive one.
const isWide = (lines, times) => {
  const known = lines.flatMap((line) => line.y).filter((value) => value > 0);
  return known.length > 0 && Math.max(...known) > times * Math.min(...known);
};

// A figure with a title, what it shows, and a body; null where the body has nothing to show.
const figure = (title, caption, ...body) =>
  (body.some(Boolean) ? el("figure", {}, el("h3", { text: title }), el("figcaption", { text: caption }), ...body) : null);

const withAlpha = (hex, alpha) => {
  const full = hex.length === 4 ? hex.replace(/[0-9a-f]/gi, "$&$&") : hex;
  return full + Math.round(255 * alpha).toString(16).padStart(2, "0");
};

// The background of a line's key: its colour, dashed as the line is.
const keyOf = (line) => {
  let at = 0;
  const stops = (line.dash || [1]).map((part, i) => `${i % 2 ? "transparent" : `var(${line.colour})`} ${at}px ${at += part}px`);
  return `repeating-linear-gradient(90deg, ${stops.join(", ")})`;
};

// uPlot's data need one x for all series; runs have x of their own.
const joined = (lines) => {
  const tables = lines.map((line) => [line.x, ...[line.y, ...(line.band || [])]]);
  return lines.length === 1 || lines.every((line) => line.x === lines[0].x)
    ? [lines[0].x, ...tables.flatMap((table) => table.slice(1))]
    : uPlot.join(tables);
};

// lines: [{label, x, y, colour, band: [least, greatest], step, dash}]
// options: {unit, xUnit, format, from (y starts there), height, log, level: {y, marks: [{x, colour}]} (a line across)}
const linePlot = (lines, options) => {
  const known = lines.filter((line) => line.y.some((value) => value !== null && value !== undefined));
  if (!known.length) return null;
  const canvas = el("div", { class: "canvas" });
  const legend = el("ul", { class: "legend" });
  const format = options.format || ((value) => shown(value));
  const values = [];
  const hidden = new Set();
  let plot = null;
  const data = joined(known);

  const series = () => {
    const list = [{}];
    for (const line of known) {
      const stroke = colour(line.colour);
      const paths = line.step ? uPlot.paths.stepped({ align: -1 }) : undefined;
      list.push({ stroke, width: 1.6, dash: line.dash, paths, points: { show: line.x.length < 2, size: 5 }, spanGaps: true });
      for (const _ of line.band || []) list.push({ stroke: "transparent", width: 0, paths, points: { show: false } });
    }
    return list;
  };

  const bands = () => {
    const list = [];
    let at = 1;
    for (const line of known) {
      if (line.band) list.push({ series: [at + 2, at + 1], fill: withAlpha(colour(line.colour), 0.18) });
      at += 1 + (line.band ? 2 : 0);
    }
    return list;
  };

  const places = known.map((_, i) => known.slice(0, i).reduce((sum, line) => sum + 1 + (line.band ? 2 : 0), 1));
  known.forEach((line, i) => {
    const value = el("span", { class: "value" });
    values.push(value);
    const key = el("i", { style: `background: ${keyOf(line)}` });
    const item = el("li", {});
    const button = el("button", { type: "button", title: "show or hide", onclick: () => {
      hidden.has(i) ? hidden.delete(i) : hidden.add(i);
      item.classList.toggle("off", hidden.has(i));
      for (let k = places[i]; k < places[i] + (line.band ? 3 : 1); k += 1) plot.setSeries(k, { show: !hidden.has(i) });
    } }, key, el("span", { text: line.label }));
    item.append(button, value);
    legend.append(item);
    if (line.band) {
      const band = el("i", { class: "band", style: `background: var(${line.colour})` });
      legend.append(el("li", {}, band, el("span", { class: "unit", text: "least to greatest" })));
    }
  });

  const axis = () => ({ stroke: colour("--soft"), font: "12px system-ui", grid: { stroke: colour("--grid"), width: 1 },
    ticks: { stroke: colour("--grid"), width: 1 } });
  const cursorText = (u) => {
    const at = u.cursor.idx;
    known.forEach((line, i) => {
      const value = at === null || at === undefined ? null : u.data[places[i]][at];
      values[i].textContent = value === null || value === undefined ? "" : format(value);
    });
  };

  const drawLevel = (u) => {
    const { ctx, bbox } = u;
    const y = u.valToPos(options.level.y, "y", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - 5 * uPlot.pxRatio, bbox.top, bbox.width + 10 * uPlot.pxRatio, bbox.height);
    ctx.clip();
    ctx.setLineDash([5 * uPlot.pxRatio, 4 * uPlot.pxRatio]);
    ctx.strokeStyle = colour("--soft");
    ctx.lineWidth = uPlot.pxRatio;
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    for (const mark of options.level.marks) {
      ctx.fillStyle = colour(mark.colour);
      ctx.beginPath();
      ctx.arc(u.valToPos(mark.x, "x", true), y, 4.5 * uPlot.pxRatio, 0, 2 * Math.PI);
      ctx.fill();
    }
    ctx.restore();
  };

  const draw = (width) => {
    if (plot) plot.destroy();
    const wide = width || canvas.clientWidth || 300;
    plot = new uPlot({
      width: wide,
      height: options.height || 220,
      series: series(),
      bands: bands(),
      scales: { x: { time: false, range: (u, low, high) => [Math.min(low, 0), high > low ? high : low + 1] },
        y: { distr: options.log ? 3 : 1,
          range: options.log ? rangeOfLog : (u, low, high) => (low === null ? [0, 1] : uPlot.rangeNum(
            options.from === undefined ? low : Math.min(options.from, low), high > low ? high : low + Math.abs(low || 1) / 2,
            { min: { pad: options.from === undefined ? 0.05 : 0, soft: options.from, mode: 3 }, max: { pad: 0.06, mode: 0 } })) } },
      axes: [{ ...axis(), size: 46, label: `time, ${options.xUnit}`, labelFont: "12px system-ui", labelSize: 16 },
        { ...axis(), size: (u, labels) => Math.max(40, 16 + 8 * Math.max(0, ...(labels || []).map((label) => String(label).length))), values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))) }],
      legend: { show: false },
      cursor: { points: { size: 6 }, drag: { x: true, y: false } },
      hooks: { setCursor: [cursorText], draw: options.level ? [drawLevel] : [] },
    }, data, canvas);
    known.forEach((line, i) => {
      if (hidden.has(i)) for (let k = places[i]; k < places[i] + (line.band ? 3 : 1); k += 1) plot.setSeries(k, { show: false });
    });
  };
  drawn.push({ draw, destroy: () => plot && plot.destroy() });
  // A single line needs no legend: the title names it.
  return el("div", { class: "plot" }, canvas, known.length > 1 || known[0].band ? legend : null);
};
