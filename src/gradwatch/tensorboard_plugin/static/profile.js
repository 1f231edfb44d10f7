// The profile over depth at a step: gradient, signal and update of each layer in model order, beside what is usual there.

import { envelope } from "./api.js";
import { numberAxis } from "./axes.js";
import { NOT_FINITE, SERIES, ZERO } from "./colour.js";
import { drawing, el, fill, swatch, themed } from "./dom.js";
import { count, NOT_A_NUMBER, short } from "./format.js";

const HEIGHT = 150;
const LEFT = 52;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const MANY = 60; // layers of which each has no point of its own

/** `profile.show(panels, step, statistics)` draws, with null hides it; `act`: open(layer), pin(step). */
export function depthProfile(act) {
  const title = el("h2");
  const move = (by) => el("button", { class: "plain", title: `${by < 0 ? "Earlier" : "Later"} by a step`, onclick: () => act.pin(step + by) }, by < 0 ? "◀" : "▶");
  const charts = el("div", { class: "depths" });
  const key = el("p", { class: "legend" });
  const element = el(
    "section",
    { class: "profile", hidden: true, "aria-label": "Profile over depth" },
    el("div", { class: "row" }, title, move(-1), move(1), el("button", { class: "plain close", onclick: () => act.pin(null) }, "Close"), key),
    charts,
  );
  let [turn, step] = [0, null];

  async function show(panels, wanted, statistics) {
    turn += 1;
    const mine = turn;
    step = wanted;
    element.hidden = step == null;
    if (step == null) return;
    title.textContent = `Over depth at step ${count(step)}`;
    const answers = await Promise.all(panels.map((panel) => envelope("profile", { run: panel.run.run, step }).catch(() => null)));
    if (mine !== turn) return;
    const places = panels[0].rows.flatMap((row) => row.members);
    const names = places.map((n) => panels[0].run.names[n]);
    const status = places.map((n) => panels[0].status[n]);
    const found = [...new Set(answers.flatMap((answer) => answer?.about.statistics ?? []))];
    const titled = (name) => statistics.find((each) => each.name === name)?.title ?? name;
    fill(
      key,
      panels.length > 1
        ? panels.map((panel, i) => el("span", {}, swatch(SERIES[i]), panel.run.run))
        : [el("span", {}, swatch(SERIES[0]), `step ${count(step)}`), el("span", {}, swatch("quiet"), "usual")],
    );
    const made = found.map((name) => depthChart({ name, title: titled(name), names, status, lines: linesOf(name, panels, answers, names), act }));
    fill(charts, made.map(({ element: chart }) => chart));
    made.forEach(({ draw }) => draw());
  }

  return { element, show };
}

/** For each run what `statistic` is at the layers `names`, and what is usual for them. */
function linesOf(statistic, panels, answers, names) {
  return panels.flatMap((panel, i) => {
    const arrays = answers[i]?.arrays;
    if (!arrays?.[`${statistic} low`]) return [];
    const places = names.map((name) => panel.run.names.indexOf(name));
    const pick = (kind) => places.map((n) => (n < 0 ? NaN : arrays[`${statistic} ${kind}`][n]));
    return [{ run: panel.run.run, colour: SERIES[i], numbers: pick("low"), states: pick("states"), at: pick("at"), usual: pick("usual") }];
  });
}

