"use strict";
// The page of one run or several, drawn from the JSON in #data.

const PARTS = [
  ["compute", "computing", "--c0"],
  ["data", "loading and preparing", "--c5"],
  ["network", "exchanging gradients", "--c2"],
  ["wait", "waiting for slower workers", "--c1"],
];
const page = { data: null, chosen: 0, shares: false, sorted: false, all: false };

const ms = (value) => `${shown(1000 * value)} ms`;
const scaled = (values, unit) => values.map((value) => (value === null ? null : value / unit.size));
const one = (run, name) => run.one[name].mean;

const tile = (value, label) => el("div", { class: "tile" }, el("b", { text: value }), el("span", { text: label }));

const tiles = (run) => {
  const loss = one(run, "loss").filter((value) => value !== null);
  const box = el("div", { class: "tiles" },
    tile(duration(run.seconds), "time"),
    tile(counted(run.samples - run.began_at), "samples"),
    tile(shown(run.samples_per_s), "samples a second"),
    run.workers > 1 ? tile(percentage(run.waiting), "of the time waiting") : null,
    tile(counted(run.global_batch), "global batch at the end"));
  if (loss.length) box.append(tile(shown(loss[loss.length - 1]), "training loss at the end"));
  return box;
};

// Two buttons that set page[name] to false or true.
const choice = (name, off, on) => el("div", { class: "switch" }, ...[[off, false], [on, true]].map(([text, value]) =>
  el("button", { type: "button", "aria-pressed": String(page[name] === value), onclick: () => { page[name] = value; show(); }, text })));

const workerLines = (run, rows, x) =>
  rows.map((y, i) => ({ label: `worker ${i}`, x, y, ...seriesLook(i), step: true }));

const shareRows = (rows) => rows.map((row) => row.map((value, at) => {
  const total = rows.reduce((sum, other) => sum + (other[at] || 0), 0);
  return value === null || !total ? null : value / total;
}));

const sizesFigure = (run, x, unit) => {
  const body = el("div", {});
  const few = Array.isArray(run.each.size);
  const fill = (shares) => {
    const format = shares ? percentage : (value) => shown(value);
    if (few) {
      const rows = shares ? shareRows(run.each.size) : run.each.size;
      return linePlot(workerLines(run, rows, x), { xUnit: unit.name, format, from: 0, height: 260 });
    }
    const map = unpacked(run.each.size);
    const options = heatOptions(run, unit, shares ? "shares of workers" : "batch sizes of workers",
      shares ? percentage : (value) => `${counted(value)} samples`);
    return heatMap(shares ? sharesOf(map) : map, { ...options, end: shares ? percentage : counted });
  };
  body.append(choice("shares", "samples", "share of the round"));
  if (!few) body.append(" ", choice("sorted", "by number", "by batch size"));
  body.append(fill(page.shares));
  const title = page.shares ? "Share of each worker, % of the global batch" : "Batch size of each worker, samples per round";
  return figure(title, "A round ends when workers meet. Faster workers should get more.", body);
};

const heatOptions = (run, unit, label, format, zero = false) => {
  const every = run.each.column_bins;
  const begins = run.begins.filter((_, i) => i % every === 0).map((value) => value / unit.size);
  const ends = run.ends.filter((_, i) => i % every === every - 1 || i === run.ends.length - 1).map((value) => value / unit.size);
  const order = page.sorted ? byMean(unpacked(run.each.size)) : null;
  return { begins, ends, order, xUnit: unit.name, rowWorkers: run.each.row_workers, workers: run.workers, label, format, zero };
};

const barsFigure = (run) => {
  const total = (row) => PARTS.reduce((sum, [name]) => sum + (row[name] || 0), 0);
  const longest = Math.max(...run.bars.map(total), 1e-12);
  const box = el("div", { class: "bars" });
  for (const row of run.bars) {
    const bar = el("div", { class: "bar" });
    for (const [name, label, tone] of PARTS) {
      const part = (row[name] || 0) / longest;
      if (part > 0) bar.append(el("span", { style: `width: ${100 * part}%; background: var(${tone})`, title: `${label}: ${ms(row[name])}` }));
    }
    const waits = total(row) ? (row.wait || 0) / total(row) : null;
    const told = `${ms(total(row))}, ${percentage(waits)} waiting, ${shown(row.size)} samples, ${row.each_s ? `${ms(row.each_s)} each` : "never timed"}`;
    box.append(el("span", { text: `worker ${row.worker}` }), bar, el("span", { class: "figure", text: told }));
  }
  const there = PARTS.filter(([name]) => run.bars.some((row) => row[name]));
  const keys = el("div", { class: "keys" }, ...there.map(([, label, tone]) =>
    el("span", {}, el("i", { style: `background: var(${tone})` }), label)));
  const which = run.bars.length < run.workers ? `The ${run.bars.length} workers of ${run.workers.toLocaleString("en")} that take longest for a sample. ` : "";
  const caption = `${which}Mean seconds of a round over the whole run. A bar that ends in waiting had too little to do.`;
  return figure("Where each worker's time went", caption, keys, box);
};

