"use strict";
// Draws every figure of the page from the page's JSON with uPlot: drag to zoom, double click to reset, click a name to hide its series.
const FONT = "11px system-ui, sans-serif";
const STEPS = Array.from({ length: 320 }, (_, e) => [1, 2, 5].map((digit) => Number(`${digit}e${e - 16}`))).flat();  // between ticks
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const plots = new Map();  // place of a figure in the page → its plot, kept when a live page brings new data

function short(value) {
  if (value == null) return "–";
  if (Math.abs(value) >= 1e7 || (value && Math.abs(value) < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString("en", Math.abs(value) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });
}

function ticks(u, values, axis, space, step) {
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return values.map((value) => value == null ? "" : Math.abs(value) >= 1e6 || digits > 4
    ? Number(value.toPrecision(6)).toExponential().replace("e+", "e")
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
}

function named(pairs) {  // options of an axis whose places have names
  return pairs && pairs.length ? { splits: () => pairs.map(([at]) => at), values: () => pairs.map(([, name]) => name) } : {};
}

function inside(u, low, high) {  // whether a stretch of the x axis is visible
  return high >= u.scales.x.min && low <= u.scales.x.max;
}

function heightOf(u, [, , , heights]) {
  return heights.reduce((sum, height, i) => sum + (u.series[i + 1].show ? height || 0 : 0), 0);
}

function yRange(u, low, high) {
  const { spans, bars, y, limit, fromZero } = u.chart;
  if (spans) return [-0.6, y.ticks.length - 0.4];
  if (bars) [low, high] = [0, Math.max(high || 0, ...bars.map((bar) => heightOf(u, bar)))];
  if (low == null) return [0, 1];
  if (limit) high = Math.max(high, 1.08 * limit[0]);
  if (fromZero && low >= 0) return [0, high > 0 ? 1.06 * high : 1];
  const flat = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  const margin = flat ? 0.1 * Math.abs(low) || 1 : 0.06 * (high - low);
  return [low - margin, high + margin];
}

function boxes(u, number) {  // rectangles [x0, x1, y0, y1] of a part of all bars, or of a state in all rows
  const index = number - 1, { spans, bars } = u.chart;
  if (spans) return spans.filter((span) => span[3] === index).map(([row, x0, x1]) => [x0, x1, row - 0.36, row + 0.36]);
  return bars.filter((bar) => bar[3][index]).map(([x0, x1, , heights]) => {
    const base = heights.slice(0, index).reduce((sum, height, i) => sum + (u.series[i + 1].show ? height || 0 : 0), 0);
    return [x0, x1, base, base + heights[index]];
  });
}

function boxPath(u, number) {
  const fill = new Path2D(), x = (value) => u.valToPos(value, "x", true), y = (value) => u.valToPos(value, "y", true);
  for (const [x0, x1, y0, y1] of boxes(u, number)) {
    if (!inside(u, x0, x1)) continue;
    const left = Math.round(x(x0)), bottom = y(y0);
    fill.rect(left, y(y1), Math.max(1, Math.round(x(x1)) - left), bottom - y(y1));
  }
  return { stroke: null, fill, clip: null, flags: 1 };
}

function lonely(u, number, shown) {  // points without a neighbour would be invisible
  if (shown) return null;
  const values = u.data[number].filter((value) => value !== undefined), at = u.data[number].flatMap((v, i) => v === undefined ? [] : i);
  return at.filter((_, i) => values[i] != null && values[i - 1] == null && values[i + 1] == null);
}

function seriesOf(series) {
  const colour = () => css(series.colour);
  if (!series.x) return { label: series.name, stroke: colour, fill: colour, width: 0, paths: boxPath, points: { show: false } };
  return { label: series.name, stroke: colour, width: series.faint ? 0.8 : 1.8, alpha: series.faint ? 0.45 : 1,
           class: series.faint ? "faint" : undefined, dash: series.dashed ? [5, 4] : undefined,
           paths: series.stairs ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear(),
           points: { size: 5, width: 0, fill: colour, filter: lonely,
                     show: (u, number) => !series.faint && !series.stairs && u.data[number].length <= 40 } };
}

function dataOf({ series, x }) {  // with the ends of the x axis, so that they are what is shown without a zoom
  return uPlot.join([[x.range], ...series.map((line) => line.x ? [line.x, line.y] : [x.range, [null, null]])]);
}

function decorate(u) {  // the limit, and marks where a value was not a finite number
  const { limit, marks } = u.chart, { ctx, bbox } = u, ratio = uPlot.pxRatio;
  ctx.save();
  ctx.fillStyle = ctx.strokeStyle = css("red");
  if (limit) {
    const y = u.valToPos(limit[0], "y", true);
    ctx.lineWidth = ratio;
    ctx.setLineDash([5 * ratio, 3 * ratio]);
    ctx.stroke(new Path2D(`M${bbox.left} ${y}h${bbox.width}`));
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    ctx.fillText(limit[1], bbox.left + bbox.width, y - ratio);
  }
  for (const at of (marks || []).filter((at) => inside(u, at, at))) {
    ctx.fill(new Path2D(`M${u.valToPos(at, "x", true)} ${bbox.top + bbox.height - 7 * ratio}l${4 * ratio} ${7 * ratio}h${-8 * ratio}z`));
  }
  ctx.restore();
}

function nearest(line, x) {  // index of the value that stands at a place of the x axis
  let best = line.x.findLastIndex((at) => at <= x);
  if (!line.stairs && best + 1 < line.x.length && (best < 0 || line.x[best + 1] - x < x - line.x[best])) best += 1;
  return best;
}

function valuesAt(u, x, y) {  // heading and rows of the tooltip
  const { series, bars, spans, x: axis } = u.chart, shown = series.map((_, i) => u.series[i + 1].show);
  if (spans) {
    const span = spans.find(([row, x0, x1, state]) => row === Math.round(y) && x0 <= x && x <= x1 && shown[state]);
    if (!span) return null;
    return [axis.label && `${u.chart.y.ticks.find(([row]) => row === span[0])[1]}, ${short(span[1])} to ${short(span[2])} ${axis.label}`,
            [[series[span[3]], ""]]];
  }
  const hit = (bars || []).find((bar) => bar[0] <= x && x <= bar[1]), rows = [];
  const found = hit ? bars.filter((bar) => bar[2] === hit[2]) : [];  // bars that stand side by side have one label
  let heading = hit ? hit[2] : null;
  series.forEach((line, i) => {
    if (!shown[i] || line.faint) return;
    if (!line.x) return found.forEach((bar) => bar[3][i] && rows.push([line, short(bar[3][i])]));
    const at = nearest(line, x), faint = series.find((other) => other.faint && other.name === line.name);
    if (at < 0) return;
    heading ??= `${axis.label} ${short(line.x[at])}`;
    rows.push([line, faint ? `${short(faint.y[nearest(faint, x)])} (mean ${short(line.y[at])})` : short(line.y[at])]);
  });
  return rows.length ? [heading, rows] : null;
}

function element(tag, className, text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

function showTip(u) {
  const { left, top } = u.cursor, found = left >= 0 && valuesAt(u, u.posToVal(left, "x"), u.posToVal(top, "y"));
  u.tip.hidden = !found;
  if (!found) return;
  u.tip.replaceChildren(element("b", "", found[0]), ...found[1].map(([series, value]) => {
    const row = element("div", ""), mark = element("i", "");
    mark.style.background = `var(--${series.colour})`;
    row.append(mark, `${series.name} ${value}`);
    return row;
  }));
  const room = u.over.clientWidth - u.tip.offsetWidth;
  u.tip.style.left = `${Math.max(0, Math.min(room, left < room / 2 ? left + 14 : left - u.tip.offsetWidth - 14))}px`;
}

function toggled(u, number, change) {  // a smoothed line hides with the thin one behind it; other bars move down
  if (number == null || change.show == null) return;
  u.series.forEach((other, i) => {
    if (i !== number && i && other.label === u.series[number].label && other.show !== change.show) u.setSeries(i, { show: change.show });
  });
  if (u.chart.bars) u.redraw();
}

function heightFor(figure, { spans, y }) {
  return spans ? 58 + 26 * y.ticks.length : figure.closest(".small") ? 150 : figure.classList.contains("wide") ? 240 : 220;
}

function create(figure, chart) {
  const box = figure.querySelector(".plot"), small = Boolean(figure.closest(".small"));
  const axis = { font: FONT, labelFont: FONT, labelSize: 16, labelGap: 0, stroke: () => css("soft"), ticks: { show: false },
                 grid: { stroke: () => css("rule"), width: 1 } };
  const u = new uPlot({
    width: box.clientWidth, height: heightFor(figure, chart), padding: [8, 10, 0, 0],
    scales: { x: { time: false, range: (_, low, high) => [low, high] }, y: { range: yRange } },
    series: [{}, ...chart.series.map(seriesOf)],
    axes: [
      { ...axis, label: small ? undefined : chart.x.label, size: 24, space: 60, grid: { show: false }, values: ticks,
        ticks: { stroke: () => css("grey"), size: 4, width: 1 }, border: { show: true, stroke: () => css("grey"), width: 1 },
        incrs: chart.x.whole ? STEPS.filter((step) => step >= 1) : STEPS,
        ...named(chart.x.ticks) },
      { ...axis, label: chart.y.label || undefined, space: 34, values: ticks, incrs: STEPS,
        size: (_, labels) => 12 + 6.4 * Math.max(1, ...(labels || []).map((label) => label.length)), ...named(chart.y.ticks) }],
    legend: { show: new Set(chart.series.map(({ name }) => name)).size > 1, live: false,
              markers: { width: 0, fill: (_, number) => `var(--${chart.series[number - 1].colour})` } },
    cursor: { y: false, points: { show: !chart.bars && !chart.spans }, drag: { x: true, y: false } },
    hooks: { init: [(made) => { made.tip = element("div", "tip"); made.tip.hidden = true; made.over.append(made.tip); }],
             draw: [decorate], setCursor: [showTip], setSeries: [toggled] },
  }, undefined, (made, start) => { made.chart = chart; start(); });
  box.append(u.root);
  return u;
}

function draw(figure, chart) {
  const box = figure.querySelector(".plot");
  if (!box.clientWidth) return;  // in a closed part of the page
  const before = plots.get(figure.id), names = JSON.stringify([chart.series.map(({ name }) => name), chart.bars && 1]);
  if (before && before.names === names) {
    const u = before.u, [low, high] = u.chart.x.range, zoomed = u.scales.x.min > low || u.scales.x.max < high;
    if (u.root.parentNode !== box) box.append(u.root);
    if (u.chart !== chart) {
      u.chart = chart;
      u.setData(dataOf(chart), !zoomed);
      if (zoomed) u.redraw();
    }
    if (u.width !== box.clientWidth) u.setSize({ width: box.clientWidth, height: heightFor(figure, chart) });
    u.syncRect(true);
    return;
  }
  if (before) before.u.destroy();
  const u = create(figure, chart);
  u.setData(dataOf(chart));
  plots.set(figure.id, { u, names });
}

function drawCharts(container) {  // again whenever a figure gets another width
  const source = container.querySelector("script.charts");
  if (!source) return;
  const charts = JSON.parse(source.textContent), again = ({ target }) => draw(target.parentNode, charts[target.dataset.chart]);
  const watch = new ResizeObserver((entries) => requestAnimationFrame(() => entries.forEach(again)));
  for (const box of container.querySelectorAll(".plot")) {
    again({ target: box });
    watch.observe(box);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(({ u }) => u.redraw()));
drawCharts(document.querySelector("main"));
