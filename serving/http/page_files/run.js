// One answer on the page: its tokens by round, the detail of a round, and its figures.

import { duration, find, make, percent } from "./dom.js";
import { Counts, fateOf, visible } from "./rounds.js";

export class Run {
  // nameOf: gives the title by the drafts of a round. prompt: shown before the answer, if the answer continues
  // it. isTimed: whether its pace means something.
  constructor(nameOf, drafts, prompt, { isTimed = true } = {}) {
    this.element = find("#run-template").content.firstElementChild.cloneNode(true);
    this.counts = new Counts();
    this.text = "";
    this._isTimed = isTimed;
    this._nameOf = nameOf;
    this._rounds = [];
    this._first = null;
    this._last = null;
    this._name(drafts);
    find(".prompt", this.element).textContent = prompt;
    this._list = find(".rounds", this.element);
    this._detail = find(".round-detail", this.element);
    this._listen();
    this.begin();
  }

  // Starts the clock: the request leaves now.
  begin() {
    this._begun = performance.now();
    this.say("waits for the first token");
  }

  _name(drafts) {
    find("h2", this.element).textContent = this._nameOf(drafts);
  }

  say(text) {
    find(".progress", this.element).textContent = text;
  }

  // Adds the rounds of one event.
  add(rounds) {
    const box = find(".text", this.element);
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    for (const round of rounds) this._append(round);
    if (rounds.length) {
      this._last = performance.now();
      this._first ??= this._last;
      this.say("writes");
    }
    if (follows) box.scrollTop = box.scrollHeight;
    this._showFigures({});
  }

  // Ends the answer: usage as the server counted it, and a word that says why the text ended.
  finish(usage, reason) {
    this.say(reason);
    if (this.counts.rounds) this._name(this.counts.drafts);
    this._showFigures(usage ?? {});
    this._showPositions();
  }

  // Shows the tokens of the first `count` rounds only, the newest of them in view.
  showUntil(count) {
    const shown = Math.min(count, this._rounds.length);
    this._rounds.forEach(({ element }, i) => element.classList.toggle("future", i >= shown));
    const box = find(".text", this.element);
    const { offsetTop, offsetHeight } = this._rounds[shown - 1].element;
    box.scrollTop = offsetTop + offsetHeight - box.offsetTop - box.clientHeight;
    this.say(shown === count ? `round ${count - 1}` : `ended after ${shown - 1} rounds`);
  }

  get numEntries() {
    return this._rounds.length;
  }

  _append(round) {
    const element = make("span", "round");
    round.texts.forEach((text, i) => {
      const token = make("span", `token ${fateOf(round, i)}`, text);
      if (text.startsWith("\n")) token.classList.add("line-end");
      element.append(token);
      this.text += text;
    });
    element.tabIndex = this._rounds.length ? -1 : 0;
    element.dataset.index = this._rounds.length;
    this._rounds.push({ round, element });
    this._list.append(element);
    this.counts.add(round);
  }

  _listen() {
    const show = (event) => {
      const element = event.target.closest(".round");
      if (element) this._show(Number(element.dataset.index));
    };
    this._list.addEventListener("pointerover", show);
    this._list.addEventListener("click", show);
    this._list.addEventListener("focusin", show);
    this._list.addEventListener("keydown", (event) => this._move(event));
  }

  _move(event) {
    const last = this._rounds.length - 1;
    const index = Number(event.target.dataset.index);
    const places = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: last };
    if (!(event.key in places)) return;
    event.preventDefault();
    const place = Math.min(last, Math.max(0, places[event.key]));
    this._rounds[index].element.tabIndex = -1;
    this._rounds[place].element.tabIndex = 0;
    this._rounds[place].element.focus();
  }

  // Shows the drafts of a round: accepted ones, refused ones struck through, and the target's own token.
  _show(index) {
    const { round, element } = this._rounds[index];
    find(".round.chosen", this._list)?.classList.remove("chosen");
    element.classList.add("chosen");
    this._detail.replaceChildren(make("p", "", describe(round, index)), draftList(round));
  }

  _showFigures(usage) {
    const { counts } = this;
    const length = counts.acceptanceLength;
    const seconds = (this._last - this._first) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const figures = [
      ["Tokens per round (AL)", length === null ? "–" : length.toFixed(2)],
      ["Tokens", usage.completion_tokens ?? counts.tokens],
      ["Rounds", counts.rounds],
      ["Drafts accepted", `${counts.accepted} of ${counts.drafted}`],
      ["First token after", this._first === null ? "–" : duration((this._first - this._begun) / 1000)],
    ];
    const pace = seconds > 0 ? ((counts.tokens - 1) / seconds).toFixed(0) : "–";
    if (this._isTimed) figures.push(["Tokens per second", pace]);
    if (usage.prompt_tokens !== undefined) figures.push(["Prompt tokens", usage.prompt_tokens]);
    if (cached !== undefined) figures.push(["of these cached", cached]);
    const cells = figures.map(([name, value]) =>
      make("div", "", make("dt", "", name), make("dd", "", String(value))),
    );
    find(".figures", this.element).replaceChildren(...cells);
  }

  _showPositions() {
    const table = find(".positions", this.element);
    table.hidden = this.counts.drafted === 0;
    find("tbody", table).replaceChildren(...this.counts.rates.map(positionRow));
  }
}

export function positionRow(rate, index) {
  const bar = make("span", "bar");
  bar.style.width = `${100 * rate}%`;
  const head = make("th", "", String(index + 1));
  head.scope = "row";
  return make("tr", "", head, make("td", "track", bar), make("td", "share", percent(rate)));
}

function describe(round, index) {
  if (index === 0) return "The prompt's pass: the first token comes without drafts.";
  if (round.drafts.length === 0) return `Round ${index}: no drafts, one token.`;
  const { accepted, drafts } = round;
  const refused = drafts.length - accepted;
  return `Round ${index}: ${drafts.length} drafts, ${accepted} accepted, ${refused} refused.`;
}

function draftList(round) {
  const list = make("ol", "drafts");
  round.drafts.forEach((text, i) => {
    const kind = i < round.accepted ? "accepted" : "refused";
    const tag = kind === "refused" ? "del" : "span";
    const item = make("li", "", make(tag, `token ${kind}`, visible(text)));
    if (i === round.accepted) item.classList.add("first-refused");
    list.append(item);
  });
  round.texts.slice(round.accepted).forEach((text, i) => {
    const token = make("span", `token ${fateOf(round, round.accepted + i)}`, visible(text));
    list.append(make("li", "own", make("span", "note", "target: "), token));
  });
  return list;
}
