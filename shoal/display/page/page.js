"use strict";
// Whatever comes from a run is untrusted: it is only ever set as text.
const byId = id => document.getElementById(id), tags = {state: "", curves: ""}, charts = {};
let state = {runs: []}, curves = [], focus = 0, number = 0, image = null;

function element(kind, words, parent, name) {
  const node = document.createElement(kind);
  if (words !== undefined && words !== null) node.textContent = words;
  if (name) node.className = name;
  if (parent) parent.append(node);
  return node;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const two = value => String(value).padStart(2, "0"), all = Math.floor(seconds);
  if (all >= 3.6e6) return `${short(all / 86400)} d`;
  return `${Math.floor(all / 3600)}:${two(Math.floor(all / 60) % 60)}:${two(all % 60)}`;
}

async function ask(what) {
  const answer = await fetch(`${what}?have=${tags[what]}`, {cache: "no-store"});
  if (!answer.ok) throw new Error(answer.status);
  if (answer.status === 204) return null;
  const found = await answer.json();
  tags[what] = answer.headers.get("ETag");
  return found;
}

async function refresh() {
  if (document.hidden) return;
  try {
    const newer = await ask("state");
    if (newer) { state = newer; showState(); }
    const drawn = await ask("curves");
    if (drawn) { curves = drawn; showCurves(); }
    byId("link").textContent = "";
  } catch (error) {
    byId("link").textContent = "no connection: what you see is the last known state";
  }
  byId("link").className = byId("link").textContent ? "bad" : "";
}

function showState() {
  const place = byId("runs");
  place.replaceChildren();
  focus = Math.min(focus, state.runs.length - 1);
  state.runs.forEach((run, index) => {
    const button = element("button", null, place);
    element("i", null, button).style.background = COLOURS[index % COLOURS.length];
    element("span", run.name, button);
    element("small", run.silent ? "training, no news" : run.outcome, button);
    button.setAttribute("aria-pressed", index === focus);
    button.onclick = () => { focus = index; number = 0; byId("frame").removeAttribute("src"); showState(); };
  });
  const run = state.runs[focus];
  if (run) showRun(run);
}

function showRun(run) {
  document.title = `${run.name} · Shoal`;
  byId("done").value = run.total ? Math.min((run.steps || 0) / run.total, 1) : 0;
  const figures = [["steps", `${short(run.steps)} / ${short(run.total)}`], ["steps/s", short(run.steps_per_s)],
    ["updates/s", short(run.updates_per_s)], ["elapsed", duration(run.seconds)], ["time left", run.live ? duration(run.left) : "–"],
    ["training return", short(run.return)], ["last evaluation", short(run.last)], ["best evaluation", short(run.best)],
    ["target", short(run.target)], ["policy lag", short(run.metrics.lag)], ["queue fill", run.metrics.queue === undefined ? "–" : percent(run.metrics.queue)],
    ["episodes", short(run.episodes)], ["faults", short(run.faults)], ["checkpoint step", short(run.saved)]];
  const list = byId("figures");
  list.replaceChildren();
  for (const [name, value] of [["run", run.title], ...figures]) {
    const pair = element("div", null, list, name === "run" ? "all" : "");
    element("dt", name, pair);
    element("dd", value, pair);
  }
  const spoiled = run.unreadable ? `${run.unreadable} rows of metrics could not be read. ` : "";
  byId("problem").textContent = spoiled + run.problem;
  byId("flow").replaceChildren(flow(run));
  byId("advised").hidden = !run.advice.length;
  byId("advice").replaceChildren(...run.advice.map(line => element("li", line)));
  byId("film").hidden = !state.plays;
  showWorkers(run.workers);
  const log = byId("log"), below = log.scrollHeight - log.scrollTop - log.clientHeight < 40, written = run.log.join("\n");
  if (log.textContent !== written) {
    log.textContent = written;
    if (below) log.scrollTop = log.scrollHeight;
  }
}