function depthChart({ name, title, names, status, lines, act }) {
  const canvas = el("canvas", { class: "chart" });
  const readout = el("p", { class: "readout quiet", "aria-live": "polite" });
  const element = el(
    "div",
    { class: "charted depth", tabindex: 0, role: "img", "aria-label": `${title} by layer`, "data-statistic": name },
    el("h3", {}, title),
    canvas,
    readout,
  );
  let cursor = null;

  const x = (place, width) => LEFT + ((place + 0.5) / names.length) * (width - LEFT - RIGHT);

  function extent() {
    const all = lines.flatMap((line) => [...line.numbers, ...line.usual]).filter((number) => number > 0).map(Math.log10);
    const finite = all.filter(Number.isFinite);
    if (!finite.length) return [-1, 1];
    const [low, high] = [Math.min(...finite), Math.max(...finite)];
    const room = Math.max(1, 1.1 * (high - low));
    return [(low + high - room) / 2, (low + high + room) / 2];
  }

  function draw() {
    const width = element.clientWidth;
    if (!width) return;
    const context = drawing(canvas, width, HEIGHT);
    const [low, high] = extent();
    const bottom = HEIGHT - BOTTOM;
    const yOf = (log) => bottom - ((log - low) / (high - low)) * (bottom - TOP);
    const y = (number) => yOf(Math.log10(number));
    numberAxis(context, { left: LEFT, right: width - RIGHT, low, high, log: true, y: yOf });
    context.fillStyle = themed("quiet");
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillText("first layer", LEFT, bottom + 6);
    context.textAlign = "right";
    context.fillText("last", width - RIGHT, bottom + 6);
    if (cursor !== null) {
      context.fillStyle = themed("cross");
      context.fillRect(x(cursor, width) - 2, TOP, 4, bottom - TOP);
    }
    status.forEach((severity, place) => {
      if (!severity) return;
      context.fillStyle = themed(severity);
      context.fillRect(x(place, width) - 1.5, bottom + 1, 3, 4);
    });
    for (const line of lines) {
      stroke(context, line.numbers, line.colour, width, y, names.length > MANY ? 1 : 1.6);
      if (lines.length === 1) stroke(context, line.usual, "quiet", width, y, 1.2);
      line.states.forEach((state, place) => {
        const zero = line.numbers[place] === 0;
        if (!zero && !(state >= NOT_A_NUMBER)) return;
        context.fillStyle = `rgb(${zero ? ZERO : NOT_FINITE})`;
        context.fillRect(x(place, width) - 1.5, zero ? bottom - 6 : TOP, 3, 6);
      });
    }
  }

  function stroke(context, numbers, colour, width, y, thick) {
    context.strokeStyle = context.fillStyle = themed(colour);
    context.lineWidth = thick;
    context.beginPath();
    let broken = true;
    numbers.forEach((number, place) => {
      if (!(number > 0) || !Number.isFinite(number)) {
        broken = true;
        return;
      }
      if (broken) context.moveTo(x(place, width), y(number));
      else context.lineTo(x(place, width), y(number));
      if (numbers.length <= MANY) context.fillRect(x(place, width) - 1.5, y(number) - 1.5, 3, 3);
      broken = false;
    });
    context.stroke();
  }

  function read(place) {
    cursor = place;
    draw();
    readout.textContent = place === null ? "" : `${names[place]}: ${lines.map((line) => worded(line, place)).join("; ")}`;
  }

  function worded({ run, numbers, states, at, usual }, place) {
    const number = numbers[place];
    const when = Number.isFinite(number) || states[place] >= NOT_A_NUMBER ? ` (step ${count(at[place])})` : "";
    const text = states[place] >= NOT_A_NUMBER ? "not finite" : Number.isFinite(number) ? short(number) : "no number";
    return `${lines.length > 1 ? `${run}: ` : ""}${text}${when}, usual ${short(usual[place])}`;
  }

  const placeAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const place = Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * names.length);
    return place >= 0 && place < names.length ? place : null;
  };
  canvas.addEventListener("pointermove", (event) => read(placeAt(event)));
  canvas.addEventListener("pointerleave", () => read(null));
  canvas.addEventListener("click", (event) => {
    const place = placeAt(event);
    if (place !== null) act.open(names[place]);
  });
  element.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Enter" && cursor !== null) act.open(names[cursor]);
    if (!way) return;
    event.preventDefault();
    read(Math.max(0, Math.min(names.length - 1, (cursor ?? (way > 0 ? -1 : names.length)) + way * (event.shiftKey ? 10 : 1))));
  });
  element.addEventListener("blur", () => read(null));
  new ResizeObserver(draw).observe(element);
  return { element, draw };
}
