"use strict";
// Shows and hides what the page already holds, and reads out the values under the pointer.
for (const figure of document.querySelectorAll("figure")) attach(figure);

function attach(figure) {
  const panels = [...figure.querySelectorAll(".panel")];
  const hidden = new Set();

  const choose = () => {
    const wanted = kind => figure.querySelector(`[data-switch="${kind}"]`)?.checked ? "1" : "0";
    for (const panel of panels) {
      const views = [...panel.querySelectorAll(".view")];
      // A panel without such a view keeps the nearest: the axis matters more than the smoothing.
      const match = v => 2 * (v.dataset.log === wanted("log")) + (v.dataset.smooth === wanted("smooth"));
      const best = views.reduce((a, b) => match(b) > match(a) ? b : a);
      for (const view of views) view.hidden = view !== best;
    }
  };
  const toggle = () => {
    for (const group of figure.querySelectorAll(".panel .series")) {
      group.classList.toggle("off", hidden.has(group.dataset.name));
    }
  };
  for (const box of figure.querySelectorAll("[data-switch]")) box.addEventListener("change", choose);
  for (const box of figure.querySelectorAll("[data-series]")) {
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(box.dataset.series); else hidden.add(box.dataset.series);
      toggle();
    });
  }
  for (const view of figure.querySelectorAll(".view")) hover(view, hidden);
}

function hover(view, hidden) {
  const svg = view.querySelector("svg"), source = view.querySelector("script");
  if (!svg || !source || !svg.dataset.x) return;
  const data = JSON.parse(source.textContent);
  const axis = text => {
    const [start, end, low, high, log] = text.split(" ").map(Number);
    const part = v => log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
    return {
      place: v => start + part(v) * (end - start),
      value: p => { const t = (p - start) / (end - start); return log ? low * Math.pow(high / low, t) : low + t * (high - low); },
      inside: p => p >= Math.min(start, end) && p <= Math.max(start, end), start, end,
    };
  };
  const x = axis(svg.dataset.x), y = axis(svg.dataset.y);
  const xs = [...new Set(data.series.flatMap(s => s.x))].sort((a, b) => a - b);
  if (!xs.length) return;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("class", "cursor");
  const tip = document.createElement("div");
  tip.className = "tip plot";
  tip.setAttribute("role", "status");
  let at = -1;

  const nearest = (list, v) => {
    let low = 0, high = list.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (list[mid] < v) low = mid + 1; else high = mid; }
    return low > 0 && Math.abs(x.place(list[low - 1]) - x.place(v)) <= Math.abs(x.place(list[low]) - x.place(v)) ? low - 1 : low;
  };
  const text = v => Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(5));
  const show = index => {
    at = index;
    const here = xs[at], rows = [];
    for (const s of data.series) {
      if (hidden.has(s.name)) continue;
      const i = nearest(s.x, here);
      // A series without a point nearby is not read out.
      if (i < 0 || !s.x.length || Math.abs(x.place(s.x[i]) - x.place(here)) > 3) continue;
      rows.push({ style: s.style, name: s.name, y: s.y[i], low: s.low?.[i], high: s.high?.[i] });
    }
    rows.sort((a, b) => b.y - a.y);
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = `${data.x} ${text(here)}`;
    tip.append(head);
    for (const r of rows) {
      const row = document.createElement("div"), name = document.createElement("span"), value = document.createElement("span");
      row.className = `row s${r.style}`;
      name.append(document.createElement("i"), r.name);
      value.textContent = text(r.y) + (r.low !== undefined && r.low !== r.high ? ` [${text(r.low)}, ${text(r.high)}]` : "");
      row.append(name, value);
      tip.append(row);
    }
    const px = x.place(here);
    line.setAttribute("d", `M${px} ${y.end}V${y.start}`);
    svg.append(line);
    view.append(tip);
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const left = px * scale + 12, width = tip.offsetWidth;
    tip.style.left = `${Math.max(0, left + width > box.width ? px * scale - width - 12 : left)}px`;
    tip.style.top = `${(y.end + 6) * scale}px`;
  };
  const hide = () => { at = -1; line.remove(); tip.remove(); };
  svg.tabIndex = 0;
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const px = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    if (x.inside(px)) show(nearest(xs, x.value(px))); else hide();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step && event.key !== "Escape") return;
    event.preventDefault();
    if (!step) return hide();
    show(Math.min(xs.length - 1, Math.max(0, at < 0 ? (step > 0 ? 0 : xs.length - 1) : at + step)));
  });
}