const partsFigure = (run, x, unit) => {
  const lines = PARTS.map(([name, label, tone]) => ({ label, x, y: one(run, name), colour: tone, step: true }))
    .filter((line) => line.y.some((value) => value));
  return figure("A worker's round in its parts, time in the mean over workers", "Less waiting is better shared work.",
    linePlot(lines, { xUnit: unit.name, format: (value) => duration(value), from: 0 }));
};

const waitingFigure = (run, x, unit) => {
  const caption = "How long each worker waited for slower ones in a round.";
  const title = "Waiting of each worker, time per round";
  if (Array.isArray(run.each.wait)) {
    return figure(title, caption, linePlot(workerLines(run, run.each.wait, x), { xUnit: unit.name, format: (v) => duration(v), from: 0 }));
  }
  return figure(title, caption, heatMap(unpacked(run.each.wait), heatOptions(run, unit, "waiting of workers", ms, true)));
};

const mapFigure = (run, unit, name, title, caption) => {
  if (Array.isArray(run.each[name])) return null;
  return figure(title, caption, heatMap(unpacked(run.each[name]), heatOptions(run, unit, title, ms, true)));
};

const batchFigure = (run, x, unit) => {
  const { mean: y, least, greatest } = run.one.global_batch;
  const merged = run.bin_windows > 1;
  const lines = [{ label: "global batch", x, y, colour: "--c0", step: true, band: merged ? [least, greatest] : undefined },
    { label: "noise scale", x, y: one(run, "noise_scale"), colour: "--c1" }];
  const log = isWide(lines, 20);
  const positive = lines.map((line) => (log ? { ...line, y: line.y.map((value) => (value > 0 ? value : null)), band: undefined } : line));
  const noise = lines[1].y.some((value) => value !== null);
  const caption = noise ? "A global batch far above the noise scale teaches little more for its samples; far below it more samples still pay."
    : "Of a round of all workers.";
  return figure(noise ? "Global batch and noise scale, samples" : "Global batch, samples", caption + (log ? " The axis is logarithmic." : ""), linePlot(positive, { xUnit: unit.name, from: log ? undefined : 0, log }));
};

const speedFigure = (run, x, unit) => figure("Speed, samples per second", "Of all workers together.",
  linePlot([{ label: "samples a second", x, y: one(run, "samples_per_s"), colour: "--c0", step: true }], { xUnit: unit.name, from: 0 }));

const progressFigure = (run, x, unit) => figure("Samples used so far", "A steeper line is a faster job.",
  linePlot([{ label: "samples", x, y: one(run, "samples"), colour: "--c0" }], { xUnit: unit.name, from: 0 }));

const lossFigure = (run, x, unit) => figure("Training loss", "Mean of all workers' batches.",
  linePlot([{ label: "loss", x, y: one(run, "loss"), colour: "--c0" }], { xUnit: unit.name }));

const scoreFigure = (run, x, unit) => {
  if (run.curve) {
    const times = run.curve.map((point) => point[0] / unit.size);
    return figure("Held-out score", "Of snapshots taken while the job ran.",
      linePlot([{ label: "score", x: times, y: run.curve.map((point) => point[2]), colour: "--c0" }], { xUnit: unit.name, format: percentage }));
  }
  return figure("Training accuracy", "Mean of all workers' batches.",
    linePlot([{ label: "accuracy", x, y: one(run, "accuracy"), colour: "--c0" }], { xUnit: unit.name, format: percentage }));
};

const roundFigure = (run, x, unit) => figure("Time of a round", "A round ends when workers meet.",
  linePlot([{ label: "time of a round", x, y: one(run, "step_s"), colour: "--c0", step: true }], { xUnit: unit.name, format: (value) => duration(value), from: 0 }));

const changeRow = (change) => {
  const [worker, before, after] = change.most;
  const total = change.total[0] === change.total[1] ? `stays ${change.total[0].toLocaleString("en")}`
    : `${change.total[0].toLocaleString("en")} to ${change.total[1].toLocaleString("en")}`;
  const cells = [[duration(change.at_s), "n"], [total, "w"], [percentage(change.moved), "n"],
    [`${worker}: ${before.toLocaleString("en")} to ${after.toLocaleString("en")}`, "w"]];
  return el("tr", {}, ...cells.map(([text, kind]) => el("td", { class: kind, text })));
};

