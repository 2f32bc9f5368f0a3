"use strict";
// The dataflow of a run: workers are round, services square; an arrow on which workers wait long is drawn as waiting.
function drawn(kind, attributes, words) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (words !== undefined) node.textContent = words;
  return node;
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

const percent = part => part === null ? "–" : Math.round(100 * part) + "\u00a0%";

// How workers of one kind spend their time: the share at work, and on each service.
function group(workers, pattern) {
  const found = workers.filter(worker => pattern.test(worker.name)), waits = {};
  for (const worker of found)
    for (const [what, part] of worker.waits) {
      const service = what.split(".")[0].replace(/^.*\//, "").replace(/-\d+$/, "");
      waits[service] = (waits[service] || 0) + part / found.length;
    }
  return {count: found.length, busy: mean(found.map(worker => worker.working).filter(part => part !== null)), waits};
}

function flow(run) {
  const svg = drawn("svg", {viewBox: "0 0 460 262", role: "img", "aria-label": "dataflow"});
  const tip = drawn("marker", {id: "tip", viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto"});
  tip.append(drawn("path", {d: "M0 0 L10 5 L0 10 z"}));
  svg.append(tip);
  const box = (x, y, kind, name, below, waits) => {
    svg.append(drawn("rect", {x, y, width: 122, height: 44, rx: kind === "worker" ? 20 : 2, class: kind}));
    svg.append(drawn("text", {x: x + 61, y: y + 19, "text-anchor": "middle"}, name));
    svg.append(drawn("text", {x: x + 61, y: y + 35, "text-anchor": "middle", class: "small"}, below));
    const [service, part] = Object.entries(waits || {}).sort((one, other) => other[1] - one[1])[0] || ["", 0];
    if (part >= 0.01)
      svg.append(drawn("text", {x: x + 61, y: y - 6, "text-anchor": "middle", class: "small wait"}, `waits ${percent(part)} on ${service}`));
  };
  const arrow = (path, x, y, words, part) => {
    svg.append(drawn("path", {d: path, "marker-end": "url(#tip)", "stroke-width": 1 + 4 * (part || 0), class: part >= 0.2 ? "waits" : ""}));
    if (words) svg.append(drawn("text", {x, y, "text-anchor": "middle", class: "small"}, words));
  };
  const rate = name => `${short(run[name])} ${name.split("_")[0]}/s`, workers = run.workers;
  const evaluator = group(workers, /^evaluator/), lag = run.metrics.lag, fill = run.metrics.queue;
  const acting = group(workers, /(^|\/)(actor|gradient)-/), learner = group(workers, /^learner|^overseer/);
  const federated = workers.some(worker => worker.name === "overseer"), gradient = !learner.count;
  const middle = federated ? "averager" : gradient ? "shared network" : "store";
  box(0, 40, "worker", `${acting.count || ""} ${federated || gradient ? "gradient" : "actor"}${acting.count === 1 ? "" : "s"}`, `busy ${percent(acting.busy)}`, acting.waits);
  box(169, 40, "service", middle, fill === undefined || fill === null ? rate("updates_per_s") : `${percent(fill)} full`);
  if (!gradient) box(338, 40, "worker", federated ? "overseer" : learner.count > 1 ? `${learner.count} learners` : "learner", `busy ${percent(learner.busy)}`, learner.waits);
  box(169, 130, "service", "weights", lag === undefined || lag === null ? "" : `policy lag ${short(lag)}`);
  box(169, 212, "worker", "evaluator", `last ${short(run.last)}`, {});
  arrow("M122 62 H169", 145, 100, rate("steps_per_s"), acting.waits[federated ? "averager" : "store"]);
  if (gradient) arrow("M230 84 V130", 0, 0, "");
  else {
    arrow("M291 62 H338", 315, 100, rate("updates_per_s"), learner.waits.store);
    arrow("M399 84 V152 H291", 0, 0, "");
  }
  arrow("M169 152 H61 V84", 0, 0, "", acting.waits.parameters);
  arrow("M230 174 V212", 0, 0, "", evaluator.waits.parameters >= 0.9 ? 0 : evaluator.waits.parameters);
  return svg;
}
