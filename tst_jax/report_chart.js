// The loss curves of report.html: drag to zoom, double-click to go back, point to read.
// {switch: {unit: x}, curves: [{label, color, dashed, faint, x: {unit: [x]}, loss: [nats]}]}
(() => {
const DATA = JSON.parse(document.getElementById("data").textContent);
const svg = document.getElementById("chart"), unitBox = document.getElementById("unit");
const W = 920, H = 420, left = 62, right = 14, top = 14, bottom = 44;
const NS = "http://www.w3.org/2000/svg";
let view = null, drag = null;

const make = (name, attributes, text) => {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  svg.appendChild(node);
  return node;
};
const whole = (unit) => {
  const xs = DATA.curves.flatMap((c) => c.x[unit]), ys = DATA.curves.flatMap((c) => c.loss);
  const after = DATA.curves.flatMap((c) => c.loss.filter((_, i) => c.x.step[i] > DATA.switch.step));
  const low = Math.min(...ys), high = Math.max(...(after.length ? after : ys));
  const room = 0.05 * (high - low) || 0.01;
  return { x: [0, Math.max(...xs)], y: [low - room, high + room] };
};
const ticks = ([from, to]) => {
  const rough = (to - from) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const found = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++) found.push(k * step);
  return found;
};
const short = (v) => {
  const a = Math.abs(v);
  for (const [size, mark] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (a >= size) return +(v / (mark === "k" ? 1e3 : size)).toPrecision(4) + mark;
  return String(+v.toPrecision(6));
};
const toX = (v) => left + ((v - view.x[0]) / (view.x[1] - view.x[0])) * (W - left - right);
const toY = (v) => H - bottom - ((v - view.y[0]) / (view.y[1] - view.y[0])) * (H - top - bottom);
const fromX = (p) => view.x[0] + ((p - left) / (W - left - right)) * (view.x[1] - view.x[0]);
const fromY = (p) => view.y[0] + ((H - bottom - p) / (H - top - bottom)) * (view.y[1] - view.y[0]);

function draw() {
  const unit = unitBox.value;
  view = view || whole(unit);
  svg.replaceChildren();
  const clip = make("clipPath", { id: "inside" });
  const box = document.createElementNS(NS, "rect");
  for (const [k, v] of Object.entries({ x: left, y: top, width: W - left - right, height: H - top - bottom }))
    box.setAttribute(k, v);
  clip.appendChild(box);
  for (const v of ticks(view.x)) {
    make("line", { x1: toX(v), x2: toX(v), y1: top, y2: H - bottom, class: "grid" });
    make("text", { x: toX(v), y: H - bottom + 18, "text-anchor": "middle" }, short(v));
  }
  for (const v of ticks(view.y)) {
    make("line", { x1: left, x2: W - right, y1: toY(v), y2: toY(v), class: "grid" });
    make("text", { x: left - 8, y: toY(v) + 4, "text-anchor": "end" }, short(v));
  }
  make("text", { x: (W + left) / 2, y: H - 6, "text-anchor": "middle" }, unit);
  const at = DATA.switch[unit];
  if (at > view.x[0] && at < view.x[1]) {
    make("line", { x1: toX(at), x2: toX(at), y1: top, y2: H - bottom, class: "switch" });
    make("text", { x: toX(at) + 5, y: top + 12 }, "switch");
  }
  for (const c of DATA.curves) {
    const points = c.loss.map((v, i) => `${toX(c.x[unit][i])},${toY(v)}`).join(" ");
    const style = { points, stroke: c.color, "clip-path": "url(#inside)", class: "curve" };
    if (c.dashed) style["stroke-dasharray"] = "5 4";
    if (c.faint) style.opacity = 0.3;
    make("polyline", style);
  }
}
const place = (event) => {
  const box = svg.getBoundingClientRect();
  return [((event.clientX - box.left) / box.width) * W, ((event.clientY - box.top) / box.height) * H];
};
svg.addEventListener("pointerdown", (event) => {
  drag = place(event);
  svg.setPointerCapture(event.pointerId);
});
svg.addEventListener("pointermove", (event) => {
  const [x, y] = place(event), unit = unitBox.value;
  if (drag) {
    svg.querySelector(".zoom")?.remove();
    make("rect", {
      x: Math.min(x, drag[0]), y: Math.min(y, drag[1]), width: Math.abs(x - drag[0]),
      height: Math.abs(y - drag[1]), class: "zoom",
    });
    return;
  }
  let best = null, distance = 20;
  for (const c of DATA.curves)
    c.loss.forEach((v, i) => {
      const d = Math.hypot(toX(c.x[unit][i]) - x, toY(v) - y);
      if (d < distance) [best, distance] = [[c, i], d];
    });
  const [c, i] = best || [];
  document.getElementById("said").textContent = c
    ? `${c.label}: step ${c.x.step[i].toLocaleString()}, ${short(c.x["data tokens"][i])} data tokens, ` +
      `${short(c.x.FLOPs[i])} FLOPs, held-out loss ${c.loss[i].toFixed(4)}`
    : "Drag to zoom, double-click to go back.";
});
svg.addEventListener("pointerup", (event) => {
  const [x, y] = place(event);
  if (drag && Math.abs(x - drag[0]) > 8 && Math.abs(y - drag[1]) > 8) {
    const [x0, x1] = [x, drag[0]].sort((a, b) => a - b), [y0, y1] = [y, drag[1]].sort((a, b) => a - b);
    view = { x: [fromX(x0), fromX(x1)], y: [fromY(y1), fromY(y0)] };
  }
  drag = null;
  draw();
});
svg.addEventListener("dblclick", () => { view = null; draw(); });
unitBox.addEventListener("change", () => { view = null; draw(); });
draw();
})();
