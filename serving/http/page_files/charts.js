// Charts of the server, from /metrics every two seconds.

import { find, make, makeSvg, percent, say } from "./dom.js";
import { parse, total } from "./metrics.js";
import { positionRow } from "./run.js";

const PERIOD = 2000; // milliseconds
const POINTS = 60;
const WIDTH = 240;
const HEIGHT = 44;

const number = (value) => value.toFixed(0 < value && value < 10 ? 1 : 0);
const count = (value) => value.toFixed(0);

// One line chart. Its lines have names; a value of null leaves a gap.
class Chart {
  constructor(title, format, names, least = 0) {
    this._format = format;
    this._least = least;
    this._names = names;
    this._values = names.map(() => []);
    this._now = make("span", "now", "–");
    this._top = make("span", "top-value");
    this._paths = names.map((_, i) => makeSvg("path", { class: `series series-${i}` }));
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    this._svg = makeSvg("svg", box);
    this._svg.append(...this._paths);
    const head = make("div", "chart-head", make("h3", "", title), this._now);
    this.element = make("div", "chart", head, make("div", "plot", this._top, this._svg));
    this._title = title;
  }

  push(values) {
    values.forEach((value, i) => {
      this._values[i].push(value);
      if (this._values[i].length > POINTS) this._values[i].shift();
    });
    const known = this._values.flat().filter((value) => value !== null);
    const top = Math.max(this._least, ...known);
    this._paths.forEach((path, i) => path.setAttribute("d", line(this._values[i], top)));
    this._top.textContent = known.length ? this._format(top) : "";
    this._now.textContent = this._text(values);
    this._svg.setAttribute("aria-label", `${this._title}: ${this._now.textContent}`);
  }

  _text(values) {
    const shown = values.map((value) => (value === null ? "–" : this._format(value)));
    if (this._names.length === 1) return shown[0];
    return this._names.map((name, i) => `${shown[i]} ${name}`).join(", ");
  }
}

// A path over the last POINTS values, with gaps where a value is null.
function line(values, top) {
  let path = "";
  let isOpen = false;
  values.forEach((value, i) => {
    if (value === null) {
      isOpen = false;
      return;
    }
    const x = ((POINTS - values.length + i) / (POINTS - 1)) * WIDTH;
    const y = HEIGHT - 1.5 - (top ? value / top : 0) * (HEIGHT - 3);
    path += `${isOpen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (!isOpen) path += "h0.01";
    isOpen = true;
  });
  return path;
}

export class Charts {
  constructor(api, onState) {
    this._api = api;
    this._onState = onState;
    this._before = null;
    this._charts = {
      pace: new Chart("Tokens per second", number, [""], 1),
      length: new Chart("Tokens per round (AL)", (value) => value.toFixed(2), [""], 1),
      load: new Chart("Requests", count, ["running", "waiting"], 1),
      cache: new Chart("KV cache in use", percent, [""], 1),
      hits: new Chart("Prefix cache hits, since the start", percent, [""], 1),
    };
    this._positions = make("tbody");
    const table = make("table", "positions", make("caption", "", "Accepted by position, since the start"));
    table.append(this._positions);
    const elements = Object.values(this._charts).map((chart) => chart.element);
    find("#charts").append(...elements, table);
  }

  async start() {
    for (;;) {
      if (!document.hidden) await this._poll();
      await new Promise((resolve) => setTimeout(resolve, PERIOD));
    }
  }

  async _poll() {
    const note = find("#server-note");
    try {
      this._onState(await this._api.state());
      const samples = parse(await this._api.textQuietly("../metrics"));
      this._show(samples, performance.now() / 1000);
      say(note, draftsNote(samples));
    } catch (error) {
      if (error.status === 0) this._onState("unreachable");
      this._before = null;
      say(note, error.message);
    }
  }

  _show(samples, now) {
    const before = this._before ?? { samples, now };
    this._before = { samples, now };
    const grown = (name) => total(samples, name) - total(before.samples, name);
    const share = (part, whole) => (grown(whole) > 0 ? grown(part) / grown(whole) : null);
    const seconds = now - before.now;
    const tokens = grown("vllm:generation_tokens_total");
    this._charts.pace.push([seconds > 0 ? Math.max(0, tokens) / seconds : null]);
    this._charts.length.push([
      share("peagle:spec_decode_num_emitted_tokens_total", "vllm:spec_decode_num_drafts_total"),
    ]);
    this._charts.load.push([
      total(samples, "vllm:num_requests_running"),
      total(samples, "vllm:num_requests_waiting"),
    ]);
    this._charts.cache.push([total(samples, "vllm:kv_cache_usage_perc")]);
    const queries = total(samples, "vllm:prefix_cache_queries_total");
    const hits = total(samples, "vllm:prefix_cache_hits_total");
    this._charts.hits.push([queries ? hits / queries : null]);
    this._positions.replaceChildren(...positionRates(samples).map(positionRow));
  }
}

function positionRates(samples) {
  const accepted = samples.get("vllm:spec_decode_num_accepted_tokens_per_pos_total") ?? [];
  const drafted = samples.get("peagle:spec_decode_num_draft_tokens_per_pos_total") ?? [];
  return accepted.map(({ value }, i) => (drafted[i]?.value ? value / drafted[i].value : 0));
}

// K of each batch size, as one sentence.
function draftsNote(samples) {
  const sizes = samples.get("peagle:num_speculative_tokens") ?? [];
  const values = [...new Set(sizes.map(({ value }) => value))];
  if (values.length === 0) return "";
  if (values.length > 1) {
    const pairs = sizes.map(({ labels, value }) => `${value} for ${labels.batch_size}`);
    return `K by batch size: ${pairs.join(", ")}.`;
  }
  return values[0] ? `K = ${values[0]} at every batch size.` : "The server decodes without drafts.";
}