function showWorkers(workers) {
  const table = byId("workers"), nodes = [...new Set(workers.map(worker => worker.node))];
  table.replaceChildren();
  const head = element("tr", null, table);
  for (const name of ["worker", "busy", "moves/s", "waits on"]) element("th", name, head);
  for (const node of nodes) {
    const there = workers.filter(worker => worker.node === node);
    if (nodes.length > 1 || node) {
      const rate = there.reduce((sum, worker) => sum + (worker.moves_per_s || 0), 0);
      element("th", `${node || "this machine"}: ${there.length} workers, ${short(rate)} moves/s`, element("tr", null, table)).colSpan = 4;
    }
    for (const worker of there) {
      const row = element("tr", null, table), trouble = [worker.away ? "disconnected" : "", worker.restarts ? `${worker.restarts} restarts` : "",
        worker.refused ? `${worker.refused} calls refused` : ""].filter(Boolean).join(", ");
      element("td", worker.name + (trouble ? ` (${trouble})` : ""), row, trouble ? "away" : "");
      const busy = element("td", null, row);
      element("meter", null, busy).value = worker.working || 0;
      busy.className = "busy";
      busy.append(" " + percent(worker.working));
      element("td", short(worker.moves_per_s), row);
      element("td", worker.waits.filter(([, part]) => part >= 0.005).map(([what, part]) => `${percent(part)} ${what}`).join(", "), row, "wait");
    }
  }
}

function line(index, kind, name, more) {
  const columns = curves[index][kind].columns;
  return columns[name] && columns[byId("axis").value]
    ? [{x: columns[byId("axis").value], y: columns[name], colour: COLOURS[index % COLOURS.length], ...more}] : [];
}

function showCurves() {
  const every = curves.map((_, index) => index), target = state.runs[focus] ? state.runs[focus].target : null;
  charts[""] = charts[""] || new Chart(byId("score"), "evaluation, and training (faint)");
  charts[""].show(every.flatMap(index => [...line(index, "train", "train/return", {faint: true}),
    ...line(index, "evaluation", "evaluation/return", {dots: true})]), target);
  const names = new Set(["speed/steps_per_s", "speed/updates_per_s", "learner/lag", "learner/queue"]);
  for (const run of curves) for (const kind of ["train", "evaluation"])
    for (const name of Object.keys(run[kind].columns)) if (name.includes("/")) names.add(name);
  for (const name of names) {
    const kind = name.startsWith("evaluation/") ? "evaluation" : "train", lines = every.flatMap(index => line(index, kind, name));
    if (!lines.length && !charts[name]) continue;
    charts[name] = charts[name] || new Chart(byId("metrics"), name.replace(/^.*?\//, name.startsWith("learner/") || name.startsWith("speed/") ? "" : "$&").replaceAll("_", " "));
    charts[name].show(lines);
  }
}

const pause = seconds => new Promise(done => setTimeout(done, 1000 * seconds));

// One frame after the other, so that a slow link only shows fewer of them; nobody looks, nothing plays.
async function film() {
  for (;;) {
    const inView = byId("film").getBoundingClientRect();
    if (document.hidden || !state.plays || !state.runs.length || inView.bottom < 0 || inView.top > innerHeight) { await pause(0.5); continue; }
    try {
      const run = focus, answer = await fetch(`frame?run=${run}&policy=${byId("policy").value}&after=${number}`, {cache: "no-store"});
      if (answer.status !== 200) { byId("caption").textContent = answer.status === 202 ? await answer.text() : ""; await pause(1); continue; }
      const facts = JSON.parse(answer.headers.get("X-Frame")), url = URL.createObjectURL(await answer.blob());
      if (run !== focus) { URL.revokeObjectURL(url); continue; }
      number = facts.number;
      byId("frame").src = url;
      if (image) URL.revokeObjectURL(image);
      image = url;
      byId("caption").textContent = `${facts.checkpoint}, trained for ${short(facts.trained)} steps · episode ${facts.episode}, step ${facts.step}, score ${short(facts.score)}`;
    } catch (error) { await pause(2); }
  }
}

byId("axis").onchange = showCurves;
byId("policy").onchange = () => { number = 0; };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Object.values(charts).forEach(chart => chart.draw()));
document.addEventListener("visibilitychange", refresh);
refresh();
setInterval(refresh, 2000);
film();
