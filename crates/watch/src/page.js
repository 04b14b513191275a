// The live part: asks once a second what is new, and puts it in the place of what was there.
{
  const at = id => document.getElementById(id);
  const runs = new Map();
  const shown = new Map();
  let version = 0, tag = "", most = 256, failures = 0;
  let chosen = new Set(location.hash.slice(1).split(",").filter(Boolean));
  // Until somebody chooses, the choice is ours: runs that begin later and have the name of those that are shown join them.
  let ours = chosen.size === 0, suggested = ours;
  const set = name => name.slice(0, name.lastIndexOf("-"));

  const ask = async (path, options = {}) => {
    const response = await fetch(path, { cache: "no-store", ...options });
    if (response.status === 403) throw new Error("the server was started anew: open the address that it printed");
    return response;
  };

  const age = seconds => seconds === null ? "" : seconds < 90 ? `${seconds}\u00a0s\u00a0ago`
    : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : seconds < 172800 ? `${Math.round(seconds / 3600)} h ago`
    : `${Math.round(seconds / 86400)} days ago`;

  const matching = () => {
    const words = at("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const order = { running: 0, stopped: 1, waiting: 2, finished: 3, diverged: 3, gone: 4 };
    return [...runs.values()]
      .filter(run => words.every(word => `${run.name} ${run.state}`.toLowerCase().includes(word)))
      .sort((a, b) => order[a.state] - order[b.state] || b.time - a.time || (a.name < b.name ? -1 : 1));
  };

  const LISTED = 200;
  const list = () => {
    const all = matching(), items = [];
    for (const run of all.slice(0, LISTED)) {
      const item = document.createElement("li"), label = document.createElement("label"), box = document.createElement("input");
      const name = document.createElement("span"), what = document.createElement("span"), state = document.createElement("span");
      box.type = "checkbox";
      box.checked = chosen.has(run.key);
      box.dataset.run = run.key;
      name.className = "name";
      name.textContent = run.name;
      what.className = "what";
      state.className = `state ${run.state}`;
      state.textContent = run.state;
      what.append(state, [run.step ? ` · step ${run.step}` : "", run.value ? ` · ${run.value}` : "", run.age === null ? "" : ` · ${age(run.age)}`].join(""));
      label.append(box, name, what);
      item.append(label);
      items.push(item);
    }
    const list = at("runs"), focus = document.activeElement?.dataset?.run, top = list.scrollTop;
    list.replaceChildren(...items);
    list.scrollTop = top;
    if (focus) list.querySelector(`[data-run="${focus}"]`)?.focus();
    const more = all.length > LISTED ? `, the first ${LISTED} are listed` : "";
    at("count").textContent = `${all.length} of ${runs.size} runs${more}; ${chosen.size} shown`;
  };

  const choose = keys => {
    chosen = new Set([...keys].slice(0, most));
    history.replaceState(null, "", chosen.size ? `#${[...chosen].join(",")}` : location.pathname);
    tag = "";
    list();
    // What goes wrong is said when the next second asks again.
    look().catch(() => {});
  };

  // What a reader has switched or unfolded stays so when a figure is drawn anew.
  const switches = section => {
    const state = new Map();
    section.querySelectorAll("figure").forEach((figure, i) => {
      for (const box of figure.querySelectorAll("[data-switch], [data-series]")) {
        const kind = box.dataset.switch ? `switch ${box.dataset.switch}` : `series ${box.dataset.series}`;
        state.set(`${i} ${kind}`, box.checked);
      }
    });
    section.querySelectorAll("details").forEach((details, i) => state.set(`details ${i}`, details.open));
    return state;
  };
  const restore = (section, state) => {
    section.querySelectorAll("figure").forEach((figure, i) => {
      attach(figure);
      for (const box of figure.querySelectorAll("[data-switch], [data-series]")) {
        const kind = box.dataset.switch ? `switch ${box.dataset.switch}` : `series ${box.dataset.series}`;
        const checked = state.get(`${i} ${kind}`);
        if (checked !== undefined && checked !== box.checked) {
          box.checked = checked;
          box.dispatchEvent(new Event("change"));
        }
      }
    });
    section.querySelectorAll("details").forEach((details, i) => { details.open = state.get(`details ${i}`) ?? false; });
  };

  const show = parts => {
    const main = at("sections"), there = new Set();
    let before = null, waits = false;
    for (const part of parts) {
      there.add(part.id);
      let entry = shown.get(part.id);
      if (!entry) {
        const section = document.createElement("section"), title = document.createElement("h2"), body = document.createElement("div");
        section.dataset.id = part.id;
        section.append(title, body);
        entry = { section, title, body, html: "" };
        shown.set(part.id, entry);
      }
      const next = before ? before.nextSibling : main.firstChild;
      if (entry.section !== next) main.insertBefore(entry.section, next);
      before = entry.section;
      entry.title.textContent = part.title;
      if (entry.html === part.html) continue;
      // Values that somebody is reading stay until the pointer leaves.
      if (entry.section.querySelector(".tip")) { waits = true; continue; }
      const state = switches(entry.section), left = [...entry.body.querySelectorAll(".table")].map(t => t.scrollLeft);
      entry.html = part.html;
      entry.body.innerHTML = part.html;
      restore(entry.section, state);
      entry.body.querySelectorAll(".table").forEach((table, i) => { table.scrollLeft = left[i] ?? 0; });
    }
    for (const [id, entry] of shown) if (!there.has(id)) { entry.section.remove(); shown.delete(id); }
    at("empty")?.remove();
    if (!parts.length) {
      const text = document.createElement("p");
      text.id = "empty";
      text.textContent = runs.size ? "No run is chosen: tick some in the list." : "There is no run yet; it will appear here.";
      main.replaceChildren(text);
      shown.clear();
    }
    return !waits;
  };

  const look = async () => {
    const keys = [...chosen].join(",");
    const response = await ask(`/view?runs=${keys}`, tag ? { headers: { "If-None-Match": tag } } : {});
    if (response.status === 304 || keys !== [...chosen].join(",")) return;
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const view = await response.json();
    tag = show(view.sections) ? response.headers.get("ETag") ?? "" : "";
  };

  const tick = async () => {
    const answer = await ask(`/list?since=${version}`);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const news = await answer.json();
    const now = Date.now();
    const sets = new Set([...chosen].map(key => runs.get(key)).filter(Boolean).map(run => set(run.name)));
    const joins = news.runs.filter(([key, name]) => ours && !suggested && !runs.has(key) && sets.has(set(name))).map(([key]) => key);
    for (const [key, name, state, step, value, age] of news.runs) runs.set(key, { key, name, state, step, value, age, time: age === null ? 0 : now - 1000 * age });
    most = news.most;
    for (const run of runs.values()) if (run.time) run.age = Math.max(0, Math.round((now - run.time) / 1000));
    if (suggested && news.first.length) {
      suggested = false;
      choose(news.first);
    } else if (joins.length) choose([...chosen, ...joins]);
    if (version !== news.version || version === 0 || failures) list();
    version = news.version;
    at("machine").textContent = [news.machine, ...news.problems].filter(Boolean).join(" · ");
    await look();
    const running = [...runs.values()].filter(run => run.state === "running").length;
    document.title = running ? `${running} running · Runs` : "Runs";
  };

  const loop = async () => {
    if (!document.hidden) {
      try {
        await tick();
        failures = 0;
        at("connection").hidden = true;
      } catch (error) {
        failures += 1;
        // Started anew, it may know other runs.
        version = 0;
        at("connection").hidden = false;
        at("connection").textContent = `No answer (${error.message}); what is shown is what was last known. Trying again.`;
      }
    }
    setTimeout(loop, Math.min(1000 * 2 ** Math.min(failures, 4), 15000));
  };

  const say = text => {
    at("said").textContent = text;
    at("said").hidden = false;
    clearTimeout(say.timer);
    say.timer = setTimeout(() => { at("said").hidden = true; }, 8000);
  };

  const chooses = keys => { ours = false; choose(keys); };
  at("filter").addEventListener("input", list);
  at("all").addEventListener("click", () => chooses(matching().map(run => run.key)));
  at("none").addEventListener("click", () => chooses([]));
  at("runs").addEventListener("change", event => {
    const key = event.target.dataset.run, next = new Set(chosen);
    if (event.target.checked) next.add(key); else next.delete(key);
    chooses(next);
  });
  at("sections").addEventListener("click", async event => {
    const key = event.target.dataset?.stop;
    if (!key) return;
    event.target.disabled = true;
    event.target.textContent = "stopping …";
    try {
      const response = await ask(`/stop?run=${key}`, { method: "POST" });
      const answer = await response.json();
      say(answer.done ?? answer.refused);
    } catch (error) {
      say(`It was not asked to stop: ${error.message}`);
    }
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) failures = 0; });
  loop();
}
