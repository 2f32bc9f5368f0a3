"use strict";
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#777777"];

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit) return +(value / unit).toPrecision(3) + " " + name;
  return size && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(3));
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(part => part * power).find(part => part >= raw), found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6 && found.length < 20; tick += step)
    found.push(Math.abs(tick) < step / 1e6 ? 0 : tick);
  return found;
}

// A chart of lines {x, y, colour, faint, dots}; null in y is a gap that the line passes over.
class Chart {
  constructor(place, title) {
    this.canvas = document.createElement("canvas");
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    this.reading = document.createElement("output");
    const name = document.createElement("span");
    name.textContent = title;
    caption.append(name, this.reading);
    figure.append(caption, this.canvas);
    place.append(figure);
    this.title = title;
    this.lines = [];
    this.canvas.setAttribute("role", "img");
    this.canvas.onpointermove = event => { this.at = event.offsetX; this.draw(); };
    this.canvas.onpointerleave = () => { this.at = null; this.draw(); };
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(lines, level) {
    this.lines = lines;
    this.level = level;
    this.draw();
  }

  bounds() {
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const {x, y} of this.lines)
      for (let i = 0; i < y.length; i++)
        if (y[i] !== null && x[i] !== null) {
          left = Math.min(left, x[i]); right = Math.max(right, x[i]);
          low = Math.min(low, y[i]); high = Math.max(high, y[i]);
        }
    if (left > right) return null;
    if (this.level !== null && this.level !== undefined) { low = Math.min(low, this.level); high = Math.max(high, this.level); }
    if (right === left) right = left + 1;
    const spare = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.1 || 1;
    return [left, right, low - spare, high + spare];
  }

  draw() {
    const {canvas} = this, ratio = devicePixelRatio || 1, wide = canvas.clientWidth, tall = canvas.clientHeight;
    if (!wide) return;
    canvas.width = wide * ratio;
    canvas.height = tall * ratio;
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement), bounds = this.bounds();
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = style.getPropertyValue("--dim");
    this.reading.textContent = "";
    if (!bounds) { pen.fillText("no values yet", 8, 20); return; }
    const [left, right, low, high] = bounds, inset = 46, base = tall - 18;
    const toX = value => inset + (value - left) / (right - left) * (wide - inset - 8);
    const toY = value => base - (value - low) / (high - low) * (base - 6);
    pen.strokeStyle = style.getPropertyValue("--line");
    pen.textAlign = "right";
    for (const tick of ticks(low, high, tall / 45)) {
      pen.beginPath(); pen.moveTo(inset, toY(tick)); pen.lineTo(wide - 8, toY(tick)); pen.stroke();
      pen.fillText(short(tick), inset - 5, toY(tick) + 4);
    }
    pen.textAlign = "center";
    for (const tick of ticks(left, right, wide / 90)) pen.fillText(short(tick), Math.min(toX(tick), wide - 20), tall - 4);
    if (this.level !== null && this.level !== undefined) {
      pen.setLineDash([5, 4]); pen.strokeStyle = style.getPropertyValue("--good");
      pen.beginPath(); pen.moveTo(inset, toY(this.level)); pen.lineTo(wide - 8, toY(this.level)); pen.stroke();
      pen.setLineDash([]);
    }
    for (const line of this.lines) this.trace(pen, line, toX, toY);
    this.read(pen, toX, wide, base);
  }

  trace(pen, {x, y, colour, faint, dots}, toX, toY) {
    pen.strokeStyle = pen.fillStyle = colour;
    pen.globalAlpha = faint ? 0.4 : 1;
    pen.lineWidth = faint ? 1 : 1.7;
    pen.beginPath();
    y.forEach((value, i) => { if (value !== null && x[i] !== null) pen.lineTo(toX(x[i]), toY(value)); });
    pen.stroke();
    if (dots || y.length === 1)
      y.forEach((value, i) => {
        if (value !== null && x[i] !== null) { pen.beginPath(); pen.arc(toX(x[i]), toY(value), 2, 0, 7); pen.fill(); }
      });
    pen.globalAlpha = pen.lineWidth = 1;
  }

  read(pen, toX, wide, base) {
    const values = [];
    for (const {x, y, faint} of this.lines) {
      let best = -1, gap = Infinity;
      y.forEach((value, i) => {
        const far = this.at ? Math.abs(toX(x[i]) - this.at) : wide - i;
        if (value !== null && x[i] !== null && far <= gap) { gap = far; best = i; }
      });
      if (best >= 0 && !faint) values.push(short(y[best]));
    }
    this.reading.textContent = values.join(" · ");
    this.canvas.setAttribute("aria-label", `${this.title}: ${values.join(", ")}`);
    if (this.at) { pen.beginPath(); pen.moveTo(this.at, 4); pen.lineTo(this.at, base); pen.stroke(); }
  }
}