const changesFigure = (run) => {
  if (!run.changes.length) return null;
  const size = (change) => change.moved + Math.abs(Math.log(change.total[1] / Math.max(change.total[0], 1)));
  const rows = page.all ? run.changes : [...run.changes].sort((a, b) => size(b) - size(a)).slice(0, 10).sort((a, b) => a.at_s - b.at_s);
  const heads = [["time", "n"], ["global batch", ""], ["moved", "n"], ["worker: size", ""]];
  const table = el("table", {}, el("tr", {}, ...heads.map(([text, kind]) => el("th", { class: kind, text }))), ...rows.map(changeRow));
  const more = run.changes.length > 10 ? el("button", { class: "more", type: "button", onclick: () => { page.all = !page.all; show(); },
    text: page.all ? "show the ten largest" : `show ${run.changes.length} of them` }) : null;
  const caption = `${run.change_count.toLocaleString("en")} changes; the largest are listed. `
    + "“Moved” is the part of the round that went to other workers, beside the worker whose share changed most.";
  return figure("Decisions", caption, el("div", { class: "scroll" }, table), more);
};

const noticesFigure = (run) => {
  const caption = "Takeovers by the guard, failures, late decisions, gaps, restarts, pauses, other ways of meeting.";
  if (!run.notices.length) return null;
  const total = Object.values(run.notice_counts).reduce((a, b) => a + b, 0);
  const rows = page.all ? run.notices : run.notices.slice(0, 12);
  const table = el("table", {}, el("tr", {}, el("th", { class: "n", text: "time" }), el("th", { class: "n", text: "window" }), el("th", { text: "what" })),
    ...rows.map((notice) => el("tr", {}, el("td", { class: "n", text: duration(notice.at_s) }), el("td", { class: "n", text: String(notice.window) }),
      el("td", { text: notice.text }))));
  const counted = Object.entries(run.notice_counts).map(([kind, count]) => `${kind} ${count.toLocaleString("en")}`).join(", ");
  const more = run.notices.length > 12 ? el("button", { class: "more", type: "button", onclick: () => { page.all = !page.all; show(); },
    text: page.all ? "show the first twelve" : `show ${run.notices.length} of ${total}` }) : null;
  return figure("Events", `${caption} In all: ${counted}.`, el("div", { class: "scroll" }, table), more);
};

const factsFigure = (run) => figure("How it ran", "From the run folder.", el("table", {},
  ...run.facts.map(([name, value]) => el("tr", {}, el("td", { text: name }), el("td", { class: "name", text: value })))));

const runSection = (run, unit) => {
  const x = scaled(run.ends, unit);
  const parts = page.data.runs.length > 1 ? [el("h2", { text: run.name })] : [];
  parts.push(el("ul", { class: "lead" }, ...run.sentences.map((text) => el("li", { text }))), tiles(run));
  parts.push(sizesFigure(run, x, unit), barsFigure(run));
  parts.push(partsFigure(run, x, unit));
  if (run.workers > 1) parts.push(waitingFigure(run, x, unit));
  parts.push(mapFigure(run, unit, "compute", "Computing of each worker, time per round", "Forward, backward and the optimizer's update."));
  if (one(run, "data").some((value) => value > 0.001)) {
    parts.push(mapFigure(run, unit, "data", "Waiting for data of each worker, time per round", "How long the loader kept a worker waiting."));
  }
  parts.push(batchFigure(run, x, unit));
  parts.push(el("div", { class: "pair" }, lossFigure(run, x, unit), scoreFigure(run, x, unit)));
  parts.push(el("div", { class: "pair" }, progressFigure(run, x, unit), speedFigure(run, x, unit)));
  parts.push(roundFigure(run, x, unit), changesFigure(run), noticesFigure(run), factsFigure(run));
  return parts.filter(Boolean);
};

// A run's time over the first one's, with its interval.
const verdict = (row) => {
  if (row.no_verdict) return "no verdict";
  if (row.over_first === null) return shown(null);
  return row.over_first.toFixed(2) + (row.low === null ? "" : ` (${row.low.toFixed(2)} to ${row.high.toFixed(2)})`);
};

const comparisonTable = (data) => {
  const rows = data.comparison.rows;
  const loss = data.comparison.common_loss;
  const samples = data.comparison.common_samples;
  // The answer first: a narrow screen shows these columns above the others.
  const heads = [`time over ${rows.length ? rows[0].name : "the first"}'s`, loss === null ? "time to equal loss" : `time to loss ${shown(loss)}`,
    `time to ${counted(samples)} samples`, "samples a second", "waiting", "best loss", "global batch", "time", "samples"];
  const table = el("table", { class: "rows" }, el("tr", {}, el("th", { text: "run" }), ...heads.map((text) => el("th", { class: "n", text }))));
  rows.forEach((row, i) => {
    const cells = [verdict(row), duration(row.loss_s), duration(row.samples_s), shown(row.samples_per_s), percentage(row.waiting),
      shown(row.loss), counted(row.global_batch), duration(row.seconds), counted(row.samples)];
    table.append(el("tr", { class: i === page.chosen ? "chosen" : "" }, el("td", { class: "name", text: row.name }),
      ...cells.map((text, k) => el("td", { class: "n", "data-head": heads[k], text }))));
  });
  for (const row of data.comparison.absent || []) {
    table.append(el("tr", {}, el("td", { class: "name", text: row.name }), el("td", { class: "soft", colspan: "9", text: row.why })));
  }
  return el("div", { class: "scroll" }, table, ...data.comparison.notes.map((text) => el("p", { class: "soft", text })));
};

