"use strict";
// Heat maps: workers down, time across. One canvas each, so that a thousand workers cost no more than ten.

const unpacked = (map) => {
  const text = atob(map.data);
  const unknown = 2 ** map.bits - 1;
  const values = new Float32Array(map.rows * map.columns);
  for (let i = 0; i < values.length; i += 1) {
    const level = map.bits === 8 ? text.charCodeAt(i) : text.charCodeAt(2 * i) + 256 * text.charCodeAt(2 * i + 1);
    values[i] = level === unknown ? NaN : map.low + level * map.step;
  }
  return { rows: map.rows, columns: map.columns, values };
};

// Each column divided by its sum: sizes become shares.
const sharesOf = (map) => {
  const values = new Float32Array(map.values.length);
  for (let c = 0; c < map.columns; c += 1) {
    let total = 0;
    for (let r = 0; r < map.rows; r += 1) total += map.values[r * map.columns + c] || 0;
    for (let r = 0; r < map.rows; r += 1) values[r * map.columns + c] = total ? map.values[r * map.columns + c] / total : NaN;
  }
  return { ...map, values };
};

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

const ramp = () => {
  const stops = ["--low", "--middle", "--high"].map((name) => rgb(colour(name)));
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * 2;
    const from = stops[Math.min(Math.floor(at), 1)];
    const to = stops[Math.min(Math.floor(at), 1) + 1];
    const part = at - Math.min(Math.floor(at), 1);
    return from.map((value, k) => Math.round(value + part * (to[k] - value)));
  });
};

// The range that colours span: one value in two hundred may lie beyond either end, or a single outlier hides the rest.
const spanOf = (values) => {
  const known = [];
  const every = Math.max(Math.floor(values.length / 20000), 1);
  for (let i = 0; i < values.length; i += every) if (Number.isFinite(values[i])) known.push(values[i]);
  if (!known.length) return null;
  known.sort((a, b) => a - b);
  return [known[Math.floor(0.005 * (known.length - 1))], known[Math.ceil(0.995 * (known.length - 1))]];
};

const imageOf = (map, low, high) => {
  const image = new ImageData(map.columns, map.rows);
  const colours = ramp();
  const none = rgb(colour("--none"));
  const scale = high > low ? 255 / (high - low) : 0;
  for (let i = 0; i < map.values.length; i += 1) {
    const value = map.values[i];
    const level = Math.min(Math.max(Math.round((value - low) * scale), 0), 255);
    const [r, g, b] = Number.isFinite(value) ? colours[level] : none;
    image.data[4 * i] = r; image.data[4 * i + 1] = g; image.data[4 * i + 2] = b; image.data[4 * i + 3] = 255;
  }
  const canvas = document.createElement("canvas");
  canvas.width = map.columns;
  canvas.height = map.rows;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
};

const niceSteps = (most, wanted) => {
  const rough = most / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
};

// Rows in another order; `order` holds the row of `map` that each place shows.
const inOrder = (map, order) => {
  const values = new Float32Array(map.values.length);
  order.forEach((row, place) => values.set(map.values.subarray(row * map.columns, (row + 1) * map.columns), place * map.columns));
  return { ...map, values };
};

// Rows by their means, the largest first.
const byMean = (map) => {
  const means = Array.from({ length: map.rows }, (_, row) => {
    let [sum, count] = [0, 0];
    for (let c = 0; c < map.columns; c += 1) {
      const value = map.values[row * map.columns + c];
      if (Number.isFinite(value)) { sum += value; count += 1; }
    }
    return count ? sum / count : -Infinity;
  });
  return means.map((_, row) => row).sort((a, b) => means[b] - means[a]);
};

// options: {begins, ends (of columns, in the plot's unit of time), xUnit, rowWorkers, workers, format, label, zero,
//   end (format of the scale's ends), order (rows of the map from top to bottom; none: as they are)}
const heatMap = (given, options) => {
  const map = options.order ? inOrder(given, options.order) : given;
  const span = spanOf(map.values);
  if (!span) return null;
  const [low, high] = options.zero ? [0, Math.max(span[1], 1e-12)] : span;
  const canvas = el("canvas", { role: "img", "aria-label": options.label });
  const at = el("div", { class: "at" });
  const [left, bottom, top] = [58, 40, 8];
  const last = options.ends[options.ends.length - 1] || 1;
  let tall = 0;
  let wide = 0;

  const draw = (width) => {
    wide = width || canvas.parentElement.clientWidth || 300;
    tall = Math.min(Math.max(map.rows * 14, 110), 380);
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round((tall + bottom + top) * ratio);
    canvas.style.height = `${tall + bottom + top}px`;
    canvas.style.width = `${wide}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const image = imageOf(map, low, high);
    context.imageSmoothingEnabled = map.rows > tall * ratio;
    context.imageSmoothingQuality = "high";
    const across = (seconds) => left + ((wide - left - 6) * seconds) / last;
    for (let c = 0; c < map.columns; c += 1) {
      const from = across(options.begins[c]);
      const to = across(options.ends[c]);
      context.drawImage(image, c, 0, 1, map.rows, from, top, Math.max(to - from, 0.5) + 0.35, tall);
    }
    context.fillStyle = colour("--soft");
    context.font = "12px system-ui";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const rows = niceSteps(Math.max(options.workers - 1, 1), Math.min(options.workers, tall / 34)).filter((row) => Number.isInteger(row));
    for (const worker of options.order ? [] : rows) {
      const y = top + ((worker / options.rowWorkers + 0.5) * tall) / map.rows;
      if (y < top + tall) context.fillText(worker.toLocaleString("en"), left - 6, y);
    }
    context.save();
    context.translate(options.order ? 46 : 11, top + tall / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(options.order ? "workers, by batch size" : "worker", 0, 0);
    context.restore();
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const tick of niceSteps(last, wide / 110)) context.fillText(shown(tick), Math.min(across(tick), wide - 14), top + tall + 5);
    context.fillText(`time, ${options.xUnit}`, left + (wide - left) / 2, top + tall + 22);
  };

  const tell = (event) => {
    const box = canvas.getBoundingClientRect();
    const when = ((event.clientX - box.left - left) / (wide - left - 6)) * last;
    const row = Math.floor(((event.clientY - box.top - top) / tall) * map.rows);
    const column = options.ends.findIndex((end) => when <= end);
    if (row < 0 || row >= map.rows || column < 0 || when < 0) { at.textContent = ""; return; }
    const first = (options.order ? options.order[row] : row) * options.rowWorkers;
    const name = options.rowWorkers === 1 ? `worker ${first}` : `workers ${first} to ${first + options.rowWorkers - 1}`;
    const value = map.values[row * map.columns + column];
    at.textContent = `${name} at ${shown(when)} ${options.xUnit}: ${Number.isFinite(value) ? options.format(value) : "unknown"}`;
  };
  canvas.addEventListener("pointermove", tell);
  canvas.addEventListener("pointerleave", () => { at.textContent = ""; });
  drawn.push({ draw, destroy: () => {} });

  const end = options.end || options.format; // of the scale, which is narrow
  const ends = el("div", { class: "ends" }, el("span", { text: end(low) }), el("span", { text: end(high) }));
  const scale = el("div", { class: "scale" }, el("div", { class: "ramp" }), ends,
    el("div", {}, el("span", { class: "none" }), "unknown"));
  return el("div", { class: "plot" }, el("div", { class: "canvas heat" }, canvas, at), scale);
};