const comparisonSection = (data, unit) => {
  const lines = (name, extra = {}) => data.runs.map((run, i) => ({ label: run.name, x: scaled(run.ends, unit), y: one(run, name),
    ...seriesLook(i), ...extra }));
  const scored = data.runs.some((run) => run.curve);
  const score = scored ? data.runs.filter((run) => run.curve).map((run) => ({ label: run.name, x: run.curve.map((p) => p[0] / unit.size),
    y: run.curve.map((p) => p[2]), ...seriesLook(data.runs.indexOf(run)) })) : lines("accuracy");
  const scoreTitle = scored ? "Held-out score against time" : "Training accuracy against time";
  // What all runs reached, and when each did.
  const level = (y, name) => y !== null && { y, marks: data.comparison.rows.map((row, i) =>
    ({ x: row[name] === null ? null : row[name] / unit.size, ...seriesLook(i) })).filter(({ x }) => x !== null) };
  const { common_loss: loss, common_samples: samples } = data.comparison;
  const losses = lines("loss");
  const log = isWide(losses, 2.5) && losses.every(({ y }) => y.every((value) => value === null || value > 0));
  const summary = [el("h2", { text: "Runs beside each other" }),
    figure("Summary", "Times are seconds to what all runs reached. The first column is such a time over the first run's; smaller is better. The loss is that of training, smoothed.", comparisonTable(data))];
  return data.runs.length < 2 ? summary : [...summary,
    figure("Training loss against time", `Mean of all workers' batches.${log ? " The axis is logarithmic." : ""} A dot on the dashed line: the run's smoothed loss has reached what all runs reach.`,
      linePlot(losses, { xUnit: unit.name, height: 300, log, level: level(loss, "loss_s") })),
    el("div", { class: "pair" },
      figure(scoreTitle, "Higher is better.", linePlot(score, { xUnit: unit.name, format: percentage })),
      figure("Samples used so far", "A steeper line is a faster job.", linePlot(lines("samples"), { xUnit: unit.name, from: 0, level: level(samples, "samples_s") }))),
    el("div", { class: "pair" },
      figure("Waiting for slower workers, % of the time", "Mean over workers.", linePlot(lines("waiting", { step: true }), { xUnit: unit.name, from: 0, format: percentage })),
      figure("Global batch, samples", "Of a round of all workers.", linePlot(lines("global_batch", { step: true }), { xUnit: unit.name, from: 0 }))),
  ].filter(Boolean);
};

const show = () => {
  const { data } = page;
  const main = document.getElementById("page");
  const scroll = window.scrollY;
  forget();
  main.replaceChildren();
  if (!data) return;
  document.title = data.title;
  document.querySelector("h1").textContent = data.title;
  document.getElementById("headline").textContent = data.headline;
  if (data.missing.length) main.append(el("div", { class: "missing" }, ...data.missing.map((text) => el("p", { text }))));
  if (!data.runs.length) return; // the headline says what the page waits for
  const unit = timeUnit(Math.max(...data.runs.map((run) => run.seconds)));
  page.chosen = Math.min(page.chosen, data.runs.length - 1);
  if (data.comparison) main.append(...comparisonSection(data, unit));
  if (data.runs.length > 1) {
    const select = el("select", { id: "run", onchange: (event) => { page.chosen = Number(event.target.value); page.all = false; show(); } },
      ...data.runs.map((run, i) => el("option", { value: String(i), text: run.name })));
    select.value = String(page.chosen);
    main.append(el("p", { class: "choose" }, el("label", { for: "run", text: "One run in detail: " }), select));
  }
  main.append(...runSection(data.runs[page.chosen], unit));
  redrawAll();
  window.scrollTo(0, scroll);
};

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) { width = window.innerWidth; redrawAll(); }
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redrawAll());
const printing = (on) => {
  document.documentElement.classList.toggle("printing", on);
  redrawAll();
};
window.addEventListener("beforeprint", () => printing(true));
window.addEventListener("afterprint", () => printing(false));

page.data = JSON.parse(document.getElementById("data").textContent);
show();
performance.mark("drawn");
document.documentElement.dataset.ready = "1";
